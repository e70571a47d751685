"""Emotion cause: empathetic responses by recognising emotion causes (Gao et al. 2021).

A reasoner, a small encoder without positions, predicts the emotion of the context from the hidden
state of `<cls>`, and for each word whether it belongs to the cause of the emotion (eq. 1-4). The
generator is a Transformer. The embedding of the predicted emotion is added at each position of its
encoder and decoder. Above the cross-attention, each decoder layer has a second attention to the
context, with a gate per word (eq. 5). Soft gates are the probabilities of the cause labels. Hard
gates are the labels themselves, in training sampled by the Gumbel-softmax trick. `<sep>` follows
each utterance and is treated as its last word. The gate of `<cls>` is always 1, so that attention
is defined if no word belongs to the cause.

There are two stages: the reasoner, then reasoner and generator together (eq. 6-7).

Deviations: as in `transformer.py`, and
- Eq. 4 sums the loss of the cause labels over words. Here it is the mean over the words of a
  sample, as in the public code. The default weights of emotion and causes assume that eq. 7 adds
  them to the summed likelihood of a response, rather than to the mean per token.
- Eq. 6 lacks the logarithm. The sum of eq. 5 has to include `<cls>`; its label is not learned, as
  in eq. 4.
- The reasoner has positions in section 4.2 and none in appendix A; here it has none.
- 300 is not a multiple of 8 heads: queries, keys and values have 8 x 64 dimensions.
- The generator gets the predicted emotion in training as well, without a gradient through the
  argmax. The gradient of the gates reaches the reasoner.
- Hard gates are sampled only while the reasoner is trained. Otherwise the probability is compared
  with a threshold; the public code also samples at test time.
- Roles are embedded as in the other systems. Contractions are expanded, as in all prepared data.
- In the lexicon ablation the reasoner is trained to label the words that NRC-VAD rates as intense.
- Where the paper gives no value, preset `paper` follows its public code: filter width 4 x 300,
  dropout, Adam's parameters and shared output weights, but no label smoothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    DataFilters,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Probability,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Stage,
    State,
    Temperature,
    Update,
    Weight,
    extend_presets,
)
from attune.models.layers import (
    Attention,
    DecoderLayer,
    Encoder,
    LayerShape,
    compute_attention_weights,
)
from attune.models.multitask import (
    EMOTION_PRESETS,
    EMOTION_WEIGHT_RANGE,
    SUMMED_LIKELIHOOD_WEIGHT,
    emotion_loss,
    run_frozen,
)
from attune.models.transformer import (
    EmbeddedBatch,
    Transformer,
    TransformerConfig,
    build_word_embedding,
    is_word,
)

CAUSES = "context_causes"
UNKNOWN = -1
"""The cause label of a word whose utterance is not annotated."""
STAGE_END = Progress(fraction=1.0)
"""Outside training, gates have their final temperature."""


@dataclass(frozen=True, kw_only=True)
class EmotionCauseConfig(TransformerConfig):
    """Settings of the Transformer, of the gates and of the loss weights."""

    gate: Literal["soft", "hard"] = "soft"
    """`soft`: a gate is the probability that a word belongs to the cause; `hard`: 0 or 1."""
    gated_by: Literal["cause", "lexicon", "nothing"] = "cause"
    """Words that the reasoner labels and the gates select: those of the cause, those that a lexicon
    rates as intense, or none (without gates)."""
    gated_layers: Literal["all", "first", "last"] = "all"
    """The decoder layers with gated attention."""
    gate_temperature: Temperature = 1.0
    """Temperature of the gates at the start of the joint stage. Usually 0.1 to 2."""
    final_gate_temperature: Temperature = 1.0
    """Temperature of the gates at the end of the joint stage and in evaluation; in between it
    changes geometrically. Usually 0.1 to 1."""
    hard_threshold: Probability = 0.5
    """Probability from which a hard gate is 1 outside training. Usually 0.3 to 0.7."""
    cause_threshold: Share = 0.0
    """Annotator's probability from which an utterance is labelled as a cause; 0 keeps the labels of
    the data. Usually 0.3 to 0.7."""
    lexicon_threshold: Annotated[float, Bounds(at_least=0, at_most=1.5)] = 0.8
    """|valence - 1/2| + arousal above which a word is intense. With 0.8, a quarter of NRC-VAD's
    words are."""
    emotion: bool = True
    """Add the embedding of the predicted emotion to the generator's inputs."""
    multitask: bool = True
    """Train the reasoner together with the generator; if false, it is frozen in the joint stage."""
    emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion's cross-entropy in eq. 4. Usually 0.05 to 0.5."""
    cause_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the cause labels' cross-entropy in eq. 4. Usually 0.05 to 0.5."""
    response_weight: Weight = 1.0
    """Weight of the response's negative log-likelihood in eq. 7. Usually 1."""


@dataclass(frozen=True, kw_only=True)
class HardGateConfig(EmotionCauseConfig):
    """The same settings with hard gates as default."""

    gate: Literal["soft", "hard"] = "hard"
    """`soft`: a gate is the probability that a word belongs to the cause; `hard`: 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class ReasonerOutput:
    """The reasoner's predictions for a context."""

    emotion_logits: Tensor
    """(B, emotions)."""
    cause_logits: Tensor | None
    """(B, S, 2), no cause and cause; None without gates."""


class Reasoner(nn.Module):
    """An encoder with one layer and one head, its own word embedding and no positions."""

    def __init__(self, config: EmotionCauseConfig, data_info: DataInfo):
        super().__init__()
        width = config.width
        self.embedding = build_word_embedding(config, data_info)
        shape = LayerShape(
            width=width, num_heads=1, key_depth=width, filter_width=width, dropout=config.dropout
        )
        self.encoder = Encoder(shape, num_layers=1)
        self.dropout = nn.Dropout(config.dropout)
        self.emotion_head = nn.Linear(width, len(data_info.emotions))  # W_e, b_e
        self.cause_head = None if config.gated_by == "nothing" else nn.Linear(width, 2)  # W_c, b_c
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor) -> ReasonerOutput:
        """Predict emotion and causes from the tokens and roles of a context, (B, S) each."""
        e_context, e_roles = self.embedding(context, roles)
        mask = (context != self.padding)[:, None, None, :]
        v = self.encoder(self.dropout(e_context + e_roles), mask)  # (B, S, D)
        return ReasonerOutput(
            emotion_logits=self.emotion_head(v[:, 0]),  # eq. 1
            cause_logits=None if self.cause_head is None else self.cause_head(v),  # eq. 2
        )


class GatedDecoderLayer(DecoderLayer):
    """A decoder layer with a second, gated attention to the source above the cross-attention."""

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        self.gated_attention = GatedAttention(shape)
        self.gated_norm = nn.LayerNorm(shape.width)

    def project_kv(self, source: Tensor, condition: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the source's keys and values for both attentions, and the gates (B, S)."""
        assert condition is not None
        cross, gated = super().project_kv(source), self.gated_attention.project_kv(source)
        return (*cross, *gated, condition)

    def _cross_attend(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        hidden = super()._cross_attend(hidden, source, mask)
        _, _, keys, values, gates = source
        attended = self.gated_attention.attend_gated(
            self.gated_norm(hidden), keys, values, gates, mask
        )
        output: Tensor = hidden + self.dropout(attended)
        return output


class GatedAttention(Attention):
    """Attention whose weights are multiplied by gates (eq. 5)."""

    def attend_gated(
        self, query: Tensor, keys: Tensor, values: Tensor, gates: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the output (B, T, D) of attention from (B, T, D), with gates (B, S).

        The gates multiply the exponentials. Equivalently, their logarithms could be added to the
        logits, but then a gate of 0 would get no gradient.
        """
        weights = compute_attention_weights(self.project_queries(query), keys, mask)
        gated = weights * gates[:, None, None, :]  # (B, H, T, S)
        # The gate of <cls> is 1, but its softmax weight may be rounded to 0.
        weights = gated / gated.sum(dim=-1, keepdim=True).clamp(min=1e-9)  # a_i of eq. 5
        attended = self.dropout(weights) @ values
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


@dataclass(frozen=True, kw_only=True)
class GatedBatch(EmbeddedBatch):
    """An embedded batch with the reasoner's predictions for it."""

    emotion: Tensor
    """(B, 1, D), the embedding of the predicted emotion."""
    gates: Tensor | None
    """(B, S), the gate of each word; None without gates."""
    reasoner_output: ReasonerOutput


def _table_4_ablations(name: str) -> dict[str, Mapping[str, Any]]:
    """Return the ablations of Table 4 of a variant with soft or hard gates."""
    return {
        f"{name}-no-multitask": {"multitask": False},
        f"{name}-no-emotion": {"emotion": False},
        f"{name}-lexicon": {"gated_by": "lexicon"},
    }


class EmotionCause(Transformer):
    """A reasoner of emotion and causes, and a generator with soft gates on its attention."""

    system = "Emotion cause"
    paper = "Gao et al. 2021"
    Config = EmotionCauseConfig
    requirements = DataRequirements(
        separators=True,
        columns=("context", "context_roles", "response", "emotion", CAUSES),
        filters=DataFilters(cause_threshold="cause_threshold"),
    )
    validation_metrics = ("nll", "emotion", "cause", "emotion_accuracy", "cause_accuracy")
    presets: ClassVar = {
        **extend_presets(
            EMOTION_PRESETS,
            tiny={"emotion_weight": 1.0, "cause_weight": 1.0},
            small={"emotion_weight": 4.0, "cause_weight": 1.0},
            compact={"emotion_weight": 0.2, "cause_weight": 0.2, "max_epochs": 8},
        ),
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
        **_table_4_ablations("emotion-cause-soft"),
        "emotion-cause-no-cause": {"gated_by": "nothing"},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            "emotion_weight": EMOTION_WEIGHT_RANGE,
            "cause_weight": EMOTION_WEIGHT_RANGE,
            "response_weight": Range(low=0.3, high=3.0, scale="loguniform"),
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
    """(num_tokens,)."""

    def __init__(self, config: EmotionCauseConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.reasoner = Reasoner(config, data_info)
        if config.emotion:
            self.emotion_embedding = nn.Embedding(len(data_info.emotions), config.width)
            nn.init.normal_(self.emotion_embedding.weight, std=config.width**-0.5)
        if config.gated_by == "lexicon":
            assert data_info.intensity is not None, "`requirements_for` includes intensities"
            self.register_buffer("intensity", data_info.intensity, persistent=False)

    @classmethod
    def requirements_for(cls, config: EmotionCauseConfig) -> DataRequirements:
        """Return the requirements: cause labels or intensities, whichever the gates use."""
        if config.gated_by == "cause":
            return cls.requirements
        columns = tuple(name for name in cls.requirements.columns if name != CAUSES)
        return replace(cls.requirements, columns=columns, intensity=config.gated_by == "lexicon")

    @classmethod
    def stage_independent_settings(
        cls, config: EmotionCauseConfig
    ) -> Mapping[str, tuple[str, ...]]:
        """Return the settings of gates and responses, which the reasoner's stage does not have."""
        gates = ("gate", "gate_temperature", "final_gate_temperature", "hard_threshold")
        return {"reasoner": (*gates, "response_weight", "label_smoothing")}

    def stages(self) -> list[Stage]:
        """Return the stages: the reasoner, then the generator, together with the reasoner if
        `multitask`."""
        [train] = super().stages()
        parts = train.players["model"]
        if not self.config.multitask:
            parts = tuple(name for name in parts if name != "reasoner")
        reasoner_update = Update(
            player="reasoner",
            losses="cause_reasoner_losses",
            weights=self._cause_reasoner_weights(),
        )
        return [
            Stage(
                name="reasoner",
                players={"reasoner": ("reasoner",)},
                updates=(reasoner_update,),
                share=0.25,
            ),
            replace(train, name="joint", players={"model": parts}, share=0.75),
        ]

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of eq. 7."""
        reasoner = self._cause_reasoner_weights() if self.config.multitask else {}
        return {"nll": self.config.response_weight, **reasoner}

    def _cause_reasoner_weights(self) -> dict[str, float]:
        """Return the weights of eq. 4."""
        weights = {"emotion": self.config.emotion_weight}
        if self.config.gated_by != "nothing":
            weights["cause"] = self.config.cause_weight
        return weights

    def cause_reasoner_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms of eq. 4."""
        batch = batches[PAIRED]
        return self._reasoning_losses(batch, self.reasoner(*self.prepare_context(batch)))

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms of eq. 7: response, emotion and causes."""
        batch = batches[PAIRED]
        embedded = self.embed(batch, progress)
        decoded = self.decode(embedded, self.encode_context(embedded))  # (B, T, D)
        return {
            "nll": self.compute_nll(batch, decoded, embedded),  # eq. 6
            **self._reasoning_losses(batch, embedded.reasoner_output),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the emotion by the reasoner (eq. 1)."""
        reasoner_output = self.reasoner(batch["context"], batch["context_roles"])
        return {"emotion": reasoner_output.emotion_logits.log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the decoder's state with the gates and the embedding of the predicted emotion."""
        embedded = self.embed(batch)
        state = self.decoder.init_state(
            self.encode_context(embedded), embedded.attention_mask, embedded.gates
        )
        return {**state, "emotion": embedded.emotion}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one more token; the embedding of the predicted emotion is added to it."""
        embedded = self.embed_next(tokens, state["length"]) + state["emotion"]
        decoded, state = self.decoder.step(embedded, state)
        return self.output.logits(decoded), state

    def embed(self, batch: Batch, progress: Progress = STAGE_END) -> GatedBatch:
        """Embed context and response, and add the predicted emotion at each position."""
        context, roles = self.prepare_context(batch)
        response, padding = batch["response"], self.data_info.specials["<pad>"]
        reasoner_output = self._run_cause_reasoner(batch, context)
        emotion = self._embed_emotion(reasoner_output)
        e_context, e_roles, e_response = self.embedding(context, roles, self.shift_right(response))
        return GatedBatch(
            context=self.dropout(e_context + e_roles + self.positions(context.shape[1]) + emotion),
            attention_mask=(context != padding)[:, None, None, :],
            decoder_inputs=self.dropout(e_response + self.positions(e_response.shape[1]) + emotion),
            response_mask=response != padding,
            emotion=emotion,
            gates=self._compute_gates(reasoner_output, progress),
            reasoner_output=reasoner_output,
        )

    def decode(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return the decoder's hidden states (B, T, D), teacher-forced."""
        assert isinstance(embedded, GatedBatch)
        decoded: Tensor = self.decoder(
            embedded.decoder_inputs, hidden, embedded.attention_mask, embedded.gates
        )
        return decoded

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the emotion, and by the cause probability and the gate of each word."""
        explanations, embedded = super().explain(batch), self.embed(batch)
        cause_logits, gates = embedded.reasoner_output.cause_logits, embedded.gates
        if cause_logits is None or gates is None:
            return explanations
        word_mask = is_word(batch["context"], self.data_info)
        word_values = {
            self.config.gated_by: cause_logits.softmax(dim=-1)[..., 1],
            "gate": gates,
        }
        return [
            replace(
                explanation,
                by_word={
                    name: values[row][word_mask[row]].tolist()
                    for name, values in word_values.items()
                },
            )
            for row, explanation in enumerate(explanations)
        ]

    def _run_cause_reasoner(self, batch: Batch, context: Tensor) -> ReasonerOutput:
        """Apply the reasoner to the generator's context, or, if it is frozen, to the context
        without word dropout."""
        roles = batch["context_roles"]
        output: ReasonerOutput = (
            self.reasoner(context, roles)
            if self.config.multitask
            else run_frozen(self.reasoner, batch["context"], roles)
        )
        return output

    def _embed_emotion(self, output: ReasonerOutput) -> Tensor:
        """Return the embedding of the most likely emotion, (B, 1, D); zeros if not `emotion`."""
        if not self.config.emotion:
            return output.emotion_logits.new_zeros(len(output.emotion_logits), 1, self.config.width)
        embedded: Tensor = self.emotion_embedding(output.emotion_logits.argmax(dim=-1))
        return embedded[:, None]

    def _compute_gates(self, output: ReasonerOutput, progress: Progress) -> Tensor | None:
        """Return g, the gate of each word (B, S)."""
        if output.cause_logits is None:
            return None
        logits = output.cause_logits[..., 1] - output.cause_logits[..., 0]
        if self.config.gate == "soft":
            gates = (logits / self._gate_temperature(progress)).sigmoid()
        elif self.training and self.config.multitask:
            gates = sample_gates(logits, self._gate_temperature(progress))
        else:
            gates = (logits.sigmoid() >= self.config.hard_threshold).to(logits.dtype)
        return torch.cat([torch.ones_like(gates[:, :1]), gates[:, 1:]], dim=1)  # <cls>

    def _gate_temperature(self, progress: Progress) -> float:
        """Return the geometric interpolation of the first and the final temperature."""
        first, last = self.config.gate_temperature, self.config.final_gate_temperature
        fraction = progress.fraction if self.training else 1.0
        return float(first ** (1 - fraction) * last**fraction)

    def _reasoning_losses(self, batch: Batch, output: ReasonerOutput) -> Losses:
        """Return the terms of eq. 4 and the accuracy of the cause labels."""
        losses = {"emotion": emotion_loss(output.emotion_logits, batch)}
        if output.cause_logits is None:
            return losses
        labels, logits = self._cause_labels(batch)[:, 1:], output.cause_logits[:, 1:]  # no <cls>
        known = labels >= 0
        weights = known / known.sum(dim=1, keepdim=True).clamp(min=1) / batch.samples  # (B, S - 1)
        cross_entropy = F.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=UNKNOWN, reduction="none"
        )
        correct = logits.argmax(dim=-1) == labels
        return {
            **losses,
            "cause": (cross_entropy * weights).sum(),
            "cause_accuracy": (correct * weights).sum().detach(),
        }

    def _cause_labels(self, batch: Batch) -> Tensor:
        """Return the target label of each word, (B, S): 1, 0, or -1 if unknown."""
        context = batch["context"]
        if self.config.gated_by == "lexicon":
            labels = (self.intensity[context] > self.config.lexicon_threshold).long()
        else:
            labels = batch[CAUSES]
        return labels.masked_fill(context == self.data_info.specials["<pad>"], UNKNOWN)

    def decoder_layer_types(self, config: TransformerConfig) -> list[type[DecoderLayer]]:
        """Return the type of each decoder layer: with gated attention where gates are used."""
        assert isinstance(config, EmotionCauseConfig)
        layer_types = super().decoder_layer_types(config)
        if config.gated_by == "nothing":
            return layer_types
        count = config.num_layers
        gated = {"all": range(count), "first": range(1), "last": range(count - 1, count)}
        for index in gated[config.gated_layers]:
            layer_types[index] = GatedDecoderLayer
        return layer_types


def sample_gates(logits: Tensor, temperature: float) -> Tensor:
    """Sample gates of 0 or 1 from logits by the straight-through Gumbel-softmax."""
    uniform = torch.rand_like(logits)
    noise = uniform.log() - (-uniform).log1p()  # logistic, as the difference of two Gumbel samples
    soft = ((logits + noise) / temperature).sigmoid()
    return (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())


class HardEmotionCause(EmotionCause):
    """The same system with hard gates."""

    Config = HardGateConfig
    ablations: ClassVar = _table_4_ablations("emotion-cause-hard")
