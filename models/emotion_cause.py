"""Emotion cause: empathetic responses by recognising emotion causes (Gao et al. 2021).

A reasoner, a small encoder without positions, predicts the emotion of the context from the state of
`<cls>` and for each word whether it belongs to the emotion's cause (eq. 1-4). The generator is a
Transformer that is given the predicted emotion as an embedding at every place of its encoder and of
its decoder, and whose decoder attends to the context twice: as usual, and above that through gates
that let the cause's words pass (eq. 5). Soft gates are the probabilities of the cause labels, hard
gates the labels themselves, in training drawn by the Gumbel-softmax trick. `<sep>` stands behind
each utterance and counts as its last word; the gate of `<cls>` is always 1, so that something can
be looked at where no word is a cause.

Two stages: the reasoner, then both together (eq. 6-7).

Deviations: as in `transformer.py`, and
- Eq. 4 and 6 are sums over words. Ours are means: of the responses' words over the batch, of the
  emotions over the samples, and of the cause labels over the words of a sample, then over samples.
- Eq. 6 lacks its logarithm. Eq. 5 must let `<cls>` in, whose label, as in eq. 4, is not learned.
- Section 4.2 gives the reasoner positions, appendix A takes them away: ours has none.
- 300 is no multiple of 8 heads: queries, keys and values are 8 x 64 wide.
- The emotion that the generator is given is the predicted one, in training too, without a gradient
  through its choice; gates pass theirs on to the reasoner.
- Hard gates are drawn where the reasoner learns; otherwise the probability is held against a
  threshold. The public code draws them in its tests, too.
- Roles are read as in the other systems. Contractions are expanded in the data that all share.
- With a lexicon instead of causes the reasoner learns which words are intense in NRC-VAD.
- Where the paper is silent, preset `paper` has what is in its public code: a filter of 4 x 300,
  dropout, Adam's numbers, shared output weights; not its label smoothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

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
from attune.models.layers import Attention, DecoderLayer, Encoder, WordEmbedding
from attune.models.multitask import SMALL, emotion_loss, run_frozen
from attune.models.transformer import EmbeddedBatch, Transformer, TransformerConfig, is_word

CAUSES = "context_causes"
UNKNOWN = -1
LAST = Progress(fraction=1.0)


@dataclass(frozen=True, kw_only=True)
class EmotionCauseConfig(TransformerConfig):
    """The Transformer's, which of the ideas are in, how gates open, and how losses are weighed."""

    gate: Literal["soft", "hard"] = "soft"
    """A gate is the probability that a word belongs to the cause, or 0 or 1."""
    gated_by: Literal["cause", "lexicon", "nothing"] = "cause"
    """What the reasoner marks and the gates let pass: words of the cause, words that a lexicon
    holds for intense, or neither, and there are no gates."""
    gated_layers: Literal["all", "first", "last"] = "all"
    """The layers of the decoder that attend through gates."""
    gate_temperature: float = 1.0
    """What logits of the gates are divided by when the joint stage begins."""
    final_gate_temperature: float = 1.0
    """The same at its end and in evaluation; in between it goes from one to the other by equal
    factors."""
    hard_threshold: float = 0.5
    """The probability from which a hard gate is open outside training."""
    cause_threshold: float = 0.0
    """The annotator's probability from which an utterance is a cause to learn from; 0 leaves the
    data's marks as they are."""
    lexicon_threshold: float = 0.8
    """|valence - 1/2| + arousal above which a word is intense; a quarter of NRC-VAD is."""
    emotion: bool = True
    """Give the generator the predicted emotion."""
    multitask: bool = True
    """Let the reasoner go on learning with the generator; otherwise it rests."""
    emotion_weight: float = 1.0
    """Of the emotion's cross-entropy in eq. 4."""
    cause_weight: float = 1.0
    """Of the cause labels' cross-entropy in eq. 4."""
    response_weight: float = 1.0
    """Of the response's likelihood in eq. 7."""

    def __post_init__(self) -> None:
        for name in ("gate_temperature", "final_gate_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: more than 0 is expected")
        if not 0 < self.hard_threshold < 1:
            raise ValueError(f"hard_threshold={self.hard_threshold}: between 0 and 1 is expected")
        if not 0 <= self.cause_threshold < 1:
            raise ValueError(f"cause_threshold={self.cause_threshold}: between 0 and 1 is expected")


@dataclass(frozen=True, kw_only=True)
class HardGateConfig(EmotionCauseConfig):
    """The same with hard gates."""

    gate: Literal["soft", "hard"] = "hard"
    """A gate is the probability that a word belongs to the cause, or 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class Reasoned:
    """What the reasoner makes of a context, as logits."""

    emotion: Tensor
    """(B, emotions)."""
    causes: Tensor | None
    """(B, S, 2) no cause, cause; None where it marks nothing."""


class Reasoner(nn.Module):
    """One layer, one head, no positions; words of its own."""

    def __init__(self, config: EmotionCauseConfig, data_info: DataInfo):
        super().__init__()
        width = config.width
        self.embedding = WordEmbedding(data_info.num_tokens, width, vectors=data_info.word_vectors)
        self.encoder = Encoder(width, 1, 1, width, width, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.emotion = nn.Linear(width, len(data_info.emotions))
        self.cause = None if config.gated_by == "nothing" else nn.Linear(width, 2)
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor) -> Reasoned:
        """Each (B, S)."""
        words, speakers = self.embedding(context, roles)
        mask = (context != self.padding)[:, None, None, :]
        states = self.encoder(self.dropout(words + speakers), mask)
        return Reasoned(
            emotion=self.emotion(states[:, 0]),  # eq. 1
            causes=None if self.cause is None else self.cause(states),  # eq. 2
        )


class GatedDecoderLayer(DecoderLayer):
    """A decoder layer with a second, gated attention to the source above the first."""

    def __init__(
        self, width: int, num_heads: int, key_depth: int, filter_width: int, dropout: float,
        activation: type[nn.Module] = nn.ReLU,
    ):  # fmt: skip
        super().__init__(width, num_heads, key_depth, filter_width, dropout, activation)
        self.gated_attention = GatedAttention(width, num_heads, key_depth, dropout)
        self.gated_norm = nn.LayerNorm(width)

    def project_kv(self, source: Tensor, condition: Tensor | None = None) -> tuple[Tensor, ...]:
        """Keys and values of the source for both attentions, and the gates (B, S)."""
        assert condition is not None
        cross, gated = super().project_kv(source), self.gated_attention.project_kv(source)
        return (*cross, *gated, condition)

    def _cross_attend(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        hidden = super()._cross_attend(hidden, source, mask)
        _, _, keys, values, gates = source
        looked = self.gated_attention.through(self.gated_norm(hidden), keys, values, gates, mask)
        attended: Tensor = hidden + self.dropout(looked)
        return attended


class GatedAttention(Attention):
    """Attention that gates let through (eq. 5)."""

    def through(
        self, query: Tensor, keys: Tensor, values: Tensor, gates: Tensor, mask: Tensor
    ) -> Tensor:
        """(B, T, D) from (B, T, D), with gates (B, S).

        The gates multiply. As logarithms, added to the products, a gate of 0 could not be told by
        any gradient to open.
        """
        queries = self._split_heads(self.queries(query))
        products = queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5  # (B, H, T, S)
        shares = products.masked_fill(~mask, -torch.inf).softmax(dim=-1) * gates[:, None, None, :]
        # The gate of <cls> keeps the sum from 0, but its share may be rounded to that.
        weights = shares / shares.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        mixed = F.dropout(weights, self.dropout, self.training) @ values
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


@dataclass(frozen=True, kw_only=True)
class Felt(EmbeddedBatch):
    """A batch as word vectors with the predicted emotion's."""

    emotion: Tensor
    """(B, 1, D) the vector of the predicted emotion."""
    gates: Tensor | None
    """(B, S), None where there are none."""
    reasoned: Reasoned


def _ablations(name: str) -> dict[str, Mapping[str, Any]]:
    """Table 4's, of soft and hard gates alike."""
    return {
        f"{name}-no-multitask": {"multitask": False},
        f"{name}-no-emotion": {"emotion": False},
        f"{name}-lexicon": {"gated_by": "lexicon"},
    }


class EmotionCause(Transformer):
    """A generator that looks at what a reasoner holds for the emotion's cause, by soft gates."""

    system = "Emotion cause"
    paper = "Gao et al. 2021"
    Config = EmotionCauseConfig
    requirements = DataRequirements(
        separators=True, columns=("context", "context_roles", "response", "emotion", CAUSES)
    )
    presets: ClassVar = {
        **Transformer.presets,
        "small": {**Transformer.presets["small"], **SMALL, "emotion_weight": 4.0},
        "paper": {
            "num_layers": 6,
            "num_heads": 8,
            "key_depth": 512,
            "filter_width": 1200,
            "dropout": 0.1,
            "tied": True,
            "batch_by": "tokens",
            "batch_size": 8192,
            "learning_rate": 5e-4,
            "adam_beta2": 0.997,
            "adam_epsilon": 1e-9,
            "weight_decay": 0.0,
            "max_epochs": 80,
        },
    }
    ablations: ClassVar = {
        **_ablations("emotion-cause-soft"),
        "emotion-cause-no-cause": {"gated_by": "nothing"},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            name: Range(low=0.1, high=10.0, scale="loguniform")
            for name in ("emotion_weight", "cause_weight", "response_weight")
        },
        "gating": {
            "gate": Choice(values=("soft", "hard")),
            "gated_layers": Choice(values=("all", "first", "last")),
            "gate_temperature": Range(low=0.2, high=5.0, scale="loguniform"),
            "final_gate_temperature": Range(low=0.2, high=5.0, scale="loguniform"),
        },
        "thresholds": {
            "hard_threshold": Range(low=0.2, high=0.8),
            "lexicon_threshold": Range(low=0.4, high=1.2),
            "cause_threshold": Range(low=0.2, high=0.8),
        },
    }
    intensity: Tensor

    def __init__(self, config: EmotionCauseConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.reasoner = Reasoner(config, data_info)
        if config.emotion:
            self.emotions = nn.Embedding(len(data_info.emotions), config.width)
            nn.init.normal_(self.emotions.weight, std=config.width**-0.5)
        for number in self._gated_layers():
            self.decoder.layers[number] = GatedDecoderLayer(
                config.width, config.num_heads, config.key_depth, config.filter_width,
                config.dropout,
            )  # fmt: skip
        if config.gated_by == "lexicon":
            assert data_info.intensity is not None, "intensity is asked for in `needs_with`"
            self.register_buffer("intensity", data_info.intensity, persistent=False)

    @classmethod
    def requirements_for(cls, config: EmotionCauseConfig) -> DataRequirements:
        """Marks of causes where it learns from them, intensities where from those."""
        if config.gated_by == "cause":
            return cls.requirements
        columns = tuple(name for name in cls.requirements.columns if name != CAUSES)
        return replace(cls.requirements, columns=columns, intensity=config.gated_by == "lexicon")

    @classmethod
    def stage_independent_settings(
        cls, config: EmotionCauseConfig
    ) -> Mapping[str, tuple[str, ...]]:
        """The reasoner learns before anything is said or gated."""
        gates = ("gate", "gate_temperature", "final_gate_temperature", "hard_threshold")
        return {"reasoner": (*gates, "response_weight", "label_smoothing")}

    def stages(self) -> list[Stage]:
        """The reasoner, then the generator with it (eq. 7), or without where it rests."""
        [train] = super().stages()
        parts = train.players["model"]
        if not self.config.multitask:
            parts = tuple(name for name in parts if name != "reasoner")
        reason = Update(
            player="reasoner", losses="reasoner_losses", weights=self._reasoner_weights()
        )
        return [
            Stage(
                name="reasoner",
                players={"reasoner": ("reasoner",)},
                updates=(reason,),
                share=0.25,
            ),
            replace(train, name="joint", players={"model": parts}, share=0.75),
        ]

    def loss_weights(self) -> dict[str, float]:
        """Eq. 7."""
        reasoner = self._reasoner_weights() if self.config.multitask else {}
        return {"nll": self.config.response_weight, **reasoner}

    def _reasoner_weights(self) -> dict[str, float]:
        """Eq. 4."""
        weights = {"emotion": self.config.emotion_weight}
        if self.config.gated_by != "nothing":
            weights["cause"] = self.config.cause_weight
        return weights

    def reasoner_losses(self, batches: Batches, progress: Progress) -> Losses:
        """The reasoner alone."""
        batch = batches[PAIRED]
        return self._reasoning(batch, self.reasoner(*self.prepare_context(batch)))

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The response, and what the reasoner learns beside it."""
        batch = batches[PAIRED]
        words = self.embed(batch, progress)
        nll = self.compute_nll(
            batch, self.decode(words, self.encode_context(words)), words
        )  # eq. 6
        return {"nll": nll, **self._reasoning(batch, words.reasoned)}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion that the reasoner reads in the state of `<cls>`."""
        reasoned = self.reasoner(batch["context"], batch["context_roles"])
        return {"emotion": reasoned.emotion.log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The source with its gates, and the emotion that each token is given."""
        words = self.embed(batch)
        state = self.decoder.init_state(
            self.encode_context(words), words.attention_mask, words.gates
        )
        return {**state, "emotion": words.emotion}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One more token."""
        embedded = self.embed_next(tokens, state["length"]) + state["emotion"]
        hidden, state = self.decoder.step(embedded, state)
        return self.output.logits(hidden), state

    def embed(self, batch: Batch, progress: Progress = LAST) -> Felt:
        """What the encoder and the decoder are given, the predicted emotion at every place."""
        context, roles = self.prepare_context(batch)
        response, padding = batch["response"], self.data_info.specials["<pad>"]
        reasoned = self._reasoned(batch, context)
        emotion = self._emotion(reasoned)
        words, speakers, given = self.embedding(context, roles, self.shift_right(response))
        return Felt(
            context=self.dropout(words + speakers + self.positions(context.shape[1]) + emotion),
            attention_mask=(context != padding)[:, None, None, :],
            decoder_inputs=self.dropout(given + self.positions(given.shape[1]) + emotion),
            response_mask=response != padding,
            emotion=emotion,
            gates=self._gates(reasoned, progress),
            reasoned=reasoned,
        )

    def decode(self, words: EmbeddedBatch, source: Tensor) -> Tensor:
        """Hidden states (B, T, D) that predict the response."""
        assert isinstance(words, Felt)
        hidden: Tensor = self.decoder(
            words.decoder_inputs, source, words.attention_mask, words.gates
        )
        return hidden

    def explain(self, batch: Batch) -> list[Explanation]:
        """The emotion, and of each word how likely it belongs to the cause and its gate."""
        explanations, words = super().explain(batch), self.embed(batch)
        causes, gates = words.reasoned.causes, words.gates
        if causes is None or gates is None:
            return explanations
        there = is_word(batch["context"], self.data_info)
        shown = {self.config.gated_by: causes.softmax(dim=-1)[..., 1], "gate": gates}
        return [
            replace(
                explanation,
                by_word={name: each[row][there[row]].tolist() for name, each in shown.items()},
            )
            for row, explanation in enumerate(explanations)
        ]

    def _reasoned(self, batch: Batch, context: Tensor) -> Reasoned:
        """What the reasoner makes of the context that the generator reads; where it rests, of the
        context with all its words."""
        roles = batch["context_roles"]
        reasoned: Reasoned = (
            self.reasoner(context, roles)
            if self.config.multitask
            else run_frozen(self.reasoner, batch["context"], roles)
        )
        return reasoned

    def _emotion(self, reasoned: Reasoned) -> Tensor:
        """(B, 1, D) the vector of the likeliest emotion; zeros where the generator gets none."""
        if not self.config.emotion:
            return reasoned.emotion.new_zeros(len(reasoned.emotion), 1, self.config.width)
        vectors: Tensor = self.emotions(reasoned.emotion.argmax(dim=-1))
        return vectors[:, None]

    def _gates(self, reasoned: Reasoned, progress: Progress) -> Tensor | None:
        """(B, S) how far each word may pass."""
        if reasoned.causes is None:
            return None
        logits = reasoned.causes[..., 1] - reasoned.causes[..., 0]
        if self.config.gate == "soft":
            gates = (logits / self._temperature(progress)).sigmoid()
        elif self.training and self.config.multitask:
            gates = drawn(logits, self._temperature(progress))
        else:
            gates = (logits.sigmoid() >= self.config.hard_threshold).to(logits.dtype)
        return torch.cat([torch.ones_like(gates[:, :1]), gates[:, 1:]], dim=1)  # <cls> passes

    def _temperature(self, progress: Progress) -> float:
        first, last = self.config.gate_temperature, self.config.final_gate_temperature
        share = progress.fraction if self.training else 1.0
        return float(first ** (1 - share) * last**share)

    def _reasoning(self, batch: Batch, reasoned: Reasoned) -> Losses:
        """Eq. 3-4, and how many words are marked rightly."""
        losses = {"emotion": emotion_loss(reasoned.emotion, batch)}
        if reasoned.causes is None:
            return losses
        marks, logits = self._marks(batch)[:, 1:], reasoned.causes[:, 1:]  # without <cls>
        known = marks >= 0
        counts = known / known.sum(dim=1, keepdim=True).clamp(min=1) / batch.samples  # (B, S - 1)
        each = F.cross_entropy(
            logits.transpose(1, 2), marks, ignore_index=UNKNOWN, reduction="none"
        )
        right = logits.argmax(dim=-1) == marks
        return {
            **losses,
            "cause": (each * counts).sum(),
            "cause_accuracy": (right * counts).sum().detach(),
        }

    def _marks(self, batch: Batch) -> Tensor:
        """(B, S) whether each word is to be marked: 1, 0, or -1 where nothing is known."""
        context = batch["context"]
        if self.config.gated_by == "lexicon":
            marks = (self.intensity[context] > self.config.lexicon_threshold).long()
        else:
            marks = batch[CAUSES]
        return marks.masked_fill(context == self.data_info.specials["<pad>"], UNKNOWN)

    def _gated_layers(self) -> range:
        """The numbers of the decoder's layers that attend through gates."""
        if self.config.gated_by == "nothing":
            return range(0)
        count = self.config.num_layers
        return {"all": range(count), "first": range(1), "last": range(count - 1, count)}[
            self.config.gated_layers
        ]


def drawn(logits: Tensor, temperature: float) -> Tensor:
    """0 or 1, drawn as often as they are likely; the gradient is that of the softmax of what was
    drawn (Gumbel-softmax, straight-through)."""
    chance = torch.rand_like(logits)
    noise = chance.log() - (-chance).log1p()  # of two labels Gumbel's noises differ by this
    soft = ((logits + noise) / temperature).sigmoid()
    return (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())


class HardEmotionCause(EmotionCause):
    """The same by hard gates."""

    Config = HardGateConfig
    ablations: ClassVar = _ablations("emotion-cause-hard")
