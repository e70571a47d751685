"""Generation: batched, cached and stopping at `<eos>`, against one context at a time and no cache.

The references work like the papers' code: each step decodes the whole prefix again and computes the
distribution at each of its positions. Greedy decoding always takes the maximum number of steps;
beams are Python lists, decoded together. Both sides must give the same answers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from attune.jobs.bench.command import run_attune_command
from attune.jobs.bench.preparation import time_benchmark_call
from attune.jobs.tables import table
from attune.models.decoding import NEVER, Decoding
from attune.models.transformer import Transformer
from attune.platform.batching.encoding import Columns, encode
from attune.platform.batching.streams import Stream
from attune.platform.core.allocator import keep_freed_memory
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.evaluation.evaluate import answer
from attune.platform.runs.model import load_model
from attune.platform.runs.record import find_run
from attune.platform.serving.responder import Responder
from attune.platform.text.tokenizing import tokenize_one

REFERENCE_ANSWERS = 40
SINGLE_ANSWERS = 100
OUR_ANSWERS = {"greedy": 5_257, "beam": 1_000}
KNOWN = ("transformer", "multi-trs", "emoprepend-1")
"""Variants whose decoding the references implement."""
TRAINED_STEPS = 400
PAPERS_STEPS = 51
"""Number of steps of the papers' code for every answer; tokens after `<eos>` are discarded."""
SAME = 0.9
"""Minimum share of equal answers; another order of summation may change a close choice."""
Slow = Callable[[Transformer, Tensor, Tensor, Decoding], list[int]]


def measure_generation(data: Path, folder: Path, run: str | None) -> dict[str, Any]:
    """Return answers per second of both implementations, for greedy and beam search."""
    model_folder = (
        find_run(run).model
        if run
        else _train_model_for_generation(data, folder / "home-generation")
    )
    model = load_model(model_folder)
    variant = model.variant
    if not isinstance(variant, Transformer) or model.name not in KNOWN:
        raise UsageError(
            f"--run {run}: expected a run of {', '.join(KNOWN)}, got one of {model.name}"
        )
    keep_freed_memory()
    samples = read_dataset_samples(data, "test").sample(fraction=1, shuffle=True, seed=0)

    def contexts(count: int) -> Columns:
        return encode(samples.head(count), model.vocabulary, layout=model.layout)

    rows = {
        "greedy": _compare_generation(variant, contexts, Decoding(), _generate_reference_greedily),
        "beam": _compare_generation(
            variant, contexts, Decoding(method="beam"), _generate_reference_by_beams
        ),
    }
    single = _measure_single_generation(
        Responder(model_folder), samples["context"].head(SINGLE_ANSWERS)
    )
    rows["greedy, single"] = {**rows["greedy"], **single}
    slow = rows["greedy"]["reference_answers_per_second"]
    for row in rows.values():
        row["ratio"] = row["answers_per_second"] / row["reference_answers_per_second"]
        row["ratio_to_greedy_reference"] = row["answers_per_second"] / slow
    return rows


def print_generation_speed(screen: Console, rows: dict[str, Any]) -> None:
    """Print a table of the speeds."""
    names = ("answers/s", "reference", "ratio", "to the greedy reference", "tokens per answer")
    rendered = table("\ngenerating test answers", "", *names, numbers=names)
    for method, row in rows.items():
        rendered.add_row(
            method,
            f"{row['answers_per_second']:.1f}",
            f"{row['reference_answers_per_second']:.2f}",
            f"{row['ratio']:.0f}",
            f"{row['ratio_to_greedy_reference']:.0f}",
            f"{row['tokens']:.1f}",
        )
    screen.print(rendered)


def _measure_single_generation(responder: Responder, contexts: pl.Series) -> dict[str, float]:
    """Return the speed of requests with one context each, from text to explained answer."""
    responder.respond([contexts[0].to_list()])
    seconds, answers = time_benchmark_call(
        lambda: [responder.respond([context])[0] for context in contexts.to_list()]
    )
    tokens = sum(len(tokenize_one(each.text)) for each in answers) / len(answers)
    return {"answers_per_second": len(answers) / seconds, "tokens": tokens}


def _train_model_for_generation(data: Path, home: Path) -> Path:
    result = run_attune_command(
        home, "train", "multi-trs", "--preset", "paper",
        "--data", str(data), "--max-steps", str(TRAINED_STEPS),
        "--set", "evaluate_every=1000000", "--set", "warmup_steps=100",
    )  # fmt: skip
    return Path(result["checkpoint"])


def _compare_generation(
    variant: Transformer, contexts: Callable[[int], Columns], decoding: Decoding, slow: Slow
) -> dict[str, float]:
    few, many = contexts(REFERENCE_ANSWERS), contexts(OUR_ANSWERS[decoding.method])
    reference_seconds, theirs = time_benchmark_call(
        lambda: _generate_one_by_one(variant, few, decoding, slow)
    )
    seconds, ours = time_benchmark_call(lambda: answer(variant, many, decoding))
    same = sum(our == their for our, their in zip(ours, theirs, strict=False)) / len(theirs)
    assert same >= SAME, f"only {same:.0%} of the answers are equal, expected {SAME:.0%}"
    rate, reference = len(ours) / seconds, len(theirs) / reference_seconds
    return {
        "answers_per_second": rate,
        "reference_answers_per_second": reference,
        "tokens": sum(map(len, ours)) / len(ours),
    }


@torch.no_grad()
def _generate_one_by_one(
    variant: Transformer, columns: Columns, decoding: Decoding, slow: Slow
) -> list[list[int]]:
    answers = {}
    for batch in Stream(columns, size=1, shuffle=False).epoch():
        words = variant.embed(batch)
        source = variant.encode_context(words)
        answers[int(batch["index"])] = slow(variant, source, words.attention_mask, decoding)
    return [answers[row] for row in sorted(answers)]


def _generate_reference_distributions(
    variant: Transformer, prefixes: list[list[int]], source: Tensor, mask: Tensor
) -> Tensor:
    """Return log-probabilities (N, V) of the token after each prefix, without a cache."""
    [words] = variant.embedding(
        torch.tensor([[variant.data_info.specials["<sos>"], *prefix] for prefix in prefixes])
    )
    embedded = words + variant.positions(words.shape[1])
    hidden = variant.decoder(embedded, source.expand(len(prefixes), -1, -1), mask)
    output = variant.output
    logits = F.linear(output.reduce(hidden), output.weight, output.bias)
    everywhere = logits.log_softmax(dim=-1)  # (N, T, V)
    last = everywhere[:, -1]
    last[:, [n for name, n in variant.data_info.specials.items() if name != "<eos>"]] = NEVER
    return last


def _generate_reference_greedily(
    variant: Transformer, source: Tensor, mask: Tensor, decoding: Decoding
) -> list[int]:
    answer: list[int] = []
    for _ in range(PAPERS_STEPS):
        answer.append(
            int(_generate_reference_distributions(variant, [answer], source, mask)[0].argmax())
        )
    return _truncate_generated_reference(variant, answer)[: decoding.max_tokens]


def _generate_reference_by_beams(
    variant: Transformer, source: Tensor, mask: Tensor, decoding: Decoding
) -> list[int]:
    """Return the answer of the beam search of `models/decoding.py`, implemented with lists."""
    end = variant.data_info.specials["<eos>"]
    open_beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished_beams: list[tuple[float, list[int]]] = []
    for _ in range(decoding.max_tokens):
        log_probs = _generate_reference_distributions(
            variant, [prefix for _, prefix in open_beams], source, mask
        )
        values, tokens = log_probs.topk(decoding.beams)
        candidates = [
            (score + value, [*prefix, token])
            for row, (score, prefix) in enumerate(open_beams)
            for value, token in zip(values[row].tolist(), tokens[row].tolist(), strict=True)
        ]
        best = sorted(candidates, key=lambda one: -one[0])[: decoding.beams]
        for score, prefix in best:
            if prefix[-1] == end:
                finished_beams.append((score / len(prefix) ** decoding.length_penalty, prefix[:-1]))
        open_beams = [one for one in best if one[1][-1] != end]
        if len(finished_beams) >= decoding.beams or not open_beams:
            return max(finished_beams, key=lambda one: one[0])[1]
    finished_beams += [
        (score / len(prefix) ** decoding.length_penalty, prefix) for score, prefix in open_beams
    ]
    return max(finished_beams, key=lambda one: one[0])[1]


def _truncate_generated_reference(variant: Transformer, token_ids: list[int]) -> list[int]:
    end = variant.data_info.specials["<eos>"]
    return token_ids[: token_ids.index(end)] if end in token_ids else token_ids
