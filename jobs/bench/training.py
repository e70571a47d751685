"""Training: `attune train` against three loops in plain torch, on the same model and samples.

plain       our model, batches and loss, without Ray, DeepSpeed, MLflow
good        bucketed batches, torch's own smoothed cross-entropy on the real tokens, fused Adam
reference   as the papers' code does it: batches in random order, padded to the longest, the
            smoothed loss over the logits of every place, pads too, Adam weight by weight

They take turns, each in a process of its own, and the median of the turns counts.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from attune.jobs.tables import table
from attune.models.base import PAIRED, Batch, Progress
from attune.models.multitask import MultiTransformer, emotion_loss
from attune.platform import memory, runs
from attune.platform.batches import PADDING, Columns, Ragged, Stream, encode
from attune.platform.corpora.labels import EMOTIONS
from attune.platform.corpora.prepare import TOKENS, read_samples
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.training.loop import total_loss
from attune.platform.training.metrics_file import read_metrics
from attune.platform.training.settings import configure

VARIANT, PRESET = "multi-trs", "paper"
SMOOTHING = 0.1
SETTINGS = {"label_smoothing": SMOOTHING}
ROUNDS = 3
WARM_UP = 20
STEPS = {"attune train": 400, "plain": 400, "good": 120, "reference": 60}
FEWER_STEPS = 160
"""Of the plain loop, where it is compared with itself."""
GROWING_DATA, GROWING_WORDS = (1, 2, 4), (8_000, 16_000, 32_000)
SYSTEMS: dict[str, dict[str, float]] = {
    VARIANT: {},
    "moel": {"true_emotion_decay": 0},  # from the first step as many listeners as in the end
    "mime": {},
}
"""What a sample costs in the plain loop is compared between these."""

Step = Callable[[Any, Batch], Tensor]


def measure(data: Path, folder: Path) -> dict[str, Any]:
    """Samples a second of each, their ratios, and how cost grows with data and vocabulary."""
    rates: dict[str, list[float]] = {name: [] for name in STEPS}
    peaks: dict[str, float] = {}
    for turn in range(ROUNDS):
        for name, steps in STEPS.items():
            found = (
                _through_the_command(data, folder / f"home-{turn}", steps)
                if name == "attune train"
                else _in_a_process(name, data, steps)
            )
            rates[name].append(found["samples_per_second"])
            peaks[name] = found["peak_memory_mb"]
    systems: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(ROUNDS):
        for name, found_rates in systems.items():
            found = _in_a_process("plain", data, FEWER_STEPS, variant=name)
            found_rates.append(found["samples_per_second"])
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ours = middle["attune train"]
    return {
        "samples_per_second": middle,
        "all_turns": rates,
        "peak_memory_mb": peaks,
        "ratio_to_plain": ours / middle["plain"],
        "ratio_to_reference": ours / middle["reference"],
        "good_ratio_to_reference": middle["good"] / middle["reference"],
        "cost_of_a_sample": {
            name: statistics.median(systems[VARIANT]) / statistics.median(values)
            for name, values in systems.items()
        },
        "growth": {
            "data": {
                times: _in_a_process("plain", data, FEWER_STEPS, times=times)
                for times in GROWING_DATA
            },
            "vocabulary": {
                words: _in_a_process("plain", data, FEWER_STEPS, words=words)
                for words in GROWING_WORDS
            },
        },
    }


def show(screen: Console, found: dict[str, Any]) -> None:
    """As people read it."""
    made = table(
        f"\ntraining {VARIANT} at preset {PRESET}, median of {ROUNDS} turns",
        "", "samples/s", "of the reference", "peak MB",
        numbers=("samples/s", "of the reference", "peak MB"),
    )  # fmt: skip
    rates = found["samples_per_second"]
    for name, rate in rates.items():
        ratio, peak = rate / rates["reference"], found["peak_memory_mb"][name]
        made.add_row(name, f"{rate:.1f}", f"{ratio:.2f}", f"{peak:,.0f}")
    screen.print(made)
    screen.print(f"attune train runs at {found['ratio_to_plain']:.2f} of the plain loop")
    costs = (f"{name} {cost:.2f}" for name, cost in found["cost_of_a_sample"].items())
    screen.print(f"a training sample costs, as a multiple of {VARIANT}'s: {', '.join(costs)}")
    for kind, grown in found["growth"].items():
        each = (f"{n:,}: {1000 / g['samples_per_second']:.2f}" for n, g in grown.items())
        screen.print(f"milliseconds a sample by {kind}: {', '.join(each)}")


def _through_the_command(data: Path, home: Path, steps: int) -> dict[str, float]:
    """What a user would type; the rate is that of the steps between two logged times."""
    command = [
        *(sys.executable, "-m", "attune.jobs.cli", "train", VARIANT, "--preset", PRESET),
        *("--data", str(data), "--max-steps", str(steps), "--name", "bench", "--json"),
        *("--set", "evaluate_every=1000000", "--set", "track_checkpoint=false"),
        *(part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")),
    ]
    environment = {**os.environ, "ATTUNE_HOME": str(home)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    run = Path(json.loads(done.stdout.splitlines()[-1])["checkpoint"]).parent
    logged = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line["metrics"]]
    first = next(line for line in logged if line["step"] >= WARM_UP)
    last = logged[-1]
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    samples = record["training"]["batch_size"] * (last["step"] - first["step"])
    return {
        "samples_per_second": 1000 * samples / (last["time"] - first["time"]),
        "peak_memory_mb": record["result"]["peak_memory_mb"],
    }


def _in_a_process(
    kind: str, data: Path, steps: int, *, times: int = 1, words: int = 0, variant: str = VARIANT
) -> Any:
    options = (kind, variant, str(data), str(steps), str(times), str(words))
    command = [sys.executable, "-m", __name__, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _loop(kind: str, name: str, data: str, steps: str, times: str, words: str) -> None:
    """One of the plain loops; prints its rate and the most memory it took."""
    if kind == "plain":
        memory.keep_freed()
    vocabulary = _vocabulary(Path(data), int(words))
    samples = pl.concat([read_samples(Path(data), "train")] * int(times))
    columns = encode(samples, vocabulary, emotions=EMOTIONS)
    config, training = configure(name, PRESET, {**SETTINGS, **SYSTEMS[name]})
    variant = runs.build(name, config, vocabulary, EMOTIONS).variant.train()
    torch.manual_seed(0)
    if kind == "reference":
        optimizer = torch.optim.Adam(variant.parameters(), lr=1e-4, foreach=False, fused=False)
        batches = _at_random(columns, training.batch_size)
    else:
        optimizer = torch.optim.Adam(variant.parameters(), lr=1e-4, fused=True)
        batches = (loaded.batch for loaded in Stream(columns, size=training.batch_size).batches())
    losses: dict[str, Step] = {
        "plain": _our_loss, "good": _good_loss, "reference": _papers_loss
    }  # fmt: skip
    loss = losses[kind]
    seen = 0
    for step, batch in zip(range(int(steps)), batches, strict=False):
        if step == WARM_UP:
            started, seen = time.perf_counter(), 0
        optimizer.zero_grad()
        loss(variant, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen += len(batch)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"samples_per_second": seen / seconds, "peak_memory_mb": peak}))


def _our_loss(variant: Any, batch: Batch) -> Tensor:
    [stage] = variant.stages()
    [update] = stage.updates
    return total_loss(update, getattr(variant, update.losses)({PAIRED: batch}, Progress()))


def _good_loss(variant: MultiTransformer, batch: Batch) -> Tensor:
    words = variant.embedded(batch)
    source = variant.read(words)
    hidden = variant.decoded(words, source)[words.real]
    nll = F.cross_entropy(
        variant.output.logits(hidden), batch["response"][words.real], label_smoothing=SMOOTHING
    )
    return nll + emotion_loss(variant.classifier(source[:, 0]), batch)


def _papers_loss(variant: MultiTransformer, batch: Batch) -> Tensor:
    """Kullback-Leibler divergence from a smoothed target that is written out for every place."""
    context, given = batch["context"], variant.given(batch["response"])
    [words], [roles] = variant.embedding(context), variant.embedding(batch["context_roles"])
    [said] = variant.embedding(given)
    mask = (context != PADDING)[:, None, None, :]
    source = variant.encoder(words + roles + variant.positions(context.shape[1]), mask)
    hidden = variant.decoder(said + variant.positions(given.shape[1]), source, mask)
    predicted = F.log_softmax(variant.output.logits(hidden), dim=-1).flatten(0, 1)  # (B T, V)
    response = batch["response"].flatten()
    target = predicted.detach().clone().fill_(SMOOTHING / (predicted.shape[1] - 2))
    target.scatter_(1, response[:, None], 1 - SMOOTHING)
    target[:, PADDING] = 0
    target.index_fill_(0, (response == PADDING).nonzero().squeeze(1), 0.0)
    divergence = F.kl_div(predicted, target, reduction="sum")
    return divergence + emotion_loss(variant.classifier(source[:, 0]), batch)


def _at_random(columns: Columns, size: int) -> Iterator[Batch]:
    order = np.random.default_rng(0)
    while True:
        shuffled = order.permutation(len(columns["index"]))
        for start in range(0, len(shuffled) - size, size):
            rows = shuffled[start : start + size]
            tensors = {
                name: c.padded(rows) if isinstance(c, Ragged) else torch.from_numpy(c[rows])
                for name, c in columns.items()
            }
            yield Batch(tensors=tensors, samples=float(size), tokens=1.0)


def _vocabulary(data: Path, words: int) -> Vocabulary:
    """The data's own, or one of as many tokens as asked for, cut or filled up with strange ones."""
    own = Vocabulary.build(pl.read_parquet(data / TOKENS), always=EMOTIONS)
    if not words:
        return own
    strange = [f"<strange {number}>" for number in range(words - len(own))]
    return Vocabulary([*own.tokens, *strange][:words])


if __name__ == "__main__":
    _loop(*sys.argv[1:])
