"""Training: `attune train` against three loops in plain torch, on the same model and samples.

plain       our model, batches and loss, without Ray, DeepSpeed, MLflow
good        bucketed batches, torch's own smoothed cross-entropy on the real tokens, fused Adam
reference   like the papers' code: batches in random order, padded to the longest sample; the
            smoothed loss over the logits of all positions, including padding; unfused Adam

They take turns, each in its own process. The speed of a shared machine drifts, so ratios are taken
within a turn, and their median over the turns is reported. Plain loops that are compared with each
other take turns within one process, some steps at a time.
"""

import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from attune.jobs.bench.command import run_attune_command
from attune.jobs.tables import table
from attune.models.base import PAIRED, Batch, Progress
from attune.models.multitask import MultiTransformer, emotion_loss
from attune.platform.batching.encoding import PADDING, Columns, Ragged, encode
from attune.platform.batching.streams import Stream
from attune.platform.core.allocator import keep_freed_memory
from attune.platform.data.dataset_folder import TOKENS, read_dataset_samples
from attune.platform.data.labels import EMOTIONS
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.model import build_model
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.training.settings import configure
from attune.platform.training.updates import update_loss

VARIANT, PRESET = "multi-trs", "paper"
SMOOTHING = 0.1
SETTINGS = {"label_smoothing": SMOOTHING}
ROUNDS = 5
WARM_UP = 20
STEPS = {"plain": 400, "attune train": 400, "reference": 60, "good": 120}
PLAIN_STEPS, AT_A_TIME = 180, 10
"""Steps of plain loops that are compared with each other, in all and per turn."""
GROWING_DATA, GROWING_WORDS = (1, 2, 4), (8_000, 16_000, 32_000)
SYSTEMS: dict[str, dict[str, float]] = {
    VARIANT: {},
    "moel": {"true_emotion_share": 0},  # the final number of listeners from the first step
    "mime": {},
}
"""Systems whose cost per sample in the plain loop is compared, with their settings."""

Step = Callable[[Any, Batch], Tensor]


def measure_training(data: Path, folder: Path) -> dict[str, Any]:
    """Return samples/s of each loop, their ratios, and how cost scales with data and vocabulary."""
    rates: dict[str, list[float]] = {name: [] for name in STEPS}
    peaks: dict[str, float] = {}
    for turn in range(ROUNDS):
        for name, steps in STEPS.items():
            measured = (
                _measure_training_command(data, folder / f"home-{turn}", steps)
                if name == "attune train"
                else _measure_training_loops(data, [_Spec(kind=name)], steps)[0]
            )
            rates[name].append(measured["samples_per_second"])
            peaks[name] = measured["peak_memory_mb"]
    systems = [_Spec(variant=name) for name in SYSTEMS]
    costs = [1 / each["samples_per_second"] for each in _measure_training_loops(data, systems)]
    return {
        "samples_per_second": {name: statistics.median(each) for name, each in rates.items()},
        "all_turns": rates,
        "peak_memory_mb": peaks,
        "ratio_to_plain": _training_speed_ratio(rates["attune train"], rates["plain"]),
        "ratio_to_reference": _training_speed_ratio(rates["attune train"], rates["reference"]),
        "good_ratio_to_reference": _training_speed_ratio(rates["good"], rates["reference"]),
        "cost_of_a_sample": {
            name: cost / costs[0] for name, cost in zip(SYSTEMS, costs, strict=True)
        },
        "growth": {
            "data": _measure_training_growth(
                data, {times: _Spec(times=times) for times in GROWING_DATA}
            ),
            "vocabulary": _measure_training_growth(
                data, {words: _Spec(words=words) for words in GROWING_WORDS}
            ),
        },
    }


def _training_speed_ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _measure_training_growth(data: Path, specs: dict[int, "_Spec"]) -> dict[int, float]:
    """Return milliseconds per sample by size."""
    measured = _measure_training_loops(data, list(specs.values()))
    return {
        size: 1000 / each["samples_per_second"] for size, each in zip(specs, measured, strict=True)
    }


def print_training_speed(screen: Console, results: dict[str, Any]) -> None:
    """Print a table of the speeds, the ratios, and how cost scales."""
    rates_table = table(
        f"\ntraining {VARIANT} at preset {PRESET}, median of {ROUNDS} turns",
        "", "samples/s", "of the reference", "peak MB",
        numbers=("samples/s", "of the reference", "peak MB"),
    )  # fmt: skip
    rates = results["samples_per_second"]
    reference = results["all_turns"]["reference"]
    for name, rate in rates.items():
        ratio = _training_speed_ratio(results["all_turns"][name], reference)
        rates_table.add_row(
            name, f"{rate:.1f}", f"{ratio:.2f}", f"{results['peak_memory_mb'][name]:,.0f}"
        )
    screen.print(rates_table)
    screen.print(f"attune train runs at {results['ratio_to_plain']:.2f} of the plain loop's speed")
    costs = (f"{name} {cost:.2f}" for name, cost in results["cost_of_a_sample"].items())
    screen.print(f"cost of a training sample relative to {VARIANT}: {', '.join(costs)}")
    for kind, grown in results["growth"].items():
        each = (f"{size:,}: {cost:.2f}" for size, cost in grown.items())
        screen.print(f"milliseconds per sample by {kind}: {', '.join(each)}")


def _measure_training_command(data: Path, home: Path, steps: int) -> dict[str, float]:
    """Return the samples/s of `attune train`, between two logged steps, and its peak memory."""
    output = run_attune_command(
        home, "train", VARIANT, "--preset", PRESET,
        "--data", str(data), "--max-steps", str(steps), "--name", "bench",
        "--set", "evaluate_every=1000000", "--set", "track_checkpoint=false",
        *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")),
    )  # fmt: skip
    return measure_training_run(Path(output["checkpoint"]).parent)


def measure_training_run(run: Path) -> dict[str, float]:
    """Return the samples/s of a run's last stage, between two logged steps, and its peak memory."""
    logged = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line["metrics"]]
    last = logged[-1]
    stage = [line for line in logged if line["metrics"]["stage"] == last["metrics"]["stage"]]
    first = next(line for line in stage if line["step"] >= stage[0]["step"] + WARM_UP)
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    samples = record["training"]["batch_size"] * (last["step"] - first["step"])
    return {
        "samples_per_second": 1000 * samples / (last["time"] - first["time"]),
        "peak_memory_mb": record["result"]["peak_memory_mb"],
    }


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """A training loop in plain torch."""

    kind: str = "plain"
    variant: str = VARIANT
    times: int = 1
    """Number of copies of the training samples."""
    words: int = 0
    """Size of the vocabulary; 0 uses that of the data."""


def _measure_training_loops(
    data: Path, specs: list[_Spec], steps: int = PLAIN_STEPS
) -> list[dict[str, float]]:
    """Return speed and peak memory of each loop; they alternate in one new process."""
    specs_json = json.dumps([dataclasses.asdict(spec) for spec in specs])
    command = [sys.executable, "-m", __name__, str(data), str(steps), specs_json]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    rates: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rates


def _run_training_benchmark(data: str, steps: str, specs_json: str) -> None:
    """Run the loops in turns and print their measurements as JSON; the new process calls this."""
    specs = [_Spec(**each) for each in json.loads(specs_json)]
    if all(spec.kind == "plain" for spec in specs):
        keep_freed_memory()
    loops = [_benchmark_training_loop(Path(data), spec) for spec in specs]
    for loop in loops:
        for _ in range(WARM_UP):
            next(loop)
    seen, seconds = [0] * len(loops), [0.0] * len(loops)
    for _ in range(0, int(steps) - WARM_UP, AT_A_TIME):
        for number, loop in enumerate(loops):
            started = time.perf_counter()
            seen[number] += sum(next(loop) for _ in range(AT_A_TIME))
            seconds[number] += time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rates = [samples / taken for samples, taken in zip(seen, seconds, strict=True)]
    print(json.dumps([{"samples_per_second": rate, "peak_memory_mb": peak} for rate in rates]))


def _benchmark_training_loop(data: Path, spec: _Spec) -> Iterator[int]:
    """Train, and yield the number of samples of each step."""
    vocabulary = _benchmark_training_vocabulary(data, spec.words)
    samples = pl.concat([read_dataset_samples(data, "train")] * spec.times)
    columns = encode(samples, vocabulary, emotions=EMOTIONS)
    config, training = configure(spec.variant, PRESET, {**SETTINGS, **SYSTEMS[spec.variant]})
    torch.manual_seed(0)
    variant = build_model(spec.variant, config, vocabulary, EMOTIONS).variant.train()
    if spec.kind == "reference":
        optimizer = torch.optim.Adam(variant.parameters(), lr=1e-4, foreach=False, fused=False)
        batches = _benchmark_training_batches(columns, training.batch_size)
    else:
        optimizer = torch.optim.Adam(variant.parameters(), lr=1e-4, fused=True)
        batches = (loaded.batch for loaded in Stream(columns, size=training.batch_size).batches())
    losses: dict[str, Step] = {
        "plain": _benchmark_our_loss,
        "good": _benchmark_good_loss,
        "reference": _benchmark_reference_loss,
    }
    loss = losses[spec.kind]
    for batch in batches:
        optimizer.zero_grad()
        loss(variant, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield len(batch)


def _benchmark_our_loss(variant: Any, batch: Batch) -> Tensor:
    [stage] = variant.stages()
    [update] = stage.updates
    return update_loss(update, getattr(variant, update.losses)({PAIRED: batch}, Progress()))


def _benchmark_good_loss(variant: MultiTransformer, batch: Batch) -> Tensor:
    words = variant.embed(batch)
    source = variant.encode_context(words)
    hidden = variant.decode(words, source)[words.response_mask]
    nll = F.cross_entropy(
        variant.output.logits(hidden),
        batch["response"][words.response_mask],
        label_smoothing=SMOOTHING,
    )
    return nll + emotion_loss(variant.classifier(source[:, 0]), batch)


def _benchmark_reference_loss(variant: MultiTransformer, batch: Batch) -> Tensor:
    """Return the KL divergence from a smoothed target that is materialized for every position."""
    context, decoder_input = batch["context"], variant.shift_right(batch["response"])
    [words], [roles] = variant.embedding(context), variant.embedding(batch["context_roles"])
    [decoder_embedded] = variant.embedding(decoder_input)
    mask = (context != PADDING)[:, None, None, :]
    source = variant.encoder(words + roles + variant.positions(context.shape[1]), mask)
    hidden = variant.decoder(
        decoder_embedded + variant.positions(decoder_input.shape[1]), source, mask
    )
    predicted = F.log_softmax(variant.output.logits(hidden), dim=-1).flatten(0, 1)  # (B T, V)
    response = batch["response"].flatten()
    target = predicted.detach().clone().fill_(SMOOTHING / (predicted.shape[1] - 2))
    target.scatter_(1, response[:, None], 1 - SMOOTHING)
    target[:, PADDING] = 0
    target.index_fill_(0, (response == PADDING).nonzero().squeeze(1), 0.0)
    divergence = F.kl_div(predicted, target, reduction="sum")
    return divergence + emotion_loss(variant.classifier(source[:, 0]), batch)


def _benchmark_training_batches(columns: Columns, size: int) -> Iterator[Batch]:
    order = np.random.default_rng(0)
    while True:
        shuffled = order.permutation(len(columns["index"]))
        for start in range(0, len(shuffled) - size, size):
            rows = shuffled[start : start + size]
            tensors = {
                name: c.pad(rows) if isinstance(c, Ragged) else torch.from_numpy(c[rows])
                for name, c in columns.items()
            }
            yield Batch(tensors=tensors, samples=float(size), tokens=1.0)


def _benchmark_training_vocabulary(data: Path, words: int) -> Vocabulary:
    """Return the vocabulary of the data, truncated or padded to `words` tokens if not 0."""
    own = Vocabulary.build(pl.read_parquet(data / TOKENS), always=EMOTIONS)
    if not words:
        return own
    strange = [f"<strange {number}>" for number in range(words - len(own))]
    return Vocabulary([*own.tokens, *strange][:words])


if __name__ == "__main__":
    _run_training_benchmark(*sys.argv[1:])
