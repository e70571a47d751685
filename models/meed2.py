"""MEED2: predicts the emotion or intent of the response, then generates it (Xie and Pu 2021).

Each utterance of the context has one of 41 labels: 32 emotions, 8 intents and neutral. The input is
the sum of the embeddings of a token, its position, the label of its utterance and its speaker;
encoder and decoder share the tables. A predictor with a separate encoder classifies the label e_y
of the response from the context. The embedding of this label is added to each input of the decoder:
that of the true label in training, otherwise that of the predicted label or of one that a user
requests.

Deviations:
- The speaker is a token of the vocabulary, as in the other systems, and shares its table.
- Layer normalisation precedes each sublayer.
- Each utterance ends with `<sep>` and the context begins with `<cls>`; the paper uses RoBERTa's
  `<s>` and `</s>`.
- Validation and perplexity use the predicted label, not the true one.
- All responses are the listener's, so the inputs of the decoder have no speaker embedding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    Count,
    DataFilters,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Size,
    Stage,
    State,
    Update,
    Weight,
)
from attune.models.labels import LABELS
from attune.models.layers import Encoder, LayerShape, Positions, WordEmbedding
from attune.models.multitask import EMOTION_WEIGHT_RANGE, SUMMED_LIKELIHOOD_WEIGHT
from attune.models.transformer import (
    EmbeddedBatch,
    Transformer,
    TransformerConfig,
    is_word,
    score_tokens,
)

PREDICTED = "predicted"
"""Value of the control `label` that selects the predictor's label."""
COLUMNS = ("context", "context_roles", "response")
LABEL_COLUMNS = ("context_labels", "response_label")


@dataclass(frozen=True, kw_only=True)
class Meed2Config(TransformerConfig):
    """Settings of a larger Transformer, and of the labels and their predictor."""

    num_layers: Count = 4
    """Number of layers of each encoder, and of the decoder. Usually 1 to 6."""
    num_heads: Count = 6
    """Number of attention heads; must divide key_depth. Usually 2 to 8."""
    key_depth: Size = 300
    """Total width of queries, keys and values over all heads. Usually the same as width."""
    filter_width: Size = 1200
    """Width of the hidden layer in feed-forward blocks. Usually 2 to 4 times width."""
    dropout: Share = 0.1
    """Dropout rate of activations in training. Usually 0 to 0.4."""
    tied: bool = True
    """Use the word embedding as the output layer as well."""
    labels: bool = True
    """Embed the labels of utterances and of the response; if false, a plain Transformer."""
    joint: bool = False
    """Predict the label from the states that the decoder attends to, and train both together."""
    predictor_rate: Annotated[float, Bounds(above=0, at_most=1_000)] = 1.0
    """Learning rate of the predictor's stage, as a multiple of the run's. Usually 0.1 to 1."""
    label_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the label's cross-entropy in joint training. Usually 0.05 to 0.5."""
    label_strength: Annotated[float, Bounds(at_least=0)] = 1.0
    """Factor of the response label's embedding in the decoder's input. Usually 1 to 4."""
    emotionality_threshold: Share = 0.0
    """Train only on dialogs whose emotionality reaches this value: the mean over a dialog's
    utterances of the summed probabilities of the 32 emotions. Usually 0 to 0.8; above 0 it needs
    `attune annotate emotions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint and not self.labels:
            raise ValueError("joint=true needs labels=true")

    @property
    def layer_shape(self) -> LayerShape:
        """The sizes of encoder and decoder layers, with GELU in the feed-forward."""
        return replace(super().layer_shape, activation=nn.GELU)


class LabelHead(nn.Module):
    """Attention pooling of the context's hidden states, and a classifier of the response's
    label."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.Linear(width, 1, bias=False)  # v
        self.output = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, len(LABELS))
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, labels) of e_y and the attention weights alpha (B, S), from hidden
        states r_i (B, S, D) and their mask (B, 1, 1, S)."""
        scores = self.attention(hidden).squeeze(-1).masked_fill(~mask[:, 0, 0], -torch.inf)
        alpha = scores.softmax(dim=-1)  # eq. 1
        r = (alpha[:, None] @ hidden).squeeze(1)  # eq. 2, (B, D)
        return self.output(r), alpha


class LabelPredictor(nn.Module):
    """A classifier of the response's label with its own encoder and embeddings."""

    def __init__(self, config: Meed2Config, data_info: DataInfo):
        super().__init__()
        self.embedding = WordEmbedding(
            data_info.num_tokens, config.width, table_width=config.embedding_width
        )
        self.label_embedding = build_label_embedding(config.width)
        self.positions = Positions(config.width)
        self.encoder = Encoder(config.layer_shape, config.num_layers)
        self.head = LabelHead(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, labels) and attention weights (B, S), from the tokens, roles and
        labels of a context, (B, S) each."""
        e_context, e_roles = self.embedding(context, roles)
        e_labels, positions = self.label_embedding(labels), self.positions(context.shape[1])
        embedded = e_context + e_roles + e_labels + positions
        mask = (context != self.padding)[:, None, None, :]
        hidden = self.encoder(self.dropout(embedded), mask)
        logits, alpha = self.head(hidden, mask)
        return logits, alpha


def build_label_embedding(width: int) -> nn.Embedding:
    """Return an embedding of padding (index 0, zeros), the labels (from 1), and no label (last)."""
    table = nn.Embedding(len(LABELS) + 2, width, padding_idx=0)
    with torch.no_grad():  # the standard deviation of words and positions
        nn.init.normal_(table.weight, std=width**-0.5)
        table.weight[0].zero_()
    return table


class Meed2(Transformer):
    """A Transformer with embeddings of the utterances' labels, and a predictor of the response's
    label."""

    system = "MEED2"
    paper = "Xie and Pu 2021"
    Config = Meed2Config
    requirements = DataRequirements(
        tokenizer="subwords",
        separators=True,
        columns=(*COLUMNS, *LABEL_COLUMNS),
        filters=DataFilters(emotionality_threshold="emotionality_threshold"),
    )
    validation_metrics = ("nll", "label", "response_label_accuracy")
    presets: ClassVar = {
        "tiny": {
            "width": 32, "num_layers": 1, "num_heads": 2, "key_depth": 32, "filter_width": 64,
            "vocabulary_size": 600, "max_context": 100, "label_weight": 1.0,
        },
        "small": {
            "width": 128, "num_layers": 2, "num_heads": 4, "key_depth": 128, "filter_width": 512,
            "vocabulary_size": 8_000, "learning_rate": 1e-3, "schedule": "linear",
            "warmup_share": 0.08, "max_epochs": 6, "max_context": 100, "label_weight": 1.0,
        },
        "compact": {
            **Transformer.presets["compact"], "label_weight": 0.2, "max_context": 100,
            "max_epochs": 9,
        },
        # The settings of the appendix; the others follow the public code of the other papers.
        "paper": {
            "batch_size": 512, "learning_rate": 5e-5, "max_context": 100, "weight_decay": 0.0,
            "evaluate_every": 0, "patience": 3,
        },
    }  # fmt: skip
    ablations: ClassVar = {
        "meed2-joint": {"joint": True},
        "meed2-no-emotion": {"labels": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {"label_weight": EMOTION_WEIGHT_RANGE},
        "schedule": {"predictor_rate": Range(low=0.1, high=3.0, scale="loguniform")},
        "gating": {"label_strength": Range(low=0.25, high=4.0, scale="loguniform")},
        "thresholds": {"emotionality_threshold": Choice(values=(0.0, 0.25, 0.5, 0.75))},
    }
    controls: ClassVar = {"label": (PREDICTED, *LABELS)}

    def __init__(self, config: Meed2Config, data_info: DataInfo):
        super().__init__(config, data_info)
        if not config.labels:
            return
        self.label_embedding = build_label_embedding(config.width)
        self.predictor = (
            LabelHead(config.width) if config.joint else LabelPredictor(config, data_info)
        )

    @classmethod
    def requirements_for(cls, config: Meed2Config) -> DataRequirements:
        """Return the requirements, without the label columns if labels are not used."""
        return cls.requirements if config.labels else replace(cls.requirements, columns=COLUMNS)

    @classmethod
    def controls_for(cls, config: Meed2Config) -> Mapping[str, Sequence[str]]:
        """Return the controls: the label of the response, if labels are used."""
        return cls.controls if config.labels else {}

    @classmethod
    def stage_independent_settings(cls, config: Meed2Config) -> Mapping[str, tuple[str, ...]]:
        """Return the settings of the decoder, which the predictor's stage does not use."""
        has_own_stage = config.labels and not config.joint
        return {"predictor": ("label_strength", "label_smoothing")} if has_own_stage else {}

    def stages(self) -> list[Stage]:
        """Return the stages: the predictor, then encoder and decoder with the predictor frozen; in
        joint training, one stage for all."""
        [train] = super().stages()
        if not self.config.labels or self.config.joint:
            return [train]
        predictor_update = Update(player="predictor", losses="label_losses", weights={"label": 1.0})
        parts = tuple(name for name in train.players["model"] if name != "predictor")
        return [
            Stage(
                name="predictor",
                players={"predictor": ("predictor",)},
                updates=(predictor_update,),
                share=0.3,
                rate=self.config.predictor_rate,
                metric="valid_label",
            ),
            replace(train, name="dialogue", players={"model": parts}, share=0.7),
        ]

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of the response and, in joint training, of the label."""
        label = {"label": self.config.label_weight} if self.config.joint else {}
        return {"nll": 1.0, **label}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms: the response, and in joint training the label."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)  # (B, S, D)
        if not self.config.labels:
            return {"nll": self.compute_nll(batch, self.decode(embedded, hidden), embedded)}
        losses: Losses = {}
        if self.config.joint:
            logits, _ = self.predictor(hidden, embedded.attention_mask)
            losses["label"] = _label_loss(logits, batch)
        # Validation must see what decoding will see: the predicted label.
        e_y = batch["response_label"] + 1 if self.training else self.predict_label(batch, hidden)
        decoded = self.decode(self._add_label(embedded, e_y), hidden)
        return {**losses, "nll": self.compute_nll(batch, decoded, embedded)}

    def label_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the cross-entropy of the predictor in its own stage."""
        batch = batches[PAIRED]
        logits, _ = self._classify_label(batch, None)
        return {"label": _label_loss(logits, batch)}

    def log_likelihood(self, batch: Batch) -> Tensor:
        """Return the log-probability of each response token (B, T), given the predicted label."""
        return self._log_likelihood(batch, use_true_label=False)

    def oracle_log_likelihood(self, batch: Batch) -> Tensor:
        """Return the log-probability of each response token (B, T), given the true label."""
        return self._log_likelihood(batch, use_true_label=self.config.labels)

    def _log_likelihood(self, batch: Batch, *, use_true_label: bool) -> Tensor:
        """Return the log-probability of each response token (B, T), given a label."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        e_y = batch["response_label"] + 1 if use_true_label else self.predict_label(batch, hidden)
        decoded = self.decode(self._add_label(embedded, e_y), hidden)
        return score_tokens(self.output, decoded, batch["response"], embedded.response_mask)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the label of the response."""
        if not self.config.labels:
            return {}
        hidden = self.encode_context(self.embed(batch)) if self.config.joint else None
        logits, _ = self._classify_label(batch, hidden)
        return {"response_label": logits.log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the decoder's state with the embedding of the response's label."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        label = (controls or {}).get("label", PREDICTED)
        if label == PREDICTED:
            e_y = self.predict_label(batch, hidden)
        else:
            e_y = torch.full((len(batch),), LABELS.index(label) + 1, device=hidden.device)
        state = self.decoder.init_state(hidden, embedded.attention_mask)
        return {**state, "label": self._embed_label(e_y)}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one more token; the embedding of the label is added to it."""
        embedded = self.embed_next(tokens, state["length"]) + state["label"]
        decoded, state = self.decoder.step(embedded, state)
        return self.output.logits(decoded), state

    def embed(self, batch: Batch) -> EmbeddedBatch:
        """Embed context and response, and add the label of its utterance to each context token."""
        embedded = super().embed(batch)
        if not self.config.labels:
            return embedded
        e_labels = self.label_embedding(batch["context_labels"])
        return replace(embedded, context=embedded.context + e_labels)

    def predict_label(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Return the most likely label of the response as an index of `label_embedding`, (B,): from
        1, or 0 without labels."""
        if not self.config.labels:
            return torch.zeros(len(batch), dtype=torch.long, device=hidden.device)
        with torch.no_grad():
            logits, _ = self._classify_label(batch, hidden if self.config.joint else None)
        return logits.argmax(dim=-1) + 1

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the labels of the context, the probabilities of the response's label, and the
        attention weight of each word in predicting it."""
        explanations = super().explain(batch)
        if not self.config.labels:
            return explanations
        hidden = self.encode_context(self.embed(batch)) if self.config.joint else None
        logits, alpha = self._classify_label(batch, hidden)
        probs = logits.softmax(dim=-1).tolist()
        word_mask, labels = is_word(batch["context"], self.data_info), batch["context_labels"]
        names = ("", *LABELS, "")
        return [
            replace(
                explanation,
                response_label=dict(zip(LABELS, probs[row], strict=True)),
                by_word={"tells the label": alpha[row][word_mask[row]].tolist()},
                word_labels=[names[number] for number in labels[row][word_mask[row]].tolist()],
            )
            for row, explanation in enumerate(explanations)
        ]

    def _classify_label(self, batch: Batch, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the logits of the response's label (B, labels), and the attention weights (B, S),
        from the context's hidden states (joint training) or, if None, with the predictor's own
        encoder."""
        context = batch["context"]
        if hidden is not None:
            mask = (context != self.data_info.specials["<pad>"])[:, None, None, :]
            logits, alpha = self.predictor(hidden, mask)
        else:
            logits, alpha = self.predictor(context, batch["context_roles"], batch["context_labels"])
        return logits, alpha

    def _add_label(self, embedded: EmbeddedBatch, e_y: Tensor) -> EmbeddedBatch:
        """Add the embedding of the response's label (B,) to the decoder's inputs."""
        return replace(embedded, decoder_inputs=embedded.decoder_inputs + self._embed_label(e_y))

    def _embed_label(self, e_y: Tensor) -> Tensor:
        """Return the scaled embedding of the response's label (B,), (B, 1, D); zeros without
        labels."""
        if not self.config.labels:
            return torch.zeros(len(e_y), 1, self.config.width, device=e_y.device)
        embedding: Tensor = self.config.label_strength * self.label_embedding(e_y)[:, None]
        return embedding


def _label_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of the response's label, divided by `batch.samples`; responses
    without a label add 0."""
    total = F.cross_entropy(logits, batch["response_label"], ignore_index=-1, reduction="sum")
    return total / batch.samples
