"""The contract between a paper's model and everything that drives it.

A `Variant` is anything the trainer trains; a `DialogueVariant` also answers. What a variant needs
of its data, how it is sized, what may be left out of it (ablations) and what is worth tuning are
plain data on the class, so that the command line, sweeps, evaluation, the page and the tests pick
up a new system by its being listed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

TextKind = Literal["context", "response"]
"""What a classifier of texts may read."""

Losses = dict[str, Tensor]
"""Unweighted loss terms: sums over tokens or samples, divided by the batch's divisors; an `Update`
weighs them."""

State = dict[str, Any]
"""What decoding carries from token to token: nested dicts and lists of tensors, batch first."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's part of a global batch."""

    tensors: Mapping[str, Tensor]
    samples: float
    """The divisor of this rank's sums over samples; the mean of the results over the ranks is that
    of the global batch. In training a constant, the mean over the batches of the run; otherwise the
    number of samples."""
    tokens: float
    """The same for sums over tokens: in training `samples` times the mean length of a response of
    train, otherwise the number of response tokens, `<eos>` included."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.tensors["index"])

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved = {name: t.to(device, non_blocking=True) for name, t in self.tensors.items()}
        return Batch(tensors=moved, samples=self.samples, tokens=self.tokens)


Batches = Mapping[str, Batch]
"""A batch of each stream that a stage asks for, by the stream's name."""

PAIRED = "paired"
FOLLOWED = "followed"
"""The paired samples whose response the speaker answers: `next_turn` is there."""
CONTEXTS, RESPONSES = "contexts", "responses"
"""Unpaired text: `index`, `context`, `context_roles` and `emotion`, and nothing of a response; or
`index`, `response` and `emotion`, and nothing of a context. A variant that asks for them has the
filters `harvest` and `harvest_threshold` (`DataFilters`). Only training has them: on valid, losses
get paired samples alone."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a stage, which schedules inside a loss depend on."""

    step: int = 0
    """Optimizer steps that the stage has done."""
    fraction: float = 0.0
    """Of the stage's steps: 0 at its first update, 1 at its last."""


@dataclass(frozen=True, kw_only=True)
class DataFilters:
    """The settings, by name, with which a variant selects the data it is trained on.

    None: the variant has no such setting.
    """

    cause_threshold: str | None = None
    """Probability from which an utterance is marked as a cause, in train and valid; 0 keeps the
    marks of the data."""
    emotionality_threshold: str | None = None
    """Minimum emotionality of a dialogue of train; 0 keeps all."""
    harvest: str | None = None
    """Folder of `attune data harvest` with the unpaired texts; empty: those of the data."""
    harvest_threshold: str | None = None
    """Probability above which a harvested text is kept with its emotion."""


@dataclass(frozen=True, kw_only=True)
class DataRequirements:
    """What a variant needs of its data."""

    tokenizer: Literal["words", "subwords"] = "words"
    labels: Literal["conversations", "utterances"] = "conversations"
    """Whose labels `emotion` numbers: the 32 emotions of conversations, or the 41 emotions and
    intents of utterances, of which each is then a context of its own without a response."""
    separators: bool = False
    """`<sep>` behind each utterance of the context."""
    columns: tuple[str, ...] = ("context", "context_roles", "response", "emotion")
    """The tensors it reads from a batch; `emotion_words` brings the others' with it."""
    intensity: bool = False
    """How strongly words are felt (`DataInfo.intensity`)."""
    streams: tuple[str, ...] = (PAIRED,)
    filters: DataFilters = DataFilters()
    encoder: str | None = None
    """The setting that names the pretrained encoder it reads with: it gets the encoder under this
    name, and in its batches those columns of `encoder_columns` and `subword_columns` that it asks
    for."""


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """What a model must know of the data it is built for."""

    num_tokens: int
    specials: Mapping[str, int]
    """The numbers of `<pad>`, `<sos>` and the others."""
    emotions: tuple[str, ...]
    emotion_tokens: tuple[int, ...]
    """The number of each emotion's own word in the vocabulary."""
    word_vectors: Tensor | None = None
    """(num_tokens, any dimension), to begin with."""
    emotion_words: Tensor | None = None
    """(num_tokens,) which tokens are emotion words, where a variant reads `emotion_words`."""
    intensity: Tensor | None = None
    """(num_tokens,) |valence - 1/2| + arousal of each token, 0 where a lexicon has none; where a
    variant needs it."""
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    """Pretrained encoders, by the name a variant asks for them with."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of one player."""

    player: str
    losses: str
    """The variant's method `(batches, progress) -> Losses`."""
    weights: Mapping[str, float]
    """What each term counts in the total; a term without one is only logged."""
    repeat: int = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Who learns what, from which data, judged by what."""

    name: str
    players: Mapping[str, tuple[str, ...]]
    """A player is what one optimizer owns: names of the variant's own parts."""
    updates: tuple[Update, ...]
    streams: tuple[str, ...] = (PAIRED,)
    share: float = 1.0
    """Of the whole run's steps, in proportion to the other stages' shares."""
    rate: float = 1.0
    """Factor of the run's learning rate."""
    schedule: Literal["constant", "noam", "linear", "cosine"] | None = None
    """The decay of the learning rate, if it is not the run's."""
    metric: str = "valid_loss"
    """What the best checkpoint has the least of (the most, where it is an accuracy)."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting to be tuned: one of these values."""

    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A setting to be tuned: a number from `low` to `high`."""

    low: float
    high: float
    scale: Literal["uniform", "loguniform", "int"] = "uniform"


SearchSpaces = Mapping[str, Mapping[str, Choice | Range]]

Presets = Mapping[str, Mapping[str, Any]]
"""Settings of model and training by the name of the preset."""


def extend_presets(presets: Presets, **settings: Mapping[str, Any]) -> Presets:
    """Return presets with further settings, given by the name of the preset."""
    return {name: {**preset, **settings.get(name, {})} for name, preset in presets.items()}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The finite numbers that a setting accepts, as in `Annotated[float, Bounds(above=0)]`."""

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
"""A number of things of which there is at least one, such as layers."""
Steps = Annotated[int, Bounds(at_least=0, at_most=1_000_000_000)]
"""A number of optimizer steps; 0 usually has a special meaning."""
Weight = Annotated[float, Bounds(at_least=0)]
"""The weight of a loss term; 0 removes it."""
Share = Annotated[float, Bounds(at_least=0, below=1)]
"""A share that may be nothing but not everything, such as a dropout rate."""
Probability = Annotated[float, Bounds(above=0, below=1)]
"""A probability that separates two cases."""
Temperature = Annotated[float, Bounds(above=0, at_most=100)]
"""The temperature of a softmax or of sampling."""


@dataclass(frozen=True, kw_only=True)
class LabelledPoints:
    """Points of a figure, such as embeddings, with a name and a group for each."""

    points: Tensor
    """(N, D), detached, on the CPU."""
    names: Sequence[str]
    """(N,) the label beside each point."""
    groups: Sequence[str]
    """(N,) the group that colours each point."""


class Variant(nn.Module, ABC):
    """Everything the trainer drives: dialogue models, classifiers, annotators."""

    system: ClassVar[str]
    """The name in tables: "MIME"."""
    paper: ClassVar[str]
    """Who proposed it, where."""
    Config: ClassVar[type]
    """A frozen keyword-only dataclass; each field's docstring is its help text."""
    requirements: ClassVar[DataRequirements] = DataRequirements()
    presets: ClassVar[Presets]
    """`tiny` (tests), `small` (the demo), `compact` (converges on EmpatheticDialogues on two cores)
    and `paper` (what the paper states)."""
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names of reduced systems with the settings that make them."""
    search_spaces: ClassVar[SearchSpaces] = {}
    validation_metrics: ClassVar[tuple[str, ...]] = ()
    """What validation measures besides the loss and perplexity: the loss terms of all stages, and
    an accuracy for each prediction. An ablation may have fewer."""
    figures: ClassVar[Mapping[str, str]] = {}
    """The figures of its paper that can be drawn from a trained model: the figure's name (that of
    the `attune show` command) -> the method that returns what to draw. The method takes what the
    figure depends on, often nothing, and returns a small dataclass of tensors and labels, such as
    `LabelledPoints`; drawing is left to the caller."""
    zero_3: ClassVar[bool] = False
    """Whether every weight is used only within the forward of the module that owns it, which is
    what lets ZeRO 3 spread the weights themselves over the workers."""

    def __init__(self, config: Any, data_info: DataInfo):
        super().__init__()
        self.config = config
        self.data_info = data_info

    @classmethod
    def requirements_for(cls, config: Any) -> DataRequirements:
        """What it needs with these settings: an ablation may need less, or something else."""
        return cls.requirements

    @classmethod
    def stage_independent_settings(cls, config: Any) -> Mapping[str, tuple[str, ...]]:
        """By stage but the last, in their order, settings that change nothing in it nor in those
        before it: runs that differ in these alone share it."""
        return {}

    @abstractmethod
    def stages(self) -> list[Stage]:
        """The schedule of the paper, which the one training loop follows."""

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Log-probabilities (B, labels) of what the variant predicts, never from the true label:
        `emotion`, and whatever else it classifies."""
        return {}


class Annotator(Variant):
    """A classifier of the utterances of a context: which hold the cause of the emotion?"""

    @abstractmethod
    def marks(self, batch: Batch) -> Tensor:
        """(B, U) the probability that an utterance holds the cause; 0 where there is none."""


class TextClassifier(Variant):
    """A classifier of texts: of contexts, which `predict` is about, and of responses."""

    learns: ClassVar[tuple[TextKind, ...]] = ("context", "response")
    """Which of them it learns from."""

    @abstractmethod
    def predict_response(self, batch: Batch) -> dict[str, Tensor]:
        """As `predict`, but from the response alone."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why an answer is what it is; what a variant has no notion of is None."""

    emotion: Mapping[str, float] | None = None
    """The predicted emotion's distribution."""
    groups: Mapping[str, float] | None = None
    """The share of each group of emotions, such as the positive ones, in it."""
    response_emotion: Mapping[str, Mapping[str, float]] | None = None
    """By group, the distribution of the emotion that the answer is given."""
    response_label: Mapping[str, float] | None = None
    """The distribution of the label that the answer is given: an emotion or an intent."""
    word_labels: Sequence[str] | None = None
    """For each word of the context the label of its utterance; empty where it has none."""
    consensus: Mapping[str, float] | None = None
    """The share of each state on which context and answer might agree."""
    imagined_tokens: Sequence[int] | None = None
    """The context that the answer would be an answer to, as a backward model imagines it."""
    listeners: Mapping[str, float] | None = None
    """How much the listener of each emotion is heard."""
    by_word: Mapping[str, Sequence[float]] | None = None
    """What there is of each word of the context (attention, gates): a number a word."""
    attention: Mapping[str, Sequence[Sequence[float]]] | None = None
    """By what is attended to (the context, emotion words): for each word of the answer how much it
    looks at each word there."""
    scores: Mapping[str, float] | None = None
    """What each critic gives the answer, where the next turn is known."""
    words: Sequence[str] | None = None
    """The words of the context; who has the vocabulary fills them in, here and below."""
    emotion_words: Sequence[str] | None = None
    """The emotion words found in it."""
    imagined: str | None = None
    """The text of the imagined context."""
    answer_words: Sequence[str] | None = None
    """The words of the answer that attention is given for."""


class DialogueVariant(Variant):
    """What decoding, perplexity, the page and the tables need beyond training."""

    likelihood_term: ClassVar[str | None] = None
    """The loss term that outside training is the mean of `-log_likelihood`, so that perplexity need
    not be computed beside it; None where the losses are told what evaluation has to predict."""
    controls: ClassVar[Mapping[str, Sequence[str]]] = {}
    """What a user may set for an answer (an intent, say), and to what."""

    @classmethod
    def controls_with(cls, config: Any) -> Mapping[str, Sequence[str]]:
        """Those that a configuration leaves."""
        return cls.controls

    @abstractmethod
    def log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T) log-probability of each response token, unsmoothed; 0 on padding."""

    def oracle_log_likelihood(self, batch: Batch) -> Tensor:
        """The same where the truth is told that an answer has to predict, for papers that measured
        their perplexity so."""
        return self.log_likelihood(batch)

    @abstractmethod
    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """All that decoding needs to know of the contexts."""

    @abstractmethod
    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """(B,) the newest tokens -> (B, num_tokens) logits of the next ones, and the new state.

        The first call gets `<sos>`.
        """

    def select(self, state: State, rows: Tensor) -> State:
        """The state of some rows, in their order; a row may be taken several times (beams)."""
        selected: State = _select(state, rows)
        return selected

    def explain(self, batch: Batch) -> list[Explanation]:
        """An explanation of the answer to each context."""
        predicted = self.predict(batch).get("emotion")
        if predicted is None:
            return [Explanation() for _ in range(len(batch))]
        return [
            Explanation(emotion=dict(zip(self.data_info.emotions, row.tolist(), strict=True)))
            for row in predicted.exp()
        ]


def _select(state: Any, rows: Tensor) -> Any:
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, dict):
        return {name: _select(part, rows) for name, part in state.items()}
    if isinstance(state, list):
        return [_select(part, rows) for part in state]
    return state
