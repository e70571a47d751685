"""Generation: batched, cached and stopping at `<eos>`, against one context at a time and no cache.

The references do as the papers' code does: each step decodes the whole prefix again and asks for
the distribution at each of its places. Greedily every answer takes all the steps there are; beams
are lists in Python, decoded together. Both sides must give the same answers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from attune.jobs.bench.command import attune
from attune.jobs.bench.preparation import timed
from attune.jobs.tables import table
from attune.models.decoding import NEVER, Decoding
from attune.models.transformer import Transformer
from attune.platform.batching.encoding import Columns, encode
from attune.platform.batching.streams import Stream
from attune.platform.core.allocator import keep_freed_memory
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_samples
from attune.platform.evaluation.evaluate import answer
from attune.platform.runs.model import load_model
from attune.platform.runs.record import find_run

REFERENCE_ANSWERS = 40
OUR_ANSWERS = {"greedy": 5_257, "beam": 1_000}
KNOWN = ("transformer", "multi-trs", "emoprepend-1")
"""Whose decoding the references know."""
TRAINED_STEPS = 400
PAPERS_STEPS = 51
"""What the papers' code takes for every answer; what comes after `<eos>` is thrown away."""
SAME = 0.9
"""Share of answers in which both must agree: sums in another order may turn a close choice."""
Slow = Callable[[Transformer, Tensor, Tensor, Decoding], list[int]]


def measure(data: Path, folder: Path, run: str | None) -> dict[str, Any]:
    """Answers a second of both, for greedy and beam search."""
    model = load_model(find_run(run).model if run else _trained(data, folder / "home-generation"))
    variant = model.variant
    if not isinstance(variant, Transformer) or model.name not in KNOWN:
        raise UsageError(f"--run {run}: a run of {', '.join(KNOWN)} is expected")
    keep_freed_memory()
    samples = read_samples(data, "test").sample(fraction=1, shuffle=True, seed=0)

    def contexts(count: int) -> Columns:
        return encode(samples.head(count), model.vocabulary, layout=model.layout)

    found = {
        "greedy": _compared(variant, contexts, Decoding(), _greedy),
        "beam": _compared(variant, contexts, Decoding(method="beam"), _beams),
    }
    slow = found["greedy"]["reference_answers_per_second"]
    for row in found.values():
        row["ratio_to_greedy_reference"] = row["answers_per_second"] / slow
    return found


def show(screen: Console, found: dict[str, Any]) -> None:
    """As people read it."""
    names = ("answers/s", "reference", "ratio", "to the greedy reference", "tokens an answer")
    made = table("\ngenerating test answers", "", *names, numbers=names)
    for method, row in found.items():
        made.add_row(
            method,
            f"{row['answers_per_second']:.1f}",
            f"{row['reference_answers_per_second']:.2f}",
            f"{row['ratio']:.0f}",
            f"{row['ratio_to_greedy_reference']:.0f}",
            f"{row['tokens']:.1f}",
        )
    screen.print(made)


def _trained(data: Path, home: Path) -> Path:
    told = attune(
        home, "train", "multi-trs", "--preset", "paper",
        "--data", str(data), "--max-steps", str(TRAINED_STEPS),
        "--set", "evaluate_every=1000000", "--set", "warmup_steps=100",
    )  # fmt: skip
    return Path(told["checkpoint"])


def _compared(
    variant: Transformer, contexts: Callable[[int], Columns], decoding: Decoding, slow: Slow
) -> dict[str, float]:
    few, many = contexts(REFERENCE_ANSWERS), contexts(OUR_ANSWERS[decoding.method])
    reference_seconds, theirs = timed(lambda: _one_by_one(variant, few, decoding, slow))
    seconds, ours = timed(lambda: answer(variant, many, decoding))
    same = sum(our == their for our, their in zip(ours, theirs, strict=False)) / len(theirs)
    assert same >= SAME, f"only {same:.0%} of the answers agree"
    rate, reference = len(ours) / seconds, len(theirs) / reference_seconds
    return {
        "answers_per_second": rate,
        "reference_answers_per_second": reference,
        "ratio": rate / reference,
        "tokens": sum(map(len, ours)) / len(ours),
    }


@torch.no_grad()
def _one_by_one(
    variant: Transformer, columns: Columns, decoding: Decoding, slow: Slow
) -> list[list[int]]:
    answers = {}
    for batch in Stream(columns, size=1, shuffle=False).epoch():
        words = variant.embedded(batch)
        source = variant.read(words)
        answers[int(batch["index"])] = slow(variant, source, words.mask, decoding)
    return [answers[row] for row in sorted(answers)]


def _distributions(
    variant: Transformer, said: list[list[int]], source: Tensor, mask: Tensor
) -> Tensor:
    """(N, V) log-probabilities of what comes after N prefixes, by decoding all of them again."""
    [words] = variant.embedding(
        torch.tensor([[variant.data_info.specials["<sos>"], *prefix] for prefix in said])
    )
    embedded = words + variant.positions(words.shape[1])
    hidden = variant.decoder(embedded, source.expand(len(said), -1, -1), mask)
    output = variant.output
    logits = F.linear(output.reduce(hidden), output.weight, output.bias)
    everywhere = logits.log_softmax(dim=-1)  # (N, T, V)
    last = everywhere[:, -1]
    last[:, [n for name, n in variant.data_info.specials.items() if name != "<eos>"]] = NEVER
    return last


def _greedy(variant: Transformer, source: Tensor, mask: Tensor, decoding: Decoding) -> list[int]:
    said: list[int] = []
    for _ in range(PAPERS_STEPS):
        said.append(int(_distributions(variant, [said], source, mask)[0].argmax()))
    return _until_the_end(variant, said)[: decoding.max_tokens]


def _beams(variant: Transformer, source: Tensor, mask: Tensor, decoding: Decoding) -> list[int]:
    """The search of `models/decoding.py`, in lists."""
    end = variant.data_info.specials["<eos>"]
    going: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(decoding.max_tokens):
        following = _distributions(variant, [said for _, said in going], source, mask)
        values, tokens = following.topk(decoding.beams)
        found = [
            (score + value, [*said, token])
            for row, (score, said) in enumerate(going)
            for value, token in zip(values[row].tolist(), tokens[row].tolist(), strict=True)
        ]
        best = sorted(found, key=lambda one: -one[0])[: decoding.beams]
        for score, said in best:
            if said[-1] == end:
                ended.append((score / len(said) ** decoding.length_penalty, said[:-1]))
        going = [one for one in best if one[1][-1] != end]
        if len(ended) >= decoding.beams or not going:
            return max(ended, key=lambda one: one[0])[1]
    ended += [(score / len(said) ** decoding.length_penalty, said) for score, said in going]
    return max(ended, key=lambda one: one[0])[1]


def _until_the_end(variant: Transformer, said: list[int]) -> list[int]:
    end = variant.data_info.specials["<eos>"]
    return said[: said.index(end)] if end in said else said
