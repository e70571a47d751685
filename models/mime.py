"""MIME: mimicking emotions for empathetic response generation (Majumder et al. 2020).

A Transformer encodes the context. The speaker's emotion is classified by the similarity of its
embedding to the hidden state of `<cls>` (eq. 1-6). Emotions form two groups, positive and negative
(Table 1). For each group g, a Gaussian latent variable z_g gives a distribution d_g over its
emotions, and the response emotion e_g is the mean of their embeddings under d_g (eq. 7-17). The
response emotion of the speaker's own polarity mimics the speaker (m), the other does not (m~). The
hidden states of the context are refined with each of them (eq. 18-23), a gate fuses the two results
(eq. 24-27), and the decoder attends to the fused context (eq. 28-31).

Deviations: as in `transformer.py`, and
- In eq. 16-17 the posterior of z_g is conditioned on e_g, which is itself computed from z_g. Here
  it is conditioned on the embedding of the true emotion if the group contains it, and on the mean
  of the group's embeddings otherwise. The likelihood term is the log-probability of the true
  emotion under d_g; a group without the true emotion has no such term.
- Eq. 20-23 do not say how 2 D dimensions become D: here by a linear layer before the encoder. This
  layer and that of eq. 27 initially pass the hidden states on unchanged.
- The ablations of Table 5 are "neither", "grouping only" and "both". Without groups there is
  nothing to mimic: one distribution over all emotions and one refined context remain.
- The weight of the KL divergence in eq. 16 rises from 0 (`annealing_share`).
- Without stochasticity z_g is the prior's mean, in training as well, and there is no posterior and
  no KL divergence.
- The speaker's polarity is that of the true emotion in training and of the predicted emotion
  otherwise. The public code uses the true emotion at test time as well.
- Perplexity and answers use the prior's mean, unless the control `stochasticity` is on.
- The default weights assume that alpha, beta and gamma, 1 in the paper, weigh the summed likelihood
  of a response, as in its equations, rather than the mean per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    DataInfo,
    Explanation,
    LabelledPoints,
    Losses,
    Probability,
    Progress,
    Range,
    SearchSpaces,
    Share,
    State,
    Weight,
    extend_presets,
)
from attune.models.decoding import sample_generators
from attune.models.latents import Gaussian, gaussian_kl, kl_weight, sample_gaussian
from attune.models.layers import Encoder, Packing
from attune.models.multitask import (
    EMOTION_PRESETS,
    EMOTION_WEIGHT_RANGE,
    SUMMED_LIKELIHOOD_WEIGHT,
    emotion_loss,
)
from attune.models.transformer import EmbeddedBatch, Transformer, TransformerConfig

TABLE_1 = {
    "positive": (
        "confident", "joyful", "grateful", "impressed", "proud", "excited", "trusting", "hopeful",
        "faithful", "prepared", "content", "surprised", "caring",
    ),
    "negative": (
        "afraid", "angry", "annoyed", "anticipating", "anxious", "apprehensive", "ashamed",
        "devastated", "disappointed", "disgusted", "embarrassed", "furious", "guilty", "jealous",
        "lonely", "nostalgic", "sad", "sentimental", "terrified",
    ),
}  # fmt: skip
ON, OFF = "on", "off"
NO_TARGET = -100
"""The index that `nll_loss` ignores: the target of a group without the true emotion."""


@dataclass(frozen=True, kw_only=True)
class MimeConfig(TransformerConfig):
    """The Transformer's settings, MIME's components and the weights of its loss terms."""

    classification_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion's cross-entropy (alpha of eq. 32). Usually 0.05 to 0.5."""
    elbo_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the evidence lower bounds of both groups (beta of eq. 32). Usually 0.05 to 0.5."""
    response_weight: Weight = 1.0
    """Weight of the response's negative log-likelihood (gamma of eq. 32). Usually 1."""
    mimicry: bool = True
    """Order the refined contexts by the speaker's polarity: mimicking first (eq. 18-19)."""
    grouping: bool = True
    """Separate positive and negative emotions; if false, one distribution covers all emotions."""
    stochasticity: bool = True
    """Train with samples of the latent variable instead of its mean."""
    moved: str = ""
    """Emotions to move to the other group of Table 1, comma-separated; the paper itself questions
    the place of `surprised` and `anticipating`."""
    positive_threshold: Probability = 0.5
    """A context is positive if p / (p + n) reaches this value, where p and n are the probabilities
    of the most likely positive and negative emotion. Usually 0.3 to 0.7; 0.5 compares the two."""
    gate: Literal["each", "pair", "open"] = "each"
    """Gates of eq. 25: one for each dimension of both representations, one for each representation
    of a token, or none (always open)."""
    sampling_temperature: Annotated[float, Bounds(at_least=0)] = 1.0
    """Factor of the standard deviation when the latent variable is sampled. Usually 0.5 to 1.5."""
    annealing_share: Share = 0.3
    """Share of the training in which the KL weight rises from 0; 0 uses the full weight from the
    first step, as in eq. 16. Usually 0.1 to 0.3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mimicry and not self.grouping:
            raise ValueError("mimicry=true needs grouping=true: set mimicry=false as well")
        known = sorted(name for names in TABLE_1.values() for name in names)
        for name in self.moved_emotions():
            if name not in known:
                raise ValueError(f"moved: unknown emotion '{name}'; choose from {', '.join(known)}")

    def moved_emotions(self) -> list[str]:
        """Return the names in `moved`."""
        return [name.strip() for name in self.moved.split(",") if name.strip()]


class GroupLinear(nn.Module):
    """A linear layer for each group, computed as one batched matrix product."""

    def __init__(self, num_groups: int, input_width: int, output_width: int):
        super().__init__()
        bound = input_width**-0.5  # the initialisation of nn.Linear
        self.weight = nn.Parameter(torch.empty(num_groups, input_width, output_width))
        self.bias = nn.Parameter(torch.empty(num_groups, 1, output_width))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (groups, B, output width) of inputs (groups, B, input width), or
        (B, input width) if all groups share them."""
        return torch.baddbmm(self.bias, inputs.expand(len(self.weight), -1, -1), self.weight)


@dataclass(frozen=True, kw_only=True)
class ResponseEmotion:
    """The distribution over the emotions of the response, for each group."""

    probs: Tensor
    """d_g: (groups, B, emotions), 0 for emotions of other groups."""
    negative_elbo: Tensor
    """(groups, B), the negative evidence lower bound of each sample."""


class Mime(Transformer):
    """A Transformer whose context is refined with a mimicking and a non-mimicking response
    emotion."""

    system = "MIME"
    paper = "Majumder et al. 2020"
    Config = MimeConfig
    validation_metrics = (
        "nll", "emotion", "emotion_accuracy", "elbo_positive", "elbo_negative", "elbo_all",
    )  # fmt: skip
    presets: ClassVar = extend_presets(
        EMOTION_PRESETS,
        tiny={"classification_weight": 1.0, "elbo_weight": 1.0},
        small={"classification_weight": 4.0, "elbo_weight": 1.0},
        compact={"classification_weight": 0.2, "elbo_weight": 0.2},
        paper={"patience": 2},
    )
    ablations: ClassVar = {
        "mime-no-mimicry": {"mimicry": False},
        "mime-no-mimicry-no-grouping": {"mimicry": False, "grouping": False},
        "mime-no-stochasticity": {"stochasticity": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            "classification_weight": EMOTION_WEIGHT_RANGE,
            "elbo_weight": EMOTION_WEIGHT_RANGE,
            "response_weight": Range(low=0.3, high=3.0, scale="loguniform"),
        },
        "gating": {"gate": Choice(values=("each", "pair", "open"))},
        "thresholds": {
            "positive_threshold": Range(low=0.2, high=0.8),
            "moved": Choice(values=("", "surprised", "anticipating", "surprised,anticipating")),
        },
        "schedule": {
            "sampling_temperature": Range(low=0.1, high=2.0),
            "annealing_share": Choice(values=(0.0, 0.1, 0.3, 0.6)),
        },
    }
    figures: ClassVar = {"embeddings": "emotion_embeddings"}
    controls: ClassVar = {
        "stochasticity": (OFF, ON),
        "seed": tuple(str(number) for number in range(100)),
    }
    group_mask: Tensor
    """(groups, emotions), True for the emotions of a group."""
    posterior_emotion_mix: Tensor
    """(emotions + 1, groups, emotions), by true emotion: the weights of the emotion embeddings in
    the mean that conditions the posterior of a group."""
    group_targets: Tensor
    """(emotions + 1, groups), by true emotion: the emotion that a group is trained to predict."""

    def __init__(self, config: MimeConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width, num_emotions = config.width, len(data_info.emotions)
        self.groups = group_emotions(config, data_info.emotions)
        """The indices of each group's emotions, by the group's name."""
        self._register_group_buffers(num_emotions)
        self.emotions = nn.Embedding(num_emotions, width)  # E_E, used in eq. 4 and 10
        nn.init.normal_(self.emotions.weight, std=width**-0.5)
        self.similarity = nn.Linear(width, width, bias=False)  # W_E
        per_group = partial(GroupLinear, len(self.groups))
        self.prior = Gaussian(  # eq. 11-13
            width, width, with_variance=config.stochasticity, output_layer=per_group
        )
        if config.stochasticity:
            self.posterior = Gaussian(2 * width, width, output_layer=per_group)
        # FC_d of eq. 9: one layer for both groups, since each emotion belongs to one group.
        self.emotion_head = nn.Linear(width, num_emotions)
        self.condition_on_emotion = nn.Linear(2 * width, width)
        self.refine = Encoder(config.layer_shape, config.num_layers)  # TR_respEnc
        fused_width = len(self.groups) * width
        num_gates = {"each": fused_width, "pair": len(self.groups)}
        if config.gate in num_gates:
            self.contribution = nn.Linear(fused_width, num_gates[config.gate])  # FC_contrib
        self.fuse = nn.Linear(fused_width, width)  # FC_fused
        self._init_as_identity()

    def _register_group_buffers(self, num_emotions: int) -> None:
        """Precompute the tables that depend only on the true emotion: a lookup is cheaper than a
        dozen small operations per step. Their last row (-1) is for samples without an emotion."""
        group_mask = torch.zeros(len(self.groups), num_emotions, dtype=torch.bool)
        for group, indices in enumerate(self.groups.values()):
            group_mask[group, indices] = True
        in_group = F.pad(group_mask.t(), (0, 0, 0, 1))  # (emotions + 1, groups)
        group_mean = group_mask / group_mask.sum(dim=1, keepdim=True)
        one_hot = F.pad(torch.eye(num_emotions), (0, 0, 0, 1))
        emotion_mix = torch.where(in_group[..., None], one_hot[:, None], group_mean)
        targets = torch.arange(len(in_group))[:, None].where(in_group, NO_TARGET)
        self.register_buffer("group_mask", group_mask, persistent=False)
        self.register_buffer("posterior_emotion_mix", emotion_mix, persistent=False)
        self.register_buffer("group_targets", targets, persistent=False)

    @torch.no_grad()
    def _init_as_identity(self) -> None:
        """Initialise eq. 20-27 so that they pass the encoder's hidden states on unchanged.

        No residual connection bypasses these layers: with random weights little of the context
        reaches the decoder, and answers stay the same few phrases for epochs (docs/log.md).
        """
        identity = torch.eye(self.config.width)
        initial_gate = 1.0 if self.config.gate == "open" else 0.5
        self.condition_on_emotion.weight[:, : self.config.width] = identity
        num_groups = len(self.groups)
        self.fuse.weight.copy_(identity.repeat(1, num_groups) / (initial_gate * num_groups))

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of eq. 32."""
        elbo_weights = {f"elbo_{name}": self.config.elbo_weight for name in self.groups}
        return {
            "nll": self.config.response_weight,
            "emotion": self.config.classification_weight,
            **elbo_weights,
        }

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms of eq. 32: response, emotion, and one negative ELBO per
        group."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)  # (B, S, D)
        h_cls = hidden[:, 0]
        emotion_logits = self.classify_emotion(h_cls)
        posterior = self.posterior_emotions(h_cls, batch["emotion"], progress)
        if self.training:
            emotion_probs = posterior.probs
            is_positive = self._true_polarity(batch["emotion"], emotion_logits)
        else:  # validation must see what decoding will see: the prior and the predicted polarity
            emotion_probs = self.prior_emotions(h_cls)
            is_positive = self._predict_polarity(emotion_logits)
        fused, _ = self._fuse_emotions(hidden, embedded, emotion_probs, is_positive)
        elbo_terms = zip(self.groups, posterior.negative_elbo, strict=True)
        return {
            "nll": self.compute_nll(batch, self._decode_fused(embedded, fused), embedded),
            "emotion": emotion_loss(emotion_logits, batch),
            **{f"elbo_{name}": term.sum() / batch.samples for name, term in elbo_terms},
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities of the emotions (eq. 4-5)."""
        hidden = self.encode_context(self.embed(batch))
        return {"emotion": self.classify_emotion(hidden[:, 0]).log_softmax(dim=-1)}

    def decode(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return the decoder's hidden states (B, T, D), teacher-forced, at the prior's mean."""
        emotion_probs = self.prior_emotions(hidden[:, 0])
        fused, _ = self._fuse_by_predicted_polarity(hidden, embedded, emotion_probs)
        return self._decode_fused(embedded, fused)

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the decoder's state with the keys and values of the fused context; the control
        `stochasticity` samples the latent variable."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        settings = {"stochasticity": OFF, "seed": "0", **(controls or {})}
        noise = None
        if settings["stochasticity"] == ON:
            noise = self._sample_latent_noise(batch["index"], int(settings["seed"]))
        emotion_probs = self.prior_emotions(hidden[:, 0], noise)
        fused, _ = self._fuse_by_predicted_polarity(hidden, embedded, emotion_probs)
        return self.decoder.init_state(fused, _fused_context_mask(embedded))

    def classify_emotion(self, h_cls: Tensor) -> Tensor:
        """Return the logits of the speaker's emotion: (B, D) -> (B, emotions), eq. 4."""
        logits: Tensor = self.similarity(h_cls) @ self.emotions.weight.t()
        return logits

    def prior_emotions(self, h_cls: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return d_g of each group under the prior, (groups, B, emotions) (eq. 7-9). z_g is sampled
        from `noise` (groups, B, D); without noise it is the prior's mean."""
        mean, log_variance = self.prior(h_cls)
        z = mean if noise is None else self._sample_latent(mean, log_variance, noise)
        return self._group_log_probs(z).exp()

    def _group_log_probs(self, z: Tensor) -> Tensor:
        """Return log d_g, (groups, B, emotions), normalised over the emotions of each group, from z
        (groups, B, D) (eq. 9)."""
        logits: Tensor = self.emotion_head(z)
        return logits.masked_fill(~self.group_mask[:, None], -torch.inf).log_softmax(dim=-1)

    def posterior_emotions(
        self, h_cls: Tensor, emotion: Tensor, progress: Progress
    ) -> ResponseEmotion:
        """Return d_g of each group under the posterior, and the negative ELBO (eq. 16-17)."""
        mean, log_variance = self.prior(h_cls)
        kl, z = None, mean
        if self.config.stochasticity:
            prior = mean, log_variance
            # The stand-in for e_g in eq. 17 (see Deviations).
            condition = (self.posterior_emotion_mix[emotion] @ self.emotions.weight).transpose(0, 1)
            inputs = torch.cat([h_cls.expand_as(condition), condition], dim=-1)  # (groups, B, 2 D)
            mean, log_variance = self.posterior(inputs)
            kl = gaussian_kl(mean, log_variance, *prior)
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            z = self._sample_latent(mean, log_variance, noise)
        log_probs = self._group_log_probs(z)
        negative_elbo = F.nll_loss(  # 0 in the group without the true emotion
            log_probs.permute(1, 2, 0), self.group_targets[emotion], reduction="none",
            ignore_index=NO_TARGET,
        ).t()  # fmt: skip
        if kl is not None:
            # With the full weight from the first step the latent variable stays uninformative: its
            # noise shrinks the weights that use it before they have learned to (docs/log.md).
            weight = kl_weight(self.config.annealing_share, progress, training=self.training)
            negative_elbo = negative_elbo + weight * kl
        return ResponseEmotion(probs=log_probs.exp(), negative_elbo=negative_elbo)

    def _sample_latent(self, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        """Return z from standard normal noise (eq. 13-15)."""
        temperature = self.config.sampling_temperature
        return sample_gaussian(mean, log_variance, noise, temperature=temperature)

    def _sample_latent_noise(self, index: Tensor, seed: int) -> Tensor:
        """Return noise (groups, B, D) that depends on each sample's index and not on its batch."""
        noise = [
            torch.randn(len(self.groups), self.config.width, generator=generator)
            for generator in sample_generators(index, seed)
        ]
        return torch.stack(noise, dim=1).to(index.device)

    def _predict_polarity(self, emotion_logits: Tensor) -> Tensor:
        """Return whether the predicted emotion is positive: (B,)."""
        if not self.config.grouping:
            return emotion_logits.new_ones(len(emotion_logits), dtype=torch.bool)
        positive, negative = (
            emotion_logits[:, indices].amax(dim=1) for indices in self.groups.values()
        )
        # p / (p + n) of the two most likely emotions is the sigmoid of their logits' difference.
        return (positive - negative).sigmoid() >= self.config.positive_threshold

    def _true_polarity(self, emotion: Tensor, emotion_logits: Tensor) -> Tensor:
        """Return whether the true emotion is positive, or, if it is unknown, the predicted one:
        (B,)."""
        is_positive = self.group_mask[0, emotion.clamp(min=0)]
        is_known = emotion >= 0
        if is_known.all():
            return is_positive
        return torch.where(is_known, is_positive, self._predict_polarity(emotion_logits))

    def _fuse_by_predicted_polarity(
        self, hidden: Tensor, embedded: EmbeddedBatch, emotion_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fuse as in validation and decoding, with the polarity of the predicted emotion."""
        is_positive = self._predict_polarity(self.classify_emotion(hidden[:, 0]))
        return self._fuse_emotions(hidden, embedded, emotion_probs, is_positive)

    def _fuse_emotions(
        self, hidden: Tensor, embedded: EmbeddedBatch, emotion_probs: Tensor, is_positive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the fused context without `<cls>`, (B, S - 1, D), and the gates of its N real
        tokens, (N, groups, D or 1).

        H are the hidden states of the context without `<cls>`. The plain equations are

            H_resp  = [H_i; m]                              eq. 20-21 (H_resp~ with m~)
            M       = TR_respEnc(W H_resp + b)              eq. 22-23 (M~ from H_resp~)
            M'      = [M_i; M~_i]                           eq. 24
            M_fused = FC_fused(sigma(FC_contrib(M')) * M')  eq. 25-27

        The code computes M and M~ as one batch, leaves out padding, and splits W [H_i; m] into
        W_H H_i, which both groups share, and W_m m, which the tokens of a sample share.
        """
        e = emotion_probs @ self.emotions.weight  # eq. 10: (groups, B, D)
        if self.config.mimicry:  # eq. 18-19: m comes first, then m~
            e = torch.where(is_positive[:, None], e, e.flip(0))
        num_groups = len(e)
        mask = _fused_context_mask(embedded)
        group_mask = mask.repeat(num_groups, 1, 1, 1)
        packing, group_packing = Packing(mask), Packing(group_mask)
        w_h, w_m = self.condition_on_emotion.weight.split(self.config.width, dim=1)
        tokens = F.linear(
            packing.pack(hidden[:, 1:]), w_h, self.condition_on_emotion.bias
        )  # (N, D)
        emotions = F.embedding(group_packing.samples, (e @ w_m.t()).flatten(0, 1))
        h_resp = tokens.repeat(num_groups, 1) + emotions  # (groups * N, D)
        refined = self.refine(h_resp, group_mask, group_packing)  # M, then M~
        by_group = torch.stack(refined.chunk(num_groups), dim=1)  # M': (N, groups, D)
        gates = self._compute_gates(by_group)
        fused = self.fuse((gates * by_group).flatten(1))  # (N, D)
        return packing.unpack(fused), gates

    def _compute_gates(self, refined: Tensor) -> Tensor:
        """Return the gates of eq. 25: (N, groups, D) -> (N, groups, D or 1)."""
        if self.config.gate == "open":
            return torch.ones_like(refined)
        gates: Tensor = self.contribution(refined.flatten(1)).sigmoid()
        return gates.unflatten(1, (refined.shape[1], -1))

    def _decode_fused(self, embedded: EmbeddedBatch, fused: Tensor) -> Tensor:
        """Return the decoder's hidden states (B, T, D) over the fused context (eq. 28)."""
        decoded: Tensor = self.decoder(
            embedded.decoder_inputs, fused, _fused_context_mask(embedded)
        )
        return decoded

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the emotion, the probability of each group, the response emotion of each
        group, and the mean gate of each word."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        response_emotion = self.prior_emotions(hidden[:, 0])
        _, gates = self._fuse_by_predicted_polarity(hidden, embedded, response_emotion)
        lengths = _fused_context_mask(embedded).flatten(1).sum(dim=1).tolist()
        mean_gates = gates.mean(dim=-1).split(lengths)  # for each sample: (tokens, groups)
        names = ("mimicking", "non-mimicking") if self.config.mimicry else tuple(self.groups)
        emotion_probs = self.classify_emotion(hidden[:, 0]).softmax(dim=-1)
        group_probs = emotion_probs @ self.group_mask.to(emotion_probs.dtype).t()  # (B, groups)
        return [
            replace(
                explanation,
                groups=dict(zip(self.groups, group_probs[row].tolist(), strict=True)),
                response_emotion=self._name_emotions_of_groups(response_emotion[:, row]),
                by_word={
                    f"gate {name}": mean_gates[row][:, column].tolist()
                    for column, name in enumerate(names)
                },
            )
            for row, explanation in enumerate(super().explain(batch))
        ]

    def emotion_embeddings(self) -> LabelledPoints:
        """Return the emotion embeddings with the groups of Table 1 (Figure 3 of the paper), whether
        or not the model uses groups."""
        emotions = self.data_info.emotions
        groups = group_emotions(replace(self.config, grouping=True), emotions)
        group_names = {index: name for name, indices in groups.items() for index in indices}
        return LabelledPoints(
            points=self.emotions.weight.detach().cpu(),
            names=emotions,
            groups=[group_names[index] for index in range(len(emotions))],
        )

    def _name_emotions_of_groups(self, probs: Tensor) -> dict[str, dict[str, float]]:
        """Return probabilities (groups, emotions) by the names of group and emotion."""
        return {
            group: {self.data_info.emotions[index]: row[index].item() for index in indices}
            for (group, indices), row in zip(self.groups.items(), probs, strict=True)
        }


def group_emotions(config: MimeConfig, emotions: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of each group's emotions by the name of the group, positive first."""
    if not config.grouping:
        return {"all": list(range(len(emotions)))}
    positive = set(TABLE_1["positive"]) ^ set(config.moved_emotions())
    return {
        "positive": [index for index, name in enumerate(emotions) if name in positive],
        "negative": [index for index, name in enumerate(emotions) if name not in positive],
    }


def _fused_context_mask(embedded: EmbeddedBatch) -> Tensor:
    """Return the mask of the fused context, (B, 1, 1, S - 1), which has no `<cls>`."""
    return embedded.attention_mask[..., 1:]
