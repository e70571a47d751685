"""DualVAE: a conditional variational auto-encoder with a second decoder (Tran and Nguyen 2018).

A latent Gaussian is inferred from context and response, and from the context alone where there is
no response yet; its sample stands at the decoder's first place. A second decoder tells the response
again from its own encoding alone; both share word vectors and output layer, so that what one learns
of saying things the other has. The emotion is predicted as in Multi-TRS.

The paper is not at hand: this follows what the Dual-Emp paper says of it.

Deviations: as in `transformer.py`, and
- The second decoder sees one vector, the state of the response's first token: with all states it
  would have nothing to learn but copying.
- Perplexity is taken, and answers are made, at the prior's mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    State,
)
from attune.models.latents import Gaussian, annealing_weight, divergence, sampled
from attune.models.layers import Decoder, Encoder
from attune.models.multitask import MultitaskConfig, MultiTransformer, emotion_loss
from attune.models.transformer import EmbeddedBatch


@dataclass(frozen=True, kw_only=True)
class DualVaeConfig(MultitaskConfig):
    """Multi-TRS's, and how the latent and the second decoder are weighed."""

    divergence_weight: float = 1.0
    """Of the latent's divergence from its prior, once it has risen."""
    auto_encoding_weight: float = 1.0
    """Of telling the response again."""
    annealing_steps: int = 10_000
    """Steps in which the divergence's weight rises from 0; 0 weighs it fully from the first on."""


class DualVae(MultiTransformer):
    """A response from a latent and the context, and from itself."""

    system = "DualVAE"
    paper = "Tran and Nguyen 2018"
    Config = DualVaeConfig
    presets: ClassVar = {
        **MultiTransformer.presets,
        "tiny": {**MultiTransformer.presets["tiny"], "annealing_steps": 100},
        "small": {**MultiTransformer.presets["small"], "annealing_steps": 300},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **MultiTransformer.search_spaces,
        "loss-weights": {
            name: Range(low=0.1, high=10.0, scale="loguniform")
            for name in ("emotion_weight", "divergence_weight", "auto_encoding_weight")
        },
        "schedule": {"annealing_steps": Choice(values=(0, 1_000, 3_000, 10_000))},
    }

    def __init__(self, config: DualVaeConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width = config.width
        shape = (width, config.num_layers, config.num_heads, config.key_depth)
        self.prior = Gaussian(width, width)  # p(z | c)
        self.recognition = Gaussian(2 * width, width)  # q(z | c, y)
        self.response_encoder = Encoder(*shape, config.filter_width, config.dropout)
        self.response_decoder = Decoder(*shape, config.filter_width, config.dropout)

    def loss_weights(self) -> dict[str, float]:
        """Response, emotion, latent, and the response from itself."""
        return {
            **super().loss_weights(),
            "divergence": self.config.divergence_weight,
            "auto_encoding": self.config.auto_encoding_weight,
        }

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The evidence bound's two terms, auto-encoding, and the emotion."""
        batch = batches[PAIRED]
        words = self.embed(batch)
        source = self.encode_context(words)
        encoded = self.response_encoder(
            words.decoder_inputs, words.response_mask[:, None, None, :]
        )[:, :1]
        both = torch.cat([source[:, 0], encoded[:, 0]], dim=1)
        prior, posterior = self.prior(source[:, 0]), self.recognition(both)
        # What is looked at in between is what answers will be made from.
        latent = sampled(*posterior) if self.training else prior[0]
        nothing_hidden = torch.ones_like(encoded[:, :, 0], dtype=torch.bool)[:, None, None, :]
        again = self.response_decoder(words.decoder_inputs, encoded, nothing_hidden)
        bound = divergence(*posterior, *prior).sum() / batch.samples
        return {
            "nll": self.compute_nll(batch, self._decoded(words, source, latent), words),
            "emotion": emotion_loss(self.classifier(source[:, 0]), batch),
            "divergence": self._divergence_weight(progress) * bound,
            "auto_encoding": self.compute_nll(batch, again, words),
        }

    def decode(self, words: EmbeddedBatch, source: Tensor) -> Tensor:
        """Hidden states (B, T, D) that predict the response, the latent at its prior mean."""
        return self._decoded(words, source, self.prior(source[:, 0])[0])

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The context, and the prior's mean for the first place."""
        words = self.embed(batch)
        source = self.encode_context(words)
        state = self.decoder.init_state(source, words.attention_mask)
        return {**state, "first_input": self._first(self.prior(source[:, 0])[0])}

    def _decoded(self, words: EmbeddedBatch, source: Tensor, latent: Tensor) -> Tensor:
        given = torch.cat([self._first(latent), words.decoder_inputs[:, 1:]], dim=1)
        hidden: Tensor = self.decoder(given, source, words.attention_mask)
        return hidden

    def _first(self, latent: Tensor) -> Tensor:
        """(B, 1, D) the latent where `<sos>` would stand."""
        return latent[:, None] + self.positions(1)

    def _divergence_weight(self, progress: Progress) -> float:
        return annealing_weight(self.config.annealing_steps, progress) if self.training else 1.0
