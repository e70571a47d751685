"""MoEL: all listeners at once equal separate decoder layers; weights of 0 have no effect."""

import dataclasses

import pytest
import torch

from attune.models.base import PAIRED, Progress
from attune.models.layers import DecoderLayer
from attune.models.moel import Routing
from tests.contract import select_rows

AT_THE_END = Progress(fraction=1.0)


@pytest.fixture
def variant(build):
    return build("moel", filter_width=52).variant.eval()


def build_decoder_layer(listeners, number, config):
    """Return a decoder layer with the weights of one listener."""
    layer = DecoderLayer(config.layer_shape)
    weights = {}
    depth = config.key_depth
    for name, stacked, parts in (
        ("self_attention", listeners.self_qkv, ("queries", "keys", "values")),
        ("cross_attention", listeners.cross_queries, ("queries",)),
        ("cross_attention", listeners.cross_kv, ("keys", "values")),
    ):
        for place, part in enumerate(parts):
            columns = stacked.weight[number][:, place * depth : (place + 1) * depth]
            weights[f"{name}.{part}.weight"] = columns.t()
    weights["self_attention.out.weight"] = listeners.self_out.weight[number].t()
    weights["cross_attention.out.weight"] = listeners.cross_out.weight[number].t()
    for place, stacked in ((0, listeners.feed_forward_in), (3, listeners.feed_forward_out)):
        weights[f"feed_forward.{place}.weight"] = stacked.weight[number].t()
        weights[f"feed_forward.{place}.bias"] = stacked.bias[number]
    for name in ("self_norm", "cross_norm", "feed_forward_norm"):
        norm = getattr(listeners, name)
        weights[f"{name}.weight"], weights[f"{name}.bias"] = norm.scale[number], norm.shift[number]
    layer.load_state_dict(weights)
    return layer.eval()


@torch.no_grad()
def test_each_listener_equals_a_decoder_layer(variant, batch):
    for parameter in variant.listeners.parameters():  # norms and biases away from 1 and 0
        parameter.add_(0.1 * torch.randn_like(parameter))
    embedded = variant.embed(batch)
    hidden = variant.encode_context(embedded)
    # Not sorted, and some repeated.
    listeners = torch.tensor([7, 3, 3, 31, 0, 7, 12, 3, 7, 30, 31, 7])
    routing = Routing.from_listeners(listeners, 32)
    source = variant.listeners.project_kv(hidden, routing)
    outputs, _ = variant.listeners(
        embedded.decoder_inputs, listeners, routing, source, embedded.attention_mask
    )
    for row, number in enumerate(listeners.tolist()):
        layer = build_decoder_layer(variant.listeners, number, variant.config)
        only = slice(row, row + 1)
        expected, _ = layer(
            embedded.decoder_inputs[only],
            layer.project_kv(hidden[only]),
            embedded.attention_mask[only],
        )
        assert torch.allclose(outputs[only], expected, atol=1e-4)


@torch.no_grad()
def test_listeners_with_weight_0_have_no_effect(variant, batch):
    """Not computing them is equivalent to computing all with weights of exactly 0."""
    embedded = variant.embed(batch)
    hidden = variant.encode_context(embedded)
    weights = variant.listener_weights(variant.classifier(hidden[:, 0]))
    assert ((weights > 0).sum(dim=1) == 5).all()
    assert torch.allclose(weights.sum(dim=1), torch.ones(len(weights)))
    mixture, _ = variant.shared_listener(
        embedded.decoder_inputs,
        variant.shared_listener.project_kv(hidden),
        embedded.attention_mask,
    )
    for number in range(32):
        listeners = torch.full((len(batch),), number)
        routing = Routing.from_listeners(listeners, 32)
        source = variant.listeners.project_kv(hidden, routing)
        output, _ = variant.listeners(
            embedded.decoder_inputs, listeners, routing, source, embedded.attention_mask
        )
        mixture = mixture + weights[:, number, None, None] * output
    expected = variant.decoder(mixture, hidden, embedded.attention_mask)
    assert torch.allclose(variant.decode(embedded, hidden), expected, atol=1e-4)


def test_only_active_listeners_get_a_gradient(build, batch):
    variant = build("moel", top_k=1, true_emotion_share=0.0).variant.train()
    few = select_rows(batch, [0, 1, 2])
    terms = variant.losses({PAIRED: few}, AT_THE_END)
    terms["nll"].backward()
    with torch.no_grad():
        hidden = variant.encode_context(variant.embed(few))
        active = set(variant.classifier(hidden[:, 0]).argmax(dim=1).tolist())
    for name, parameter in variant.listeners.named_parameters():
        trained = set(parameter.grad.flatten(1).any(dim=1).nonzero().flatten().tolist())
        assert trained == active, name


def test_the_true_emotion_is_used_early_in_training(build, batch):
    variant = build("moel", true_emotion_share=0.01).variant
    logits = torch.randn(len(batch), 32)
    weights, emotion = variant.listener_weights(logits), batch["emotion"]
    truth = torch.nn.functional.one_hot(emotion, 32).float()
    assert torch.equal(variant._mix_true_emotions(weights, emotion, Progress(step=0)), truth)
    assert torch.equal(variant._mix_true_emotions(weights, emotion, AT_THE_END), weights)
    torch.manual_seed(0)
    mixed = variant._mix_true_emotions(
        weights[:1].expand(4000, -1), emotion[:1].expand(4000), Progress(fraction=0.01)
    )
    share = (mixed == truth[:1]).all(dim=1).float().mean()
    assert share.item() == pytest.approx(1 / torch.e, abs=0.03)
    unlabelled = torch.full_like(emotion, -1)
    assert torch.equal(variant._mix_true_emotions(weights, unlabelled, Progress(step=0)), weights)


@torch.no_grad()
def test_validation_does_not_use_the_true_emotion(variant, batch):
    tensors = {**batch.tensors, "emotion": (batch["emotion"] + 1) % 32}
    changed = dataclasses.replace(batch, tensors=tensors)
    one, other = (variant.losses({PAIRED: b}, Progress())["nll"] for b in (batch, changed))
    assert torch.equal(one, other)


@torch.no_grad()
def test_explanations(variant, batch):
    for row, explanation in enumerate(variant.explain(batch)):
        assert len(explanation.listeners) == 5
        assert sum(explanation.listeners.values()) == pytest.approx(1.0)
        best = sorted(explanation.emotion, key=explanation.emotion.get)[-5:]
        assert set(best) == set(explanation.listeners)
        attention = explanation.by_word["attention"]
        assert len(attention) == int((batch["context"][row] != 0).sum()) - 1
        assert 0 < sum(attention) < 1  # <cls> has the rest
