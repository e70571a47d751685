"""MIME: emotion groups, the latent variable, mimicry and the ablations."""

import pytest
import torch

from attune.models import mime
from attune.models.base import PAIRED, Progress
from attune.models.decoding import decode
from attune.models.latents import gaussian_kl
from attune.platform.core.errors import UsageError
from attune.platform.data.labels import EMOTIONS
from attune.platform.training import settings
from tests.contract import select_rows


def compute_first_logits(variant, batch, controls=None):
    start = torch.full((len(batch),), variant.data_info.specials["<sos>"])
    with torch.no_grad():
        return variant.next_logits(start, variant.encode(batch, controls))[0]


def test_groups_are_those_of_table_1():
    assert sorted(name for names in mime.TABLE_1.values() for name in names) == sorted(EMOTIONS)
    config = settings.configure("mime")[0]
    groups = mime.group_emotions(config, EMOTIONS)
    assert [len(members) for members in groups.values()] == [13, 19]
    assert EMOTIONS.index("surprised") in groups["positive"]
    config = settings.configure("mime", "tiny", {"moved": "surprised, anticipating"})[0]
    groups = mime.group_emotions(config, EMOTIONS)
    assert EMOTIONS.index("surprised") in groups["negative"]
    assert EMOTIONS.index("anticipating") in groups["positive"]
    assert [len(members) for members in groups.values()] == [13, 19]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moved": "suprised"}, "moved: unknown emotion 'suprised'; choose from afraid, angry"),
        ({"grouping": "false"}, "mimicry=true needs grouping=true"),
        ({"positive_threshold": "1"}, "expected a number above 0 and below 1, got 1"),
        ({"gate": "wide"}, "unknown value of gate 'wide'"),
    ],
)
def test_invalid_settings_are_rejected(overrides, message):
    with pytest.raises(UsageError, match=message):
        settings.configure("mime", "tiny", overrides)


@torch.no_grad()
def test_negative_elbo(build, batch):
    """The group of the true emotion has a likelihood term, both groups have a KL divergence."""
    variant = build("mime").variant.eval()
    context = variant.encode_context(variant.embed(batch))[:, 0]
    posterior = variant.posterior_emotions(context, batch["emotion"], Progress())
    for group, (members, negative_elbo) in enumerate(
        zip(variant.groups.values(), posterior.negative_elbo, strict=True)
    ):
        for row, emotion in enumerate(batch["emotion"].tolist()):
            is_member = emotion in members
            chosen = emotion if is_member else members
            condition = variant.emotions.weight[chosen].reshape(-1, 32).mean(dim=0)
            prior = [each[group] for each in variant.prior(context[row : row + 1])]
            both = torch.cat([context[row], condition])[None]
            mean, log_variance = (each[group] for each in variant.posterior(both))
            expected = gaussian_kl(mean, log_variance, *prior)
            if is_member:
                log_probs = variant.emotion_head(mean)[:, members].log_softmax(dim=-1)
                expected = expected - log_probs[0, members.index(emotion)]
            assert torch.allclose(negative_elbo[row], expected, atol=1e-4)


def test_the_predicted_polarity_decides_which_emotion_mimics(build, batch):
    """Without mimicry the polarity has no effect."""
    for name, has_effect in (("mime", True), ("mime-no-mimicry", False)):
        high, low = (
            build(name, positive_threshold=threshold).variant.eval() for threshold in (0.999, 0.001)
        )
        assert (
            torch.allclose(compute_first_logits(high, batch), compute_first_logits(low, batch))
            is not has_effect
        )


@torch.no_grad()
def test_the_most_likely_emotion_determines_the_polarity(build):
    variant = build("mime").variant
    logits = torch.randn(200, 32)
    expected = torch.isin(logits.argmax(dim=1), torch.tensor(variant.groups["positive"]))
    assert torch.equal(variant._predict_polarity(logits), expected)
    assert 20 < expected.sum() < 180


@pytest.mark.parametrize("is_positive", [True, False])
@pytest.mark.parametrize("gate", ["each", "pair", "open"])
def test_fusing_packed_tokens_equals_equations_18_to_27(build, batch, gate, is_positive):
    """The plain equations, with padding and one group after the other, have equal outputs and
    gradients."""
    variant = build("mime", gate=gate).variant.eval()
    torch.nn.init.normal_(variant.fuse.weight, std=0.1)  # initially the order has no effect
    embedded = variant.embed(batch)
    hidden = variant.encode_context(embedded).detach().requires_grad_()
    emotion_probs = variant.prior_emotions(hidden[:, 0])
    e_pos, e_neg = (
        probs[:, indices] @ variant.emotions.weight[indices]  # eq. 10
        for probs, indices in zip(emotion_probs, variant.groups.values(), strict=True)
    )
    m, m_tilde = (e_pos, e_neg) if is_positive else (e_neg, e_pos)  # eq. 18-19
    h, mask = hidden[:, 1:], embedded.attention_mask[..., 1:]
    refined = []
    for emotion in (m, m_tilde):
        h_resp = torch.cat([h, emotion[:, None].expand_as(h)], dim=2)  # eq. 20-21
        refined.append(variant.refine(variant.condition_on_emotion(h_resp), mask))  # eq. 22-23
    m_prime = torch.cat(refined, dim=2)  # eq. 24
    if gate == "open":
        gates = torch.ones_like(m_prime)
    else:
        gates = variant.contribution(m_prime).sigmoid()  # eq. 25
        gates = gates.repeat_interleave(m_prime.shape[2] // gates.shape[2], dim=2)
    expected = variant.fuse(gates * m_prime)  # eq. 26-27
    polarity = torch.full((len(batch),), is_positive)
    fused, _ = variant._fuse_emotions(hidden, embedded, emotion_probs, polarity)
    real, weights = mask[:, 0, 0], torch.randn_like(expected)
    assert not real.all(), "the batch has padding"
    assert torch.allclose(fused[real], expected[real], atol=1e-4)
    inputs = (hidden, variant.emotions.weight, variant.condition_on_emotion.weight)
    gradients = [
        torch.autograd.grad((output * weights)[real].sum(), inputs, retain_graph=True)
        for output in (fused, expected)
    ]
    for actual, plain in zip(*gradients, strict=True):
        assert torch.allclose(actual, plain, atol=1e-3)


def test_samples_of_the_latent_variable(build, batch):
    variant = build("mime").variant.eval()
    on = {"stochasticity": "on"}
    at_mean, sampled = (
        compute_first_logits(variant, batch),
        compute_first_logits(variant, batch, on),
    )
    assert not torch.allclose(at_mean, sampled, atol=1e-4)
    assert torch.equal(sampled, compute_first_logits(variant, batch, {**on, "seed": "0"}))
    assert not torch.allclose(
        sampled, compute_first_logits(variant, batch, {**on, "seed": "1"}), atol=1e-4
    )
    for row in (0, 7):  # the noise of a sample does not depend on its batch
        alone = compute_first_logits(variant, select_rows(batch, [row]), on)
        assert torch.allclose(alone[0], sampled[row], atol=1e-4)
    deterministic = build("mime-no-stochasticity").variant.eval()
    assert torch.equal(
        compute_first_logits(deterministic, batch), compute_first_logits(deterministic, batch, on)
    )
    cold = build("mime", sampling_temperature=0.0).variant.eval()
    assert torch.equal(compute_first_logits(cold, batch), compute_first_logits(cold, batch, on))
    assert len(decode(variant, batch, controls=on)) == len(batch)


def test_training_is_stochastic_and_validation_is_not(build, batch):
    variant = build("mime").variant.train()

    def nll():
        return variant.losses({PAIRED: batch}, Progress())["nll"].item()

    assert nll() != nll()
    variant.eval()
    assert nll() == nll()
    without = build("mime-no-stochasticity").variant.train()
    one, other = (without.losses({PAIRED: batch}, Progress())["nll"].item() for _ in range(2))
    assert one == other


@torch.no_grad()
@pytest.mark.parametrize("name", ["mime", "mime-no-mimicry", "mime-no-mimicry-no-grouping"])
@pytest.mark.parametrize("gate", ["each", "pair", "open"])
def test_explanations(build, batch, name, gate):
    variant = build(name, gate=gate).variant.eval()
    expected = {
        "mime": {"gate mimicking", "gate non-mimicking"},
        "mime-no-mimicry": {"gate positive", "gate negative"},
        "mime-no-mimicry-no-grouping": {"gate all"},
    }[name]
    for row, explanation in enumerate(variant.explain(batch)):
        assert sum(explanation.groups.values()) == pytest.approx(1.0)
        positive = sum(explanation.emotion[n] for n in mime.TABLE_1["positive"])
        if variant.config.grouping:
            assert explanation.groups["positive"] == pytest.approx(positive, abs=1e-5)
        for group, probs in explanation.response_emotion.items():
            assert sum(probs.values()) == pytest.approx(1.0, abs=1e-5)
            assert len(probs) == len(variant.groups[group])
        assert set(explanation.by_word) == expected
        for values in explanation.by_word.values():
            assert len(values) == int((batch["context"][row] != 0).sum()) - 1
            assert all(0 <= value <= 1 for value in values)
            if gate == "open":
                assert set(values) == {1.0}


def test_kl_is_annealed_in_training_only(build, batch):
    variant = build("mime", annealing_share=0.5).variant
    context = torch.randn(len(batch), variant.config.width)
    negative_elbo = {}
    for training in (True, False):
        variant.train(training)
        for fraction in (0, 0.25, 0.5, 1):
            torch.manual_seed(0)
            progress = Progress(fraction=fraction)
            posterior = variant.posterior_emotions(context, batch["emotion"], progress)
            negative_elbo[training, fraction] = posterior.negative_elbo.detach()
    kl = negative_elbo[True, 0.5] - negative_elbo[True, 0]
    assert (kl > 0).all()
    assert torch.allclose(negative_elbo[True, 0.25] - negative_elbo[True, 0], kl / 2, atol=1e-5)
    assert torch.equal(negative_elbo[True, 1], negative_elbo[True, 0.5])
    assert torch.equal(negative_elbo[False, 0], negative_elbo[False, 1])


def test_the_figure_of_embeddings(build):
    """Each emotion has a point and a group, also in a model without groups."""
    for name in ("mime", "mime-no-mimicry-no-grouping"):
        variant = build(name).variant
        figure = getattr(variant, variant.figures["embeddings"])()
        assert figure.points.shape == (32, variant.config.width)
        assert tuple(figure.names) == EMOTIONS
        for emotion, group in zip(figure.names, figure.groups, strict=True):
            assert emotion in mime.TABLE_1[group]
