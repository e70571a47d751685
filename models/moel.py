"""MoEL: a mixture of empathetic listeners (Lin et al. 2019).

The query q is the hidden state of `<cls>`, and each emotion has a learned key k_i. The distribution
of the emotion, p = softmax(q k_i), is trained with cross-entropy. A listener is a decoder layer
that attends to the context; each emotion has one, and all emotions share another. V_M is the sum of
the shared listener's output V_0 and the outputs V_i of the emotions' listeners, weighted by p. A
last decoder, the meta listener, reads V_M, attends to the context and predicts the response. Early
in training the mixture consists of the true emotion's listener only, with a probability that decays
exponentially, so that the listeners specialise.

Only the `top_k` most likely emotions have a weight; these weights are renormalised to sum to 1.
Listeners with a weight of exactly 0 are not computed, which affects neither outputs nor gradients.

Deviations: as in `transformer.py`, and
- Whether to use the true emotion is sampled per sample; the public code samples once per batch.
- The hidden width of the listeners' feed-forward is rounded up to a multiple of 4, as required by
  the grouped matrix product.
- The default emotion weight assumes that the paper weighs the emotion like the summed likelihood of
  a response, rather than the mean per token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    DataInfo,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    State,
)
from attune.models.layers import DecoderLayer, attend, extend_past, split_heads
from attune.models.multitask import MultitaskConfig, MultiTransformer, emotion_loss
from attune.models.transformer import EmbeddedBatch


@dataclass(frozen=True, kw_only=True)
class MoelConfig(MultitaskConfig):
    """Settings of Multi-TRS and of the listeners' weights."""

    top_k: Annotated[int, Bounds(at_least=0, at_most=1_000)] = 5
    """Number of listeners whose weight is above 0; 0 uses all. The paper uses 5 of 32."""
    true_emotion_share: Annotated[float, Bounds(at_least=0)] = 0.2
    """Share of the training in which the probability of using only the true emotion's listener
    falls from 1 to 1/e; 0 never uses it. Usually 0.05 to 0.3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "key_depth"):
            if getattr(self, name) % 4:
                raise ValueError(f"{name}: expected a multiple of 4, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The assignment of rows to listeners; the rows of a listener are computed together."""

    ends: Tensor
    """(L,), the end of each listener's rows when rows are sorted by listener."""
    order: Tensor | None = None
    """(P,), the permutation that sorts the rows; None if they are sorted."""

    @classmethod
    def from_listeners(cls, listeners: Tensor, count: int) -> "Routing":
        """Return the routing of rows in any order, from the listener of each row, (P,)."""
        ends = torch.bincount(listeners, minlength=count).cumsum(dim=0)
        return cls(ends=ends, order=listeners.argsort(stable=True))


class ListenerLinear(nn.Module):
    """A linear layer per listener, computed as one grouped matrix product."""

    def __init__(
        self, num_listeners: int, input_width: int, output_width: int, *, bias: bool = False
    ):
        super().__init__()
        assert input_width % 4 == output_width % 4 == 0, "grouped_mm needs rows aligned to 16 bytes"
        bound = input_width**-0.5  # the initialisation of nn.Linear
        self.weight = nn.Parameter(torch.empty(num_listeners, input_width, output_width))
        nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(num_listeners, output_width)) if bias else None

    def forward(self, rows: Tensor, routing: Routing) -> Tensor:
        """(P, T, input width) -> (P, T, output width)."""
        count, length, _ = rows.shape
        if routing.order is not None:
            rows = rows[routing.order]
        ends = (routing.ends * length).to(torch.int32)
        with torch.autocast(rows.device.type, enabled=False):
            flat = rows.to(self.weight.dtype).reshape(count * length, -1)
            output = F.grouped_mm(flat, self.weight, offs=ends)
        if output.requires_grad:
            output.register_hook(Tensor.contiguous)  # the backward pass needs contiguous gradients
        if self.bias is not None:
            output = output + self.bias.repeat_interleave(
                _count_rows_by_listener(routing.ends) * length, dim=0
            )
        output = output.unflatten(0, (count, length))
        return output if routing.order is None else output[routing.order.argsort()]


class ListenerNorm(nn.Module):
    """Layer normalisation with a scale and a shift per listener."""

    def __init__(self, num_listeners: int, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_listeners, width))
        self.shift = nn.Parameter(torch.zeros(num_listeners, width))

    def forward(self, rows: Tensor, listeners: Tensor) -> Tensor:
        """(P, T, D) -> (P, T, D)."""
        scale, shift = F.embedding(listeners, self.scale), F.embedding(listeners, self.shift)
        return F.layer_norm(rows, rows.shape[-1:]) * scale[:, None] + shift[:, None]


class Listeners(nn.Module):
    """A decoder layer per emotion, all computed at once.

    Each of the P rows is a pair of a sample and a listener. The steps are those of `DecoderLayer`,
    but each linear layer and norm has weights per listener and therefore takes the routing.
    """

    def __init__(self, count: int, config: MoelConfig):
        super().__init__()
        width, depth, inner = config.width, config.key_depth, -(-config.filter_width // 4) * 4
        self.count, self.num_heads = count, config.num_heads
        self.self_norm = ListenerNorm(count, width)
        self.cross_norm = ListenerNorm(count, width)
        self.feed_forward_norm = ListenerNorm(count, width)
        self.self_qkv = ListenerLinear(count, width, 3 * depth)
        self.self_out = ListenerLinear(count, depth, width)
        self.cross_queries = ListenerLinear(count, width, depth)
        self.cross_kv = ListenerLinear(count, width, 2 * depth)
        self.cross_out = ListenerLinear(count, depth, width)
        self.feed_forward_in = ListenerLinear(count, width, inner, bias=True)
        self.feed_forward_out = ListenerLinear(count, inner, width, bias=True)
        self.dropout = nn.Dropout(config.dropout)

    def project_kv(self, source: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Return the keys and values (P, H, S, D/H) of the source (P, S, D)."""
        keys, values = split_heads(self.cross_kv(source, routing), self.num_heads, 2)
        return keys, values

    def forward(
        self, hidden: Tensor, listeners: Tensor, routing: Routing, source: tuple[Tensor, Tensor],
        mask: Tensor, past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return the outputs V_i (P, T, D), and the keys and values of all positions so far.

        `listeners` (P,) is the listener of each row; `source` has the keys and values of the
        context.
        """
        dropout = self.dropout.p if self.training else 0.0
        normed = self.self_norm(hidden, listeners)
        queries, keys, values = split_heads(self.self_qkv(normed, routing), self.num_heads, 3)
        keys, values = extend_past(past, keys, values)
        attended = attend(queries, keys, values, dropout=dropout, causal=past is None)
        hidden = hidden + self.dropout(self.self_out(attended, routing))

        normed = self.cross_norm(hidden, listeners)
        [queries] = split_heads(self.cross_queries(normed, routing), self.num_heads)
        attended = attend(queries, *source, mask, dropout=dropout)
        hidden = hidden + self.dropout(self.cross_out(attended, routing))

        normed = self.feed_forward_norm(hidden, listeners)
        inner = self.dropout(self.feed_forward_in(normed, routing).relu())
        return hidden + self.dropout(self.feed_forward_out(inner, routing)), (keys, values)


class Moel(MultiTransformer):
    """A mixture of one listener per emotion, weighted by the probabilities of the emotions."""

    system = "MoEL"
    paper = "Lin et al. 2019"
    Config = MoelConfig
    search_spaces: ClassVar[SearchSpaces] = {
        **MultiTransformer.search_spaces,
        "thresholds": {"top_k": Choice(values=(1, 2, 3, 5, 10, 0))},
        "schedule": {"true_emotion_share": Range(low=0.01, high=1.0, scale="loguniform")},
    }

    def __init__(self, config: MoelConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.classifier = nn.Linear(config.width, len(data_info.emotions), bias=False)  # k_i
        self.shared_listener = DecoderLayer(config.layer_shape)
        self.listeners = Listeners(len(data_info.emotions), config)

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms: response and emotion."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)  # (B, S, D)
        emotion_logits = self.classifier(hidden[:, 0])
        weights = self.listener_weights(emotion_logits)
        if self.training:
            weights = self._mix_true_emotions(weights, batch["emotion"], progress)
        decoded = self.decode(embedded, hidden, weights)
        return {
            "nll": self.compute_nll(batch, decoded, embedded),
            "emotion": emotion_loss(emotion_logits, batch),
        }

    def listener_weights(self, emotion_logits: Tensor) -> Tensor:
        """Return the listeners' weights (B, emotions): p over the top emotions, 0 elsewhere."""
        logits, emotions = emotion_logits.topk(self._num_active_listeners(), dim=-1)
        return torch.zeros_like(emotion_logits).scatter(1, emotions, logits.softmax(dim=-1))

    def _num_active_listeners(self) -> int:
        """Return the number of listeners of a sample with a weight above 0."""
        return min(self.config.top_k or self.listeners.count, self.listeners.count)

    def _mix_true_emotions(self, weights: Tensor, emotion: Tensor, progress: Progress) -> Tensor:
        """Replace the weights (B, emotions) of some samples by the one-hot true emotion, with a
        probability that decays with the progress of training."""
        if not self.config.true_emotion_share:
            return weights
        probability = math.exp(-progress.fraction / self.config.true_emotion_share)
        use_truth = torch.rand(len(weights), device=weights.device) < probability
        one_hot = F.one_hot(emotion.clamp(min=0), weights.shape[1]).to(weights.dtype)
        return torch.where((use_truth & (emotion >= 0))[:, None], one_hot, weights)

    def decode(
        self, embedded: EmbeddedBatch, hidden: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states (B, T, D) of the meta listener, teacher-forced, for the weights
        of the listeners (B, emotions), by default the predicted ones."""
        if weights is None:
            weights = self.listener_weights(self.classifier(hidden[:, 0]))
        v_m = self._mix_listeners(embedded, hidden, weights)
        decoded: Tensor = self.decoder(v_m, hidden, embedded.attention_mask)
        return decoded

    def _mix_listeners(self, embedded: EmbeddedBatch, hidden: Tensor, weights: Tensor) -> Tensor:
        """Return V_M (B, T, D), the output of the shared listener plus the weighted outputs of the
        emotions' listeners."""
        listener, sample = weights.t().nonzero(as_tuple=True)  # (P,) pairs, sorted by listener
        routing = Routing(ends=(weights != 0).sum(dim=0).cumsum(dim=0))
        v_i, _ = self.listeners(
            embedded.decoder_inputs.index_select(0, sample), listener, routing,
            self.listeners.project_kv(hidden.index_select(0, sample), routing),
            embedded.attention_mask.index_select(0, sample),
        )  # fmt: skip  # (P, T, D)
        v_0, _ = self.shared_listener(
            embedded.decoder_inputs,
            self.shared_listener.project_kv(hidden),
            embedded.attention_mask,
        )
        weighted: Tensor = v_i * weights[sample, listener][:, None, None]
        v_m: Tensor = v_0.index_add(0, sample, weighted)
        return v_m

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the state of all listeners: the keys and values of the context for each active
        listener, and the active listeners and their weights, (B, active) each."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        weights, listeners = self.listener_weights(self.classifier(hidden[:, 0])).topk(
            self._num_active_listeners(), dim=-1
        )
        count = listeners.shape[1]
        routing = Routing.from_listeners(listeners.flatten(), self.listeners.count)
        source = self.listeners.project_kv(hidden.repeat_interleave(count, dim=0), routing)
        return {
            "meta": self.decoder.init_state(hidden, embedded.attention_mask),
            "shared_source": list(self.shared_listener.project_kv(hidden)),
            "listeners": listeners,
            "weights": weights,
            "listener_source": [part.unflatten(0, (-1, count)) for part in source],
            "past": None,
        }

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Advance all listeners and the meta listener by one token."""
        meta, listeners = state["meta"], state["listeners"]
        rows, count = listeners.shape
        embedded, mask = self.embed_next(tokens, meta["length"]), meta["mask"]
        past = state["past"] or {"shared": None, "listeners": None}
        v_0, shared_past = self.shared_listener(
            embedded, tuple(state["shared_source"]), mask, past["shared"]
        )
        v_i, listener_past = self.listeners(
            embedded.repeat_interleave(count, dim=0),
            listeners.flatten(),
            Routing.from_listeners(listeners.flatten(), self.listeners.count),
            tuple(part.flatten(0, 1) for part in state["listener_source"]),
            mask.repeat_interleave(count, dim=0),
            past["listeners"] and tuple(part.flatten(0, 1) for part in past["listeners"]),
        )
        weighted = v_i.unflatten(0, (rows, count)) * state["weights"][:, :, None, None]
        decoded, meta = self.decoder.step(v_0 + weighted.sum(dim=1), meta)
        past = {
            "shared": list(shared_past),
            "listeners": [part.unflatten(0, (rows, count)) for part in listener_past],
        }
        return self.output.logits(decoded), {**state, "meta": meta, "past": past}

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the emotion, the weights of the listeners, and the meta listener's attention
        to each word, averaged over the response."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        weights = self.listener_weights(self.classifier(hidden[:, 0]))
        attention_weights = self.decoder.attention_weights(
            self._mix_listeners(embedded, hidden, weights), hidden, embedded.attention_mask
        )  # (B, T, S)
        mask = embedded.response_mask[:, :, None]
        attention = (attention_weights * mask).sum(dim=1) / mask.sum(dim=1)  # (B, S)
        by_emotion = [
            dict(zip(self.data_info.emotions, row, strict=True)) for row in weights.tolist()
        ]
        return [
            replace(
                explanation,
                listeners={name: weight for name, weight in listeners.items() if weight},
                by_word={"attention": word_attention},
            )
            for explanation, listeners, word_attention in zip(
                super().explain(batch),
                by_emotion,
                self.select_words(attention, embedded),
                strict=True,
            )
        ]


def _count_rows_by_listener(ends: Tensor) -> Tensor:
    """Return the number of rows of each listener, (L,), from `Routing.ends`."""
    return torch.diff(ends, prepend=ends.new_zeros(1))
