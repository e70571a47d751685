"""The output layer, which predicts tokens from hidden states, with a fused cross-entropy.

Shapes: N tokens (without padding), D width, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.layers import WordEmbedding
from attune.models.precision import uses_bf16

CACHE_LINE_FLOATS = 16
"""Number of floats per cache line."""
_HAS_ONE_DNN = torch.backends.mkldnn.is_available()
PACKED_FOR_ROWS = 128
"""Number of rows that the packed weight is optimised for."""
CHUNK_BYTES = 32 * 2**20
"""Maximum size of the logits of a chunk. The allocator would map larger tensors anew each time."""


class OutputLayer(nn.Module):
    """Predicts tokens from hidden states; losses are computed in chunks, so that the logits of a
    whole batch are never in memory."""

    def __init__(self, embedding: WordEmbedding, width: int, *, tied: bool):
        super().__init__()
        num_tokens, dimension = embedding.table.weight.shape
        self.reduce = (
            nn.Identity() if not tied or dimension == width else nn.Linear(width, dimension)
        )
        self.weight = (
            embedding.table.weight
            if tied
            else nn.Parameter(torch.empty(num_tokens, width).normal_(std=width**-0.5))
        )
        self.bias = nn.Parameter(torch.zeros(num_tokens))
        self._packed: tuple[tuple[int, int], Tensor] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens: (..., D) -> (..., V)."""
        reduced = self.reduce(hidden)
        if self.training or torch.is_grad_enabled() or not _uses_one_dnn(reduced):
            return F.linear(reduced, self.weight, self.bias)
        return _apply_linear(reduced, self._pack_weight(), self.bias)

    def train(self, mode: bool = True) -> Self:
        """Discard the packed weight: ZeRO changes weights without changing their version."""
        self._packed = None
        return super().train(mode)

    def _pack_weight(self) -> Tensor:
        """Return the weight in oneDNN's layout, cached.

        Decoding uses it for each token. Converting it takes longer than the product with a few
        rows.
        """
        version = (self.weight._version, self.weight.data_ptr())
        if self._packed is None or self._packed[0] != version:
            weight = self.weight.detach()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            self._packed = (version, packed)
        return self._packed[1]

    def loss_sum(self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropy of hidden states (N, D) and targets (N,)."""
        total, _ = self.losses(hidden, targets, smoothing)
        return total

    def losses(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the sum of the cross-entropies, multiplied by weights (N,), and the unweighted
        cross-entropy of each token (N,), which has no gradient."""
        product_dtype = torch.bfloat16 if uses_bf16(hidden) else self.weight.dtype
        reduced = self.reduce(hidden).to(product_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            total, token_losses = _ChunkedCrossEntropy.apply(
                reduced, self.weight, self.bias, targets, smoothing, weights,
                torch.is_grad_enabled(),
            )  # fmt: skip
        return total, token_losses

    @torch.no_grad()
    def log_likelihood(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the unsmoothed log-probability of each target (N,), without a gradient."""
        reduced = self.reduce(hidden)
        return -_cross_entropies(reduced, self.weight, self.bias, targets, smoothing=0.0)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear layer, softmax and cross-entropy in one function, for one chunk of rows at a time.

    The matrix products are computed in the number format of the hidden states, the softmax and the
    gradients of weight and bias in fp32.

    The forward pass computes the gradient in place of the logits, so that the largest tensor is one
    chunk and nothing is computed twice. This tensor is traversed twice only: by the product that
    computes the logits, and by the softmax. Everything else is part of the other two products,
    which take no longer with an additional row and column:

    - Smoothing subtracts a constant c = smoothing / V from each probability. For the gradient of
      the weight this is an additional row of -c, whose hidden state is the sum of all hidden
      states. The product of this row with the weight is added to the gradient of each hidden state.
    - The gradient of the bias is that of the weight for an additional dimension that is always 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float,
        weights: Tensor | None, needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not needs_grad:
            losses = _cross_entropies(hidden, weight, bias, targets, smoothing)
            return _sum_losses(losses, weights), losses
        num_tokens, width = weight.shape
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        # The gradients of weight and bias, padded to whole cache lines: aligned rows are written
        # 1.5 times as fast.
        columns = math.ceil((width + 1) / CACHE_LINE_FLOATS) * CACHE_LINE_FLOATS
        grads = weight.new_empty(num_tokens, columns)
        factor, offset = weight.to(hidden.dtype), bias.to(hidden.dtype)
        for rows in _split_into_chunks(len(hidden), num_tokens):
            states, target = hidden[rows], targets[rows, None]
            count = len(states)
            logits = _apply_linear(F.pad(states, (0, 0, 0, 1)), factor, offset).float()
            target_logits = logits[:count].gather(1, target)
            probs = torch.softmax(logits, dim=1, out=logits)
            target_probs = probs[:count].gather(1, target)
            probs[:count].scatter_add_(1, target, torch.full_like(target_logits, smoothing - 1))
            probs[count] = -smoothing / num_tokens
            probs = probs.to(hidden.dtype)
            back = _apply_linear(probs, factor.t()).float()
            extended = F.pad(states, (0, columns - width))  # hidden state, 1 for the bias, zeros
            extended[:, width] = 1
            grad_states = back[:count] + back[count]
            if weights is not None:  # the weight of a row multiplies its part of both products
                extended, grad_states = (
                    (each * weights[rows, None]).to(each.dtype) for each in (extended, grad_states)
                )
            grad_hidden[rows] = grad_states
            extended = torch.cat([extended, extended.sum(dim=0, keepdim=True)])
            grads = _add_product_(grads, probs.t(), extended, is_first=rows.start == 0)
            # Probabilities are at least the smallest float, so the loss is at most 87; the gradient
            # is exact.
            tiny = torch.finfo(target_probs.dtype).tiny
            loss = smoothing * target_logits - target_probs.clamp(min=tiny).log()
            if smoothing:
                sums = (back[count] * (-num_tokens / smoothing))[
                    :, None
                ]  # sums over the vocabulary
                loss -= smoothing * (states.float() @ sums + bias.sum()) / num_tokens
            losses[rows] = loss.squeeze(1)
        if not len(targets):
            grads.zero_()
        ctx.save_for_backward(grad_hidden, grads)
        ctx.mark_non_differentiable(losses)
        return _sum_losses(losses, weights), losses

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_hidden, grads = ctx.saved_tensors
        width = grad_hidden.shape[1]
        gradients = (grad_hidden, grads[:, :width], grads[:, width])
        return (*(gradient * grad_total for gradient in gradients), None, None, None, None)


def _cross_entropies(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float
) -> Tensor:
    """Return the cross-entropy of each token (N,), without a gradient."""
    losses = hidden.new_empty(len(targets), dtype=torch.float32)
    for rows in _split_into_chunks(len(hidden), len(weight)):
        logits = _apply_linear(hidden[rows], weight, bias)
        target_logits = (1 - smoothing) * logits.gather(1, targets[rows, None]).squeeze(1)
        if smoothing:
            target_logits += smoothing * logits.mean(dim=1)
        losses[rows] = _log_sum_exp_(logits) - target_logits
    return losses


def _sum_losses(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of losses (N,), weighted if there are weights."""
    return losses.sum() if weights is None else losses @ weights


def _log_sum_exp_(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of logits, (N, V) -> (N,), and overwrite the logits."""
    highest = logits.amax(dim=1)
    return logits.sub_(highest[:, None]).exp_().sum(dim=1).log_() + highest


def _split_into_chunks(count: int, num_tokens: int) -> Iterator[slice]:
    """Yield slices of rows whose logits take at most `CHUNK_BYTES`."""
    size = max(1, CHUNK_BYTES // (4 * num_tokens) - 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _apply_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` without a gradient, on CPUs with oneDNN's kernel.

    torch uses oneDNN for compiled models and MKL otherwise, which is a quarter slower on AMD's
    processors.
    """
    if not _uses_one_dnn(rows):
        return F.linear(rows, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def _add_product_(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> Tensor:
    """Return the total plus a matrix product; the first product replaces the total.

    A single product keeps its number format, because a conversion takes half as long as the
    product. Sums are in fp32.
    """
    if left.dtype == torch.float32:
        return total.addmm_(left, right, beta=float(not is_first))
    product = left @ right
    return product if is_first else total.float().add_(product)


def _uses_one_dnn(rows: Tensor) -> bool:
    """Return whether oneDNN's kernels apply to a tensor."""
    return _HAS_ONE_DNN and rows.device.type == "cpu" and rows.dtype == torch.float32
