"""Which divisor each loss term has: that of sums over tokens or that of sums over samples."""

import dataclasses

import pytest
import torch

from attune.models import VARIANTS
from attune.platform.training import settings
from tests.contract import compute_stage_losses

PER_TOKEN = {
    "dual-vae": {"nll", "auto_encoding", "divergence"},
    "dual-emp": {
        "nll", "nll_by_response", "back", "back_by_response", "divergence_context",
        "divergence_response", "reconstruction_contexts", "reconstruction_responses",
        "divergence_contexts", "divergence_responses", "policy_contexts", "policy_responses",
    },
    "cause-annotator": set(),
    "emotion-classifier": set(),
    "intent-classifier": set(),
}  # fmt: skip
"""Terms of one bound share its divisor; the others' only such term is the likelihood."""


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_terms_of_one_bound_share_a_divisor(name, build, batch):
    variant = build(name).variant.train()

    def terms(**divisors):
        torch.manual_seed(0)
        scaled = dataclasses.replace(batch, **divisors)
        return {
            term: value.item()
            for _, _, losses in compute_stage_losses(variant, scaled)
            for term, value in losses.items()
        }

    before = terms()
    halved = terms(tokens=2 * batch.tokens), terms(samples=2 * batch.samples)
    per_token, per_sample = (
        {term for term in before if after[term] == pytest.approx(before[term] / 2, rel=1e-4)}
        for after in halved
    )
    assert per_token == PER_TOKEN.get(name, {"nll"})
    assert per_sample == set(before) - per_token


@pytest.mark.parametrize("name", ["multi-trs", "moel", "mime", "empdg", "emotion-cause-soft"])
def test_defaults_weigh_a_summed_likelihood_and_an_emotion_equally(name):
    """1 / L with the mean response length of EmpatheticDialogues, 14.55 words."""
    config = settings.configure(name, "paper")[0]
    weights = dataclasses.asdict(config)
    emotion = weights.get("emotion_weight", weights.get("classification_weight"))
    assert emotion == pytest.approx(1 / 14.55, abs=5e-4)
