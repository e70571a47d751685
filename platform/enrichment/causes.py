"""`attune annotate cause`: marks of causes for prepared data, made by a trained annotator.

Each sample's marks are made from its own context only, so nothing of later turns can leak into
what is learned from them. The streams are cut into shards that Ray tasks mark; a shard is a file of
probabilities in a folder beside the one to be made, so that what was done before an interruption
is not done again. The new folder appears whole or not at all, and its manifest says who marked it.
The probabilities are kept in it, so that what learns from the marks may choose another threshold.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from attune.models.base import Annotator
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError
from attune.platform.core.files import checksum
from attune.platform.core.settings import Threshold
from attune.platform.data.conversations import CAUSE_STREAMS
from attune.platform.data.dataset_folder import (
    OutputFolder,
    combine_hashes,
    find_existing,
    read_manifest,
    read_samples,
    serialize_rows,
    write_manifest,
)
from attune.platform.runs.model import MODEL_WEIGHTS, Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import run_file_tasks

CAUSE_THRESHOLD = 0.5
CAUSE_SHARD_ROWS = 512
TOKENS_AT_A_TIME = 8192
CAUSES_COLUMN, MARKS = "context_causes", "probability"
CAUSES_FILE = "cause_probabilities.parquet"
"""By stream, the probabilities of each sample's utterances, in the order of the samples."""

Progress = Callable[[int], None]
"""Called with the number of samples that were just done."""


@torch.no_grad()
def cause_probabilities(
    model: Model, samples: pl.DataFrame, progress: Progress = lambda _: None
) -> pl.Series:
    """For each sample, how probably each utterance of its context holds the cause."""
    variant = require_annotator(model).eval()
    by_row: dict[int, list[float]] = {}
    stream = Stream(
        model.columns(samples), size=TOKENS_AT_A_TIME, by="tokens", shuffle=False, by_context=True
    )
    for batch in stream.epoch():
        turns = (batch["turn_roles"] > 0).sum(dim=1).tolist()
        for row, marks, count in zip(
            batch["index"].tolist(), variant.marks(batch).tolist(), turns, strict=True
        ):
            by_row[row] = marks[:count]
        progress(len(batch))
    rows = [by_row[row] for row in range(samples.height)]
    return pl.Series(MARKS, rows, dtype=pl.List(pl.Float64))


def require_annotator(model: Model) -> Annotator:
    """The variant of a model, which must be one that marks causes."""
    if not isinstance(model.variant, Annotator):
        raise UsageError(f"'{model.name}' marks no causes: name a run of an annotator")
    return model.variant


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some samples of a stream, and the file for their probabilities."""

    model: str
    data: str
    stream: str
    start: int
    rows: int
    file: str


def annotate_shard(shard: Shard) -> int:
    """Write a shard's probabilities, null where a sample has no emotion; its number of samples."""
    torch.set_num_threads(1)  # a task has one core
    samples = read_samples(Path(shard.data), shard.stream).slice(shard.start, shard.rows)
    numbered = samples.with_row_index("row")
    annotatable = numbered.filter(_has_emotion_and_context())
    marks = pl.Series(MARKS, [], dtype=pl.List(pl.Float64))
    if annotatable.height:
        marks = cause_probabilities(load_model_once(Path(shard.model)), annotatable)
    probabilities = annotatable.select("row").with_columns(marks)
    aligned = numbered.select("row").join(
        probabilities, on="row", how="left", maintain_order="left"
    )
    path = Path(shard.file)
    new = path.with_suffix(".new")
    aligned.select(MARKS).write_parquet(new)
    new.replace(path)
    return samples.height


def _has_emotion_and_context() -> pl.Expr:
    return pl.col("emotion").is_not_null() & (pl.col("context").list.len() > 0)


def annotate_causes(
    run: Run,
    data: Path,
    out: Path,
    *,
    threshold: float = CAUSE_THRESHOLD,
    replace: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Make `out`: the prepared folder `data` with marks of causes; returns its manifest.

    `replace` marks anew what has marks. Nothing is done where `out` is what would be made.
    """
    if not 0 < threshold < 1:
        raise UsageError(f"--threshold: expected a probability between 0 and 1, got {threshold}")
    manifest = read_manifest(data)
    require_annotator(load_model(run.model))  # refused here, and not in a task
    maker = {
        "run": run.name,
        "run_id": run.run_id,
        "variant": run.variant,
        "weights": checksum(run.model / MODEL_WEIGHTS),
        "threshold": threshold,
        "data": manifest["hash"],
    }
    target = OutputFolder(out, overwrite=False)
    if out.resolve() == data.resolve():
        raise UsageError(f"--out '{out}' is the data itself: name another folder")
    if (existing := find_existing(out, "causes", maker)) is not None:
        return existing
    streams = [stream for stream in manifest["splits"] if stream not in CAUSE_STREAMS.values()]
    samples = {stream: read_samples(data, stream) for stream in streams}
    _check_can_annotate(data, manifest, samples, replace)
    total(sum(frame.height for frame in samples.values()))
    key = hashlib.sha256(f"{maker['weights']} {maker['data']}".encode()).hexdigest()[:12]
    shards = out.resolve().parent / f".{out.name}.marks-{key}"
    shards.mkdir(parents=True, exist_ok=True)
    files = _annotate_shards(run, data, samples, shards, progress)
    with target.temporary_folder() as staging:
        manifest = _write_annotated(data, staging, manifest, samples, files, maker)
        target.publish(staging, manifest)
    shutil.rmtree(shards)
    return manifest


def _check_can_annotate(
    data: Path, manifest: dict[str, Any], samples: dict[str, pl.DataFrame], replace: bool
) -> None:
    """Refuse what has marks already, unless told to replace them, and what cannot be marked."""
    by = manifest.get("causes")
    has = any(frame[CAUSES_COLUMN].explode().is_not_null().any() for frame in samples.values())
    if (by or has) and not replace:
        who = f"'{by['run']}' has marked them" if by else "its source brings them"
        raise UsageError(
            f"'{data}' has marks of causes already ({who}): add --replace to mark them anew"
        )
    if not any(frame.filter(_has_emotion_and_context()).height for frame in samples.values()):
        raise UsageError(f"'{data}': no sample has an emotion whose cause could be marked")


def _annotate_shards(
    run: Run, data: Path, samples: dict[str, pl.DataFrame], folder: Path, progress: Progress
) -> dict[str, list[Path]]:
    """The files of probabilities by stream; those that are not there yet are made by Ray tasks."""
    shards = {
        stream: list(_split_into_shards(run, data, stream, frame.height, folder))
        for stream, frame in samples.items()
    }
    run_file_tasks(
        annotate_shard, [one for of_stream in shards.values() for one in of_stream], progress
    )
    return {
        stream: [Path(shard.file) for shard in of_stream] for stream, of_stream in shards.items()
    }


def _split_into_shards(
    run: Run, data: Path, stream: str, count: int, folder: Path
) -> Iterator[Shard]:
    for start in range(0, count, CAUSE_SHARD_ROWS):
        yield Shard(
            model=str(run.model.resolve()),
            data=str(data.resolve()),
            stream=stream,
            start=start,
            rows=min(CAUSE_SHARD_ROWS, count - start),
            file=str(folder / f"{stream}-{start:08d}.parquet"),
        )


def _write_annotated(
    data: Path,
    folder: Path,
    manifest: dict[str, Any],
    samples: dict[str, pl.DataFrame],
    files: dict[str, list[Path]],
    maker: dict[str, Any],
) -> dict[str, Any]:
    """The folder's files with the new marks in them."""
    for name in manifest["contents"]:
        if name != CAUSES_FILE:
            shutil.copyfile(data / name, folder / name)
    digests, kept = {}, []
    for stream in manifest["splits"]:
        frame = samples[stream] if stream in samples else read_samples(data, stream)
        if files.get(stream):
            marks = pl.concat([pl.read_parquet(file) for file in files[stream]])[MARKS]
            kept.append(marks.to_frame().with_columns(stream=pl.lit(stream)))
            frame = frame.with_columns(_above_threshold(marks, maker["threshold"]))
            frame.write_parquet(folder / f"{stream}.parquet")
        if frame.height:
            digests[stream] = hashlib.sha256(serialize_rows(frame)).hexdigest()
    pl.concat(kept).write_parquet(folder / CAUSES_FILE)
    return write_manifest(folder, {**manifest, "hash": combine_hashes(digests), "causes": maker})


def _above_threshold(marks: pl.Series, threshold: float) -> pl.Series:
    return marks.list.eval(pl.element() >= threshold).alias(CAUSES_COLUMN)


def apply_cause_threshold(
    samples: pl.DataFrame, folder: Path, stream: str, threshold: Threshold
) -> pl.DataFrame:
    """Return a stream's samples with marks where the annotator's probability reaches a
    threshold."""
    if not (folder / CAUSES_FILE).exists():
        raise UsageError(
            f"{threshold}: '{folder}' has no probabilities of causes: add them with 'attune "
            f"annotate cause RUN --data DIR', or keep the marks of the data with "
            f"{threshold.setting}=0"
        )
    marks = (
        pl.scan_parquet(folder / CAUSES_FILE).filter(pl.col("stream") == stream).collect()[MARKS]
    )
    return samples.with_columns(_above_threshold(marks, threshold.value))


def cause_shares(folder: Path) -> dict[str, float]:
    """By stream, how many of the utterances that are marked hold a cause."""
    shares = {}
    for stream in read_manifest(folder)["splits"]:
        marks = read_samples(folder, stream)[CAUSES_COLUMN].explode().drop_nulls()
        if len(marks):
            shares[stream] = float(marks.sum() / len(marks))
    return shares
