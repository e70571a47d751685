"""The interface between a model and training, evaluation, serving and tuning.

A `Variant` can be trained; a `DialogueVariant` also generates responses. Data requirements,
presets, ablations and search spaces are plain data on the class. A system that is listed in
`VARIANTS` is therefore available in the command line, sweeps, evaluation, the page and the tests.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

TextKind = Literal["context", "response"]
"""The kinds of text that a classifier can read."""

Losses = dict[str, Tensor]
"""Unweighted loss terms by name: sums over tokens or samples, divided by the batch's `tokens` or
`samples`. An `Update` has their weights."""

State = dict[str, Any]
"""The decoder's state between tokens: nested dicts and lists of tensors, batch first."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    tensors: Mapping[str, Tensor]
    samples: float
    """Divisor of sums over the samples of this rank, such that the mean over ranks of the quotients
    is the loss of the global batch. In training it is a constant of the run, the mean number of
    samples per batch; otherwise the number of samples."""
    tokens: float
    """Divisor of sums over tokens: in training `samples` times the mean length of a response in
    train, otherwise the number of response tokens, including `<eos>`."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.tensors["index"])

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return Batch(tensors=moved, samples=self.samples, tokens=self.tokens)


Batches = Mapping[str, Batch]
"""A batch of each stream of a stage, by the name of the stream."""

PAIRED = "paired"
FOLLOWED = "followed"
"""The paired samples with a next turn, in which the speaker reacts to the response."""
CONTEXTS, RESPONSES = "contexts", "responses"
"""Unpaired text. Contexts have the columns `index`, `context`, `context_roles` and `emotion`;
responses have `index`, `response` and `emotion`. A variant that requires them has the filters
`harvest` and `harvest_threshold` (`DataFilters`). They exist in training only: validation computes
the losses of paired samples."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a stage, for schedules inside a loss, such as KL annealing."""

    step: int = 0
    """Number of optimizer steps done in the stage."""
    fraction: float = 0.0
    """Share of the stage's steps: 0 at the first update, 1 at the last."""


@dataclass(frozen=True, kw_only=True)
class DataFilters:
    """Names of the settings by which a variant filters its training data; None if it has no such
    setting."""

    cause_threshold: str | None = None
    """Minimum probability at which an utterance is labelled as a cause, in train and valid; 0 keeps
    the labels of the data."""
    emotionality_threshold: str | None = None
    """Minimum emotionality of a dialogue in train; 0 keeps all dialogues."""
    harvest: str | None = None
    """Folder of unpaired text (`attune data harvest`); if empty, the data's own is used."""
    harvest_threshold: str | None = None
    """An unpaired text is used if the probability of its emotion is above this."""


@dataclass(frozen=True, kw_only=True)
class DataRequirements:
    """The data that a variant requires."""

    tokenizer: Literal["words", "subwords"] = "words"
    labels: Literal["conversations", "utterances"] = "conversations"
    """The labels in the column `emotion`: the 32 emotions of conversations, or the 41 emotions and
    intents of utterances. With labels of utterances each utterance is a context without a
    response."""
    separators: bool = False
    """Whether `<sep>` follows each utterance of the context."""
    columns: tuple[str, ...] = ("context", "context_roles", "response", "emotion")
    """The tensors of a batch. `emotion_words` adds those of response and next turn."""
    intensity: bool = False
    """Whether `DataInfo.intensity` is required."""
    streams: tuple[str, ...] = (PAIRED,)
    filters: DataFilters = DataFilters()
    encoder: str | None = None
    """The setting that names a pretrained encoder. `DataInfo.encoders` has the encoder under this
    name, and `columns` may name columns of its token ids (`encode_for_pretrained` and
    `encode_as_subwords`)."""


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """Properties of the dataset that a model is built for: vocabulary, labels, lexicon values and
    pretrained modules."""

    num_tokens: int
    """Size of the vocabulary."""
    specials: Mapping[str, int]
    """Token ids of `<pad>`, `<sos>` and the other special tokens, which come first."""
    emotions: tuple[str, ...]
    """Names of the emotions, in the order of their ids."""
    emotion_tokens: tuple[int, ...]
    """Token id of each emotion's name."""
    word_vectors: Tensor | None = None
    """(num_tokens, any dimension) initial word embeddings."""
    emotion_words: Tensor | None = None
    """(num_tokens,) True for emotion words; only if the column `emotion_words` is required."""
    intensity: Tensor | None = None
    """(num_tokens,) emotional intensity |valence - 1/2| + arousal of each token, 0 for tokens that
    are not in the lexicon; only if required."""
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    """Pretrained encoders by `DataRequirements.encoder`."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of one player."""

    player: str
    losses: str
    """The variant's method `(batches, progress) -> Losses`."""
    weights: Mapping[str, float]
    """Weight of each loss term in the total; a term without a weight is only logged."""
    repeat: int = 1
    """Number of times the update is done per round."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of training: players, updates, data streams and the metric of the best checkpoint."""

    name: str
    players: Mapping[str, tuple[str, ...]]
    """Modules by player. A player is the set of modules, named by attribute of the variant, that
    one optimizer owns."""
    updates: tuple[Update, ...]
    """The updates of one round, in order."""
    streams: tuple[str, ...] = (PAIRED,)
    share: float = 1.0
    """Share of the run's steps, relative to those of the other stages."""
    rate: float = 1.0
    """Factor of the run's learning rate."""
    schedule: Literal["constant", "noam", "linear", "cosine"] | None = None
    """Decay of the learning rate; None uses that of the run."""
    metric: str = "valid_loss"
    """Metric that selects the best model: accuracies are maximised, all others minimised."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A dimension of a search space: one of several values."""

    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A dimension of a search space: a number from `low` to `high`."""

    low: float
    high: float
    scale: Literal["uniform", "loguniform", "int"] = "uniform"


SearchSpaces = Mapping[str, Mapping[str, Choice | Range]]
"""Dimensions by setting, by the name of the search space."""

Presets = Mapping[str, Mapping[str, Any]]
"""Settings of model and training by the name of the preset."""


def extend_presets(presets: Presets, **settings: Mapping[str, Any]) -> Presets:
    """Return presets with further settings, given by the name of the preset."""
    return {name: {**preset, **settings.get(name, {})} for name, preset in presets.items()}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The range of finite numbers that a setting accepts: `Annotated[float, Bounds(above=0)]`."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        exclusive = self.above > -math.inf
        low = f"above {self.above:,}" if exclusive else f"from {self.at_least:,}"
        if self.at_most < math.inf:
            return f"{low} {'and at most' if exclusive else 'to'} {self.at_most:,}"
        if self.below < math.inf:
            return f"{low} {'and' if exclusive else 'to'} below {self.below:,}"
        return low.replace("from", "at least")


Size = Annotated[int, Bounds(at_least=1, at_most=65_536)]
"""The width of a layer, in units."""
Count = Annotated[int, Bounds(at_least=1, at_most=1_000)]
"""A number of layers, updates and so on, of which there is at least one."""
Steps = Annotated[int, Bounds(at_least=0, at_most=1_000_000_000)]
"""A number of optimizer steps; 0 usually has a special meaning."""
Weight = Annotated[float, Bounds(at_least=0)]
"""The weight of a loss term; 0 removes it."""
Share = Annotated[float, Bounds(at_least=0, below=1)]
"""A share from 0 to below 1, such as a dropout rate."""
Probability = Annotated[float, Bounds(above=0, below=1)]
"""A probability between 0 and 1, such as a decision threshold."""
Temperature = Annotated[float, Bounds(above=0, at_most=100)]
"""The temperature of a softmax or of sampling."""


@dataclass(frozen=True, kw_only=True)
class LabelledPoints:
    """Points of a figure, such as embeddings, with a name and a group for each."""

    points: Tensor
    """(N, D), detached, on the CPU."""
    names: Sequence[str]
    """(N,) label of each point."""
    groups: Sequence[str]
    """(N,) group of each point, which determines its colour."""


class Variant(nn.Module, ABC):
    """A model that can be trained: a dialogue model, a classifier or an annotator."""

    system: ClassVar[str]
    """Name in tables, such as "MIME"."""
    paper: ClassVar[str]
    """Authors and year of the paper."""
    Config: ClassVar[type]
    """Settings: a frozen keyword-only dataclass whose field docstrings are the help texts."""
    requirements: ClassVar[DataRequirements] = DataRequirements()
    presets: ClassVar[Presets]
    """`tiny` (tests), `small` (the demo), `compact` (converges on EmpatheticDialogues on two cores)
    and `paper` (the paper's settings)."""
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings of each ablation, by its name. An ablation can be trained like a variant."""
    search_spaces: ClassVar[SearchSpaces] = {}
    validation_metrics: ClassVar[tuple[str, ...]] = ()
    """Validation metrics besides loss and perplexity: the loss terms of all stages, and an accuracy
    for each predicted label. An ablation may have fewer."""
    figures: ClassVar[Mapping[str, str]] = {}
    """Figures of the paper that can be drawn from a trained model: the name of the `attune show`
    command -> the method that returns its data. The method returns a dataclass of tensors and
    labels, such as `LabelledPoints`; the caller draws it."""
    zero_3: ClassVar[bool] = False
    """Whether each weight is used only in the forward pass of the module that owns it, which ZeRO 3
    requires to partition the weights."""

    def __init__(self, config: Any, data_info: DataInfo):
        super().__init__()
        self.config = config
        self.data_info = data_info

    @classmethod
    def requirements_for(cls, config: Any) -> DataRequirements:
        """Return the requirements with these settings; those of an ablation may differ."""
        return cls.requirements

    @classmethod
    def stage_independent_settings(cls, config: Any) -> Mapping[str, tuple[str, ...]]:
        """Return, for each stage but the last, in order, the settings that affect neither it nor
        the stages before it. Trials that differ only in these settings share the stage."""
        return {}

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Return the stages of training, in order."""

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities (B, labels) of each predicted label, such as `emotion`,
        without reading the true label."""
        return {}


class Annotator(Variant):
    """A classifier of the utterances of a context that detects the causes of the emotion."""

    @abstractmethod
    def predict_causes(self, batch: Batch) -> Tensor:
        """Return the probability that each utterance contains the cause, (B, U), 0 for padding."""


class TextClassifier(Variant):
    """A classifier of contexts (`predict`) and of responses (`predict_response`)."""

    trained_on: ClassVar[tuple[TextKind, ...]] = ("context", "response")
    """The kinds of text that it is trained on."""

    @abstractmethod
    def predict_response(self, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities of the labels as `predict` does, from the response only."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Intermediate results of generating an answer. Fields that a variant does not have are None.

    A variant sets the fields up to `scores`, which contain numbers, labels and token ids.
    `Responder` adds the corresponding text: `words` and the fields after it.
    """

    emotion: Mapping[str, float] | None = None
    """Predicted probabilities of the speaker's emotion."""
    groups: Mapping[str, float] | None = None
    """Predicted probabilities of the groups of emotions, such as positive and negative."""
    response_emotion: Mapping[str, Mapping[str, float]] | None = None
    """Distribution of the response's emotion, by group of emotions."""
    response_label: Mapping[str, float] | None = None
    """Predicted probabilities of the response's label, an emotion or intent."""
    word_labels: Sequence[str] | None = None
    """For each context word the label of its utterance; an empty string if it has none."""
    consensus: Mapping[str, float] | None = None
    """Posterior distribution of the latent consensus variable."""
    imagined_tokens: Sequence[int] | None = None
    """Token ids of the context that a backward model generates from the answer."""
    listeners: Mapping[str, float] | None = None
    """Weight of each listener (an expert decoder), by its emotion."""
    by_word: Mapping[str, Sequence[float]] | None = None
    """A value for each context word, such as an attention weight or a gate, by the name of the
    value."""
    attention: Mapping[str, Sequence[Sequence[float]]] | None = None
    """Attention weights by source (the context or the emotion words): for each word of the answer,
    the weight of each word of the source."""
    scores: Mapping[str, float] | None = None
    """Score of the answer by each critic; requires the next turn."""
    words: Sequence[str] | None = None
    """The words of the context."""
    emotion_words: Sequence[str] | None = None
    """The emotion words of the context."""
    imagined: str | None = None
    """The text of `imagined_tokens`."""
    answer_words: Sequence[str] | None = None
    """The words of the answer, as in `attention`."""


class DialogueVariant(Variant):
    """A variant that generates responses: likelihood, decoding, controls and explanations."""

    likelihood_term: ClassVar[str | None] = None
    """The loss term that outside training equals the mean of `-log_likelihood`, from which
    validation takes the perplexity; None if validation must compute `log_likelihood`."""
    controls: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Values that a user can select for a control of the answer, such as its intent, by control."""

    @classmethod
    def controls_for(cls, config: Any) -> Mapping[str, Sequence[str]]:
        """Return the controls with these settings; an ablation may have fewer."""
        return cls.controls

    @abstractmethod
    def log_likelihood(self, batch: Batch) -> Tensor:
        """Return the unsmoothed log-probability of each response token, (B, T), 0 for padding."""

    def oracle_log_likelihood(self, batch: Batch) -> Tensor:
        """Return the log-likelihood given the true labels, which generation has to predict. Some
        papers compute their perplexity from it."""
        return self.log_likelihood(batch)

    @abstractmethod
    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the decoder's state before the first token, for the contexts of a batch."""

    @abstractmethod
    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits of the next tokens (B, num_tokens), from the newest tokens (B,), and
        the new state. The first tokens are `<sos>`."""

    def select(self, state: State, rows: Tensor) -> State:
        """Return the state of some rows, in the given order; beam search repeats rows."""
        selected: State = _select_rows_of_state(state, rows)
        return selected

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain the answer to each context; the batch has the answers as responses."""
        predicted = self.predict(batch).get("emotion")
        if predicted is None:
            return [Explanation() for _ in range(len(batch))]
        return [
            Explanation(emotion=dict(zip(self.data_info.emotions, row.tolist(), strict=True)))
            for row in predicted.exp()
        ]


def _select_rows_of_state(state: Any, rows: Tensor) -> Any:
    """Return the rows of all tensors in nested dicts and lists."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, dict):
        return {name: _select_rows_of_state(part, rows) for name, part in state.items()}
    if isinstance(state, list):
        return [_select_rows_of_state(part, rows) for part in state]
    return state
