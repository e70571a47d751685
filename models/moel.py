"""MoEL: a mixture of empathetic listeners (Lin et al. 2019).

The state of `<cls>` is the query to one learned key an emotion; the softmax of the products is the
emotion's distribution, trained with cross-entropy. A listener is a decoder block that reads the
context: one that all emotions share, and one for each. The emotions' listeners are summed with the
distribution as weights, the shared one is added, and a last decoder, the meta listener, which
attends to the context too, makes the words. Early in training the true emotion's listener alone is
heard with a probability that decays with the steps, so that listeners become different at all.

Only the likeliest `top_k` emotions are heard, with their weights made to sum to 1. Listeners whose
weight is exactly 0 are not computed, which changes neither result nor gradient.

Deviations: as in `transformer.py`; whether the true emotion is heard is drawn for each sample,
where the public code draws once a batch; the feed-forward of the listeners is as wide as asked for,
rounded up to a multiple of 4, which their joint product needs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    State,
)
from attune.models.layers import DecoderLayer
from attune.models.multitask import MultitaskConfig, MultiTransformer, emotion_loss
from attune.models.transformer import EmbeddedBatch


@dataclass(frozen=True, kw_only=True)
class MoelConfig(MultitaskConfig):
    """The Transformer's, and who is heard."""

    top_k: int = 5
    """Listeners that are heard; 0 hears all."""
    true_emotion_decay: float = 10_000.0
    """Steps in which the probability that the true emotion's listener is heard alone falls from 1
    to 1/e; 0 never does so."""

    def __post_init__(self) -> None:
        for name in ("top_k", "true_emotion_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: at least 0 is expected")


@dataclass(frozen=True, kw_only=True)
class Route:
    """Which row goes to which listener; the rows of one listener are computed together."""

    ends: Tensor
    """(L,) where each listener's rows end, rows being in the order of the listeners."""
    order: Tensor | None = None
    """(P,) the row at each place of that order; None where rows stand in it."""

    @classmethod
    def to(cls, listeners: Tensor, count: int) -> "Route":
        """For rows in any order: (P,) the listener of each."""
        ends = torch.bincount(listeners, minlength=count).cumsum(dim=0)
        return cls(ends=ends, order=listeners.argsort(stable=True))


class ListenerLinear(nn.Module):
    """A linear layer for each listener, as one grouped product."""

    def __init__(self, num_listeners: int, inside: int, outside: int, *, bias: bool = False):
        super().__init__()
        assert inside % 4 == outside % 4 == 0, "grouped products want rows of whole 16 bytes"
        bound = inside**-0.5  # as nn.Linear begins
        self.weight = nn.Parameter(torch.empty(num_listeners, inside, outside))
        nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(num_listeners, outside)) if bias else None

    def forward(self, rows: Tensor, route: Route) -> Tensor:
        """(P, T, inside) -> (P, T, outside)."""
        count, length, _ = rows.shape
        if route.order is not None:
            rows = rows[route.order]
        ends = (route.ends * length).to(torch.int32)
        with torch.autocast(rows.device.type, enabled=False):
            flat = rows.to(self.weight.dtype).reshape(count * length, -1)
            made = F.grouped_mm(flat, self.weight, offs=ends)
        if made.requires_grad:
            made.register_hook(Tensor.contiguous)  # what its own backward asks for
        if self.bias is not None:
            made = made + self.bias.repeat_interleave(_counts(route.ends) * length, dim=0)
        made = made.unflatten(0, (count, length))
        return made if route.order is None else made[route.order.argsort()]


class ListenerNorm(nn.Module):
    """Layer normalisation with each listener's own scale and shift."""

    def __init__(self, num_listeners: int, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_listeners, width))
        self.shift = nn.Parameter(torch.zeros(num_listeners, width))

    def forward(self, rows: Tensor, listeners: Tensor) -> Tensor:
        """(P, T, D) -> (P, T, D)."""
        scale, shift = F.embedding(listeners, self.scale), F.embedding(listeners, self.shift)
        return F.layer_norm(rows, rows.shape[-1:]) * scale[:, None] + shift[:, None]


class Listeners(nn.Module):
    """One decoder layer an emotion, all of them at once; P rows are pairs of sample and listener.

    Read beside `DecoderLayer`, whose steps it takes.
    """

    def __init__(self, count: int, config: MoelConfig):
        super().__init__()
        width, depth, inner = config.width, config.key_depth, -(-config.filter_width // 4) * 4
        self.count, self.num_heads, self.dropout_share = count, config.num_heads, config.dropout
        self.self_norm = ListenerNorm(count, width)
        self.cross_norm = ListenerNorm(count, width)
        self.feed_forward_norm = ListenerNorm(count, width)
        self.self_in = ListenerLinear(count, width, 3 * depth)  # queries, keys, values
        self.self_out = ListenerLinear(count, depth, width)
        self.cross_in = ListenerLinear(count, width, depth)
        self.cross_source = ListenerLinear(count, width, 2 * depth)  # keys, values
        self.cross_out = ListenerLinear(count, depth, width)
        self.wider = ListenerLinear(count, width, inner, bias=True)
        self.narrower = ListenerLinear(count, inner, width, bias=True)
        self.dropout = nn.Dropout(config.dropout)

    def project_kv(self, source: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        """Keys and values (P, H, S, D/H) of the source (P, S, D)."""
        keys, values = self._split_heads(self.cross_source(source, route), 2)
        return keys, values

    def forward(
        self, hidden: Tensor, listeners: Tensor, route: Route, source: tuple[Tensor, Tensor],
        mask: Tensor, past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """(P, T, D) -> the same and the keys and values so far."""
        normed = self.self_norm(hidden, listeners)
        queries, keys, values = self._split_heads(self.self_in(normed, route), 3)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        looked = self._attended(queries, keys, values, causal=past is None)
        hidden = hidden + self.dropout(self.self_out(looked, route))
        [queries] = self._split_heads(self.cross_in(self.cross_norm(hidden, listeners), route), 1)
        looked = self._attended(queries, *source, mask)
        hidden = hidden + self.dropout(self.cross_out(looked, route))
        inner = self.wider(self.feed_forward_norm(hidden, listeners), route).relu()
        return hidden + self.dropout(self.narrower(self.dropout(inner), route)), (keys, values)

    def _split_heads(self, tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(P, T, parts D) -> as many (P, H, T, D/H)."""
        split = tensor.unflatten(-1, (parts, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return split.unbind()

    def _attended(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None,
        *, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        share = self.dropout_share if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=share, is_causal=causal
        )
        return mixed.transpose(1, 2).flatten(2)


class Moel(MultiTransformer):
    """A listener for each emotion, heard as much as the emotion is likely."""

    system = "MoEL"
    paper = "Lin et al. 2019"
    Config = MoelConfig
    presets: ClassVar = {
        **MultiTransformer.presets,
        "tiny": {**MultiTransformer.presets["tiny"], "true_emotion_decay": 100.0},
        "small": {
            **MultiTransformer.presets["small"],
            "true_emotion_decay": 200.0,
        },
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **MultiTransformer.search_spaces,
        "thresholds": {"top_k": Choice(values=(1, 2, 3, 5, 10, 0))},
        "schedule": {"true_emotion_decay": Range(low=100.0, high=30_000.0, scale="loguniform")},
    }

    def __init__(self, config: MoelConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        shape = (config.width, config.num_heads, config.key_depth, config.filter_width)
        self.classifier = nn.Linear(config.width, len(data_info.emotions), bias=False)  # the keys
        self.shared = DecoderLayer(*shape, config.dropout)
        self.listeners = Listeners(len(data_info.emotions), config)

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Both from one reading of the context."""
        batch = batches[PAIRED]
        words = self.embed(batch)
        source = self.encode_context(words)
        logits = self.classifier(source[:, 0])
        heard = self.heard(logits)
        if self.training:
            heard = self._with_true_emotions(heard, batch["emotion"], progress)
        return {
            "nll": self.compute_nll(batch, self.decode(words, source, heard), words),
            "emotion": emotion_loss(logits, batch),
        }

    def heard(self, logits: Tensor) -> Tensor:
        """(B, emotions) how much each listener is heard: a distribution over the likeliest."""
        count = self._num_heard()
        kept, which = logits.topk(count, dim=-1)
        return torch.zeros_like(logits).scatter(1, which, kept.softmax(dim=-1))

    def _num_heard(self) -> int:
        return min(self.config.top_k or self.listeners.count, self.listeners.count)

    def _with_true_emotions(self, heard: Tensor, emotion: Tensor, progress: Progress) -> Tensor:
        """The same, with the true emotion alone for some of the samples, ever fewer."""
        if not self.config.true_emotion_decay:
            return heard
        chance = math.exp(-progress.step / self.config.true_emotion_decay)
        told = (torch.rand(len(heard), device=heard.device) < chance) & (emotion >= 0)
        alone = F.one_hot(emotion.clamp(min=0), heard.shape[1]).to(heard.dtype)
        return torch.where(told[:, None], alone, heard)

    def decode(self, words: EmbeddedBatch, source: Tensor, heard: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, D) of the meta listener."""
        if heard is None:
            heard = self.heard(self.classifier(source[:, 0]))
        hidden: Tensor = self.decoder(
            self._said(words, source, heard), source, words.attention_mask
        )
        return hidden

    def _said(self, words: EmbeddedBatch, source: Tensor, heard: Tensor) -> Tensor:
        """(B, T, D) what the meta listener is told: the shared listener and the others' mixture."""
        listener, sample = heard.t().nonzero(as_tuple=True)  # pairs in the order of listeners
        route = Route(ends=(heard != 0).sum(dim=0).cumsum(dim=0))
        said, _ = self.listeners(
            words.decoder_inputs.index_select(0, sample), listener, route,
            self.listeners.project_kv(source.index_select(0, sample), route),
            words.attention_mask.index_select(0, sample),
        )  # fmt: skip
        together, _ = self.shared(
            words.decoder_inputs, self.shared.project_kv(source), words.attention_mask
        )
        weighed = said * heard[sample, listener][:, None, None]
        return together.index_add(0, sample, weighed)

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Every listener's memory of the source; a sample's listeners stand in its own row."""
        words = self.embed(batch)
        source = self.encode_context(words)
        weights, listeners = self.heard(self.classifier(source[:, 0])).topk(
            self._num_heard(), dim=-1
        )
        count = listeners.shape[1]
        route = Route.to(listeners.flatten(), self.listeners.count)
        memory = self.listeners.project_kv(source.repeat_interleave(count, dim=0), route)
        return {
            "meta": self.decoder.init_state(source, words.attention_mask),
            "shared": list(self.shared.project_kv(source)),
            "listeners": listeners,
            "weights": weights,
            "memory": [part.unflatten(0, (-1, count)) for part in memory],
            "past": None,
        }

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One more token, heard by all."""
        meta, listeners = state["meta"], state["listeners"]
        rows, count = listeners.shape
        embedded, mask = self.embed_next(tokens, meta["length"]), meta["mask"]
        past = state["past"] or {"shared": None, "listeners": None}
        together, shared_past = self.shared(embedded, tuple(state["shared"]), mask, past["shared"])
        said, own_past = self.listeners(
            embedded.repeat_interleave(count, dim=0),
            listeners.flatten(),
            Route.to(listeners.flatten(), self.listeners.count),
            tuple(part.flatten(0, 1) for part in state["memory"]),
            mask.repeat_interleave(count, dim=0),
            past["listeners"] and tuple(part.flatten(0, 1) for part in past["listeners"]),
        )
        mixed = (said.unflatten(0, (rows, count)) * state["weights"][:, :, None, None]).sum(dim=1)
        hidden, meta = self.decoder.step(together + mixed, meta)
        past = {
            "shared": list(shared_past),
            "listeners": [part.unflatten(0, (rows, count)) for part in own_past],
        }
        return self.output.logits(hidden), {**state, "meta": meta, "past": past}

    def explain(self, batch: Batch) -> list[Explanation]:
        """The emotion, who is heard how much, and where the meta listener looks."""
        words = self.embed(batch)
        source = self.encode_context(words)
        heard = self.heard(self.classifier(source[:, 0]))
        attention_weights = self.decoder.attention_weights(
            self._said(words, source, heard), source, words.attention_mask
        )
        counted = words.response_mask[:, :, None]
        attention = (attention_weights * counted).sum(dim=1) / counted.sum(dim=1)  # (B, S)
        shares = [dict(zip(self.data_info.emotions, row, strict=True)) for row in heard.tolist()]
        return [
            replace(
                explanation,
                listeners={name: share for name, share in listeners.items() if share},
                by_word={"attention": on_words},
            )
            for explanation, listeners, on_words in zip(
                super().explain(batch), shares, self.select_words(attention, words), strict=True
            )
        ]


def _counts(ends: Tensor) -> Tensor:
    """How many rows each listener has."""
    return torch.diff(ends, prepend=ends.new_zeros(1))
