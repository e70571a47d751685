"""DualVAE: a conditional variational auto-encoder with a second decoder (Tran and Nguyen 2018).

The latent variable z is Gaussian, with a posterior q(z | c, y) computed from context and response
and a prior p(z | c) computed from the context. It is the decoder's first input. A second decoder
reconstructs the response from an encoding of the response. Both decoders share the word embedding
and the output layer, which the auto-encoder therefore trains as well. The emotion is predicted as
in Multi-TRS.

The paper itself was not available: this follows its description in the Dual-Emp paper.

Deviations: as in `transformer.py`, and
- The second decoder attends to a single vector, the encoder's state at `<sos>`; from all states it
  could copy the response.
- Perplexity and answers use the prior's mean.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attune.models.base import (
    PAIRED,
    Batches,
    Choice,
    DataInfo,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Weight,
)
from attune.models.latents import Gaussian, gaussian_kl, kl_weight, sample_gaussian
from attune.models.layers import Decoder, Encoder
from attune.models.multitask import (
    EMOTION_WEIGHT_RANGE,
    MultitaskConfig,
    MultiTransformer,
    emotion_loss,
)
from attune.models.transformer import EmbeddedBatch, replace_first_input


@dataclass(frozen=True, kw_only=True)
class DualVaeConfig(MultitaskConfig):
    """Settings of Multi-TRS, of the latent variable and of the auto-encoder."""

    divergence_weight: Weight = 1.0
    """Weight of the KL divergence of posterior and prior, after annealing. Usually 0.1 to 1."""
    auto_encoding_weight: Weight = 1.0
    """Weight of the response's reconstruction loss. Usually 0.1 to 1."""
    annealing_share: Share = 0.3
    """Share of the training in which the KL weight rises from 0; 0 uses the full weight from the
    first step. Usually 0.1 to 0.3."""


class DualVae(MultiTransformer):
    """A conditional variational auto-encoder, and an auto-encoder of the response."""

    system = "DualVAE"
    paper = "Tran and Nguyen 2018"
    Config = DualVaeConfig
    validation_metrics = (*MultiTransformer.validation_metrics, "auto_encoding", "divergence")
    search_spaces: ClassVar[SearchSpaces] = {
        **MultiTransformer.search_spaces,
        "loss-weights": {
            "emotion_weight": EMOTION_WEIGHT_RANGE,
            "divergence_weight": Range(low=0.1, high=10.0, scale="loguniform"),
            "auto_encoding_weight": Range(low=0.1, high=10.0, scale="loguniform"),
        },
        "schedule": {"annealing_share": Choice(values=(0.0, 0.1, 0.3, 0.6))},
    }

    def __init__(self, config: DualVaeConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width = config.width
        self.prior = Gaussian(width, width)  # p(z | c)
        self.posterior = Gaussian(2 * width, width)  # q(z | c, y)
        self.response_encoder = Encoder(config.layer_shape, config.num_layers)
        self.response_decoder = Decoder(config.layer_shape, self.decoder_layer_types(config))

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of response, emotion, KL divergence and reconstruction."""
        return {
            **super().loss_weights(),
            "divergence": self.config.divergence_weight,
            "auto_encoding": self.config.auto_encoding_weight,
        }

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms: the two of the evidence lower bound, emotion, and
        reconstruction."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)  # (B, S, D)
        h_cls = hidden[:, 0]
        encoded_response = self.response_encoder(
            embedded.decoder_inputs, embedded.response_mask[:, None, None, :]
        )[:, :1]  # (B, 1, D)
        prior = self.prior(h_cls)
        posterior = self.posterior(torch.cat([h_cls, encoded_response[:, 0]], dim=1))
        z = prior[0]  # validation must see what decoding will see: the prior's mean
        if self.training:
            mean, log_variance = posterior
            z = sample_gaussian(mean, log_variance, torch.randn_like(mean))
        mask = torch.ones_like(encoded_response[:, :, 0], dtype=torch.bool)[:, None, None, :]
        reconstructed = self.response_decoder(embedded.decoder_inputs, encoded_response, mask)
        inputs = replace_first_input(embedded.decoder_inputs, self.embed_first_input(z))
        decoded = self.decoder(inputs, hidden, embedded.attention_mask)  # (B, T, D)
        kl = gaussian_kl(*posterior, *prior).sum() / batch.tokens  # like the likelihood
        weight = kl_weight(self.config.annealing_share, progress, training=self.training)
        return {
            "nll": self.compute_nll(batch, decoded, embedded),
            "emotion": emotion_loss(self.classifier(h_cls), batch),
            "divergence": weight * kl,
            "auto_encoding": self.compute_nll(batch, reconstructed, embedded),
        }

    def first_decoder_input(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return the prior's mean as the decoder's first input, (B, 1, D)."""
        mean, _ = self.prior(hidden[:, 0])
        return self.embed_first_input(mean)
