"""Layers that several systems use.

Shapes: B batch, T target or query length, S source length, D width, H heads, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WordEmbedding(nn.Module):
    """Token embeddings, random or pretrained, projected to the model's width.

    Pretrained vectors keep their dimension, such as GloVe's 300; random vectors have `table_width`
    dimensions, by default the model's width. A linear layer projects them if the widths differ.

    Tokens and positions are initialised with the same standard deviation, 1 / sqrt(dimension), and
    pretrained vectors are scaled to it. With larger positions, tokens have almost no effect for
    epochs; larger tokens are noise that takes epochs to unlearn (docs/log.md). The scale is also
    appropriate for an output layer that shares the table.
    """

    def __init__(
        self, num_tokens: int, width: int, *, table_width: int | None = None,
        vectors: Tensor | None = None, padding: int = 0,
    ):  # fmt: skip
        super().__init__()
        dimension = (table_width or width) if vectors is None else vectors.shape[1]
        std = dimension**-0.5
        self.table = nn.Embedding(num_tokens, dimension, padding_idx=padding)
        self.project = (
            nn.Identity() if dimension == width else nn.Linear(dimension, width, bias=False)
        )
        with torch.no_grad():
            if vectors is None:
                nn.init.normal_(self.table.weight, std=std)
                self.table.weight[padding].zero_()
            else:
                known = vectors[vectors.any(dim=1)]  # tokens without a vector have zeros
                # All vectors are zero if the weights will be loaded later.
                scale = std / known.std() if len(known) else 1.0
                self.table.weight.copy_(vectors * scale)

    def forward(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        """Embed tensors of token ids: (B, T) -> (B, T, D) each.

        One lookup serves all tensors, because the gradient of a lookup is as large as the table.
        """
        embedded = self.project(self.table(torch.cat([each.flatten() for each in tokens])))
        parts = embedded.split([each.numel() for each in tokens])
        return tuple(
            part.unflatten(0, each.shape) for part, each in zip(parts, tokens, strict=True)
        )


class Positions(nn.Module):
    """Sinusoidal position encodings (Vaswani et al. 2017) of any length, scaled like
    `WordEmbedding`."""

    table: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.register_buffer("table", self._compute_encodings(512), persistent=False)

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Return the encodings of positions from `start`: (length, D)."""
        if start + length > len(self.table):
            self.table = self._compute_encodings(2 * (start + length)).to(self.table)
        return self.table[start : start + length]

    def _compute_encodings(self, length: int) -> Tensor:
        half = math.ceil(self.width / 2)
        rates = torch.exp(torch.arange(half) * (-math.log(10_000) / max(half - 1, 1)))
        angles = torch.arange(length)[:, None] * rates
        encodings = torch.cat([angles.sin(), angles.cos()], dim=1)[:, : self.width]
        return encodings * math.sqrt(2 / self.width)  # a sine's standard deviation is sqrt(1 / 2)


class Packing:
    """Conversion between padded (B, S, D) and packed (N, D) tensors, where N counts real tokens.

    Layers that process each token separately can leave out padding. `F.embedding` is the indexing
    operation with the fastest gradient.
    """

    def __init__(self, mask: Tensor):
        real = mask.flatten()  # (B, 1, 1, S), True for real tokens
        self.positions = real.nonzero().squeeze(1)
        self.samples = self.positions // mask.shape[-1]
        """(N,) the sample of each token."""
        nearest = (real.cumsum(dim=0) - 1).clamp(min=0)  # padding gets the values of a real token
        self.nearest = nearest.view(len(mask), -1)

    def pack(self, padded: Tensor) -> Tensor:
        """(B, S, D) -> (N, D)."""
        return F.embedding(self.positions, padded.flatten(0, 1))

    def unpack(self, packed: Tensor) -> Tensor:
        """(N, D) -> (B, S, D)."""
        return F.embedding(self.nearest, packed)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of an encoder or decoder layer."""

    width: int
    """Width of hidden states."""
    num_heads: int
    """Number of attention heads."""
    key_depth: int
    """Total width of queries, keys and values over all heads."""
    filter_width: int
    """Width of the hidden layer in feed-forward blocks."""
    dropout: float = 0.0
    """Dropout rate."""
    activation: type[nn.Module] = nn.ReLU
    """Activation in feed-forward blocks."""


def split_heads(projected: Tensor, num_heads: int, parts: int = 1) -> tuple[Tensor, ...]:
    """Split `parts` concatenated projections, (B, T, parts * D), into heads: (B, H, T, D/H)
    each."""
    heads = (part.unflatten(-1, (num_heads, -1)) for part in projected.chunk(parts, dim=-1))
    return tuple(part.transpose(1, 2) for part in heads)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None,
    *, dropout: float = 0.0, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Return the concatenated outputs of all heads, (B, T, D), from queries, keys and values
    (B, H, T or S, D/H); `mask` (B or 1, 1, T or 1, S) is True at positions that may be attended to.

    In bf16 on CPUs attention is computed step by step: torch's fused kernel takes two to nine times
    as long.
    """
    if queries.dtype == torch.bfloat16 and queries.device.type == "cpu":
        products = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(2, 3)  # (B, H, T, S)
        if causal:
            mask = torch.ones(products.shape[2:], dtype=torch.bool).tril()
        if mask is not None:
            products = products.masked_fill(~mask, torch.finfo(products.dtype).min)
        attended = F.dropout(products.softmax(dim=-1), dropout) @ values
    else:
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
    return attended.transpose(1, 2).flatten(2)


def compute_attention_weights(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Return the attention weights of each head, (B, H, T, S)."""
    products = queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
    return products.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def extend_past(
    past: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, H, T, D/H) of all positions so far: the past, then the new
    ones."""
    if past is None:
        return keys, values
    return torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)


class Attention(nn.Module):
    """Multi-head attention whose keys may be narrower than the model."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.num_heads, self.dropout = shape.num_heads, nn.Dropout(shape.dropout)
        self.queries = nn.Linear(shape.width, shape.key_depth, bias=False)
        self.keys = nn.Linear(shape.width, shape.key_depth, bias=False)
        self.values = nn.Linear(shape.width, shape.key_depth, bias=False)
        self.out = nn.Linear(shape.key_depth, shape.width, bias=False)

    def project_queries(self, hidden: Tensor) -> Tensor:
        """Return the queries, (B, H, T, D/H), of (B, T, D)."""
        [queries] = split_heads(self.queries(hidden), self.num_heads)
        return queries

    def project_kv(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the source: (B, H, S, D/H)."""
        keys, values = self._project_to_heads(source, self.keys, self.values)
        return keys, values

    def project_qkv(
        self, hidden: Tensor, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values for self-attention, (B, H, T, D/H), of padded or packed
        hidden states."""
        layers = self.queries, self.keys, self.values
        queries, keys, values = self._project_to_heads(hidden, *layers, packing=packing)
        return queries, keys, values

    def cross_attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the output of attention from (B, T, D) to projected keys and values."""
        return self.attend(self.project_queries(query), keys, values, mask)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None,
        *, causal: bool = False, packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the output of attention, (B, T, D) or packed (N, D), from the projections of all
        heads."""
        dropout = self.dropout.p if self.training else 0.0
        attended = attend(queries, keys, values, mask, dropout=dropout, causal=causal)
        output: Tensor = self.out(attended if packing is None else packing.pack(attended))
        return output

    def attention_weights(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Return the attention weights averaged over heads, (B, T, S), for explanations."""
        return compute_attention_weights(self.project_queries(query), keys, mask).mean(dim=1)

    def _project_to_heads(
        self, tensor: Tensor, *layers: nn.Linear, packing: Packing | None = None
    ) -> tuple[Tensor, ...]:
        """Apply several layers to one tensor in one matrix product, which is faster for narrow
        layers and also sums the tensor's gradients."""
        outputs = F.linear(tensor, torch.cat([layer.weight for layer in layers]))
        outputs = outputs if packing is None else packing.unpack(outputs)
        return split_heads(outputs, self.num_heads, len(layers))


class FeedForward(nn.Sequential):
    """Two linear layers with an activation in between; the input may be wider than the output."""

    def __init__(self, shape: LayerShape, *, input_width: int | None = None):
        super().__init__(
            nn.Linear(input_width or shape.width, shape.filter_width),
            shape.activation(),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.filter_width, shape.width),
        )


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a preceding norm and a residual connection."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = nn.LayerNorm(shape.width)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, hidden: Tensor, mask: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D), or packed (N, D) -> (N, D)."""
        qkv = self.attention.project_qkv(self.attention_norm(hidden), packing)
        hidden = hidden + self.dropout(self.attention.attend(*qkv, mask, packing=packing))
        output: Tensor = hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return output


class Encoder(nn.Module):
    """A stack of encoder layers over embedded tokens."""

    def __init__(self, shape: LayerShape, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(shape) for _ in range(num_layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, embedded: Tensor, mask: Tensor, packing: Packing | None = None) -> Tensor:
        """(B, S, D), mask (B, 1, 1, S) -> (B, S, D), or packed (N, D) -> (N, D)."""
        for layer in self.layers:
            embedded = layer(embedded, mask, packing)
        normed: Tensor = self.norm(embedded)
        return normed


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the source, and feed-forward, each with a preceding
    norm and a residual connection."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.self_attention = Attention(shape)
        self.cross_attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.self_norm = nn.LayerNorm(shape.width)
        self.cross_norm = nn.LayerNorm(shape.width)
        self.feed_forward_norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def project_kv(self, source: Tensor, condition: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the keys and values of the source. A subclass with a condition, such as gates or a
        latent variable, appends what its other methods need of it."""
        return self.cross_attention.project_kv(source)

    def forward(
        self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return hidden states (B, T, D) and the keys and values of all positions so far.

        Without a past, the T positions attend causally; with a past, T is 1.
        """
        hidden, present = self._self_attend(hidden, past)
        hidden = self._cross_attend(hidden, source, mask)
        return hidden + self.dropout(self._apply_feed_forward(hidden, source)), present

    def attention_weights(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Return the cross-attention weights, (B, T, S)."""
        hidden, _ = self._self_attend(hidden, None)
        return self.cross_attention.attention_weights(self.cross_norm(hidden), source[0], mask)

    def _self_attend(
        self, hidden: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        queries, keys, values = self.self_attention.project_qkv(self.self_norm(hidden))
        keys, values = extend_past(past, keys, values)
        attended = self.self_attention.attend(queries, keys, values, causal=past is None)
        return hidden + self.dropout(attended), (keys, values)

    def _cross_attend(self, hidden: Tensor, source: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        keys, values = source[:2]
        attended = self.cross_attention.cross_attend(self.cross_norm(hidden), keys, values, mask)
        output: Tensor = hidden + self.dropout(attended)
        return output

    def _apply_feed_forward(self, hidden: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        """Return the feed-forward output, without the residual connection."""
        output: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return output


class Decoder(nn.Module):
    """A stack of decoder layers, of one or several types, for decoding in parallel or step by
    step."""

    def __init__(self, shape: LayerShape, layer_types: Sequence[type[DecoderLayer]]):
        super().__init__()
        self.layers = nn.ModuleList(layer_type(shape) for layer_type in layer_types)
        self.norm = nn.LayerNorm(shape.width)

    def init_state(
        self, source: Tensor, mask: Tensor, condition: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the state before the first token, which holds the keys and values of the
        source."""
        layers = [list(layer.project_kv(source, condition)) for layer in self._decoder_layers()]
        return {"source": layers, "mask": mask, "past": [None] * len(layers), "length": 0}

    def step(self, embedded: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Decode the newest token (B, 1, D); return its hidden state (B, D) and the new state."""
        hidden, past = embedded, []
        stack = zip(self.layers, state["source"], state["past"], strict=True)
        for layer, source, layer_past in stack:
            hidden, present = layer(hidden, tuple(source), state["mask"], layer_past)
            past.append(list(present))
        new_state = {**state, "past": past, "length": state["length"] + 1}
        return self.norm(hidden[:, -1]), new_state

    def forward(
        self, embedded: Tensor, source: Tensor, mask: Tensor, condition: Tensor | None = None
    ) -> Tensor:
        """Decode all positions in parallel, for training: (B, T, D) -> (B, T, D)."""
        hidden = embedded
        for layer in self._decoder_layers():
            hidden, _ = layer(hidden, layer.project_kv(source, condition), mask)
        normed: Tensor = self.norm(hidden)
        return normed

    def attention_weights(self, embedded: Tensor, source: Tensor, mask: Tensor) -> Tensor:
        """Return the cross-attention weights of the last layer, (B, T, S)."""
        hidden = embedded
        *lower, last = self._decoder_layers()
        for layer in lower:
            hidden, _ = layer(hidden, layer.project_kv(source), mask)
        return last.attention_weights(hidden, last.project_kv(source), mask)

    def _decoder_layers(self) -> Iterator["DecoderLayer"]:
        return (layer for layer in self.layers if isinstance(layer, DecoderLayer))
