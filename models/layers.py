"""Blocks that at least two papers use.

Shapes: B batch, T target or query length, S source length, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINE = 16
"""Floats in a cache line."""
_ONE_DNN = torch.backends.mkldnn.is_available()
PACKED_FOR_ROWS = 128
"""How many rows at a time the output layer's packed weight is best for."""
CHUNK_BYTES = 32 * 2**20
"""A tensor above this size is mapped and faulted anew by the allocator each time it is made."""


class WordEmbedding(nn.Module):
    """Word vectors of any dimension for a model of any width.

    Vectors that were loaded (GloVe's 100 or 300, say) keep their own dimension, and where that is
    not the model's width a learned projection leads from one to the other.

    Words and positions both begin with a spread of 1 / sqrt(dimension), loaded words too: beside
    larger positions words would hardly be seen for epochs, and larger words are noise that takes
    epochs to unlearn (docs/log.md). It also is the right spread for an output layer that shares
    the table.
    """

    def __init__(
        self, num_tokens: int, width: int, *, vectors: Tensor | None = None, padding: int = 0
    ):
        super().__init__()
        dimension = width if vectors is None else vectors.shape[1]
        spread = dimension**-0.5
        self.table = nn.Embedding(num_tokens, dimension, padding_idx=padding)
        self.project = (
            nn.Identity() if dimension == width else nn.Linear(dimension, width, bias=False)
        )
        with torch.no_grad():
            if vectors is None:
                nn.init.normal_(self.table.weight, std=spread)
                self.table.weight[padding].zero_()
            else:
                found = vectors[vectors.any(dim=1)]
                scale = spread / found.std() if len(found) else 1.0  # nothing: weights follow
                self.table.weight.copy_(vectors * scale)

    def forward(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        """Each (B, T) -> (B, T, D).

        They are looked up together: the gradient of each look is as large as the table.
        """
        embedded = self.project(self.table(torch.cat([each.flatten() for each in tokens])))
        parts = embedded.split([each.numel() for each in tokens])
        return tuple(
            part.unflatten(0, each.shape) for part, each in zip(parts, tokens, strict=True)
        )


class Positions(nn.Module):
    """Sines and cosines of the position (Vaswani et al. 2017), for sequences of any length, with
    the spread of `WordEmbedding`."""

    table: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.register_buffer("table", self._made(512), persistent=False)

    def forward(self, length: int, start: int = 0) -> Tensor:
        """(length, D), from position `start` on."""
        if start + length > len(self.table):
            self.table = self._made(2 * (start + length)).to(self.table)
        return self.table[start : start + length]

    def _made(self, length: int) -> Tensor:
        half = math.ceil(self.width / 2)
        rates = torch.exp(torch.arange(half) * (-math.log(10_000) / max(half - 1, 1)))
        angles = torch.arange(length)[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)[:, : self.width]
        return waves * math.sqrt(2 / self.width)  # a wave of height 1 has a spread of sqrt(1 / 2)


class Packing:
    """The real words of a batch one after another, and back: what is done to each word alone need
    not be done to padding. F.embedding is the indexing whose gradient is fast."""

    def __init__(self, mask: Tensor):
        real = mask.flatten()  # (B, 1, 1, S), True for words
        self.places = real.nonzero().squeeze(1)
        self.samples = self.places // mask.shape[-1]
        """(N,) the row each word is from."""
        nearest = (real.cumsum(dim=0) - 1).clamp(min=0)  # of padding: any word
        self.nearest = nearest.view(len(mask), -1)

    def pack(self, spread: Tensor) -> Tensor:
        """(B, S, D) -> (N, D)."""
        return F.embedding(self.places, spread.flatten(0, 1))

    def spread(self, packed: Tensor) -> Tensor:
        """(N, D) -> (B, S, D)."""
        return F.embedding(self.nearest, packed)


class Attention(nn.Module):
    """Multi-head attention whose keys may be narrower than the model."""

    def __init__(self, width: int, num_heads: int, key_depth: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.queries = nn.Linear(width, key_depth, bias=False)
        self.keys = nn.Linear(width, key_depth, bias=False)
        self.values = nn.Linear(width, key_depth, bias=False)
        self.out = nn.Linear(key_depth, width, bias=False)

    def remember(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D/H) of what is attended to."""
        keys, values = self._together(source, self.keys, self.values)
        return keys, values

    def look_around(
        self, hidden: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, D/H) of what attends to itself, packed or not."""
        layers = self.queries, self.keys, self.values
        queries, keys, values = self._together(hidden, *layers, packing=packing)
        return queries, keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) from (B, T, D); `mask` (B or 1, 1, T or 1, S) is True where to look."""
        return self.mix(self._heads(self.queries(query)), keys, values, mask)

    def mix(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None,
        *, causal: bool = False, packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """(B, T, D), or packed (N, D), from queries, keys and values of all heads."""
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        attended: Tensor = self.out(mixed if packing is None else packing.pack(mixed))
        return attended

    def looks(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """(B, T, S) how much each query looks at each key, the heads averaged: to be shown."""
        queries = self._heads(self.queries(query))
        products = queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5  # (B, H, T, S)
        return products.masked_fill(~mask, -torch.inf).softmax(dim=-1).mean(dim=1)

    def _together(
        self, tensor: Tensor, *layers: nn.Linear, packing: Packing | None = None
    ) -> Iterator[Tensor]:
        """What several layers make of the same, as one product: they are narrow, and the gradient
        of what they share is summed within it."""
        made = F.linear(tensor, torch.cat([layer.weight for layer in layers]))
        made = made if packing is None else packing.spread(made)
        return (self._heads(part) for part in made.chunk(len(layers), dim=-1))

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between; what it is given may be wider than what it
    makes."""

    def __init__(
        self, width: int, filter_width: int, dropout: float = 0.0, *, given: int | None = None,
        activation: type[nn.Module] = nn.ReLU,
    ):  # fmt: skip
        super().__init__(
            nn.Linear(given or width, filter_width),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(filter_width, width),
        )


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each normalised before and added after."""

    def __init__(
        self, width: int, num_heads: int, key_depth: int, filter_width: int, dropout: float,
        activation: type[nn.Module] = nn.ReLU,
    ):  # fmt: skip
        super().__init__()
        self.attention = Attention(width, num_heads, key_depth, dropout)
        self.feed_forward = FeedForward(width, filter_width, dropout, activation=activation)
        self.before_attention = nn.LayerNorm(width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D), or packed (N, D) -> (N, D)."""
        looked = self.attention.look_around(self.before_attention(hidden), packing)
        hidden = hidden + self.dropout(self.attention.mix(*looked, mask, packing=packing))
        mixed: Tensor = hidden + self.dropout(self.feed_forward(self.before_feed_forward(hidden)))
        return mixed


class Encoder(nn.Module):
    """A stack of encoder layers over embedded tokens."""

    def __init__(self, width: int, num_layers: int, num_heads: int, key_depth: int,
                 filter_width: int, dropout: float,
                 activation: type[nn.Module] = nn.ReLU):  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(width, num_heads, key_depth, filter_width, dropout, activation)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, embedded: Tensor, mask: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, S, D), mask (B, 1, 1, S) -> (B, S, D), or packed (N, D) -> (N, D)."""
        for layer in self.layers:
            embedded = layer(embedded, mask, packing)
        normed: Tensor = self.norm(embedded)
        return normed


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, feed-forward."""

    def __init__(
        self, width: int, num_heads: int, key_depth: int, filter_width: int, dropout: float,
        activation: type[nn.Module] = nn.ReLU,
    ):  # fmt: skip
        super().__init__()
        self.self_attention = Attention(width, num_heads, key_depth, dropout)
        self.cross_attention = Attention(width, num_heads, key_depth, dropout)
        self.feed_forward = FeedForward(width, filter_width, dropout, activation=activation)
        self.before_self = nn.LayerNorm(width)
        self.before_cross = nn.LayerNorm(width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def remember(self, source: Tensor, beside: Tensor | None = None) -> tuple[Tensor, ...]:
        """Keys and values of the source; a layer that heeds something beside it (gates, an emotion)
        keeps that, too."""
        return self.cross_attention.remember(source)

    def forward(
        self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """(B, T, D) -> the same and the keys and values so far.

        Without a past all T positions are new and see only what is before them; with one, T is 1.
        """
        hidden, now = self._after_self(hidden, past)
        hidden = self._after_source(hidden, source, mask)
        return hidden + self.dropout(self._fed_forward(hidden, source)), now

    def looks(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """(B, T, S) how much each position looks at each place of the source."""
        hidden, _ = self._after_self(hidden, None)
        return self.cross_attention.looks(self.before_cross(hidden), source[0], mask)

    def _after_self(
        self, hidden: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        queries, keys, values = self.self_attention.look_around(self.before_self(hidden))
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        looked = self.self_attention.mix(queries, keys, values, causal=past is None)
        return hidden + self.dropout(looked), (keys, values)

    def _after_source(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        keys, values = source[:2]
        looked = self.cross_attention.attend(self.before_cross(hidden), keys, values, mask)
        attended: Tensor = hidden + self.dropout(looked)
        return attended

    def _fed_forward(self, hidden: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        """What is added at last."""
        made: Tensor = self.feed_forward(self.before_feed_forward(hidden))
        return made


class Decoder(nn.Module):
    """A stack of decoder layers that decodes all positions at once, or one after another."""

    def __init__(self, width: int, num_layers: int, num_heads: int, key_depth: int,
                 filter_width: int, dropout: float,
                 layer: type[DecoderLayer] = DecoderLayer,
                 activation: type[nn.Module] = nn.ReLU):  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(
            layer(width, num_heads, key_depth, filter_width, dropout, activation)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)

    def begin(self, source: Tensor, mask: Tensor, beside: Tensor | None = None) -> dict[str, Any]:
        """The state before the first token: the source's keys and values, computed once."""
        layers = [list(layer.remember(source, beside)) for layer in self._layers()]
        return {"source": layers, "mask": mask, "past": [None] * len(layers), "length": 0}

    def step(self, embedded: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """(B, 1, D) the newest token -> (B, D), and the state with it."""
        hidden, past = embedded, []
        stack = zip(self.layers, state["source"], state["past"], strict=True)
        for layer, source, before in stack:
            hidden, now = layer(hidden, tuple(source), state["mask"], before)
            past.append(list(now))
        new = {**state, "past": past, "length": state["length"] + 1}
        return self.norm(hidden[:, -1]), new

    def forward(
        self, embedded: Tensor, source: Tensor, mask: Tensor, beside: Tensor | None = None
    ) -> Tensor:
        """(B, T, D) all positions at once, for training."""
        hidden = embedded
        for layer in self._layers():
            hidden, _ = layer(hidden, layer.remember(source, beside), mask)
        normed: Tensor = self.norm(hidden)
        return normed

    def looks(self, embedded: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """(B, T, S) how much the last layer's positions look at each place of the source."""
        hidden = embedded
        *lower, last = self._layers()
        for layer in lower:
            hidden, _ = layer(hidden, layer.remember(source), mask)
        return last.looks(hidden, last.remember(source), mask)

    def _layers(self) -> Iterator["DecoderLayer"]:
        return (layer for layer in self.layers if isinstance(layer, DecoderLayer))


class OutputLayer(nn.Module):
    """Hidden states to words, without ever holding all logits of a batch at once."""

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
        """(..., D) -> (..., V)."""
        reduced = self.reduce(hidden)
        if self.training or torch.is_grad_enabled() or not _one_dnn(reduced):
            return F.linear(reduced, self.weight, self.bias)
        return _linear(reduced, self._pack(), self.bias)

    def train(self, mode: bool = True) -> Self:
        """Forget the packed weight: ZeRO changes weights without their noticing."""
        self._packed = None
        return super().train(mode)

    def _pack(self) -> Tensor:
        """The weight as oneDNN wants it. Answers need it again for each token, and to rearrange it
        each time takes longer than the product of a few rows."""
        version = (self.weight._version, self.weight.data_ptr())
        if self._packed is None or self._packed[0] != version:
            weight = self.weight.detach()
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            self._packed = (version, packed)
        return self._packed[1]

    def loss_sum(self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The summed cross-entropy of real tokens: (N, D) and (N,), padding already left out."""
        total, _ = self.losses(hidden, targets, smoothing)
        return total

    def losses(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same, where each token counts as much as its weight (N,) says; and each token's
        unweighted cross-entropy (N,), to look at and not to learn from."""
        reduced = self.reduce(hidden).to(self.weight.dtype)  # narrower where autocast is on
        with torch.autocast(hidden.device.type, enabled=False):
            total, each = _ChunkedCrossEntropy.apply(
                reduced, self.weight, self.bias, targets, smoothing, weights,
                torch.is_grad_enabled(),
            )  # fmt: skip
        return total, each

    @torch.no_grad()
    def log_likelihood(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """(N,) unsmoothed log-probability of each target, to look at and not to learn from."""
        return -_losses(self.reduce(hidden), self.weight, self.bias, targets, smoothing=0.0)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear layer, softmax and cross-entropy in one, a chunk of rows at a time.

    The gradient is made in the place of the logits while they are at hand, so that the largest
    tensor is one chunk and nothing is computed twice. After the first product that tensor is passed
    over only once more, by the softmax; what else there is to it is left to the other two products,
    which take as long with a row and a column more:

    - smoothing takes a constant c = smoothing / V off each probability. As one more row of -c, with
      the sum of all hidden states beside it, it is in the weight's gradient; that row's own product
      with the weight is what it takes off each hidden state's.
    - the bias's gradient is the weight's for a hidden state with one more number, which is 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float,
        weights: Tensor | None, learns: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not learns:
            losses = _losses(hidden, weight, bias, targets, smoothing)
            return _total(losses, weights), losses
        num_tokens, width = weight.shape
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        # The weight's, the bias's, and nothing up to the next cache line: rows that begin at one
        # and end with one are written half as fast again.
        columns = math.ceil((width + 1) / LINE) * LINE
        grads = weight.new_empty(num_tokens, columns)
        for rows in _chunks(len(hidden), num_tokens):
            states, target = hidden[rows], targets[rows, None]
            count = len(states)
            logits = _linear(F.pad(states, (0, 0, 0, 1)), weight, bias)
            wanted = logits[:count].gather(1, target)
            shares = torch.softmax(logits, dim=1, out=logits)
            chosen = shares[:count].gather(1, target)
            shares[:count].scatter_add_(1, target, torch.full_like(wanted, smoothing - 1))
            shares[count] = -smoothing / num_tokens
            back = _linear(shares, weight.t())
            beside = F.pad(states, (0, columns - width))
            beside[:, width] = 1
            grad_states = back[:count] + back[count]
            if weights is not None:  # a row's gradient is a factor of either product
                beside, grad_states = (each * weights[rows, None] for each in (beside, grad_states))
            grad_hidden[rows] = grad_states
            beside = torch.cat([beside, beside.sum(dim=0, keepdim=True)])
            grads.addmm_(shares.t(), beside, beta=float(rows.start > 0))
            # A share below the least float counts as that: its loss ends at 87, its gradient is
            # what it is.
            loss = smoothing * wanted - chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()
            if smoothing:
                sums = (back[count] * (-num_tokens / smoothing))[:, None]  # of the weight's columns
                loss -= smoothing * (states @ sums + bias.sum()) / num_tokens
            losses[rows] = loss.squeeze(1)
        if not len(targets):
            grads.zero_()
        ctx.save_for_backward(grad_hidden, grads)
        ctx.mark_non_differentiable(losses)
        return _total(losses, weights), losses

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Any, ...]:
        grad_hidden, grads = ctx.saved_tensors
        width = grad_hidden.shape[1]
        parts = (grad_hidden, grads[:, :width], grads[:, width])
        return (*(part * grad_total for part in parts), None, None, None, None)


def _losses(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float
) -> Tensor:
    """(N,) the cross-entropy of each alone."""
    losses = hidden.new_empty(len(targets), dtype=torch.float32)
    for rows in _chunks(len(hidden), len(weight)):
        logits = _linear(hidden[rows], weight, bias)
        wanted = (1 - smoothing) * logits.gather(1, targets[rows, None]).squeeze(1)
        if smoothing:
            wanted += smoothing * logits.mean(dim=1)
        losses[rows] = _log_sums(logits) - wanted
    return losses


def _total(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.sum() if weights is None else losses @ weights


def _log_sums(logits: Tensor) -> Tensor:
    """(N, V) -> (N,) the logarithm of the exponentials' sum; the logits are spent."""
    highest = logits.amax(dim=1)
    return logits.sub_(highest[:, None]).exp_().sum(dim=1).log_() + highest


def _chunks(count: int, num_tokens: int) -> Iterator[slice]:
    """Some rows at a time, few enough for their logits to stay small."""
    size = max(1, CHUNK_BYTES // (4 * num_tokens) - 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` without a gradient, on CPUs by the kernel of oneDNN.

    torch takes that one for models it has compiled and MKL's otherwise, which on AMD's processors
    is a quarter slower.
    """
    if not _one_dnn(rows):
        return F.linear(rows, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def _one_dnn(rows: Tensor) -> bool:
    return _ONE_DNN and rows.device.type == "cpu" and rows.dtype == torch.float32
