"""Dataset folders: read and write their manifest and streams, and publish them atomically.

A dataset folder is what `attune data prepare` writes (its files are listed in data/prepare.py), and
what curation and enrichment derive from one. It appears complete or not at all.
"""

import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import polars as pl

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import file_checksum
from attune.platform.data.conversations import CAUSE_STREAMS, LABELLED, SPLITS, UNPAIRED
from attune.platform.data.files import ROWS_AT_A_TIME, ParquetWriter, read_parquet_chunks
from attune.platform.data.samples import extract_utterance_samples, utterance_samples
from attune.platform.data.sources import OWN_FILES, Source

STREAMS = (*SPLITS, *UNPAIRED)
ALL_STREAMS = (*STREAMS, *CAUSE_STREAMS.values(), *LABELLED.values())
MANIFEST, REJECTS = OWN_FILES
TOKENS, LEXICON = "tokens.parquet", "lexicon.json"


def read_dataset_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a dataset folder."""
    path = folder / MANIFEST
    command = f"'attune data prepare --source bundled|PATH --out {folder}'"
    if not path.is_file():
        raise UsageError(
            f"'{folder}' is not a prepared folder ({MANIFEST} is missing): create it with {command}"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"hash", "format", "splits", "contents", "rejected"} - set(manifest)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): prepare it again with {command}") from error
    if missing:
        raise DataError(f"{path} is not a manifest of Attune: '{min(missing)}' is missing")
    return manifest


def write_dataset_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest, the last file of a folder, with the checksums of the other files."""
    contents = {path.name: file_checksum(path) for path in sorted(folder.iterdir())}
    complete = {**manifest, "contents": contents}
    (folder / MANIFEST).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
    return complete


def summarize_rejects(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the number of rejected rows, the reasons, and the path of the file that lists them."""
    rejects: dict[str, Any] = manifest["rejected"]
    return {**rejects, "file": str(folder / rejects["file"]) if rejects["file"] else None}


def read_dataset_samples(folder: Path, stream: str) -> pl.DataFrame:
    """Return the samples of a stream."""
    streams = read_dataset_manifest(folder)["splits"]
    if stream not in streams:
        raise UsageError(f"'{folder}' has no stream '{stream}'; it has {', '.join(streams)}")
    path = folder / f"{stream}.parquet"
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} is missing or damaged: prepare the folder again") from error


def read_cause_samples(folder: Path, split: str) -> pl.DataFrame:
    """Return the samples of a split with an emotion and cause labels.

    They are those of the cause stream if the folder has one, else of the pairs.
    """
    stream = CAUSE_STREAMS[split]
    if stream in read_dataset_manifest(folder)["splits"]:
        return read_dataset_samples(folder, stream)
    marks = pl.col("context_causes").list.drop_nulls().list.len()
    marked = read_dataset_samples(folder, split).filter(
        pl.col("emotion").is_not_null() & (marks == pl.col("context").list.len())
    )
    if marked.is_empty():
        raise UsageError(
            f"'{folder}': no sample of {split} has cause labels: use data that have them, such as "
            f"RECCON or 'bundled', or add them with 'attune annotate cause RUN --data {folder}'"
        )
    return marked


def read_labelled_utterances(folder: Path, split: str) -> pl.DataFrame:
    """Return the labelled utterances of a split: contexts of one turn, with the label as emotion.

    They are those of the stream of single utterances if the folder has one, else of the pairs.
    """
    stream = LABELLED[split]
    if stream in read_dataset_manifest(folder)["splits"]:
        return read_dataset_samples(folder, stream)
    labelled = extract_utterance_samples(read_dataset_samples(folder, split)).filter(
        pl.col("label").is_not_null()
    )
    if labelled.is_empty():
        raise UsageError(
            f"'{folder}': no utterance of {split} has a label: use data with labels, such as "
            f"EmpatheticIntents or 'bundled', or add them with 'attune annotate emotions RUN "
            f"--data {folder}'"
        )
    return utterance_samples(labelled)


def serialize_rows(rows: pl.DataFrame) -> bytes:
    """Return the bytes that a stream's hash is computed from.

    They depend on the samples only, not on the Parquet writer. The bytes of a stream are those of
    its chunks in order.
    """
    return rows.write_ndjson().encode()


def combine_dataset_hashes(digests: Mapping[str, str]) -> str:
    """Return the hash of a folder from those of its streams."""
    nothing = hashlib.sha256().hexdigest()
    whole = hashlib.sha256()
    for stream in ALL_STREAMS:
        if stream in digests or stream in STREAMS:
            whole.update(f"{stream} {digests.get(stream, nothing)}\n".encode())
    return whole.hexdigest()


class StreamWriter:
    """A stream of a dataset folder that is written a frame at a time, with its hash and counts.

    No conversation may be spread over two frames, or it is counted twice.
    """

    def __init__(self, path: Path, schema: pl.Schema):
        self.counts = {"conversations": 0, "samples": 0}
        self._parquet = ParquetWriter(path, schema)
        self._digest = hashlib.sha256()

    def write(self, rows: pl.DataFrame) -> None:
        """Append rows."""
        self._parquet.write(rows)
        self._digest.update(serialize_rows(rows))
        self.counts["conversations"] += rows["conversation_id"].n_unique()
        self.counts["samples"] += rows.height

    @property
    def hash(self) -> str:
        """The hash of the rows so far."""
        return self._digest.hexdigest()

    def __enter__(self) -> "StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.__exit__()


def hash_stream(folder: Path, stream: str) -> str:
    """Return the hash of a stream's rows, read a chunk at a time."""
    digest = hashlib.sha256()
    for rows in read_parquet_chunks(folder / f"{stream}.parquet", ROWS_AT_A_TIME):
        digest.update(serialize_rows(rows))
    return digest.hexdigest()


def check_folder_is_not_source(out: Path, data: Path) -> None:
    """Refuse an output folder that is the input folder."""
    if out.resolve() == data.resolve():
        raise UsageError(f"--out '{out}' is the data itself: name another folder")


def find_existing_dataset(
    out: Path, key: str, provenance: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the manifest of `out` if it was derived in the same way, or None if nothing is there.

    The provenance is what the manifest has under `key`. Raise an error if `out` has other content.
    """
    if (out / MANIFEST).is_file() and (manifest := read_dataset_manifest(out)).get(
        key
    ) == provenance:
        return manifest
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"--out '{out}' exists and was made in another way: name another folder, or remove it"
        )
    return None


def publish_dataset_folder(out: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Call `write` with a temporary folder, publish the folder as `out`, and return its manifest,
    which `write` returns."""
    target = OutputFolder(out, overwrite=False)
    with target.temporary_folder() as folder:
        manifest = write(folder)
        target.publish(folder, manifest)
    return manifest


class OutputFolder:
    """The output folder of a command: it is published atomically, and other data is kept."""

    def __init__(self, out: Path, overwrite: bool):
        self.named = out
        self.out = out.resolve()  # resolved, so that a link is kept
        self.overwrite = overwrite

    def check(self, source: Source) -> None:
        """Raise an error now if the folder could not be published later."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out '{self.named}' is a file: name a folder")
        if self.out == Path.cwd():
            raise UsageError(f"--out '{self.named}' is the working directory: name another folder")
        if not self.out.is_dir() or not any(self.out.iterdir()):
            return
        there = self._read_existing_folder()
        if self.overwrite:
            others = {path.name for path in self.out.iterdir()} - {*there["contents"], MANIFEST}
            if others:
                raise UsageError(
                    f"--out '{self.named}' also holds '{min(others)}', which --overwrite would "
                    f"delete: move it away, or name another folder"
                )
        elif (there["format"], there["files"]) != (source.format, source.source_file_sizes):
            self._raise_other_dataset()

    @contextmanager
    def temporary_folder(self) -> Iterator[Path]:
        """Yield a new folder on the same disk, which is removed afterwards if not published.

        Its name is chosen before it is created, so that a signal in between leaves nothing behind.
        """
        place = self.out.parent
        while not place.exists():
            place = place.parent
        folder = place / f".{self.out.name}-{secrets.token_hex(4)}"
        try:
            try:
                folder.mkdir()
            except OSError as error:
                raise UsageError(
                    f"--out '{self.named}' cannot be created: {error.strerror}"
                ) from error
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Move the finished folder to its place."""
        if not (self.out / MANIFEST).is_file():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(self.out)
        elif self.overwrite:
            old = Path(tempfile.mkdtemp(prefix=f".{self.out.name}-old-", dir=self.out.parent))
            self.out.rename(old / self.out.name)
            folder.rename(self.out)
            shutil.rmtree(old)
        elif self._read_existing_folder() != manifest:
            self._raise_other_dataset()
        else:  # the same data; the folder may have other files, too
            for name, digest in manifest["contents"].items():
                path = self.out / name
                if not path.is_file() or file_checksum(path) != digest:
                    (folder / name).replace(path)  # repair a damaged file

    def _read_existing_folder(self) -> dict[str, Any]:
        try:
            return read_dataset_manifest(self.out)
        except (DataError, UsageError) as error:
            raise UsageError(
                f"--out '{self.named}' contains something else than prepared data: name another "
                f"folder"
            ) from error

    def _raise_other_dataset(self) -> NoReturn:
        raise UsageError(
            f"--out '{self.named}' contains other prepared data: name another folder, or replace "
            f"it with --overwrite"
        )
