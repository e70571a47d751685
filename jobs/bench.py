"""`make bench`: how fast, as ratios of two things run side by side.

A time by itself means nothing on a shared machine, so each figure of ours stands beside that of a
straightforward reference in the style of the papers' public code, on the same samples, in the same
run. `make bench SOURCE=PATH` takes a corpus of your own instead of the bundled one.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.platform.batches import Ragged, Stream, encode
from attune.platform.corpora.prepare import TOKENS, prepare, read_samples
from attune.platform.corpora.sources import BUNDLED, Source
from attune.platform.text.tokenizing import CONTRACTIONS, nltk_tokenize, tokenize
from attune.platform.text.vocabulary import Vocabulary

REFERENCE_SAMPLES = 2000
BATCH = 16
GROWTH = (1, 2, 4)


def main(
    source: Annotated[str, typer.Option(help="What to prepare: bundled, or a path.")] = BUNDLED,
    as_json: Json = False,
) -> None:
    """Measure preparation and batching against straightforward references."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        started = time.perf_counter()
        prepare(source, data)
        seconds = time.perf_counter() - started
        samples = read_samples(data, "train")
        vocabulary = Vocabulary.build(pl.read_parquet(data / TOKENS))
        report: dict[str, Any] = {
            "source": "bundled" if source == BUNDLED else Path(source).name,
            "prepare_seconds": seconds,
            **_tokenizing(samples),
            **_batching(samples, vocabulary),
            "growth": _growth(source, Path(folder)),
        }
    _show(report, as_json)


def _tokenizing(samples: pl.DataFrame) -> dict[str, float]:
    """Ours, each distinct utterance once, against nltk on every utterance of every prefix."""
    some = samples.head(REFERENCE_SAMPLES)
    texts = some.select(pl.col("context").list.concat(pl.concat_list("response"))).to_series()

    def reference() -> list[list[str]]:
        return [[" ".join(_papers_tokens(text)) for text in prefix] for prefix in texts]

    def ours() -> list[list[str]]:
        tokens = tokenize(texts.explode())
        return pl.Series(tokens).to_list()

    tokenize(pl.Series(["Warm up. It's done."]))
    reference_seconds, theirs = _timed(reference)
    our_seconds, made = _timed(ours)
    assert made == [tokens for prefix in theirs for tokens in prefix], "the same tokens"
    return {
        "tokenize_samples_per_second": some.height / our_seconds,
        "tokenize_reference_samples_per_second": some.height / reference_seconds,
        "tokenize_ratio": reference_seconds / our_seconds,
    }


def _papers_tokens(text: str) -> list[str]:
    lowered = text.lower()
    for short, long in CONTRACTIONS.items():
        lowered = lowered.replace(short, long)
    return nltk_tokenize(lowered)


def _batching(samples: pl.DataFrame, vocabulary: Vocabulary) -> dict[str, float]:
    """Bucketed and prefetched, against random batches of padded lists from a DataLoader."""
    columns = encode(samples, vocabulary)
    rows = [
        {name: c.padded(np.array([row]))[0] for name, c in columns.items() if isinstance(c, Ragged)}
        for row in range(samples.height)
    ]

    def collate(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad([row[name] for row in batch], batch_first=True) for name in batch[0]}

    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=BATCH,
        shuffle=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),
    )
    reference_seconds, reference_share = _timed(lambda: _real_share(b["response"] for b in loader))
    stream = Stream(columns, size=BATCH)
    our_seconds, our_share = _timed(lambda: _real_share(b["response"] for b in stream.epoch()))
    return {
        "epoch_of_batches_seconds": our_seconds,
        "epoch_of_batches_ratio": reference_seconds / our_seconds,
        "real_target_tokens": our_share,
        "real_target_tokens_of_random_batches": reference_share,
        "target_places_ratio": our_share / reference_share,
    }


def _real_share(responses: Any) -> float:
    real = padded = 0
    for response in responses:
        real, padded = real + int((response != 0).sum()), padded + response.numel()
    return real / padded


def _growth(source: str, folder: Path) -> list[dict[str, float]]:
    """Time and memory of preparing the corpus once, twice, four times over, each in a process."""
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
        grown.append({"times": times, **_prepared_in_a_process(path, folder / str(times))})
    return grown


def _prepared_in_a_process(source: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "attune.jobs.bench", "one", str(source), str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _prepare_one(source: str, out: str) -> None:
    started = time.perf_counter()
    prepare(source, Path(out))
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_memory_mb": memory}))


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def _show(report: dict[str, Any], as_json: bool) -> None:
    screen = console(as_json)
    table = Table(
        box=None, pad_edge=False, title=f"source: {report['source']}", title_justify="left"
    )
    table.add_column("")
    table.add_column("Attune", justify="right")
    table.add_column("reference", justify="right")
    table.add_column("ratio", justify="right")
    table.add_row(
        "tokenising, samples/s",
        f"{report['tokenize_samples_per_second']:,.0f}",
        f"{report['tokenize_reference_samples_per_second']:,.0f}",
        f"{report['tokenize_ratio']:.1f}",
    )
    table.add_row(
        "an epoch of batches, s",
        f"{report['epoch_of_batches_seconds']:.2f}",
        f"{report['epoch_of_batches_seconds'] * report['epoch_of_batches_ratio']:.2f}",
        f"{report['epoch_of_batches_ratio']:.1f}",
    )
    table.add_row(
        "real target tokens",
        f"{report['real_target_tokens']:.1%}",
        f"{report['real_target_tokens_of_random_batches']:.1%}",
        f"{report['target_places_ratio']:.2f}",
    )
    screen.print(table)
    screen.print(f"preparing everything: {report['prepare_seconds']:.1f} s")
    for row in report["growth"]:
        screen.print(
            f"  {row['times']} x the corpus: {row['seconds']:.1f} s, "
            f"at most {row['peak_memory_mb']:,.0f} MB"
        )
    if as_json:
        print_json(report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        _prepare_one(*sys.argv[2:])
    else:
        typer.run(main)
