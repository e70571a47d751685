"""Dual-Emp and DualVAE: the consensus, both directions, unpaired text, and the weighted loss."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from attune.models.base import CONTEXTS, PAIRED, RESPONSES, Progress
from attune.models.dual_emp import LISTENER, _mask_forced_eos
from attune.models.layers import WordEmbedding
from attune.models.output_layer import OutputLayer
from attune.platform.core.errors import UsageError
from attune.platform.training import settings
from tests.contract import EARLY, select_rows


def repeat_for_all_streams(batch):
    return dict.fromkeys((PAIRED, CONTEXTS, RESPONSES), batch)


def select_unpaired_columns(batch, *names):
    """Return a batch of an unpaired stream, which lacks the columns of the counterpart."""
    kept = {name: batch[name] for name in ("index", "emotion", *names)}
    return dataclasses.replace(batch, tensors=kept)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_have_the_gradients_of_autograd(smoothing):
    torch.manual_seed(0)
    output = OutputLayer(WordEmbedding(50, 8), 8, tied=False)
    hidden = torch.randn(20, 8, requires_grad=True)
    targets, weights = torch.randint(0, 50, (20,)), torch.randn(20)
    parameters = (hidden, output.weight, output.bias)

    total, each = output.losses(hidden, targets, smoothing, weights)
    grads = torch.autograd.grad(total, parameters)
    logits = F.linear(hidden, output.weight, output.bias)
    losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    expected = torch.autograd.grad((losses * weights).sum(), parameters)

    assert torch.allclose(each, losses, atol=1e-5)
    assert torch.allclose(total, (losses * weights).sum(), atol=1e-4)
    for one, other in zip(grads, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_invalid_settings_are_rejected():
    with pytest.raises(UsageError, match="unpaired=true needs dual=true"):
        settings.configure("dual-emp", "tiny", {"dual": "false"})


def test_responses_are_the_targets(build, batch):
    variant = build("dual-emp").variant.eval()
    context, response = variant._embed_texts(
        variant._context_text(batch), variant._response_text(batch)
    )
    assert response.targets.equal(batch["response"])
    words = variant._response_text(batch).tokens
    assert bool((words[:, 0] == variant.data_info.specials["<cls>"]).all())
    assert not bool((words == variant.data_info.specials["<eos>"]).any())
    ends = (context.targets == variant.data_info.specials["<eos>"]).sum(dim=1)
    assert ends.tolist() == [1] * len(batch)
    assert context.target_mask.sum(dim=1).equal((batch["context"] != 0).sum(dim=1))


@torch.no_grad()
def test_exact_expectation_is_the_sum_over_states(build, batch):
    few = select_rows(batch, range(3))
    variant = build("dual-emp", expectation="exact", word_dropout=0.0).variant.train()
    context, response = variant._embed_texts(
        variant._context_text(few), variant._response_text(few)
    )
    encoded = variant._encode_text(variant.forward_model, context)
    counts = torch.ones(3)
    consensus = variant._expand_consensus(encoded.log_posterior)
    total, _ = variant._text_nll(variant.forward_model, encoded, response, consensus, counts)
    expected = 0.0
    for state in range(variant.config.num_states):
        one = dataclasses.replace(
            consensus,
            embeddings=variant.states.weight[state].expand(3, -1),
            rows=torch.arange(3),
            weights=torch.ones(3),
        )
        _, means = variant._text_nll(variant.forward_model, encoded, response, one, counts)
        sums = means * response.target_mask.sum(dim=1)
        expected += float((encoded.log_posterior[:, state].exp() * sums).sum())
    assert float(total) == pytest.approx(expected, rel=1e-4)


def test_exact_expectation_has_a_gradient_with_respect_to_the_posterior(build, batch):
    """It is the gradient of the sum over all states."""
    few = select_rows(batch, range(3))
    variant = build("dual-emp", expectation="exact", word_dropout=0.0).variant.train()
    context, response = variant._embed_texts(
        variant._context_text(few), variant._response_text(few)
    )
    with torch.no_grad():
        encoded = variant._encode_text(variant.forward_model, context)
    posterior = encoded.log_posterior.clone().requires_grad_()
    consensus = variant._expand_consensus(posterior)
    total, means = variant._text_nll(
        variant.forward_model, encoded, response, consensus, torch.ones(3)
    )
    [gradient] = torch.autograd.grad(total, posterior)
    sums = (means * response.target_mask[consensus.rows].sum(dim=1)).view_as(posterior)
    assert torch.allclose(gradient, posterior.detach().exp() * sums, rtol=1e-4)


@pytest.mark.parametrize("expectation", ["gumbel", "mean", "exact"])
def test_the_likelihood_has_a_gradient_with_respect_to_the_posterior(build, batch, expectation):
    variant = build("dual-emp", expectation=expectation).variant
    losses = variant.losses(repeat_for_all_streams(select_rows(batch, range(4))), EARLY)
    for term, direction in (
        ("nll", variant.forward_model),
        ("nll_by_response", variant.backward_model),
    ):
        grads = torch.autograd.grad(
            losses[term], tuple(direction.posterior.parameters()), retain_graph=True
        )
        assert all(bool(grad.any()) for grad in grads), term


def test_a_sampled_state_is_one_state(build):
    variant = build("dual-emp").variant.train()
    torch.manual_seed(0)
    posterior = torch.tensor([[0.7, 0.2, 0.1] + [0.0] * 29]).log().repeat(2000, 1)
    sampled = variant._sample_consensus(posterior).embeddings
    nearest = torch.cdist(sampled, variant.states.weight)
    assert bool((nearest.min(dim=1).values < 1e-3).all())
    counts = torch.bincount(nearest.argmin(dim=1), minlength=32) / 2000
    assert counts[:3].tolist() == pytest.approx([0.7, 0.2, 0.1], abs=0.04)
    most_likely = variant.eval()._sample_consensus(posterior[:1]).embeddings
    assert torch.allclose(most_likely, variant.states.weight[:1])


def test_kl_of_certain_and_uniform_posteriors(build, batch):
    """It is log K for a posterior with a single state and 0 for a uniform posterior."""
    variant = build("dual-emp").variant.eval()
    encoded = variant._encode_text(
        variant.forward_model, variant._embed_texts(variant._context_text(batch))[0]
    )
    ones = torch.ones(len(batch))
    for posterior, expected in (
        (torch.zeros(len(batch), 32) - math.log(32), 0.0),
        (F.one_hot(torch.zeros(len(batch), dtype=torch.long), 32).clamp(min=1e-30).log(), 3.4657),
    ):
        certain = dataclasses.replace(encoded, log_posterior=posterior.float())
        terms = variant._posterior_losses(certain, batch, "context", ones, Progress())
        kl = float(terms["divergence_context"]) / len(batch)
        assert kl == pytest.approx(expected, abs=1e-3)


def test_unpaired_text_needs_no_counterpart(build, batch):
    variant = build("dual-emp").variant.train()
    batches = {
        PAIRED: batch,
        CONTEXTS: select_unpaired_columns(batch, "context", "context_roles"),
        RESPONSES: select_unpaired_columns(batch, "response"),
    }
    losses = variant.losses(batches, EARLY)
    assert set(variant.loss_weights()) == set(losses)
    waits = build("dual-emp", paired_share=0.5).variant.train()
    assert "policy_contexts" not in waits.losses(batches, EARLY)
    assert "policy_contexts" in waits.losses(batches, Progress(step=5, fraction=0.5))
    seldom = build("dual-emp", unpaired_every=3).variant.train()
    steps = [Progress(step=step) for step in range(6)]
    joined = ["policy_contexts" in seldom.losses(batches, step) for step in steps]
    assert joined == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("stream", "sampler", "reconstructor"),
    [(CONTEXTS, "forward_model", "backward_model"), (RESPONSES, "backward_model", "forward_model")],
)
def test_unpaired_text_trains_both_directions(build, batch, stream, sampler, reconstructor):
    """The sampler is trained by the reward, the other direction by the reconstruction."""
    variant = build("dual-emp", tied=False).variant.train()
    losses = variant._unpaired_losses(batch, stream, EARLY)
    for term, trained, untrained in (
        ("policy", sampler, reconstructor),
        ("reconstruction", reconstructor, sampler),
    ):
        variant.zero_grad()
        losses[f"{term}_{stream}"].backward(retain_graph=True)
        assert getattr(variant, trained).decoder.norm.weight.grad.any(), term
        assert getattr(variant, untrained).decoder.norm.weight.grad is None, term


@pytest.mark.parametrize("stream", [CONTEXTS, RESPONSES])
def test_a_text_is_reconstructed_from_its_counterpart(build, batch, stream, monkeypatch):
    variant = build("dual-emp", expectation="mean").variant.train()
    words = batch["response"][:, :1]

    def reconstruct(counterpart):
        monkeypatch.setattr(variant, "_generate_text", lambda *_, **__: counterpart)
        return variant._unpaired_losses(batch, stream, EARLY)[f"reconstruction_{stream}"]

    assert torch.equal(reconstruct(words), reconstruct(words))
    assert not torch.allclose(reconstruct(words), reconstruct(words + 1), atol=1e-6)


def test_an_eos_that_was_not_sampled_has_no_reward(build):
    variant = build("dual-emp").variant
    padding, word = variant.data_info.specials["<pad>"], len(variant.data_info.specials)
    sampled = torch.tensor([[word, word, word], [word, word, padding]])
    [text] = variant._embed_texts(variant._prepend_cls(sampled, LISTENER))
    assert text.target_mask.sum(dim=1).tolist() == [4, 3]
    assert _mask_forced_eos(text, sampled, 3, padding).target_mask.sum(dim=1).tolist() == [3, 3]
    assert _mask_forced_eos(text, sampled, 4, padding) is text


def test_the_baseline_is_the_mean_reward_of_the_others(build):
    variant = build("dual-emp").variant
    advantage = variant._compute_advantage(torch.tensor([-2.0, -4.0, -6.0]))
    assert advantage.tolist() == [3.0, 0.0, -3.0]
    plain = build("dual-emp", reward_baseline="none").variant
    assert plain._compute_advantage(torch.tensor([-2.0, -4.0])).tolist() == [-2.0, -4.0]


def test_a_baseline_reduces_the_variance_of_the_policy_gradient(build, batch):
    """The gradient varies less over random draws."""

    def gradient_variance(baseline):
        variant = build("dual-emp", reward_baseline=baseline).variant.train()
        grads = []
        for seed in range(12):
            torch.manual_seed(seed)
            variant.zero_grad()
            variant._unpaired_losses(batch, CONTEXTS, EARLY)["policy_contexts"].backward()
            grads.append(variant.forward_model.output.bias.grad.clone())
        return torch.stack(grads).var(dim=0).sum()

    torch.manual_seed(0)
    assert gradient_variance("batch") < 0.5 * gradient_variance("none")


def test_generated_texts_end(build, batch):
    variant = build("dual-emp").variant.eval()
    [context] = variant._embed_texts(variant._context_text(batch))
    encoded = variant._encode_text(variant.forward_model, context)
    z = variant._sample_consensus(encoded.log_posterior).embeddings
    with torch.no_grad():
        variant.forward_model.output.bias.zero_()
        likely = math.log(variant.data_info.num_tokens) - 1  # as likely as a third of all words
        variant.forward_model.output.bias[variant.data_info.specials["<eos>"]] = likely
    torch.manual_seed(0)
    tokens = variant._generate_text(variant.forward_model, encoded, z, 50, greedy=False)
    real = tokens != 0
    assert tokens.shape[1] <= 50
    assert not bool(real.all()), "some texts end before others"
    assert bool((real.long().diff(dim=1) <= 0).all()), "padding is at the end"
    assert bool((tokens[real] >= len(variant.data_info.specials)).all()), "words only"


def test_explanations(build, batch):
    explanation = build("dual-emp").variant.eval().explain(batch)[0]
    assert sum(explanation.consensus.values()) == pytest.approx(1.0, abs=1e-4)
    assert len(explanation.consensus) == 32
    assert len(explanation.imagined_tokens) <= 40
    assert build("sing-emp-paired").variant.eval().explain(batch)[0].imagined_tokens is None


def test_ablations_have_fewer_terms(build):
    def weights(name):
        return set(build(name).variant.loss_weights())

    assert weights("sing-emp-paired") == {"nll", "emotion_context", "divergence_context"}
    assert weights("dual-emp") > weights("dual-emp-paired") > weights("sing-emp-paired")
    assert not hasattr(build("sing-emp-paired").variant, "backward_model")


def test_the_second_decoder_of_the_vae_reads_the_response_only(build, batch):
    variant = build("dual-vae").variant.eval()
    one = variant.losses({PAIRED: batch}, EARLY)
    other = {**batch.tensors, "context": batch["context"].flip(0)}
    other["context_roles"] = batch["context_roles"].flip(0)
    two = variant.losses({PAIRED: dataclasses.replace(batch, tensors=other)}, EARLY)
    assert torch.equal(one["auto_encoding"], two["auto_encoding"])
    assert not torch.allclose(one["nll"], two["nll"])


def test_the_kl_weight_of_the_vae_rises(build, batch):
    variant = build("dual-vae", dropout=0.0, word_dropout=0.0, annealing_share=0.5).variant.train()
    values = [
        variant.losses({PAIRED: batch}, Progress(fraction=fraction))["divergence"].item()
        for fraction in (0.0, 0.25, 0.5, 1.0)
    ]
    assert values[0] == 0
    assert values[1] * 2 == pytest.approx(values[2])
    assert values[2] == pytest.approx(values[3])
