"""MoEL: many listeners at once are what each of them is alone."""

import dataclasses

import pytest
import torch

from attune.models.base import PAIRED, Progress
from attune.models.layers import DecoderLayer
from attune.models.moel import Route
from tests.contract import rows_of

LONG_AGO = Progress(step=10**9)


@pytest.fixture
def variant(build):
    return build("moel", filter_width=52).variant.eval()


def one_listener(listeners, number, config):
    """The same listener as a decoder layer of its own."""
    layer = DecoderLayer(config.width, config.num_heads, config.key_depth, 52, config.dropout)
    weights = {}
    depth = config.key_depth
    for name, stacked, parts in (
        ("self_attention", listeners.self_in, ("queries", "keys", "values")),
        ("cross_attention", listeners.cross_in, ("queries",)),
        ("cross_attention", listeners.cross_source, ("keys", "values")),
    ):
        for place, part in enumerate(parts):
            columns = stacked.weight[number][:, place * depth : (place + 1) * depth]
            weights[f"{name}.{part}.weight"] = columns.t()
    weights["self_attention.out.weight"] = listeners.self_out.weight[number].t()
    weights["cross_attention.out.weight"] = listeners.cross_out.weight[number].t()
    for place, stacked in ((0, listeners.wider), (3, listeners.narrower)):
        weights[f"feed_forward.{place}.weight"] = stacked.weight[number].t()
        weights[f"feed_forward.{place}.bias"] = stacked.bias[number]
    for name in ("self_norm", "cross_norm", "feed_forward_norm"):
        norm = getattr(listeners, name)
        weights[f"{name}.weight"], weights[f"{name}.bias"] = norm.scale[number], norm.shift[number]
    layer.load_state_dict(weights)
    return layer.eval()


@torch.no_grad()
def test_listeners_together_are_each_alone(variant, batch):
    for parameter in variant.listeners.parameters():  # norms and biases that do something
        parameter.add_(0.1 * torch.randn_like(parameter))
    words = variant.embed(batch)
    source = variant.encode_context(words)
    told = torch.tensor([7, 3, 3, 31, 0, 7, 12, 3, 7, 30, 31, 7])  # any order, some several times
    route = Route.to(told, 32)
    memory = variant.listeners.project_kv(source, route)
    said, _ = variant.listeners(words.decoder_inputs, told, route, memory, words.attention_mask)
    for row, number in enumerate(told.tolist()):
        layer = one_listener(variant.listeners, number, variant.config)
        one = slice(row, row + 1)
        expected, _ = layer(
            words.decoder_inputs[one], layer.project_kv(source[one]), words.attention_mask[one]
        )
        assert torch.allclose(said[one], expected, atol=1e-4)


@torch.no_grad()
def test_listeners_that_are_not_heard_change_nothing(variant, batch):
    """All listeners computed, with weights of exactly 0, is what is saved."""
    words = variant.embed(batch)
    source = variant.encode_context(words)
    heard = variant.heard(variant.classifier(source[:, 0]))
    assert ((heard > 0).sum(dim=1) == 5).all()
    assert torch.allclose(heard.sum(dim=1), torch.ones(len(heard)))
    together, _ = variant.shared(
        words.decoder_inputs, variant.shared.project_kv(source), words.attention_mask
    )
    for number in range(32):
        route = Route.to(torch.full((len(batch),), number), 32)
        who = torch.full((len(batch),), number)
        memory = variant.listeners.project_kv(source, route)
        said, _ = variant.listeners(words.decoder_inputs, who, route, memory, words.attention_mask)
        together = together + heard[:, number, None, None] * said
    expected = variant.decoder(together, source, words.attention_mask)
    assert torch.allclose(variant.decode(words, source), expected, atol=1e-4)


def test_only_heard_listeners_learn(build, batch):
    variant = build("moel", top_k=1, true_emotion_decay=0.0).variant.train()
    one = rows_of(batch, [0, 1, 2])
    terms = variant.losses({PAIRED: one}, LONG_AGO)
    terms["nll"].backward()
    with torch.no_grad():
        source = variant.encode_context(variant.embed(one))
        heard = set(variant.classifier(source[:, 0]).argmax(dim=1).tolist())
    for name, parameter in variant.listeners.named_parameters():
        moved = set(parameter.grad.flatten(1).any(dim=1).nonzero().flatten().tolist())
        assert moved == heard, name


def test_the_true_emotion_is_heard_early_on(build, batch):
    variant = build("moel", true_emotion_decay=100.0).variant
    logits = torch.randn(len(batch), 32)
    heard = variant.heard(logits)
    truth = torch.nn.functional.one_hot(batch["emotion"], 32).float()
    first = variant._with_true_emotions(heard, batch["emotion"], Progress(step=0))
    assert torch.equal(first, truth)
    assert torch.equal(variant._with_true_emotions(heard, batch["emotion"], LONG_AGO), heard)
    torch.manual_seed(0)
    many = heard[:1].expand(4000, -1)
    then = variant._with_true_emotions(many, batch["emotion"][:1].expand(4000), Progress(step=100))
    told = (then == truth[:1]).all(dim=1).float().mean()
    assert told.item() == pytest.approx(1 / torch.e, abs=0.03)
    unknown = torch.full_like(batch["emotion"], -1)  # nothing to be told
    assert torch.equal(variant._with_true_emotions(heard, unknown, Progress(step=0)), heard)


@torch.no_grad()
def test_what_is_looked_at_on_valid_is_not_told_the_truth(variant, batch):
    others = {**batch.tensors, "emotion": (batch["emotion"] + 1) % 32}
    changed = dataclasses.replace(batch, tensors=others)
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
