"""MIME: mimicking emotions for empathetic response generation (Majumder et al. 2020).

The context is read as in the Transformer, and the emotion is the one whose embedding is most like
the state of `<cls>` (eq. 1-6). Emotions fall into two groups, positive and negative (Table 1). For
each group a Gaussian latent gives a distribution over the group's emotions, whose embeddings are
averaged with it: the emotion of the response if it were positive, and if it were negative (eq.
7-17). The one of the speaker's own polarity mimics the speaker, the other does not; each refines
the context's words by an encoder of its own weights (eq. 18-23), a gate fuses the two (eq. 24-27),
and the decoder attends to what results (eq. 28-31).

Deviations: as in `transformer.py`, and
- eq. 16-17 condition the posterior of a group on the very representation that is made from its
  sample. Ours is conditioned on the embedding of the true emotion where that belongs to the group,
  and on the mean of the group's embeddings otherwise; the likelihood term is the log-probability
  that the group's distribution gives to the true emotion, and there is none where that belongs to
  the other group.
- Table 5 has "neither", "grouping only" and "both": without groups there is nothing to mimic, and
  one distribution over all emotions with one refined context remains.
- The divergence in eq. 16-17 is weighed with a share that rises from 0 (`annealing_steps`).
- Without stochasticity the latent is the prior's mean in training, too: no posterior, and no
  divergence.
- While it learns, the speaker's polarity is the true emotion's; otherwise the predicted one's. The
  public code tests with the true one.
- Perplexity is taken, and answers are made, at the prior's mean unless `stochasticity` is switched
  on for an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    Explanation,
    LabelledPoints,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    State,
)
from attune.models.decoding import seeded
from attune.models.latents import annealing_weight, divergence
from attune.models.layers import Encoder, Packing
from attune.models.multitask import SMALL, emotion_loss
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


@dataclass(frozen=True, kw_only=True)
class MimeConfig(TransformerConfig):
    """The Transformer's, which of the ideas are in, and how they are weighed."""

    classification_weight: float = 1.0
    """Alpha of eq. 32: of the emotion's cross-entropy."""
    elbo_weight: float = 1.0
    """Beta of eq. 32: of both groups' evidence bounds."""
    response_weight: float = 1.0
    """Gamma of eq. 32: of the response's likelihood."""
    mimicry: bool = True
    """Tell the refined context of the speaker's own polarity from the other (eq. 18-19)."""
    grouping: bool = True
    """Positive and negative emotions apart; without, one distribution over all."""
    stochasticity: bool = True
    """Learn from samples of the latent instead of its mean."""
    moved: str = ""
    """Emotions that stand in the other group than in Table 1, comma-separated; the paper itself
    doubts `surprised` and `anticipating`."""
    positive_threshold: float = 0.5
    """A context counts as positive where the likeliest positive emotion has this share of the sum
    of the likeliest positive and the likeliest negative one; at 0.5 the likeliest decides."""
    gate: Literal["each", "pair", "open"] = "each"
    """Eq. 25: a gate for each number of both representations, one for each representation of a
    word, or none, everything passing."""
    sampling_temperature: float = 1.0
    """Factor of the deviation with which the latent is sampled."""
    annealing_steps: int = 10_000
    """Steps in which the weight of the bounds' divergence rises from 0 to 1; 0 weighs it fully from
    the first on, as eq. 16 is written."""

    def __post_init__(self) -> None:
        if self.mimicry and not self.grouping:
            raise ValueError("mimicry=true needs grouping=true: whoever mimics takes a side")
        if not 0 < self.positive_threshold < 1:
            raise ValueError(
                f"positive_threshold={self.positive_threshold}: between 0 and 1 is expected"
            )
        known = sorted(name for names in TABLE_1.values() for name in names)
        for name in self.moved_emotions():
            if name not in known:
                raise ValueError(f"moved={self.moved}: '{name}' is none of {', '.join(known)}")

    def moved_emotions(self) -> list[str]:
        """The names in `moved`."""
        return [name.strip() for name in self.moved.split(",") if name.strip()]


class Latent(nn.Module):
    """For each group a Gaussian whose mean and deviation are read off the context (eq. 11-13)."""

    def __init__(self, inside: int, width: int, num_groups: int, *, spread: bool):
        super().__init__()
        self.spread = spread
        outside = 2 * width if spread else width  # the mean, and the logarithm of the variance
        self.first = nn.Linear(inside, width)
        self.weight = nn.Parameter(torch.empty(num_groups, width, outside))
        self.bias = nn.Parameter(torch.empty(num_groups, 1, outside))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)  # as nn.Linear begins

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """(B, inside), or one for each group (groups, B, inside) -> mean and logarithm of the
        variance, (groups, B, D) each."""
        hidden = self.first(given).relu()  # eq. 11
        made = torch.baddbmm(self.bias, hidden.expand(len(self.weight), -1, -1), self.weight)
        if not self.spread:
            return made, torch.full_like(made, -torch.inf)
        mean, log_variance = made.chunk(2, dim=-1)  # eq. 12-13
        return mean, log_variance


@dataclass(frozen=True, kw_only=True)
class Felt:
    """The emotion of the response, for each group."""

    shares: Tensor
    """(groups, B, emotions), 0 for emotions of another group."""
    bounds: Tensor
    """(groups, B) what each adds to its evidence bound's loss."""


class Mime(Transformer):
    """Two emotions of the response, one like the speaker's, one not, fused by a gate."""

    system = "MIME"
    paper = "Majumder et al. 2020"
    Config = MimeConfig
    presets: ClassVar = {
        **Transformer.presets,
        "tiny": {**Transformer.presets["tiny"], "annealing_steps": 100},
        "small": {
            **Transformer.presets["small"],
            **SMALL,
            "classification_weight": 4.0,
            "annealing_steps": 300,
        },
        "paper": {**Transformer.presets["paper"], "patience": 2},
    }
    ablations: ClassVar = {
        "mime-no-mimicry": {"mimicry": False},
        "mime-no-mimicry-no-grouping": {"mimicry": False, "grouping": False},
        "mime-no-stochasticity": {"stochasticity": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            name: Range(low=0.1, high=10.0, scale="loguniform")
            for name in ("classification_weight", "elbo_weight", "response_weight")
        },
        "gating": {"gate": Choice(values=("each", "pair", "open"))},
        "thresholds": {
            "positive_threshold": Range(low=0.2, high=0.8),
            "moved": Choice(values=("", "surprised", "anticipating", "surprised,anticipating")),
        },
        "schedule": {
            "sampling_temperature": Range(low=0.1, high=2.0),
            "annealing_steps": Choice(values=(0, 1_000, 3_000, 10_000)),
        },
    }
    figures: ClassVar = {"embeddings": "emotion_embeddings"}
    controls: ClassVar = {
        "stochasticity": (OFF, ON),
        "seed": tuple(str(number) for number in range(100)),
    }
    members: Tensor
    likened: Tensor
    targets: Tensor

    def __init__(self, config: MimeConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width = config.width
        self.groups = groups_of(config, data_info.emotions)
        """By name, the numbers of a group's emotions."""
        members = torch.zeros(len(self.groups), len(data_info.emotions), dtype=torch.bool)
        for number, numbers in enumerate(self.groups.values()):
            members[number, numbers] = True
        self.register_buffer("members", members, persistent=False)  # (groups, emotions)
        # Of each true emotion, the last row being of none: what the groups' posteriors are given as
        # shares of all emotions (emotions + 1, groups, emotions), and what the groups are to
        # predict (emotions + 1, groups), nothing where it is of another group. Looked up, since a
        # dozen small operations cost more than the arithmetic in them.
        own = F.pad(members.t(), (0, 0, 0, 1))
        average = members / members.sum(dim=1, keepdim=True)
        itself = F.pad(torch.eye(len(data_info.emotions)), (0, 0, 0, 1))
        likened = torch.where(own[..., None], itself[:, None], average)
        targets = torch.arange(len(own))[:, None].where(own, NO_TARGET)
        self.register_buffer("likened", likened, persistent=False)
        self.register_buffer("targets", targets, persistent=False)
        self.emotions = nn.Embedding(
            len(data_info.emotions), width
        )  # E_E, of classifier and decoder
        nn.init.normal_(self.emotions.weight, std=width**-0.5)
        self.likeness = nn.Linear(width, width, bias=False)  # W_E
        self.prior = Latent(width, width, len(self.groups), spread=config.stochasticity)
        if config.stochasticity:
            self.posterior = Latent(2 * width, width, len(self.groups), spread=True)
        self.choose = nn.Linear(
            width, len(data_info.emotions)
        )  # each group's, an emotion being of one
        self.tell = nn.Linear(2 * width, width)  # of a word and an emotion, as the encoder reads it
        self.refine = Encoder(
            width, config.num_layers, config.num_heads, config.key_depth, config.filter_width,
            config.dropout,
        )  # fmt: skip
        both = len(self.groups) * width
        opened = {"each": both, "pair": len(self.groups)}
        if config.gate in opened:
            self.contribution = nn.Linear(both, opened[config.gate])
        self.fuse = nn.Linear(both, width)
        self._let_words_through()

    @torch.no_grad()
    def _let_words_through(self) -> None:
        """Begin with what the encoders made of the words, unchanged.

        No residual leads past eq. 20-27: through layers that begin at random little of the words
        comes out, and answers stay the same few phrases for epochs (docs/log.md).
        """
        same = torch.eye(self.config.width)
        opened = 1.0 if self.config.gate == "open" else 0.5
        self.tell.weight[:, : self.config.width] = same
        self.fuse.weight.copy_(same.repeat(1, len(self.groups)) / (opened * len(self.groups)))

    def loss_weights(self) -> dict[str, float]:
        """Eq. 32."""
        bounds = {f"elbo_{name}": self.config.elbo_weight for name in self.groups}
        return {
            "nll": self.config.response_weight,
            "emotion": self.config.classification_weight,
            **bounds,
        }

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The four terms of eq. 32."""
        batch = batches[PAIRED]
        words = self.embed(batch)
        source = self.encode_context(words)
        logits = self.scores(source[:, 0])
        felt = self._felt_in_training(source[:, 0], batch["emotion"], progress)
        if self.training:
            positive = self._truly_first_group(logits, batch["emotion"])
        else:  # what is looked at in between is what answers will be made from
            felt = replace(felt, shares=self._felt(source[:, 0]))
            positive = self._first_group(logits)
        fused, _ = self._refined(source, words, felt.shares, positive)
        bounds = zip(self.groups, felt.bounds, strict=True)
        return {
            "nll": self.compute_nll(batch, self._decoded(words, fused), words),
            "emotion": emotion_loss(logits, batch),
            **{f"elbo_{name}": bound.sum() / batch.samples for name, bound in bounds},
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion from the state of `<cls>`."""
        source = self.encode_context(self.embed(batch))
        return {"emotion": self.scores(source[:, 0]).log_softmax(dim=-1)}

    def decode(self, words: EmbeddedBatch, source: Tensor) -> Tensor:
        """Hidden states (B, T, D) that predict the response, the latent at its prior mean."""
        fused, _ = self._understood(source, words, self._felt(source[:, 0]))
        return self._decoded(words, fused)

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The fused context, made with samples of the latent where stochasticity is asked for."""
        words = self.embed(batch)
        source = self.encode_context(words)
        chosen = {"stochasticity": OFF, "seed": "0", **(controls or {})}
        noise = None
        if chosen["stochasticity"] == ON:
            noise = self._noise(batch["index"], int(chosen["seed"]))
        fused, _ = self._understood(source, words, self._felt(source[:, 0], noise))
        return self.decoder.init_state(fused, _words_only(words.attention_mask))

    def scores(self, context: Tensor) -> Tensor:
        """(B, D) -> (B, emotions), eq. 4."""
        products: Tensor = self.likeness(context) @ self.emotions.weight.t()
        return products

    def _felt(self, context: Tensor, noise: Tensor | None = None) -> Tensor:
        """Each group's distribution from the prior: at its mean, or off it by noise (eq. 7-9)."""
        mean, log_variance = self.prior(context)
        latent = mean if noise is None else self._sampled(mean, log_variance, noise)
        return self._log_shares(latent).exp()

    def _log_shares(self, latent: Tensor) -> Tensor:
        """(groups, B, D) -> (groups, B, emotions), each group's own emotions sharing 1."""
        logits: Tensor = self.choose(latent)
        return logits.masked_fill(~self.members[:, None], -torch.inf).log_softmax(dim=-1)

    def _felt_in_training(self, context: Tensor, emotion: Tensor, progress: Progress) -> Felt:
        """Each group's distribution from the posterior, and its evidence bound (eq. 16-17)."""
        mean, log_variance = self.prior(context)
        off, latent = None, mean
        if self.config.stochasticity:
            prior = mean, log_variance
            felt = (self.likened[emotion] @ self.emotions.weight).transpose(0, 1)
            given = torch.cat([context.expand_as(felt), felt], dim=-1)  # (groups, B, 2 D)
            mean, log_variance = self.posterior(given)
            off = divergence(mean, log_variance, *prior)
            noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
            latent = self._sampled(mean, log_variance, noise)
        log_shares = self._log_shares(latent)
        bounds = F.nll_loss(  # -log p of the true emotion, 0 in the other group
            log_shares.permute(1, 2, 0), self.targets[emotion], reduction="none",
            ignore_index=NO_TARGET,
        ).t()  # fmt: skip
        if off is not None:
            bounds = bounds + self._divergence_weight(progress) * off
        return Felt(shares=log_shares.exp(), bounds=bounds)

    def _divergence_weight(self, progress: Progress) -> float:
        """With all of it from the first step on the latent never comes to say anything: its noise
        drives out the weights that read it before they have learned to (docs/log.md)."""
        return annealing_weight(self.config.annealing_steps, progress) if self.training else 1.0

    def _sampled(self, mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
        """Eq. 13-15."""
        deviation = (0.5 * log_variance).exp()
        return torch.addcmul(mean, noise, deviation, value=self.config.sampling_temperature)

    def _noise(self, index: Tensor, seed: int) -> Tensor:
        """(groups, B, D), each sample's own, whatever batch it comes in."""
        drawn = [
            torch.randn(len(self.groups), self.config.width, generator=generator)
            for generator in seeded(index, seed)
        ]
        return torch.stack(drawn, dim=1).to(index.device)

    def _first_group(self, logits: Tensor) -> Tensor:
        """(B,) whether the predicted emotion is of the first group: positive."""
        if not self.config.grouping:
            return logits.new_ones(len(logits), dtype=torch.bool)
        positive, negative = (logits[:, numbers].amax(dim=1) for numbers in self.groups.values())
        # p / (p + n) of the two likeliest is a sigmoid of the difference of their logits.
        return (positive - negative).sigmoid() >= self.config.positive_threshold

    def _truly_first_group(self, logits: Tensor, emotion: Tensor) -> Tensor:
        """(B,) whether the true emotion is positive; the predicted one where there is none."""
        true = self.members[0, emotion.clamp(min=0)]
        known = emotion >= 0
        return true if known.all() else torch.where(known, true, self._first_group(logits))

    def _understood(
        self, source: Tensor, words: EmbeddedBatch, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The fused context and its gates, by the predicted emotion."""
        positive = self._first_group(self.scores(source[:, 0]))
        return self._refined(source, words, shares, positive)

    def _refined(
        self, source: Tensor, words: EmbeddedBatch, shares: Tensor, positive: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The fused context (B, S - 1, D) without `<cls>`, and how far the gates of its N real
        words are open (N, groups, D or 1)."""
        felt = shares @ self.emotions.weight  # eq. 10: (groups, B, D)
        if self.config.mimicry:  # eq. 18-19: what mimics comes first
            felt = torch.where(positive[:, None], felt, felt.flip(0))
        mask = _words_only(words.attention_mask)
        both = mask.repeat(len(felt), 1, 1, 1)
        once, in_groups = Packing(mask), Packing(both)
        # Eq. 20-21: a linear layer on a word and an emotion is the sum of one on each.
        of_words, of_emotions = self.tell.weight.split(self.config.width, dim=1)
        told = F.linear(once.pack(source[:, 1:]), of_words, self.tell.bias)  # (N, D)
        moods = F.embedding(in_groups.samples, (felt @ of_emotions.t()).flatten(0, 1))
        told = told.repeat(len(felt), 1) + moods  # (groups * N, D)
        refined = self.refine(told, both, in_groups)  # eq. 22-23
        apart = torch.stack(refined.chunk(len(felt)), dim=1)  # (N, groups, D)
        gates = self._gates(apart)
        fused = self.fuse((gates * apart).flatten(1))  # eq. 26-27
        return once.spread(fused), gates

    def _gates(self, apart: Tensor) -> Tensor:
        """Eq. 25."""
        if self.config.gate == "open":
            return torch.ones_like(apart)
        opened: Tensor = self.contribution(apart.flatten(1)).sigmoid()
        return opened.unflatten(1, (apart.shape[1], -1))

    def _decoded(self, words: EmbeddedBatch, fused: Tensor) -> Tensor:
        hidden: Tensor = self.decoder(
            words.decoder_inputs, fused, _words_only(words.attention_mask)
        )  # eq. 28
        return hidden

    def explain(self, batch: Batch) -> list[Explanation]:
        """Emotions, the groups' shares, the response's emotion in each, and the gates."""
        words = self.embed(batch)
        source = self.encode_context(words)
        felt = self._felt(source[:, 0])
        _, gates = self._understood(source, words, felt)
        lengths = _words_only(words.attention_mask).flatten(1).sum(dim=1).tolist()
        opened = gates.mean(dim=-1).split(lengths)  # of each sample (words, groups)
        names = ("mimicking", "non-mimicking") if self.config.mimicry else tuple(self.groups)
        shares = self.scores(source[:, 0]).softmax(dim=-1)
        in_groups = shares @ self.members.to(shares.dtype).t()  # (B, groups)
        return [
            replace(
                explanation,
                groups=dict(zip(self.groups, in_groups[row].tolist(), strict=True)),
                response_emotion={
                    name: dict(zip(self._names(name), each[row, numbers].tolist(), strict=True))
                    for (name, numbers), each in zip(self.groups.items(), felt, strict=True)
                },
                by_word={
                    f"gate {name}": opened[row][:, place].tolist()
                    for place, name in enumerate(names)
                },
            )
            for row, explanation in enumerate(super().explain(batch))
        ]

    def emotion_embeddings(self) -> LabelledPoints:
        """Return the emotions' embeddings by group (Figure 3 of the paper), also where the model
        was trained without groups."""
        emotions = self.data_info.emotions
        groups = groups_of(replace(self.config, grouping=True), emotions)
        group_names = {number: name for name, numbers in groups.items() for number in numbers}
        return LabelledPoints(
            points=self.emotions.weight.detach().cpu(),
            names=emotions,
            groups=[group_names[number] for number in range(len(emotions))],
        )

    def _names(self, group: str) -> list[str]:
        return [self.data_info.emotions[number] for number in self.groups[group]]


def groups_of(config: MimeConfig, emotions: Sequence[str]) -> dict[str, list[int]]:
    """The groups by name, each with the numbers of its emotions; the first is the positive one."""
    if not config.grouping:
        return {"all": list(range(len(emotions)))}
    positive = set(TABLE_1["positive"]) ^ set(config.moved_emotions())
    return {
        "positive": [n for n, name in enumerate(emotions) if name in positive],
        "negative": [n for n, name in enumerate(emotions) if name not in positive],
    }


def _words_only(mask: Tensor) -> Tensor:
    """(B, 1, 1, S) -> (B, 1, 1, S - 1), without `<cls>`."""
    return mask[..., 1:]
