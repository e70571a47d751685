"""Gaussian latent variables: one for all samples or one per group, sampling and annealing."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from attune.models.base import Progress
from attune.models.latents import Gaussian, gaussian_kl, kl_weight, sample_gaussian
from attune.models.mime import GroupLinear


@torch.no_grad()
@pytest.mark.parametrize("with_variance", [True, False])
def test_gaussians_of_groups_equal_one_gaussian_each(with_variance):
    """A layer per group has the outputs of as many linear layers, which keep the hidden layer."""

    def build(output_layer):
        return Gaussian(6, 4, with_variance=with_variance, output_layer=output_layer)

    grouped = build(lambda *widths: GroupLinear(3, *widths))
    shared, by_group = torch.randn(5, 6), torch.randn(3, 5, 6)
    for group in range(3):
        single = build(torch.nn.Linear)
        single.load_state_dict(
            {
                "hidden_layer.weight": grouped.hidden_layer.weight,
                "hidden_layer.bias": grouped.hidden_layer.bias,
                "output_layer.weight": grouped.output_layer.weight[group].t(),
                "output_layer.bias": grouped.output_layer.bias[group, 0],
            }
        )
        for inputs, own_inputs in ((shared, shared), (by_group, by_group[group])):
            for expected, actual in zip(single(own_inputs), grouped(inputs), strict=True):
                assert torch.allclose(actual[group], expected, atol=1e-6)


def test_samples_of_a_gaussian():
    mean, log_variance = torch.tensor([1.0, -2.0]), torch.tensor([1.0, 4.0]).log()
    noise = torch.tensor([0.5, -1.0])
    assert sample_gaussian(mean, log_variance, noise).tolist() == [1.5, -4.0]
    assert sample_gaussian(mean, log_variance, noise, temperature=0.5).tolist() == [1.25, -3.0]


def test_kl_of_gaussians():
    torch.manual_seed(0)
    mean, log_variance, prior_mean, prior_log_variance = torch.randn(4, 3, 8)
    posterior = Normal(mean, (0.5 * log_variance).exp())
    prior = Normal(prior_mean, (0.5 * prior_log_variance).exp())
    kl = gaussian_kl(mean, log_variance, prior_mean, prior_log_variance)
    assert torch.allclose(kl, kl_divergence(posterior, prior).sum(dim=1), rtol=1e-4)


@pytest.mark.parametrize(
    ("annealing_share", "fraction", "training", "weight"),
    [(0.5, 0.0, True, 0.0), (0.5, 0.25, True, 0.5), (0.5, 0.75, True, 1.0),
     (0.5, 0.25, False, 1.0), (0.0, 0.0, True, 1.0)],
)  # fmt: skip
def test_kl_weight(annealing_share, fraction, training, weight):
    assert kl_weight(annealing_share, Progress(fraction=fraction), training=training) == weight
