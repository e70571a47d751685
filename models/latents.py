"""Gaussian latent variables and the annealing of their KL divergence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attune.models.base import Progress


def kl_weight(annealing_share: float, progress: Progress, *, training: bool) -> float:
    """Return the weight of a KL divergence: in training it rises linearly from 0 to 1 within a
    share of the stage, otherwise it is 1."""
    if not training or not annealing_share:
        return 1.0
    return min(1.0, progress.fraction / annealing_share)


class Gaussian(nn.Module):
    """A Gaussian with diagonal covariance, whose mean and log-variance are computed from an input.

    `output_layer` builds the last layer from its input and output width. A layer with an output for
    each of several groups gives a Gaussian for each group.
    """

    def __init__(
        self, input_width: int, width: int, *, with_variance: bool = True,
        output_layer: Callable[[int, int], nn.Module] = nn.Linear,
    ):  # fmt: skip
        super().__init__()
        self.with_variance = with_variance
        self.hidden_layer = nn.Linear(input_width, width)
        self.output_layer = output_layer(width, 2 * width if with_variance else width)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, (..., D) each, of inputs (..., input width); without a
        variance the log-variance is -inf."""
        outputs = self.output_layer(self.hidden_layer(inputs).relu())
        if not self.with_variance:
            return outputs, torch.full_like(outputs, -torch.inf)
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance


def sample_gaussian(
    mean: Tensor, log_variance: Tensor, noise: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Return a sample from standard normal noise, by the reparameterisation trick; `temperature`
    multiplies the standard deviation."""
    return torch.addcmul(mean, noise, (0.5 * log_variance).exp(), value=temperature)


def gaussian_kl(
    mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
) -> Tensor:
    """Return the KL divergence of a Gaussian from its prior: (..., D) -> (...)."""
    ratio = log_variance - prior_log_variance
    shift = (mean - prior_mean).square() * (-prior_log_variance).exp()
    return 0.5 * (ratio.exp() - ratio - 1 + shift).sum(dim=-1)
