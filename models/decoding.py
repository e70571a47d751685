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

from attune.models.base import Batch, DialogueVariant

NEVER = -float("inf")
BLOCK = 64
"""Words whose maximum is taken at once in a search for the likeliest."""


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
    newest = alive.new_full((len(alive),), variant.data_info.specials["<sos>"])
    said = alive.new_zeros((len(alive), 0))
    chances = _chances(batch["index"], decoding) if decoding.method != "greedy" else None
    end = variant.data_info.specials["<eos>"]
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
    specials = variant.data_info.specials
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
    rows = [
        torch.rand(decoding.max_tokens, generator=generator, dtype=torch.float64)
        for generator in seeded(index, decoding.seed)
    ]
    return torch.stack(rows).to(index.device)


def seeded(index: Tensor, seed: int) -> Iterator[torch.Generator]:
    """A generator for each sample, the same whatever batch it comes in."""
    for sample in index.tolist():
        # Two rounds of a 64-bit mix, so that neighbouring samples and seeds have nothing in common.
        yield torch.Generator().manual_seed(_mixed(_mixed(seed) ^ sample))


def _mixed(number: int) -> int:
    """SplitMix64's finaliser: spreads a small number over 63 bits."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1


def _sampled(logits: Tensor, chance: Tensor, decoding: Decoding) -> Tensor:
    """(R,) tokens: the likely ones line up, and the chance says how far along to stop."""
    scaled = (logits.double() / decoding.temperature).softmax(dim=-1)
    if decoding.method == "topk":
        shares, tokens = scaled.topk(min(decoding.top_k, scaled.shape[1]), dim=-1)
    else:
        shares, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        before = shares.cumsum(dim=-1) - shares
        shares = shares.masked_fill(before >= decoding.top_p, 0.0)
    # By number, not by likelihood: words as good as equally likely would change places with the
    # rounding of another batch, and the chance would meet another one.
    tokens, order = tokens.sort(dim=-1)
    shares = shares.gather(1, order)
    return tokens.gather(1, drawn(shares, chance)[:, None]).squeeze(1)


def drawn(shares: Tensor, chance: Tensor) -> Tensor:
    """(R,) places in rows of shares (R, N), each as often as its share says where the chances (R,)
    are even in [0, 1): the first whose share and those before it come to more than that much of
    all. A number for a row costs far less than noise for each of thousands of words."""
    reached = shares.cumsum(dim=-1)
    place = torch.searchsorted(reached, chance[:, None] * reached[:, -1:], right=True)
    return place.squeeze(1).clamp(max=shares.shape[1] - 1)  # rounding may make it all of all


def _beam_search(
    variant: DialogueVariant, batch: Batch, decoding: Decoding, controls: Mapping[str, str] | None
) -> list[list[int]]:
    """The best answer that is found by going on with the `beams` likeliest hypotheses a sample.

    A sample is done when `beams` of its hypotheses have ended, so that one beam is exactly greedy.
    Ended ones are compared by log-probability over length to the power of `length_penalty`. Only
    hypotheses that go on are computed, so samples have different numbers of rows.
    """
    beams, device = decoding.beams, batch["index"].device
    end = variant.data_info.specials["<eos>"]
    ended = _Ended(len(batch), decoding)
    state = variant.encode(batch, controls)
    samples = torch.arange(len(batch), device=device)  # (R,) of each row, in order
    places = torch.zeros_like(samples)  # (R,) which of its sample's hypotheses a row is
    scores = torch.zeros(len(samples), device=device)
    said = samples.new_zeros((len(samples), 0))
    newest = torch.full_like(samples, variant.data_info.specials["<sos>"])
    for _ in range(decoding.max_tokens):
        logits, state = variant.next_logits(newest, state)
        logits = _allowed(logits, said, variant, decoding)
        # No more than `beams` continuations of one hypothesis can be among the best of its sample.
        width = min(beams, logits.shape[1])
        likeliest, continuations = _likeliest(logits.log_softmax(dim=-1), width)  # (R, width)
        here, group = samples.unique_consecutive(return_inverse=True)
        table = scores.new_full((len(here), beams, width), NEVER)
        table[group, places] = scores[:, None] + likeliest
        rows = samples.new_zeros((len(here), beams))
        rows[group, places] = torch.arange(len(samples), device=device)
        best, chosen = table.flatten(1).topk(beams, dim=-1)  # (samples, beams)
        origin = rows.gather(1, chosen // width)
        tokens = continuations[origin, chosen % width]
        possible = best > NEVER
        for place, beam in ((tokens == end) & possible).nonzero().tolist():
            text = said[origin[place, beam]].tolist()
            ended.add(int(here[place]), best[place, beam].item(), text, len(text) + 1)
        open_samples = torch.tensor([ended.room(n) for n in here.tolist()], device=device)
        going = (tokens != end) & possible & open_samples[:, None]
        if not bool(going.any()):
            return ended.best()
        samples = here[:, None].expand_as(going)[going]
        places = (going.cumsum(dim=1) - 1)[going]
        scores, newest, origin = best[going], tokens[going], origin[going]
        state = variant.select(state, origin)
        said = torch.cat([said[origin], newest[:, None]], dim=1)
    for sample, score, text in zip(samples.tolist(), scores.tolist(), said.tolist(), strict=True):
        ended.add(sample, score, text, len(text))  # no room left: what has not ended ends here
    return ended.best()


class _Ended:
    """The ended hypotheses of a beam search, of which the best of each sample is kept."""

    def __init__(self, samples: int, decoding: Decoding):
        self.decoding = decoding
        self.counts = [0] * samples
        self.kept: list[tuple[float, list[int]]] = [(NEVER, [])] * samples

    def add(self, sample: int, log_probability: float, text: list[int], length: int) -> None:
        score = log_probability / max(length, 1) ** self.decoding.length_penalty
        self.counts[sample] += 1
        self.kept[sample] = max(self.kept[sample], (score, text), key=lambda one: one[0])

    def room(self, sample: int) -> bool:
        """Whether the search for this sample goes on."""
        return self.counts[sample] < self.decoding.beams

    def best(self) -> list[list[int]]:
        return [text for _, text in self.kept]


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk` for vocabularies: first the best block of each row's logits, then their best words.

    The best `count` words lie in the `count` blocks with the highest maxima, so nothing is missed;
    and a maximum is many times cheaper than an order.
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
    values, places = logits.gather(1, candidates).topk(count, dim=-1)
    return values, candidates.gather(1, places)
