"""MEED2: predict the emotion or intent to answer with, then answer with it (Xie and Pu 2021).

Every utterance of the context has one of 41 labels: 32 emotions, 8 intents, neutral. A token enters
as the sum of its word, its place, the label of its utterance and who says it; encoder and decoder
share these tables. A predictor with an encoder of its own tells the label of the response from the
context; the decoder is told the true label in training, and the predicted one, or one that a user
asks for, when it answers.

Deviations: who says a token is a word of the vocabulary, as in all systems here, and so shares its
table. Layers are normalised before they are applied. Each utterance ends with one token, `<sep>`,
and the context begins with `<cls>`, where the paper has RoBERTa's `<s>` and `</s>`. On valid and in
perplexity the predicted label is told, not the true one. Responses are all the listener's, so the
decoder is not told who speaks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Stage,
    State,
    Update,
)
from attune.models.labels import LABELS
from attune.models.layers import Decoder, Encoder, Positions, WordEmbedding
from attune.models.transformer import EmbeddedBatch, Transformer, TransformerConfig, is_word

PREDICTED = "predicted"
COLUMNS = ("context", "context_roles", "response")
LABEL_COLUMNS = ("context_labels", "response_label")


@dataclass(frozen=True, kw_only=True)
class Meed2Config(TransformerConfig):
    """The Transformer's, larger, and what it is told of labels."""

    num_layers: int = 4
    """Layers of each encoder and of the decoder."""
    num_heads: int = 6
    """Attention heads."""
    key_depth: int = 300
    """Width of queries, keys and values, all heads together."""
    filter_width: int = 1200
    """Width inside the feed-forward."""
    dropout: float = 0.1
    """Share of activations dropped in training."""
    tied: bool = True
    """Use the word embedding as the output layer."""
    labels: bool = True
    """Read the labels of utterances, and answer with one; else it is a plain Transformer."""
    joint: bool = False
    """Predict the label from the states that the decoder reads, and learn both together."""
    predictor_rate: float = 1.0
    """The learning rate of the predictor's stage, as a multiple of the dialogue's."""
    label_weight: float = 1.0
    """Of the label's cross-entropy, where both are learned together."""
    label_strength: float = 1.0
    """How large the response's label is beside the words in what the decoder is given."""

    emotionality_threshold: float = 0.0
    """Learn from dialogs at least this emotional: the mean over a dialog's utterances of the sum of
    the 32 emotions' probabilities. Above 0 it needs `attune annotate emotions`."""

    def __post_init__(self) -> None:
        if self.joint and not self.labels:
            raise ValueError("joint=true needs labels=true")
        if not 0 <= self.emotionality_threshold < 1:
            raise ValueError(
                f"emotionality_threshold={self.emotionality_threshold}: between 0 and 1 is expected"
            )


class LabelReader(nn.Module):
    """What label a response should have, from the states of a context (eq. 1-2)."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.Linear(width, 1, bias=False)  # v
        self.output = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, len(LABELS))
        )

    def forward(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D), mask (B, 1, 1, S) -> logits (B, labels) and the weights of places (B, S)."""
        scores = self.attention(states).squeeze(-1).masked_fill(~mask[:, 0, 0], -torch.inf)
        weights = scores.softmax(dim=-1)  # eq. 1
        pooled = (weights[:, None] @ states).squeeze(1)  # eq. 2
        return self.output(pooled), weights


class Predictor(nn.Module):
    """A reader of labels with an encoder and tables of its own."""

    def __init__(self, config: Meed2Config, data_info: DataInfo):
        super().__init__()
        self.embedding = WordEmbedding(data_info.num_tokens, config.width)
        self.labels = label_table(config.width)
        self.positions = Positions(config.width)
        self.encoder = Encoder(*_shape(config), nn.GELU)
        self.reader = LabelReader(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S) each -> logits (B, labels), weights (B, S)."""
        words, speakers = self.embedding(context, roles)
        given = words + speakers + self.labels(labels) + self.positions(context.shape[1])
        mask = (context != self.padding)[:, None, None, :]
        found: tuple[Tensor, Tensor] = self.reader(self.encoder(self.dropout(given), mask), mask)
        return found


def label_table(width: int) -> nn.Embedding:
    """A vector for each label from 1 on, then one for none; 0 is padding and adds nothing."""
    table = nn.Embedding(len(LABELS) + 2, width, padding_idx=0)
    with torch.no_grad():  # the spread of words and positions
        nn.init.normal_(table.weight, std=width**-0.5)
        table.weight[0].zero_()
    return table


class Meed2(Transformer):
    """A Transformer that is told the label of every utterance, and of the one to come."""

    system = "MEED2"
    paper = "Xie and Pu 2021"
    Config = Meed2Config
    requirements = DataRequirements(
        tokenizer="subwords", separators=True, columns=(*COLUMNS, *LABEL_COLUMNS)
    )
    presets: ClassVar = {
        "tiny": {
            "width": 32, "num_layers": 1, "num_heads": 2, "key_depth": 32, "filter_width": 64,
            "vocabulary_size": 600, "max_context": 100,
        },
        "small": {
            "width": 128, "num_layers": 2, "num_heads": 4, "key_depth": 128, "filter_width": 512,
            "vocabulary_size": 8_000, "learning_rate": 1e-3, "schedule": "linear",
            "warmup_steps": 100, "max_epochs": 6, "max_context": 100,
        },
        # Of what its appendix does not say: what the public code of others has.
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
        "loss-weights": {"label_weight": Range(low=0.1, high=10.0, scale="loguniform")},
        "schedule": {"predictor_rate": Range(low=0.1, high=3.0, scale="loguniform")},
        "gating": {"label_strength": Range(low=0.25, high=4.0, scale="loguniform")},
        "thresholds": {"emotionality_threshold": Choice(values=(0.0, 0.25, 0.5, 0.75))},
    }
    controls: ClassVar = {"label": (PREDICTED, *LABELS)}

    def __init__(self, config: Meed2Config, data_info: DataInfo):
        super().__init__(config, data_info)
        self.encoder = Encoder(*_shape(config), nn.GELU)
        self.decoder = Decoder(*_shape(config), activation=nn.GELU)
        if not config.labels:
            return
        self.labels = label_table(config.width)
        self.predictor = LabelReader(config.width) if config.joint else Predictor(config, data_info)

    @classmethod
    def requirements_for(cls, config: Meed2Config) -> DataRequirements:
        """Without labels it needs none."""
        return cls.requirements if config.labels else replace(cls.requirements, columns=COLUMNS)

    @classmethod
    def controls_with(cls, config: Meed2Config) -> Mapping[str, Sequence[str]]:
        """Without labels none can be asked for."""
        return cls.controls if config.labels else {}

    @classmethod
    def stage_independent_settings(cls, config: Meed2Config) -> Mapping[str, tuple[str, ...]]:
        """The predictor says nothing."""
        apart = config.labels and not config.joint
        return {"predictor": ("label_strength", "label_smoothing")} if apart else {}

    def stages(self) -> list[Stage]:
        """The predictor alone, then encoder and decoder while it rests; or all together."""
        [train] = super().stages()
        if not self.config.labels or self.config.joint:
            return [train]
        predict = Update(player="predictor", losses="label_losses", weights={"label": 1.0})
        parts = tuple(name for name in train.players["model"] if name != "predictor")
        return [
            Stage(
                name="predictor",
                players={"predictor": ("predictor",)},
                updates=(predict,),
                share=0.3,
                rate=self.config.predictor_rate,
                metric="valid_label",
            ),
            replace(train, name="dialogue", players={"model": parts}, share=0.7),
        ]

    def loss_weights(self) -> dict[str, float]:
        """Response, and label where both are learned together."""
        label = {"label": self.config.label_weight} if self.config.joint else {}
        return {"nll": 1.0, **label}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The likelihood of responses, their labels being told."""
        batch = batches[PAIRED]
        words = self.embed(batch)
        source = self.encode_context(words)
        if not self.config.labels:
            return {"nll": self.compute_nll(batch, self.decode(words, source), words)}
        losses: Losses = {}
        if self.config.joint:
            logits, _ = self.predictor(source, words.attention_mask)
            losses["label"] = _label_loss(logits, batch)
        # What is looked at in between is what answers will be made from.
        label = batch["response_label"] + 1 if self.training else self.predicted(batch, source)
        told = self._told(words, label)
        return {**losses, "nll": self.compute_nll(batch, self.decode(told, source), words)}

    def label_losses(self, batches: Batches, progress: Progress) -> Losses:
        """The predictor's cross-entropy."""
        batch = batches[PAIRED]
        return {"label": _label_loss(self._read_label(batch, None)[0], batch)}

    def log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T), the predicted label being told."""
        return self._log_likelihood(batch, true_label=False)

    def oracle_log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T), the true label being told."""
        return self._log_likelihood(batch, true_label=self.config.labels)

    def _log_likelihood(self, batch: Batch, true_label: bool) -> Tensor:
        words = self.embed(batch)
        source, real = self.encode_context(words), words.response_mask
        label = batch["response_label"] + 1 if true_label else self.predicted(batch, source)
        hidden = self.decode(self._told(words, label), source)
        values = hidden.new_zeros(real.shape)
        values[real] = self.output.log_likelihood(hidden[real], batch["response"][real])
        return values

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The label of the response."""
        if not self.config.labels:
            return {}
        source = self.encode_context(self.embed(batch)) if self.config.joint else None
        return {"response_label": self._read_label(batch, source)[0].log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The source's keys and values, and what the decoder is told beside each word."""
        words = self.embed(batch)
        source = self.encode_context(words)
        asked = (controls or {}).get("label", PREDICTED)
        if asked == PREDICTED:
            label = self.predicted(batch, source)
        else:
            label = torch.full((len(batch),), LABELS.index(asked) + 1, device=source.device)
        begun = self.decoder.init_state(source, words.attention_mask)
        return {**begun, "told": self._beside(label)}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One more token, with the label of the response beside it."""
        embedded = self.embed_next(tokens, state["length"]) + state["told"]
        hidden, state = self.decoder.step(embedded, state)
        return self.output.logits(hidden), state

    def embed(self, batch: Batch) -> EmbeddedBatch:
        """The labels of the context's utterances are added to their words."""
        words = super().embed(batch)
        if not self.config.labels:
            return words
        return replace(words, context=words.context + self.labels(batch["context_labels"]))

    def predicted(self, batch: Batch, source: Tensor) -> Tensor:
        """(B,) the likeliest label, from 1 on; 0 where there are no labels."""
        if not self.config.labels:
            return torch.zeros(len(batch), dtype=torch.long, device=source.device)
        with torch.no_grad():
            logits, _ = self._read_label(batch, source if self.config.joint else None)
        return logits.argmax(dim=-1) + 1

    def explain(self, batch: Batch) -> list[Explanation]:
        """The labels of the context, of the response, and the words that told it."""
        explained = super().explain(batch)
        if not self.config.labels:
            return explained
        source = self.encode_context(self.embed(batch)) if self.config.joint else None
        logits, weights = self._read_label(batch, source)
        shares = logits.softmax(dim=-1).tolist()
        there, labels = is_word(batch["context"], self.data_info), batch["context_labels"]
        names = ("", *LABELS, "")
        return [
            replace(
                explanation,
                response_label=dict(zip(LABELS, shares[row], strict=True)),
                by_word={"tells the label": weights[row][there[row]].tolist()},
                word_labels=[names[number] for number in labels[row][there[row]].tolist()],
            )
            for row, explanation in enumerate(explained)
        ]

    def _read_label(self, batch: Batch, source: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits (B, labels) and weights (B, S), from the states that the decoder reads, if given,
        else by the predictor's own reading."""
        context = batch["context"]
        found: tuple[Tensor, Tensor]
        if source is not None:
            mask = (context != self.data_info.specials["<pad>"])[:, None, None, :]
            found = self.predictor(source, mask)
        else:
            found = self.predictor(context, batch["context_roles"], batch["context_labels"])
        return found

    def _told(self, words: EmbeddedBatch, label: Tensor) -> EmbeddedBatch:
        return replace(words, decoder_inputs=words.decoder_inputs + self._beside(label))

    def _beside(self, label: Tensor) -> Tensor:
        """(B,) -> (B, 1, D) the label that stands beside each word of the response."""
        if not self.config.labels:
            return torch.zeros(len(label), 1, self.config.width, device=label.device)
        beside: Tensor = self.config.label_strength * self.labels(label)[:, None]
        return beside


def _label_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy of the global batch; responses without a label do not count."""
    total = F.cross_entropy(logits, batch["response_label"], ignore_index=-1, reduction="sum")
    return total / batch.samples


def _shape(config: Meed2Config) -> tuple[int, int, int, int, int, float]:
    return (
        config.width, config.num_layers, config.num_heads, config.key_depth, config.filter_width,
        config.dropout,
    )  # fmt: skip
