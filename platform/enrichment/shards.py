"""Shards: parts of the streams of dataset folders that Ray tasks process with a trained model.

Annotating causes, labelling utterances and harvesting texts all work in three steps, each in
constant memory: cut the streams into shards, run one task per shard, which writes a Parquet file,
and join these files in the order of the shards.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.core.files import file_checksum, write_atomically
from attune.platform.data.dataset_folder import (
    StreamWriter,
    combine_dataset_hashes,
    hash_stream,
    read_dataset_manifest,
    write_dataset_manifest,
)
from attune.platform.data.files import ParquetWriter, read_parquet_rows
from attune.platform.data.samples import SAMPLES
from attune.platform.runs.model import MODEL_WEIGHTS
from attune.platform.runs.record import Run


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Consecutive samples of a stream, and the file that a task writes for them."""

    model: str
    """The folder of the model that processes it."""
    samples: str
    """The Parquet file of the stream."""
    stream: str
    start: int
    rows: int
    file: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the task."""

    def read(self) -> pl.DataFrame:
        """Return the samples."""
        return read_parquet_rows(Path(self.samples), self.start, self.rows)

    def write(self, results: pl.DataFrame) -> int:
        """Write the results of the task and return the number of samples that were processed."""
        with write_atomically(Path(self.file)) as new:
            results.write_parquet(new)
        return self.rows


def cut_into_shards(
    run: Run,
    data: Path,
    stream: str,
    sizes: Iterable[int],
    folder: Path,
    *,
    prefix: str = "",
    options: Mapping[str, Any] | None = None,
) -> list[Shard]:
    """Cut a stream of a dataset folder into shards of these sizes, whose files are in `folder`."""
    shards: list[Shard] = []
    start = 0
    for rows in sizes:
        shards.append(
            Shard(
                model=str(run.model.resolve()),
                samples=str((data / f"{stream}.parquet").resolve()),
                stream=stream,
                start=start,
                rows=rows,
                file=str(folder / f"{prefix}{stream}-{start:010d}.parquet"),
                options=options or {},
            )
        )
        start += rows
    return shards


def equal_shard_sizes(count: int, size: int) -> Iterator[int]:
    """Yield the sizes of shards with `size` rows each; the last one has the remaining rows."""
    for start in range(0, count, size):
        yield min(size, count - start)


def read_shard_results(shards: Iterable[Shard]) -> Iterator[tuple[Shard, pl.DataFrame]]:
    """Yield each shard with the results of its task."""
    for shard in shards:
        yield shard, pl.read_parquet(shard.file)


def write_folder_from_shards(
    data: Path,
    shards: Mapping[str, Sequence[Shard]],
    join: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame],
    results: tuple[str, pl.Schema],
    record: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Write a copy of a dataset folder with the results of tasks; return its manifest.

    `join` adds results to the samples of a shard. `results` names a file that keeps all results,
    with its schema, and `record` is added to the manifest. Streams without shards are copied.
    """
    manifest = read_dataset_manifest(data)
    results_file, schema = results
    written = {results_file, *(f"{stream}.parquet" for stream in shards)}
    for name in set(manifest["contents"]) - written:
        shutil.copyfile(data / name, folder / name)
    copied = [stream for stream in manifest["splits"] if stream not in shards]
    hashes = {stream: hash_stream(data, stream) for stream in copied}
    with ParquetWriter(folder / results_file, schema) as results_writer:
        for stream, parts in shards.items():
            with StreamWriter(folder / f"{stream}.parquet", SAMPLES) as writer:
                for shard, rows in read_shard_results(parts):
                    results_writer.write(rows)
                    writer.write(join(shard.read(), rows))
            hashes[stream] = writer.hash
    return write_dataset_manifest(
        folder, {**manifest, "hash": combine_dataset_hashes(hashes), **record}
    )


def describe_shard_model(run: Run) -> dict[str, Any]:
    """Return what a manifest records of the run whose model enriched the data."""
    return {
        "run": run.name,
        "run_id": run.run_id,
        "variant": run.variant,
        "weights": file_checksum(run.model / MODEL_WEIGHTS),
    }
