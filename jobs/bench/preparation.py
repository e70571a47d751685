"""Preparation: from files to samples, and from samples to batches."""

import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from attune.jobs.tables import table
from attune.platform.batching.encoding import Ragged, encode
from attune.platform.batching.streams import Stream
from attune.platform.data.dataset_folder import TOKENS, read_dataset_samples
from attune.platform.data.prepare import prepare
from attune.platform.data.sources import Source
from attune.platform.text.tokenizing import CONTRACTIONS, nltk_tokenize, tokenize
from attune.platform.text.vocabulary import Vocabulary

REFERENCE_SAMPLES = 2000
BATCH = 16
GROWTH = (1, 2, 4)
SEQUENCES = ("context", "response")


def prepare_benchmark_data(source: str, folder: Path, report: dict[str, Any]) -> Path:
    """Prepare the data of all parts, add the time it takes to the report, and return its folder."""
    data = folder / "data"
    report["prepare_seconds"], _ = time_benchmark_call(lambda: prepare(source, data))
    return data


def measure_preparation(source: str, data: Path, folder: Path) -> dict[str, Any]:
    """Return the speed of tokenizing and batching, and how preparation scales with the corpus."""
    samples = read_dataset_samples(data, "train")
    vocabulary = Vocabulary.build(pl.read_parquet(data / TOKENS))
    return {
        **_measure_tokenizing_preparation(samples),
        **_measure_batch_preparation(samples, vocabulary),
        "growth": _measure_preparation_growth(source, folder),
    }


def _measure_tokenizing_preparation(samples: pl.DataFrame) -> dict[str, float]:
    """Compare tokenizing distinct utterances once with nltk on each utterance of each prefix."""
    some = samples.head(REFERENCE_SAMPLES)
    texts = some.select(pl.col("context").list.concat(pl.concat_list("response"))).to_series()

    def prepare_reference_tokens() -> list[list[str]]:
        return [[" ".join(_prepare_papers_tokens(text)) for text in prefix] for prefix in texts]

    def prepare_our_tokens() -> list[list[str]]:
        tokens = tokenize(texts.explode())
        return pl.Series(tokens).to_list()

    tokenize(pl.Series(["Warm up. It's done."]))
    reference_seconds, theirs = time_benchmark_call(prepare_reference_tokens)
    our_seconds, our_tokens = time_benchmark_call(prepare_our_tokens)
    assert our_tokens == [tokens for prefix in theirs for tokens in prefix], "tokens differ"
    return {
        "tokenize_samples_per_second": some.height / our_seconds,
        "tokenize_reference_samples_per_second": some.height / reference_seconds,
        "tokenize_ratio": reference_seconds / our_seconds,
    }


def _prepare_papers_tokens(text: str) -> list[str]:
    lowered = text.lower()
    for short, long in CONTRACTIONS.items():
        lowered = lowered.replace(short, long)
    return nltk_tokenize(lowered)


def _measure_batch_preparation(samples: pl.DataFrame, vocabulary: Vocabulary) -> dict[str, float]:
    """Compare bucketed, prefetched batches with randomly ordered batches of a DataLoader."""
    columns = encode(samples, vocabulary)
    rows = [
        {name: c.pad(np.array([row]))[0] for name, c in columns.items() if isinstance(c, Ragged)}
        for row in range(samples.height)
    ]

    def collate_prepared_batch(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad([row[name] for row in batch], batch_first=True) for name in batch[0]}

    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        collate_fn=collate_prepared_batch,
        generator=torch.Generator().manual_seed(0),
    )
    reference_seconds, reference_shares = time_benchmark_call(
        lambda: _benchmark_unpadded_shares(loader)
    )
    stream = Stream(columns, size=BATCH)
    our_seconds, our_shares = time_benchmark_call(
        lambda: _benchmark_unpadded_shares(stream.epoch())
    )
    return {
        "epoch_of_batches_seconds": our_seconds,
        "epoch_of_batches_ratio": reference_seconds / our_seconds,
        "real_tokens": our_shares,
        "real_tokens_of_random_batches": reference_shares,
    }


def _benchmark_unpadded_shares(batches: Any) -> dict[str, float]:
    """Return the share of positions that are not padding, in contexts and in responses."""
    real: Counter[str] = Counter()
    padded: Counter[str] = Counter()
    for batch in batches:
        for name in SEQUENCES:
            real[name] += int((batch[name] != 0).sum())
            padded[name] += batch[name].numel()
    return {name: real[name] / padded[name] for name in SEQUENCES}


def _measure_preparation_growth(source: str, folder: Path) -> list[dict[str, float]]:
    """Return time and memory for 1, 2 and 4 copies of the corpus, each in its own process."""
    conversations = [
        {
            "id": name,
            "emotion": emotion,
            "utterances": [{"role": r, "text": t} for r, t in zip(roles, texts, strict=True)],
        }
        for name, emotion, roles, texts in pl.concat(Source(source).read(Counter()))
        .group_by("conversation_id", maintain_order=True)
        .agg(pl.col("emotion").first(), "role", "text")
        .iter_rows()
    ]
    grown = []
    for times in GROWTH:
        path = folder / f"{times}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for copy in range(times):
                for conversation in conversations:
                    renamed = {**conversation, "id": f"{conversation['id']} {copy}"}
                    file.write(json.dumps(renamed) + "\n")
        grown.append(
            {"times": times, **_prepare_benchmark_in_subprocess(path, folder / str(times))}
        )
    return grown


def _prepare_benchmark_in_subprocess(source: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, str(source), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _prepare_benchmark_once(source: str, out: str) -> None:
    started = time.perf_counter()
    prepare(source, Path(out))
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_memory_mb": memory}))


def time_benchmark_call(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def print_preparation_speed(screen: Console, measurements: dict[str, Any]) -> None:
    """Print a table of the speeds, and how preparation scales with the corpus."""
    names = ("Attune", "reference", "ratio")
    rendered = table("\npreparing", "", *names, numbers=names)
    rendered.add_row(
        "tokenizing, samples/s",
        f"{measurements['tokenize_samples_per_second']:,.0f}",
        f"{measurements['tokenize_reference_samples_per_second']:,.0f}",
        f"{measurements['tokenize_ratio']:.1f}",
    )
    seconds, ratio = (
        measurements["epoch_of_batches_seconds"],
        measurements["epoch_of_batches_ratio"],
    )
    rendered.add_row(
        "an epoch of batches, s", f"{seconds:.2f}", f"{seconds * ratio:.2f}", f"{ratio:.1f}"
    )
    for name in SEQUENCES:
        ours = measurements["real_tokens"][name]
        theirs = measurements["real_tokens_of_random_batches"][name]
        rendered.add_row(
            f"real tokens of {name}s", f"{ours:.1%}", f"{theirs:.1%}", f"{ours / theirs:.2f}"
        )
    screen.print(rendered)
    for row in measurements["growth"]:
        screen.print(
            f"{row['times']} x the corpus prepared: {row['seconds']:.1f} s, "
            f"peak memory {row['peak_memory_mb']:,.0f} MB"
        )


if __name__ == "__main__":
    _prepare_benchmark_once(*sys.argv[1:])
