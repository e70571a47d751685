"""Answers out of any dialogue variant: greedy, beam search, top-k and nucleus sampling.

Batched and cached: each step feeds one token a row and asks for one distribution a row; rows that
have ended are dropped on the way. Sampling draws from a seed per sample, so that a batch gives what
its samples give alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attune.models.base import Batch, DialogueVariant, State

NEVER = -float("inf")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How an answer is made."""

    method: Literal["greedy", "beam", "topk", "nucleus"] = "greedy"
    """greedy, beam, topk or nucleus."""
    max_tokens: int = 30
    """Longest answer, `<eos>` not counted; the papers' limit is 30."""
    beams: int = 5
    """Hypotheses kept by beam search."""
    length_penalty: float = 1.0
    """Beam search compares log-probabilities divided by length to this power; 0 favours short."""
    block_ngrams: int = 0
    """Never repeat a run of so many tokens; 0 allows it."""
    top_k: int = 3
    """topk samples from so many tokens."""
    top_p: float = 0.9
    """nucleus samples from the fewest tokens that hold this probability."""
    temperature: float = 1.0
    """Divides the logits before sampling: below 1 is bolder, above 1 wilder."""
    seed: int = 0
    """Of sampling."""


@torch.no_grad()
def decode(
    variant: DialogueVariant,
    batch: Batch,
    decoding: Decoding = Decoding(),  # noqa: B008
    controls: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """The answer's tokens to each context, without `<eos>`."""
    if decoding.method == "beam":
        return _beam_search(variant, batch, decoding, controls)
    rows = len(batch)
    answers: list[list[int]] = [[] for _ in range(rows)]
    for tokens, alive in _stepwise(variant, batch, decoding, controls):
        for token, row in zip(tokens, alive, strict=True):
            answers[row].append(token)
    return answers


# As a decorator, which holds at each step in whichever thread asks for it; a `with` around `yield`
# would leak into the thread that asked first.
@torch.no_grad()
def stream(
    variant: DialogueVariant,
    batch: Batch,
    decoding: Decoding = Decoding(),  # noqa: B008
    controls: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """The tokens of a single answer as they are made (of a beam search, when it is done)."""
    assert len(batch) == 1, "one context at a time"
    if decoding.method == "beam":
        yield from decode(variant, batch, decoding, controls)[0]
        return
    for tokens, _ in _stepwise(variant, batch, decoding, controls):
        yield tokens[0]


def _stepwise(
    variant: DialogueVariant, batch: Batch, decoding: Decoding, controls: Mapping[str, str] | None
) -> Iterator[tuple[list[int], list[int]]]:
    """At each step the new tokens and the rows of the batch that they belong to."""
    state = variant.encode(batch, controls)
    device = batch["index"].device
    alive = torch.arange(len(batch), device=device)
    newest = alive.new_full((len(alive),), variant.facts.specials["<sos>"])
    said = alive.new_zeros((len(alive), 0))
    chances = _chances(batch["index"], decoding) if decoding.method != "greedy" else None
    end = variant.facts.specials["<eos>"]
    for step in range(decoding.max_tokens):
        logits, state = variant.next_logits(newest, state)
        logits = _allowed(logits, said, variant, decoding)
        if chances is None:
            newest = logits.argmax(dim=-1)
        else:
            newest = _sampled(logits, chances[alive, step], decoding)
        going = newest != end
        if not bool(going.all()):
            kept = going.nonzero().squeeze(1)
            alive, newest, said = alive[kept], newest[kept], said[kept]
            if not len(alive):
                return
            state = variant.select(state, kept)
        said = torch.cat([said, newest[:, None]], dim=1)
        yield newest.tolist(), alive.tolist()


def _allowed(logits: Tensor, said: Tensor, variant: DialogueVariant, decoding: Decoding) -> Tensor:
    """Logits where what may not come next cannot: special tokens, and n-grams said before."""
    specials = variant.facts.specials
    forbidden = [number for name, number in specials.items() if name != "<eos>"]
    logits[:, forbidden] = NEVER
    n = decoding.block_ngrams
    if n and said.shape[1] >= n:
        windows = said.unfold(1, n, 1)  # (R, places, n)
        before = said[:, said.shape[1] - n + 1 :]  # (R, n - 1), what the next token would follow
        repeated = (windows[..., : n - 1] == before[:, None]).all(dim=-1)  # (R, places)
        rows, places = repeated.nonzero(as_tuple=True)
        logits[rows, windows[rows, places, n - 1]] = NEVER
    return logits


def _chances(index: Tensor, decoding: Decoding) -> Tensor:
    """(B, max_tokens) numbers in [0, 1): each sample's own, whatever batch it comes in."""
    rows = []
    for sample in index.tolist():
        # Two rounds of a 64-bit mix, so that neighbouring samples and seeds have nothing in common.
        seed = _mixed(_mixed(decoding.seed) ^ sample)
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(decoding.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows).to(index.device)


def _mixed(number: int) -> int:
    """SplitMix64's finaliser: spreads a small number over 63 bits."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1


def _sampled(logits: Tensor, chance: Tensor, decoding: Decoding) -> Tensor:
    """(R,) tokens: the likeliest ones line up, and the chance says how far along to stop."""
    scaled = (logits.double() / decoding.temperature).softmax(dim=-1)
    if decoding.method == "topk":
        shares, tokens = scaled.topk(min(decoding.top_k, scaled.shape[1]), dim=-1)
    else:
        shares, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        before = shares.cumsum(dim=-1) - shares
        shares = shares.masked_fill(before >= decoding.top_p, 0.0)
    reached = shares.cumsum(dim=-1)
    goal = chance[:, None] * reached[:, -1:]
    place = (reached <= goal).sum(dim=-1, keepdim=True).clamp(max=shares.shape[1] - 1)
    return tokens.gather(1, place).squeeze(1)


def _beam_search(
    variant: DialogueVariant, batch: Batch, decoding: Decoding, controls: Mapping[str, str] | None
) -> list[list[int]]:
    """The best of `beams` hypotheses a sample.

    A hypothesis that ends keeps its place, so the search narrows as it goes on and one beam is
    exactly greedy. Ended ones are compared by log-probability over length to the power of
    `length_penalty`.
    """
    rows, beams = len(batch), decoding.beams
    device = batch["index"].device
    end = variant.facts.specials["<eos>"]
    first = torch.arange(rows, device=device).repeat_interleave(beams)
    state: State = variant.select(variant.encode(batch, controls), first)
    # All beams begin alike, so only the first of each sample may be continued at the first step.
    scores = torch.full((rows, beams), NEVER, device=device)
    scores[:, 0] = 0.0
    said = first.new_zeros((rows * beams, 0))
    newest = torch.full_like(first, variant.facts.specials["<sos>"])
    best: list[tuple[float, list[int]]] = [(NEVER, [])] * rows
    samples = list(range(rows))  # which sample each group of beams answers
    for step in range(decoding.max_tokens + 1):
        logits, state = variant.next_logits(newest, state)
        logits = _allowed(logits, said, variant, decoding)
        if step == decoding.max_tokens:  # no room left: what has not ended ends here
            logits = torch.full_like(logits, NEVER).index_fill_(
                1, logits.new_tensor([end]).long(), 0
            )
        # No more than `beams` continuations of one hypothesis can be among the best of its sample.
        width = min(beams, logits.shape[-1])
        likeliest, continuations = logits.topk(width, dim=-1)  # (samples * beams, width)
        log_probabilities = likeliest - logits.logsumexp(dim=-1, keepdim=True)
        total = scores[:, :, None] + log_probabilities.view(len(samples), beams, width)
        scores, places = total.flatten(1).topk(beams, dim=-1)  # (samples, beams)
        tokens = continuations.view(len(samples), -1).gather(1, places)
        group = torch.arange(len(samples), device=device)[:, None] * beams
        origin = (group + places // width).flatten()
        ended = (tokens == end) & (scores > NEVER)
        for sample, beam in ended.nonzero().tolist():
            length = said.shape[1] + (0 if step == decoding.max_tokens else 1)
            score = scores[sample, beam].item() / max(length, 1) ** decoding.length_penalty
            if score > best[samples[sample]][0]:
                text = said[origin[sample * beams + beam]].tolist()
                best[samples[sample]] = (score, text)
        scores = scores.masked_fill(tokens == end, NEVER)
        going = (scores > NEVER).any(dim=-1).nonzero().squeeze(1)
        if not len(going):
            break
        if len(going) < len(samples):
            samples = [samples[sample] for sample in going.tolist()]
            scores, tokens = scores[going], tokens[going]
            origin = origin.view(-1, beams)[going].flatten()
        state = variant.select(state, origin)
        newest = tokens.flatten()
        said = torch.cat([said[origin], newest[:, None]], dim=1)
    return [text for _, text in best]
