"""Emotion cause: the gates of the decoder's attention, and their gradient to the reasoner."""

import pytest
import torch

from attune.models.base import PAIRED, Progress
from attune.models.emotion_cause import GatedAttention, GatedDecoderLayer, sample_gates
from attune.models.layers import LayerShape
from attune.platform.core.errors import UsageError
from attune.platform.training import settings
from tests.contract import check_stepwise_decoding_gives_the_likelihood

SHAPE = LayerShape(width=12, num_heads=2, key_depth=8, filter_width=16)
SOFT, HARD = "emotion-cause-soft", "emotion-cause-hard"


def joint_losses(variant, batch, **progress):
    return variant.losses({PAIRED: batch}, Progress(**progress))


def bias_reasoner(variant, towards):
    """Make the reasoner label all words as the cause, or none."""
    with torch.no_grad():
        variant.reasoner.cause_head.weight.zero_()
        variant.reasoner.cause_head.bias.copy_(torch.tensor([-towards, towards]))
    return variant


def test_gated_attention_is_equation_5():
    torch.manual_seed(0)
    attention = GatedAttention(SHAPE).double().eval()
    query, source = torch.randn(1, 3, 12).double(), torch.randn(1, 5, 12).double()
    gates = torch.tensor([[1.0, 0.0, 0.3, 1.0, 0.7]]).double()
    mask = torch.tensor([True, True, True, True, False])[None, None, None, :]
    keys, values = attention.project_kv(source)
    output = attention.attend_gated(query, keys, values, gates, mask)
    queries = attention.project_queries(query)
    for place in range(3):
        mixed = []
        for head in range(2):
            scores = [queries[0, head, place] @ keys[0, head, i] / 2.0 for i in range(4)]
            opened = torch.stack([gates[0, i] * scores[i].exp() for i in range(4)])
            weights = opened / opened.sum()
            assert weights[1] == 0.0
            mixed.append(sum(weights[i] * values[0, head, i] for i in range(4)))
        assert torch.allclose(output[0, place], attention.out(torch.cat(mixed)))


def test_a_weight_rounded_to_0_gives_finite_results():
    attention = GatedAttention(LayerShape(width=4, num_heads=1, key_depth=4, filter_width=4))
    for layer in (attention.queries, attention.keys):
        layer.weight.data.copy_(torch.eye(4))
    query, gates = torch.full((1, 1, 4), 30.0), torch.tensor([[1.0, 0.0]], requires_grad=True)
    source = torch.stack([torch.full((4,), -30.0), torch.full((4,), 30.0)])[None]
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    output = attention.attend_gated(query, *attention.project_kv(source), gates, mask)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(gates.grad).all()


@torch.no_grad()
def test_gated_attention_follows_the_cross_attention():
    """Its queries are computed from the output of the cross-attention."""
    torch.manual_seed(0)
    layer = GatedDecoderLayer(SHAPE).eval()
    hidden, source = torch.randn(2, 3, 12), torch.randn(2, 5, 12)
    mask, gates = torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.rand(2, 5)
    projected = layer.project_kv(source, gates)
    output, _ = layer(hidden, projected, mask)
    after_self, _ = layer._self_attend(hidden, None)
    cross = layer.cross_attention
    after_cross = after_self + cross.cross_attend(
        layer.cross_norm(after_self), *cross.project_kv(source), mask
    )
    gated = layer.gated_attention
    after_gated = after_cross + gated.attend_gated(
        layer.gated_norm(after_cross), *gated.project_kv(source), gates, mask
    )
    expected = after_gated + layer.feed_forward(layer.feed_forward_norm(after_gated))
    assert torch.allclose(output, expected, atol=1e-6)


@torch.no_grad()
def test_soft_gates_are_probabilities_and_hard_ones_labels(build, batch):
    soft = build(SOFT).variant.eval()
    embedded = soft.embed(batch)
    expected = embedded.reasoner_output.cause_logits.softmax(dim=-1)[..., 1]
    assert torch.allclose(embedded.gates[:, 1:], expected[:, 1:], atol=1e-6)
    assert embedded.gates[:, 0].eq(1).all()
    middle = expected[:, 1:][batch["context"][:, 1:] != 0].median().item()
    hard = build(HARD, hard_threshold=middle).variant.eval()
    embedded = hard.embed(batch)
    expected = (embedded.reasoner_output.cause_logits.softmax(dim=-1)[..., 1] >= middle).float()
    assert 0 < expected[:, 1:].mean() < 1
    assert embedded.gates[:, 1:].equal(expected[:, 1:])
    assert embedded.gates[:, 0].eq(1).all()


@torch.no_grad()
def test_without_causes_only_cls_is_attended_to(build, batch):
    """The result is finite, and words with closed gates have no effect."""
    variant = bias_reasoner(build(HARD).variant.eval(), -20.0)
    values = variant.log_likelihood(batch)
    assert torch.isfinite(values).all()
    layer = variant.decoder.layers[0].gated_attention
    source = torch.randn(1, 4, variant.config.width)
    other = torch.cat([source[:, :1], torch.randn_like(source[:, 1:])], dim=1)
    mask, gates = torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([[1.0, 0, 0, 0]])
    query = torch.randn(1, 2, variant.config.width)
    one, two = (
        layer.attend_gated(query, *layer.project_kv(s), gates, mask) for s in (source, other)
    )
    assert torch.allclose(one, two)
    opened = bias_reasoner(variant, 20.0).log_likelihood(batch)
    assert not torch.allclose(values, opened)


def test_hard_gates_are_sampled_with_their_probability():
    torch.manual_seed(0)
    logits = torch.tensor([-2.0, 0.0, 1.0]).expand(8000, 3).clone().requires_grad_()
    gates = sample_gates(logits, 0.5)
    assert set(gates.unique().tolist()) == {0.0, 1.0}
    assert torch.allclose(gates.mean(dim=0), logits[0].sigmoid(), atol=0.02)
    torch.manual_seed(1)
    [gradient] = torch.autograd.grad(sample_gates(logits, 0.5).sum(), logits)
    torch.manual_seed(1)
    uniform = torch.rand_like(logits)
    soft = ((logits + uniform.logit()) / 0.5).sigmoid()
    [expected] = torch.autograd.grad(soft.sum(), logits)
    assert torch.allclose(gradient, expected, atol=1e-5)
    assert (gradient[gates == 0].abs().sum() > 0).all()


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_the_response_loss_reaches_the_reasoner_through_the_gates(build, batch, name):
    variant = build(name).variant.train()
    joint_losses(variant, batch, fraction=0.5)["nll"].backward()
    assert variant.reasoner.cause_head.weight.grad.abs().sum() > 0
    assert variant.reasoner.embedding.table.weight.grad.abs().sum() > 0
    assert torch.isfinite(variant.reasoner.cause_head.weight.grad).all()
    assert variant.reasoner.emotion_head.weight.grad is None  # no gradient through the argmax


def test_a_closed_gate_gets_a_gradient(build, batch):
    """The logarithm of a gate of 0, added to the logits, would have no finite gradient."""
    variant = build(HARD).variant.train()
    embedded = variant.embed(batch)
    closed = torch.zeros_like(embedded.gates).requires_grad_()
    gates = torch.cat([torch.ones_like(closed[:, :1]), closed[:, 1:]], dim=1)
    hidden = variant.decoder(
        embedded.decoder_inputs, variant.encode_context(embedded), embedded.attention_mask, gates
    )
    variant.compute_nll(batch, hidden, embedded).backward()
    real = batch["context"] != 0
    assert torch.isfinite(closed.grad).all()
    assert (closed.grad[:, 1:][real[:, 1:]] != 0).float().mean() > 0.9


def test_gates_are_annealed(build, batch):
    variant = build(SOFT, gate_temperature=4.0, final_gate_temperature=1.0).variant.train()
    temperatures = [
        variant._gate_temperature(Progress(fraction=fraction)) for fraction in (0.0, 0.5, 1.0)
    ]
    assert temperatures == pytest.approx([4.0, 2.0, 1.0])
    warm, cold = (
        variant.embed(batch, Progress(fraction=fraction)).gates for fraction in (0.0, 1.0)
    )
    assert ((warm - 0.5).abs() <= (cold - 0.5).abs() + 1e-6).all()
    assert variant.eval()._gate_temperature(Progress(fraction=0.0)) == pytest.approx(1.0)
    wrong = ({"gate_temperature": "0"}, {"final_gate_temperature": "-1"}, {"hard_threshold": "1"})
    for overrides in wrong:
        with pytest.raises(UsageError, match="expected"):
            settings.configure(SOFT, "tiny", overrides)


@pytest.mark.parametrize(
    ("gated_layers", "expected"), [("all", [0, 1, 2]), ("first", [0]), ("last", [2])]
)
def test_gated_layers(build, batch, gated_layers, expected):
    variant = build(SOFT, num_layers=3, gated_layers=gated_layers).variant
    layers = enumerate(variant.decoder.layers)
    assert [number for number, at in layers if isinstance(at, GatedDecoderLayer)] == expected
    check_stepwise_decoding_gives_the_likelihood(variant, batch)
