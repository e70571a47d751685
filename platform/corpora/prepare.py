"""`attune data prepare`: a source -> a folder of samples that describes itself.

    train.parquet valid.parquet test.parquet         samples (columns: corpora/samples.py)
    unpaired_contexts.parquet unpaired_responses.parquet         where the source has them
    tokens.parquet          how often each token occurs, for vocabularies
    lexicon.json            emotion words, where the source brings its own
    rejects.jsonl           rows that were set aside, with file, row and reason
    manifest.json           what the folder is: hash, counts, rejects

The source passes through in pieces, so memory does not grow with it; the folder appears whole or
not at all; and the same input gives the same bytes, wherever and whenever it is prepared.
"""

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import polars as pl
import pyarrow.parquet as pq

from attune.platform.corpora import bundled
from attune.platform.corpora.conversations import (
    LISTENER,
    SPLITS,
    UNPAIRED,
    Checker,
    divide,
    kind_of,
    whole_conversations,
)
from attune.platform.corpora.samples import SAMPLES, samples, tokenized
from attune.platform.corpora.sources import AUTO, Source
from attune.platform.errors import DataError, UsageError

STREAMS = (*SPLITS, *UNPAIRED)
MANIFEST, REJECTS, TOKENS, LEXICON = (
    "manifest.json",
    "rejects.jsonl",
    "tokens.parquet",
    "lexicon.json",
)
TOKENIZER = "words: lower case, 23 contractions expanded, nltk word_tokenize"

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
    """Prepare a source into `out`; returns the manifest.

    `any_emotion` keeps conversations whose emotion is not among the known ones, for corpora that
    are only harvested. A folder that holds something else is never touched; one that holds another
    preparation only with `overwrite`.
    """
    files = Source(source, form)
    _check_target(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        manifest = _Preparation(files, made, strict, any_emotion).run(progress)
        _publish(made, out, manifest, overwrite)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a prepared folder says of itself."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError(
            f"'{folder}' is not a prepared folder ({MANIFEST} is missing): "
            f"make one with 'attune data prepare --source bundled|PATH --out {folder}'"
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def read_samples(folder: Path, stream: str) -> pl.DataFrame:
    """One stream of a prepared folder."""
    streams = read_manifest(folder)["splits"]
    if stream not in streams:
        raise UsageError(f"'{folder}' has no stream '{stream}'; it has {', '.join(streams)}")
    return pl.read_parquet(folder / f"{stream}.parquet")


class _Preparation:
    """One pass over a source, writing as it goes."""

    def __init__(self, source: Source, folder: Path, strict: bool, any_emotion: bool):
        self.source = source
        self.folder = folder
        self.strict = strict
        self.checker = Checker(
            source.reader.EMOTION_LABELS,
            splits=STREAMS if source.reader is bundled else SPLITS,
            any_emotion=any_emotion,
        )
        self.tolerated: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first_rejects: list[str] = []
        self.conversations: Counter[str] = Counter()
        self.samples: Counter[str] = Counter()
        self.hashes = {stream: hashlib.sha256() for stream in STREAMS}
        self.tokens = TokenCounts()

    def run(self, progress: Progress) -> dict[str, Any]:
        with ExitStack() as stack:
            rejects = stack.enter_context((self.folder / REJECTS).open("wb"))
            writers: dict[str, pq.ParquetWriter] = {}
            for piece in whole_conversations(self.source.read(self.tolerated)):
                usable, bad = divide(self.checker.check(piece))
                self._set_aside(bad, rejects)
                utterances = tokenized(_with_splits(usable))
                self._count(utterances)
                for stream, rows in (
                    samples(utterances)
                    .partition_by("split", include_key=False, as_dict=True)
                    .items()
                ):
                    self._write(str(stream[0]), rows, writers, stack)
                progress(piece.height)
        if not self.samples:
            found = "; ".join(self.first_rejects) or "no listener turn has a context"
            raise DataError(f"nothing to learn from in the source: {found}")
        return self._finish()

    def _set_aside(self, bad: pl.DataFrame, file: IO[bytes]) -> None:
        if bad.is_empty():
            return
        first = [f"{r['file']}, row {r['row']}: {r['problem']}" for r in bad.head(3).to_dicts()]
        if self.strict:
            raise DataError(
                f"{first[0]}. Nothing was written: fix the row, or leave out --strict to have "
                f"such rows set aside"
            )
        self.first_rejects = (self.first_rejects + first)[:3]
        self.reasons.update(kind_of(problem) for problem in bad["problem"])
        columns = ("file", "row", "problem", "conversation_id", "turn", "role", "text", "emotion")
        file.write(bad.select(columns).write_ndjson().encode())

    def _count(self, utterances: pl.DataFrame) -> None:
        counted = utterances.group_by("split").agg(pl.col("conversation_id").n_unique())
        self.conversations.update(dict(counted.iter_rows()))
        self.tokens.add(utterances)

    def _write(
        self,
        stream: str,
        rows: pl.DataFrame,
        writers: dict[str, pq.ParquetWriter],
        stack: ExitStack,
    ) -> None:
        self.samples[stream] += rows.height
        # The hash is of the content, not of the file: another writer's bytes are the same samples.
        self.hashes[stream].update(rows.write_ndjson().encode())
        table = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
        if stream not in writers:
            path = self.folder / f"{stream}.parquet"
            writers[stream] = stack.enter_context(
                pq.ParquetWriter(path, table.schema, compression="zstd")
            )
        writers[stream].write_table(table)

    def _finish(self) -> dict[str, Any]:
        for split in SPLITS:  # a split may be empty, but its file is always there
            if not self.samples[split]:
                SAMPLES.to_frame().write_parquet(self.folder / f"{split}.parquet")
        if not self.reasons:
            (self.folder / REJECTS).unlink()
        self.tokens.frame().write_parquet(self.folder / TOKENS)
        if self.source.reader is bundled:
            bundled.lexicon().save(self.folder / LEXICON)
        whole = hashlib.sha256()
        for stream, digest in self.hashes.items():
            whole.update(f"{stream} {digest.hexdigest()}\n".encode())
        manifest = {
            "hash": whole.hexdigest(),
            "format": self.source.format,
            "files": {path.name: path.stat().st_size for path in self.source.paths},
            "tokenizer": TOKENIZER,
            "splits": {
                stream: {
                    "conversations": self.conversations[stream],
                    "samples": self.samples[stream],
                }
                for stream in STREAMS
                if stream in SPLITS or self.samples[stream]
            },
            "tolerated": dict(sorted(self.tolerated.items())),
            "rejected": {
                "rows": self.reasons.total(),
                "file": REJECTS if self.reasons else None,
                "reasons": dict(sorted(self.reasons.items())),
            },
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        return manifest


class TokenCounts:
    """How often each token occurs: in what may be learned from, and in everything.

    An utterance counts once, if it stands in a sample: its echoes in later contexts do not. What
    may be learned from is train and the unpaired text; everything adds valid, test and the
    situations, as the papers' public code does (a profile of ours, since it leaks).
    """

    def __init__(self) -> None:
        self.learnable: Counter[str] = Counter()
        self.everything: Counter[str] = Counter()

    def add(self, utterances: pl.DataFrame) -> None:
        """Count the tokens of whole, tokenised conversations."""
        answered = pl.col("turn").filter(pl.col("role") == LISTENER).max().over("conversation_id")
        used = utterances.filter(
            pl.col("split").is_in(UNPAIRED) | (pl.col("turn") <= answered).fill_null(False)
        )
        situations = utterances.filter(pl.col("turn") == 0)["situation_tokens"]
        learnable = used.filter(~pl.col("split").is_in(["valid", "test"]))["tokens"]
        self.learnable.update(_counted(learnable))
        self.everything.update(_counted(used["tokens"]))
        self.everything.update(_counted(situations))

    def frame(self) -> pl.DataFrame:
        """(token, train, everything), commonest first, ties by the alphabet."""
        return pl.DataFrame(
            {
                "token": list(self.everything),
                "train": [self.learnable[token] for token in self.everything],
                "everything": list(self.everything.values()),
            },
            schema={"token": pl.String, "train": pl.Int64, "everything": pl.Int64},
        ).sort(["train", "everything", "token"], descending=[True, True, False])


def _counted(tokens: pl.Series) -> dict[str, int]:
    split = tokens.drop_nulls().str.split(" ").explode()
    return dict(split.alias("token").value_counts().iter_rows())


def _with_splits(conversations: pl.DataFrame) -> pl.DataFrame:
    """Where a source has no splits: 80 / 10 / 10 by a hash of the id, which never changes."""
    missing = conversations.filter(pl.col("split").is_null())["conversation_id"].unique()
    drawn = {name: _drawn_split(name) for name in missing}
    return conversations.with_columns(
        split=pl.col("split").fill_null(
            pl.col("conversation_id").replace_strict(drawn, default=None, return_dtype=pl.String)
        )
    )


def _drawn_split(conversation_id: str) -> str:
    percentile = int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8]) % 100
    return "train" if percentile < 80 else "valid" if percentile < 90 else "test"


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out '{out}' is a file: name a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise UsageError(f"--out '{out}' holds something else: name a new or empty folder")


def _publish(made: Path, out: Path, manifest: dict[str, Any], overwrite: bool) -> None:
    """Put the finished folder in its place, in one step."""
    if (out / MANIFEST).is_file():
        if read_manifest(out) == manifest:
            return  # the same data lies there already, perhaps with annotations added
        if not overwrite:
            raise UsageError(
                f"--out '{out}' holds another preparation: name another folder, or replace it "
                f"with --overwrite"
            )
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        out.rename(old / out.name)
        made.rename(out)
        shutil.rmtree(old)
    else:
        made.rename(out)
    out.chmod(0o755)  # mkdtemp makes folders that only their owner may read
