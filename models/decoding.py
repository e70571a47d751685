"""Decoding for all dialogue variants: greedy, beam search, top-k and nucleus sampling.

Decoding is batched and cached: each step takes one token per row and returns the logits of the
next, and finished rows are removed. Each sample has its own random seed, so that its answer does
not depend on its batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from attune.models.base import Batch, Bounds, Count, DialogueVariant, Temperature

NEVER = -float("inf")
BLOCK = 64
"""Number of logits per block in `_top_tokens`."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of a decoding method."""

    method: Literal["greedy", "beam", "topk", "nucleus"] = "greedy"
    """How tokens are chosen: the most likely, by beam search, or sampled."""
    max_tokens: Count = 30
    """Maximum number of tokens of an answer, without `<eos>`; the papers' limit is 30."""
    beams: Count = 5
    """Number of hypotheses that beam search keeps. Usually 2 to 10."""
    length_penalty: Annotated[float, Bounds(at_least=0, at_most=100)] = 1.0
    """Beam search divides a log-probability by the length to this power; 0 favours short answers.
    Usually 0 to 2."""
    block_ngrams: Annotated[int, Bounds(at_least=0, at_most=1_000)] = 0
    """Block repeated n-grams of this length; 0 allows all. Usually 0, 3 or 4."""
    top_k: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = 3
    """Number of most likely tokens that topk samples from. Usually 3 to 50."""
    top_p: Annotated[float, Bounds(above=0, at_most=1)] = 0.9
    """Total probability of the smallest set of tokens that nucleus samples from. Usually 0.8 to
    0.95."""
    temperature: Temperature = 1.0
    """Divisor of the logits before sampling; lower values make likely tokens more likely. Usually
    0.5 to 1.2."""
    seed: Annotated[int, Bounds(at_least=0, at_most=2**32 - 1)] = 0
    """Random seed for sampling."""


@torch.no_grad()
def decode(
    variant: DialogueVariant,
    batch: Batch,
    decoding: Decoding = Decoding(),  # noqa: B008
    controls: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Return the tokens of each answer, without `<eos>`."""
    if decoding.method == "beam":
        return _beam_search(variant, batch, decoding, controls)
    rows = len(batch)
    answers: list[list[int]] = [[] for _ in range(rows)]
    for tokens, open_rows in _decode_stepwise(variant, batch, decoding, controls):
        for token, row in zip(tokens, open_rows, strict=True):
            answers[row].append(token)
    return answers


# As a decorator, no_grad applies to each step in the thread that runs it; a `with` around `yield`
# would stay in effect in the thread that started the generator.
@torch.no_grad()
def stream(
    variant: DialogueVariant,
    batch: Batch,
    decoding: Decoding = Decoding(),  # noqa: B008
    controls: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Yield the tokens of a single answer one by one; beam search yields them all at its end."""
    assert len(batch) == 1, "one context at a time"
    if decoding.method == "beam":
        yield from decode(variant, batch, decoding, controls)[0]
        return
    for tokens, _ in _decode_stepwise(variant, batch, decoding, controls):
        yield tokens[0]


def _decode_stepwise(
    variant: DialogueVariant, batch: Batch, decoding: Decoding, controls: Mapping[str, str] | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each step the new tokens and the rows of the batch that they belong to."""
    state = variant.encode(batch, controls)
    open_rows = torch.arange(len(batch), device=batch["index"].device)
    newest = torch.full_like(open_rows, variant.data_info.specials["<sos>"])
    generated = open_rows.new_zeros((len(open_rows), 0))
    draws = _draw_uniform_numbers(batch["index"], decoding) if decoding.method != "greedy" else None
    end = variant.data_info.specials["<eos>"]
    for step in range(decoding.max_tokens):
        logits, state = variant.next_logits(newest, state)
        logits = _mask_forbidden_tokens(logits, generated, variant, decoding)
        if draws is None:
            newest = logits.argmax(dim=-1)
        else:
            newest = _sample_tokens(logits, draws[open_rows, step], decoding)
        is_open = newest != end
        if not bool(is_open.all()):
            kept = is_open.nonzero().squeeze(1)
            open_rows, newest, generated = open_rows[kept], newest[kept], generated[kept]
            if not len(open_rows):
                return
            state = variant.select(state, kept)
        generated = torch.cat([generated, newest[:, None]], dim=1)
        yield newest.tolist(), open_rows.tolist()


def _mask_forbidden_tokens(
    logits: Tensor, generated: Tensor, variant: DialogueVariant, decoding: Decoding
) -> Tensor:
    """Set the logits of special tokens and of tokens that would repeat an n-gram to -inf."""
    specials = variant.data_info.specials
    forbidden = [number for name, number in specials.items() if name != "<eos>"]
    logits[:, forbidden] = NEVER
    n = decoding.block_ngrams
    if n and generated.shape[1] >= n:
        ngrams = generated.unfold(1, n, 1)  # (R, positions, n)
        prefix = generated[:, generated.shape[1] - n + 1 :]  # (R, n - 1) of the next n-gram
        is_repeated = (ngrams[..., : n - 1] == prefix[:, None]).all(dim=-1)  # (R, positions)
        rows, positions = is_repeated.nonzero(as_tuple=True)
        logits[rows, ngrams[rows, positions, n - 1]] = NEVER
    return logits


def _draw_uniform_numbers(index: Tensor, decoding: Decoding) -> Tensor:
    """Return uniform draws in [0, 1), (B, max_tokens), that depend on each sample's index and not
    on its batch."""
    rows = [
        torch.rand(decoding.max_tokens, generator=generator, dtype=torch.float64)
        for generator in sample_generators(index, decoding.seed)
    ]
    return torch.stack(rows).to(index.device)


def sample_generators(index: Tensor, seed: int) -> Iterator[torch.Generator]:
    """Yield a random generator for each sample, seeded by its index and not by its batch."""
    for sample in index.tolist():
        # Hashed twice, so that neighbouring samples and seeds are independent.
        yield torch.Generator().manual_seed(_splitmix64(_splitmix64(seed) ^ sample))


def _splitmix64(number: int) -> int:
    """Hash a small number to 63 bits (the finaliser of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1


def _sample_tokens(logits: Tensor, draw: Tensor, decoding: Decoding) -> Tensor:
    """Sample a token for each row from top-k or nucleus, by inverting the cumulative distribution
    at the row's uniform draw: (R,)."""
    scaled = (logits.double() / decoding.temperature).softmax(dim=-1)
    if decoding.method == "topk":
        probs, tokens = scaled.topk(min(decoding.top_k, scaled.shape[1]), dim=-1)
    else:
        probs, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill(before >= decoding.top_p, 0.0)
    # Sorted by token id, not by probability: rounding depends on the batch and could swap nearly
    # equal probabilities, and the same draw would then give another token.
    tokens, order = tokens.sort(dim=-1)
    probs = probs.gather(1, order)
    return tokens.gather(1, sample_categorical(probs, draw)[:, None]).squeeze(1)


def sample_categorical(weights: Tensor, draw: Tensor) -> Tensor:
    """Sample an index of each row of unnormalised weights (R, N) by inverting the cumulative
    distribution at uniform draws (R,): (R,).

    One draw per row is much cheaper than noise for each of thousands of tokens.
    """
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, draw[:, None] * cumulative[:, -1:], right=True)
    return index.squeeze(1).clamp(max=weights.shape[1] - 1)  # rounding may reach the total


def _beam_search(
    variant: DialogueVariant, batch: Batch, decoding: Decoding, controls: Mapping[str, str] | None
) -> list[list[int]]:
    """Return the best answer to each sample, extending its `beams` most likely hypotheses.

    A sample is finished when `beams` of its hypotheses have ended, so that one beam is equivalent
    to greedy decoding. Ended hypotheses are compared by their log-probability, divided by the
    length to the power of `length_penalty`. Only open hypotheses are computed, so samples differ in
    their number of rows.
    """
    beams, device = decoding.beams, batch["index"].device
    end = variant.data_info.specials["<eos>"]
    ended = _EndedHypotheses(len(batch), decoding)
    state = variant.encode(batch, controls)
    samples = torch.arange(len(batch), device=device)  # (R,) the sample of each row, sorted
    ranks = torch.zeros_like(samples)  # (R,) the index of a row among the rows of its sample
    scores = torch.zeros(len(samples), device=device)
    generated = samples.new_zeros((len(samples), 0))
    newest = torch.full_like(samples, variant.data_info.specials["<sos>"])
    for _ in range(decoding.max_tokens):
        logits, state = variant.next_logits(newest, state)
        logits = _mask_forbidden_tokens(logits, generated, variant, decoding)
        # At most `beams` continuations of a hypothesis can be among the best of its sample.
        width = min(beams, logits.shape[1])
        log_probs, continuations = _top_tokens(logits.log_softmax(dim=-1), width)  # (R, width)
        current, group = samples.unique_consecutive(return_inverse=True)  # samples with open rows
        candidates = scores.new_full((len(current), beams, width), NEVER)
        candidates[group, ranks] = scores[:, None] + log_probs
        rows = samples.new_zeros((len(current), beams))
        rows[group, ranks] = torch.arange(len(samples), device=device)
        best, chosen = candidates.flatten(1).topk(beams, dim=-1)  # (samples, beams)
        origin = rows.gather(1, chosen // width)
        tokens = continuations[origin, chosen % width]
        is_possible = best > NEVER
        for position, beam in ((tokens == end) & is_possible).nonzero().tolist():
            text = generated[origin[position, beam]].tolist()
            ended.add(int(current[position]), best[position, beam].item(), text, len(text) + 1)
        open_samples = torch.tensor([ended.is_open(n) for n in current.tolist()], device=device)
        is_open = (tokens != end) & is_possible & open_samples[:, None]
        if not bool(is_open.any()):
            return ended.best()
        samples = current[:, None].expand_as(is_open)[is_open]
        ranks = (is_open.cumsum(dim=1) - 1)[is_open]
        scores, newest, origin = best[is_open], tokens[is_open], origin[is_open]
        state = variant.select(state, origin)
        generated = torch.cat([generated[origin], newest[:, None]], dim=1)
    for sample, score, text in zip(
        samples.tolist(), scores.tolist(), generated.tolist(), strict=True
    ):
        ended.add(sample, score, text, len(text))  # the length limit ends open hypotheses
    return ended.best()


class _EndedHypotheses:
    """The best ended hypothesis of each sample, and the number of its ended hypotheses."""

    def __init__(self, samples: int, decoding: Decoding):
        self.decoding = decoding
        self.counts = [0] * samples
        self.kept: list[tuple[float, list[int]]] = [(NEVER, [])] * samples

    def add(self, sample: int, log_probability: float, text: list[int], length: int) -> None:
        """Add a hypothesis; `length` includes `<eos>` if the hypothesis has one."""
        score = log_probability / max(length, 1) ** self.decoding.length_penalty
        self.counts[sample] += 1
        self.kept[sample] = max(self.kept[sample], (score, text), key=lambda pair: pair[0])

    def is_open(self, sample: int) -> bool:
        """Return whether the search for this sample continues."""
        return self.counts[sample] < self.decoding.beams

    def best(self) -> list[list[int]]:
        """Return the tokens of the best hypothesis of each sample."""
        return [text for _, text in self.kept]


def _top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the same as `topk`, faster for large vocabularies.

    The top `count` tokens are in the `count` blocks with the highest maxima, and maxima are much
    cheaper than a partial sort.
    """
    num_blocks = logits.shape[1] // BLOCK
    if num_blocks <= count:
        values, tokens = logits.topk(count, dim=-1)
        return values, tokens
    blocks = logits[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK))
    best_blocks = blocks.amax(dim=-1).topk(count, dim=-1).indices  # (R, count)
    inside = torch.arange(BLOCK, device=logits.device)
    rest = torch.arange(num_blocks * BLOCK, logits.shape[1], device=logits.device)
    candidates = (best_blocks[:, :, None] * BLOCK + inside).flatten(1)
    candidates = torch.cat([candidates, rest.expand(len(logits), -1)], dim=1)
    values, indices = logits.gather(1, candidates).topk(count, dim=-1)
    return values, candidates.gather(1, indices)
