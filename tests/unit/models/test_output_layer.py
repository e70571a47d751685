"""The output layer and attention in bf16: close to fp32 in training, fp32 everywhere else."""

import pytest
import torch

from attune.models import layers, output_layer, precision

NUM_TOKENS, WIDTH, COUNT = 500, 24, 70


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def layer(request):
    torch.manual_seed(0)
    embedding = layers.WordEmbedding(NUM_TOKENS, WIDTH, table_width=16 if request.param else None)
    return output_layer.OutputLayer(embedding, WIDTH, tied=request.param)


@pytest.fixture(autouse=True)
def _bf16(monkeypatch):
    """bf16 counts as native, and the logits take several chunks."""
    monkeypatch.setattr(precision, "has_native_bf16", lambda _: True)
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * NUM_TOKENS * 30)


def _compute_loss(layer, smoothing, weights, *, bf16):
    torch.manual_seed(1)
    hidden = torch.randn(COUNT, WIDTH).requires_grad_()
    targets = torch.randint(0, NUM_TOKENS, (COUNT,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        total, losses = layer.losses(hidden, targets, smoothing, weights)
    gradients = ()
    if total.requires_grad:
        gradients = torch.autograd.grad(total / COUNT, (hidden, *layer.parameters()))
    return total, losses, gradients


def _record_products(monkeypatch):
    dtypes = set()
    linear = output_layer._apply_linear

    def record(rows, weight, bias=None):
        dtypes.add(rows.dtype)
        return linear(rows, weight, bias)

    monkeypatch.setattr(output_layer, "_apply_linear", record)
    return dtypes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_bf16_gradients_are_close_to_fp32(layer, monkeypatch, smoothing, weighted):
    weights = torch.rand(COUNT) if weighted else None
    total, losses, gradients = _compute_loss(layer, smoothing, weights, bf16=False)
    dtypes = _record_products(monkeypatch)
    bf16_total, bf16_losses, bf16_gradients = _compute_loss(layer, smoothing, weights, bf16=True)
    assert dtypes == {torch.bfloat16}
    assert bf16_total.dtype == bf16_losses.dtype == torch.float32
    assert bf16_total.item() == pytest.approx(total.item(), rel=5e-3)
    assert torch.allclose(bf16_losses, losses, rtol=2e-2, atol=2e-2)
    for expected, actual in zip(gradients, bf16_gradients, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() < 1e-2 * expected.norm()
        assert not actual.equal(expected)


def test_fp32_is_computed_without_gradients_without_autocast_and_without_hardware(
    layer, monkeypatch
):
    dtypes = _record_products(monkeypatch)
    with torch.no_grad():
        _compute_loss(layer, 0.0, None, bf16=True)
    _compute_loss(layer, 0.0, None, bf16=False)
    monkeypatch.setattr(precision, "has_native_bf16", lambda _: False)
    _compute_loss(layer, 0.0, None, bf16=True)
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bf16_is_close_to_fp32(causal):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 4, 6, 8).unbind()
    mask = None if causal else (torch.arange(6) < torch.tensor([6, 3])[:, None])[:, None, None]
    expected = layers.attend(queries, keys, values, mask, causal=causal)
    actual = layers.attend(
        queries.bfloat16(), keys.bfloat16(), values.bfloat16(), mask, causal=causal
    )
    assert actual.dtype == torch.bfloat16
    assert torch.allclose(actual.float(), expected, atol=3e-2)
