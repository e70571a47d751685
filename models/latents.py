"""Gaussian latent variables and KL annealing, shared by the systems that use them."""

import torch
from torch import Tensor, nn

from attune.models.base import Progress


def annealing_weight(steps: int, progress: Progress) -> float:
    """Return the weight of a KL divergence, which rises linearly from 0 to 1 within `steps`."""
    return min(1.0, progress.step / steps) if steps else 1.0


class Gaussian(nn.Module):
    """A Gaussian whose mean and variance are computed from an input."""

    def __init__(self, input_width: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(input_width, width), nn.ReLU(), nn.Linear(width, 2 * width)
        )

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, (B, D) each, of inputs (B, input width)."""
        mean, log_variance = self.layers(inputs).chunk(2, dim=-1)
        return mean, log_variance


def sample_gaussian(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return a sample by the reparameterisation trick."""
    return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()


def gaussian_kl(
    mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
) -> Tensor:
    """Return the KL divergence of a Gaussian from its prior: (..., D) -> (...)."""
    ratio = log_variance - prior_log_variance
    shift = (mean - prior_mean).square() * (-prior_log_variance).exp()
    return 0.5 * (ratio.exp() - ratio - 1 + shift).sum(dim=-1)
