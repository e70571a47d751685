"""Prepare a source: write its conversations to a dataset folder (`attune data prepare`).

    train.parquet valid.parquet test.parquet            samples (columns: data/samples.py)
    unpaired_contexts.parquet unpaired_responses.parquet   if the source has unpaired text
    cause_train.parquet cause_valid.parquet ...         if it annotates the causes of utterances
    labelled_train.parquet labelled_valid.parquet ...   if it has labelled single utterances
    tokens.parquet          token frequencies, for vocabularies
    lexicon.json            emotion words, if the source brings its own
    rejects.jsonl           rejected rows, with file, row and reason
    manifest.json           hash, format, counts, rejects and checksums

The source is read in chunks, so memory does not grow with it. The folder is published atomically.
The same input gives the same bytes on every machine.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import polars as pl
import pyarrow.parquet as pq

from attune.platform.core.disk import MEGABYTE, explain_full_disk, folder_bytes_on_disk
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.home import home
from attune.platform.data import bundled
from attune.platform.data.conversations import (
    CAUSE_STREAMS,
    IN_REJECTED_CONVERSATION,
    SPLITS,
    Checker,
    conversation_problem_kind,
    conversation_split_by_hash,
    separate_rejected_conversations,
    shorten_column,
    whole_conversations,
)
from attune.platform.data.dataset_folder import (
    ALL_STREAMS,
    LEXICON,
    MANIFEST,
    REJECTS,
    TOKENS,
    OutputFolder,
    combine_dataset_hashes,
    read_dataset_manifest,
    serialize_rows,
    write_dataset_manifest,
)
from attune.platform.data.samples import (
    SAMPLES,
    build_cause_samples,
    build_samples,
    tokenize_conversations,
)
from attune.platform.data.sources import AUTO, Source
from attune.platform.data.token_counts import TokenCounts

TOKENIZER = "words: lower case, 23 contractions expanded, nltk word_tokenize"

_REJECTED = (
    "file", "row", "problem", "conversation_id", "turn", "role", "text", "emotion", "raw",
)  # fmt: skip

Progress = Callable[[int], None]
"""Called with the number of utterances that were just done."""


def prepare(
    source: str,
    out: Path,
    *,
    form: str = AUTO,
    strict: bool = False,
    any_emotion: bool = False,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Prepare a source and write it to `out`; return the manifest.

    `any_emotion` accepts unknown emotions, for corpora that are only harvested. Other prepared data
    in `out` is only replaced with `overwrite`, and anything else never.
    """
    files = Source(source, form)
    target = OutputFolder(out, overwrite)
    target.check(files)
    with (
        target.temporary_folder() as folder,
        explain_full_disk(folder, partial(_describe_preparation_need, folder)),
    ):
        manifest = _Preparation(files, folder, strict, any_emotion).run(progress)
        target.publish(folder, manifest)
    return manifest


def _describe_preparation_need(folder: Path) -> tuple[str, str]:
    """Return what a preparation that ended on a full disk needs, and what to do."""
    return (
        f"the prepared data needs more than {folder_bytes_on_disk(folder) / MEGABYTE:,.1f} MB",
        "nothing was written; free some space or choose another --out, then prepare again",
    )


class _Preparation:
    """One pass over a source, which writes samples chunk by chunk."""

    def __init__(self, source: Source, folder: Path, strict: bool, any_emotion: bool):
        self.source = source
        self.folder = folder
        self.strict = strict
        self.checker = Checker(
            source.reader.EMOTION_LABELS,
            splits=source.reader.STREAMS,
            any_emotion=any_emotion,
        )
        self.tolerated: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first_reject = ""
        self.conversations: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()
        self.hashes: dict[str, Any] = {}
        self.tokens = TokenCounts()

    def run(self, progress: Progress) -> dict[str, Any]:
        with ExitStack() as stack:
            rejects = stack.enter_context((self.folder / REJECTS).open("wb"))
            writers: dict[str, pq.ParquetWriter] = {}
            for piece in whole_conversations(self.source.read(self.tolerated)):
                usable, bad = separate_rejected_conversations(self.checker.check(piece))
                self._write_prepared_rejects(bad, rejects)
                utterances = tokenize_conversations(_assign_prepared_splits(usable))
                self._count_prepared_utterances(utterances)
                for frame in (build_samples(utterances), build_cause_samples(utterances)):
                    parts = frame.partition_by("split", include_key=False, as_dict=True)
                    for stream, rows in parts.items():
                        self._write_prepared_samples(str(stream[0]), rows, writers, stack)
                progress(piece.height)
        if not self.samples:
            reason = self.first_reject or "no listener turn has a context"
            raise DataError(f"the source gives no sample: {reason}")
        return self._finish_prepared_folder()

    def _write_prepared_rejects(self, bad: pl.DataFrame, file: IO[bytes]) -> None:
        if bad.is_empty():
            return
        # A row of a file may contain several utterances, but is rejected once, for its own reason.
        follows = pl.col("problem").str.starts_with(IN_REJECTED_CONVERSATION)
        own = bad.sort(follows, maintain_order=True).unique(["file", "row"], maintain_order=True)
        first = "{file}, row {row}: {problem}".format(**own.row(0, named=True))
        if self.strict:
            raise DataError(
                f"{first}\nNothing was written; without --strict such rows are rejected"
            )
        self.first_reject = self.first_reject or first
        self.reasons.update(conversation_problem_kind(problem) for problem in own["problem"])
        texts = [shorten_column(name) for name in ("problem", "conversation_id", "text", "emotion")]
        rejects = own.sort("file", "row").select(_REJECTED).with_columns(texts)
        file.write(rejects.write_ndjson().encode())

    def _count_prepared_utterances(self, utterances: pl.DataFrame) -> None:
        counted = utterances.group_by("split").agg(pl.col("conversation_id").n_unique())
        self.conversations.update(dict(counted.iter_rows()))
        self.tokens.add(utterances)

    def _write_prepared_samples(
        self,
        stream: str,
        rows: pl.DataFrame,
        writers: dict[str, pq.ParquetWriter],
        stack: ExitStack,
    ) -> None:
        self.samples[stream] += rows.height
        if stream in CAUSE_STREAMS.values():
            self.conversations[stream] += rows["conversation_id"].n_unique()
        self.hashes.setdefault(stream, hashlib.sha256()).update(serialize_rows(rows))
        table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
        if stream not in writers:
            path = self.folder / f"{stream}.parquet"
            writers[stream] = stack.enter_context(
                pq.ParquetWriter(path, table.schema, compression="zstd")
            )
        writers[stream].write_table(table)

    def _finish_prepared_folder(self) -> dict[str, Any]:
        for split in SPLITS:  # a split may be empty, but its file is always there
            if not self.samples[split]:
                SAMPLES.to_frame().write_parquet(self.folder / f"{split}.parquet")
        if not self.reasons:
            (self.folder / REJECTS).unlink()
        self.tokens.frame().write_parquet(self.folder / TOKENS)
        if self.source.reader is bundled:
            bundled.lexicon().save(self.folder / LEXICON)
        digests = {stream: digest.hexdigest() for stream, digest in self.hashes.items()}
        manifest = {
            "hash": combine_dataset_hashes(digests),
            "format": self.source.format,
            "files": self.source.source_file_sizes,
            "tokenizer": TOKENIZER,
            "splits": {
                stream: {
                    "conversations": self.conversations[stream],
                    "samples": self.samples[stream],
                }
                for stream in ALL_STREAMS
                if stream in SPLITS or self.samples[stream]
            },
            "tolerated": dict(sorted(self.tolerated.items())),
            "rejected": {
                "rows": self.reasons.total(),
                "file": REJECTS if self.reasons else None,
                "reasons": dict(sorted(self.reasons.items())),
            },
        }
        return write_dataset_manifest(self.folder, manifest)


def _assign_prepared_splits(conversations: pl.DataFrame) -> pl.DataFrame:
    """Return conversations with splits; missing ones depend on a hash of the id."""
    missing = conversations.filter(pl.col("split").is_null())["conversation_id"].unique()
    drawn = {name: conversation_split_by_hash(name) for name in missing}
    return conversations.with_columns(
        split=pl.col("split").fill_null(
            pl.col("conversation_id").replace_strict(drawn, default=None, return_dtype=pl.String)
        )
    )


def find_prepared_data(text: str) -> Path:
    """Return the folder that `--data` names; `bundled` is prepared when it is first used."""
    if text == bundled.NAME:
        folder = home() / "data" / bundled.NAME
        if not (folder / MANIFEST).is_file():
            prepare(bundled.NAME, folder)
        return folder
    folder = Path(text).absolute()
    manifest = read_dataset_manifest(folder)
    if SPLITS[0] not in manifest["splits"]:
        raise UsageError(
            f"'{folder}' contains no pairs ({manifest['format']}): name a folder from 'attune data "
            f"prepare'; to train on a harvest, add --set harvest=DIR"
        )
    return folder
