"""`attune data prepare`: a source -> a folder of samples that describes itself.

    train.parquet valid.parquet test.parquet         samples (columns: data/samples.py)
    unpaired_contexts.parquet unpaired_responses.parquet         where the source has them
    felt_train.parquet felt_valid.parquet felt_test.parquet      where it tells causes by utterance
    labelled_train.parquet ...                                   where it labels utterances alone
    tokens.parquet          how often each token occurs, for vocabularies
    lexicon.json            emotion words, where the source brings its own
    rejects.jsonl           rows that were set aside, with file, row and reason
    manifest.json           what the folder is: hash, counts, rejects

The source passes through in pieces, so memory does not grow with it; the folder appears whole or
not at all; and the same input gives the same bytes, wherever and whenever it is prepared.
"""

import hashlib
import json
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import polars as pl
import pyarrow.parquet as pq

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import checksum
from attune.platform.core.home import home
from attune.platform.data import bundled
from attune.platform.data.conversations import (
    FELT,
    LABELLED,
    LISTENER,
    SPLITS,
    SPOILT,
    UNPAIRED,
    Checker,
    divide,
    kind_of,
    split_by_hash,
    whole_conversations,
)
from attune.platform.data.readers import empathetic_intents
from attune.platform.data.samples import SAMPLES, alone, felt, samples, tokenized, utterances
from attune.platform.data.sources import AUTO, OWN_FILES, Source

STREAMS = (*SPLITS, *UNPAIRED)
ALL_STREAMS = (*STREAMS, *FELT.values(), *LABELLED.values())
_STREAMS_OF = {bundled: STREAMS, empathetic_intents: tuple(LABELLED.values())}
"""By reader, what it may say that a conversation belongs to; the others only know of splits."""
MANIFEST, REJECTS = OWN_FILES
TOKENS, LEXICON = "tokens.parquet", "lexicon.json"
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
    """Prepare a source into `out`; returns the manifest.

    `any_emotion` keeps conversations whose emotion is not among the known ones, for corpora that
    are only harvested. A folder that holds something else is never touched; one that holds another
    preparation only with `overwrite`.
    """
    files = Source(source, form)
    target = Target(out, overwrite)
    target.check(files)
    with target.beside() as made:
        manifest = _Preparation(files, made, strict, any_emotion).run(progress)
        target.publish(made, manifest)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a prepared folder says of itself."""
    path = folder / MANIFEST
    again = f"'attune data prepare --source bundled|PATH --out {folder}'"
    if not path.is_file():
        raise UsageError(
            f"'{folder}' is not a prepared folder ({MANIFEST} is missing): make one with {again}"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"hash", "format", "splits", "contents", "rejected"} - set(manifest)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): prepare it anew with {again}") from error
    if missing:
        raise DataError(f"{path} is not Attune's (it lacks '{min(missing)}')")
    return manifest


def rejected(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """How many rows of files were set aside, why, and where they are listed."""
    found: dict[str, Any] = manifest["rejected"]
    return {**found, "file": str(folder / found["file"]) if found["file"] else None}


def read_samples(folder: Path, stream: str) -> pl.DataFrame:
    """One stream of a prepared folder."""
    streams = read_manifest(folder)["splits"]
    if stream not in streams:
        raise UsageError(f"'{folder}' has no stream '{stream}'; it has {', '.join(streams)}")
    path = folder / f"{stream}.parquet"
    try:
        return pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} is missing or damaged: prepare the folder anew") from error


def read_marked(folder: Path, split: str) -> pl.DataFrame:
    """The samples of a split whose emotion is known, and which utterances hold its cause.

    They are the felt utterances where the folder has such, else the paired samples.
    """
    stream = FELT[split]
    if stream in read_manifest(folder)["splits"]:
        return read_samples(folder, stream)
    marks = pl.col("context_causes").list.drop_nulls().list.len()
    marked = read_samples(folder, split).filter(
        pl.col("emotion").is_not_null() & (marks == pl.col("context").list.len())
    )
    if marked.is_empty():
        raise UsageError(
            f"'{folder}': no sample of {split} says which utterances hold the cause of its emotion:"
            f" use data that do, such as RECCON or 'bundled', or add marks with 'attune annotate "
            f"cause RUN --data {folder}'"
        )
    return marked


def read_labelled(folder: Path, split: str) -> pl.DataFrame:
    """The labelled utterances of a split, each a context of one turn whose emotion is the label.

    They are those that stand alone where the folder has such, else those of the paired samples.
    """
    stream = LABELLED[split]
    if stream in read_manifest(folder)["splits"]:
        return read_samples(folder, stream)
    told = utterances(read_samples(folder, split)).filter(pl.col("label").is_not_null())
    if told.is_empty():
        raise UsageError(
            f"'{folder}': no utterance of {split} has a label: use data that do, such as "
            f"EmpatheticIntents or 'bundled', or add labels with 'attune annotate emotions RUN "
            f"--data {folder}'"
        )
    return alone(told)


class _Preparation:
    """One pass over a source, writing as it goes."""

    def __init__(self, source: Source, folder: Path, strict: bool, any_emotion: bool):
        self.source = source
        self.folder = folder
        self.strict = strict
        self.checker = Checker(
            source.reader.EMOTION_LABELS,
            splits=_STREAMS_OF.get(source.reader, SPLITS),
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
                usable, bad = divide(self.checker.check(piece))
                self._set_aside(bad, rejects)
                told = tokenized(_with_splits(usable))
                self._count(told)
                for made in (samples(told), felt(told)):
                    parts = made.partition_by("split", include_key=False, as_dict=True)
                    for stream, rows in parts.items():
                        self._write(str(stream[0]), rows, writers, stack)
                progress(piece.height)
        if not self.samples:
            found = self.first_reject or "no listener turn has a context"
            raise DataError(f"nothing to learn from in the source: {found}")
        return self._finish()

    def _set_aside(self, bad: pl.DataFrame, file: IO[bytes]) -> None:
        if bad.is_empty():
            return
        # A row of a file may hold several utterances: it is one reject, for its own reason.
        spoilt = pl.col("problem").str.starts_with(SPOILT)
        own = bad.sort(spoilt, maintain_order=True).unique(["file", "row"], maintain_order=True)
        first = "{file}, row {row}: {problem}".format(**own.row(0, named=True))
        if self.strict:
            raise DataError(
                f"{first}\nNothing was written; without --strict such rows are set aside"
            )
        self.first_reject = self.first_reject or first
        self.reasons.update(kind_of(problem) for problem in own["problem"])
        file.write(own.sort("file", "row").select(_REJECTED).write_ndjson().encode())

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
        if stream in FELT.values():
            self.conversations[stream] += rows["conversation_id"].n_unique()
        self.hashes.setdefault(stream, hashlib.sha256()).update(content(rows))
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
        digests = {stream: digest.hexdigest() for stream, digest in self.hashes.items()}
        manifest = {
            "hash": joint_hash(digests),
            "format": self.source.format,
            "files": self.source.sizes,
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
        return write_manifest(self.folder, manifest)


def content(rows: pl.DataFrame) -> bytes:
    """What a stream's hash is of: not the file, since another writer's bytes are the same samples.

    Pieces of a stream, one after the other, are the whole.
    """
    return rows.write_ndjson().encode()


def joint_hash(digests: Mapping[str, str]) -> str:
    """The hash of a folder from those of its streams."""
    nothing = hashlib.sha256().hexdigest()
    whole = hashlib.sha256()
    for stream in ALL_STREAMS:
        if stream in digests or stream in STREAMS:
            whole.update(f"{stream} {digests.get(stream, nothing)}\n".encode())
    return whole.hexdigest()


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The last file of a prepared folder, with the checksums of all others."""
    contents = {path.name: checksum(path) for path in sorted(folder.iterdir())}
    complete = {**manifest, "contents": contents}
    (folder / MANIFEST).write_text(json.dumps(complete, indent=2) + "\n", encoding="utf-8")
    return complete


_HELD_OUT = [name for split in SPLITS[1:] for name in (split, LABELLED[split])]


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
            pl.col("split").is_in([*UNPAIRED, *LABELLED.values()])
            | (pl.col("turn") <= answered).fill_null(False)
        )
        situations = utterances.filter(pl.col("turn") == 0)["situation_tokens"]
        learnable = used.filter(~pl.col("split").is_in(_HELD_OUT))["tokens"]
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
    """Where a source has no splits they are drawn from the id, so they never change."""
    missing = conversations.filter(pl.col("split").is_null())["conversation_id"].unique()
    drawn = {name: split_by_hash(name) for name in missing}
    return conversations.with_columns(
        split=pl.col("split").fill_null(
            pl.col("conversation_id").replace_strict(drawn, default=None, return_dtype=pl.String)
        )
    )


class Target:
    """The folder to be made: what lies there is not lost, and what is new appears in one step."""

    def __init__(self, out: Path, overwrite: bool):
        self.named = out
        self.out = out.resolve()  # through links, so that a link stays one
        self.overwrite = overwrite

    def check(self, source: Source) -> None:
        """Refuse before the work what would be refused after it."""
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out '{self.named}' is a file: name a folder")
        if self.out == Path.cwd():
            raise UsageError(f"--out '{self.named}' is the folder you are in: name one inside it")
        if not self.out.is_dir() or not any(self.out.iterdir()):
            return
        there = self._there()
        if self.overwrite:
            others = {path.name for path in self.out.iterdir()} - {*there["contents"], MANIFEST}
            if others:
                raise UsageError(
                    f"--out '{self.named}' also holds '{min(others)}', which --overwrite would "
                    f"delete: move it away, or name another folder"
                )
        elif (there["format"], there["files"]) != (source.format, source.sizes):
            self._refuse()

    @contextmanager
    def beside(self) -> Iterator[Path]:
        """A new folder to work in, on the same disk; it is gone afterwards, if not published.

        It has its name before it is made, so that no signal can come between the two.
        """
        place = self.out.parent
        while not place.exists():
            place = place.parent
        made = place / f".{self.out.name}-{secrets.token_hex(4)}"
        try:
            try:
                made.mkdir()
            except OSError as error:
                raise UsageError(
                    f"--out '{self.named}' cannot be made: {error.strerror}"
                ) from error
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def publish(self, made: Path, manifest: dict[str, Any]) -> None:
        """Put the finished folder in its place."""
        if not (self.out / MANIFEST).is_file():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            made.rename(self.out)
        elif self.overwrite:
            old = Path(tempfile.mkdtemp(prefix=f".{self.out.name}-old-", dir=self.out.parent))
            self.out.rename(old / self.out.name)
            made.rename(self.out)
            shutil.rmtree(old)
        elif self._there() != manifest:
            self._refuse()
        else:  # the same data lies there already, perhaps with somebody's notes beside it
            for name, digest in manifest["contents"].items():
                path = self.out / name
                if not path.is_file() or checksum(path) != digest:
                    (made / name).replace(path)  # damaged: made good

    def _there(self) -> dict[str, Any]:
        try:
            return read_manifest(self.out)
        except (DataError, UsageError) as error:
            raise UsageError(
                f"--out '{self.named}' holds something that is not a preparation: name another "
                f"folder"
            ) from error

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"--out '{self.named}' holds another preparation: name another folder, or replace it "
            f"with --overwrite"
        )


def made_before(out: Path, name: str, maker: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of `out` where it is what would be made, by what it has under `name`; None where
    nothing is there, and an error where something else is."""
    if (out / MANIFEST).is_file() and (manifest := read_manifest(out)).get(name) == maker:
        return manifest
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out '{out}' is there already, made in another way: name another")
    return None


def find_data(text: str) -> Path:
    """The prepared folder behind `--data`: `bundled`, prepared on first use, or a folder's path."""
    if text == bundled.NAME:
        folder = home() / "data" / bundled.NAME
        if not (folder / MANIFEST).is_file():
            prepare(bundled.NAME, folder)
        return folder
    folder = Path(text).absolute()
    manifest = read_manifest(folder)
    if SPLITS[0] not in manifest["splits"]:
        raise UsageError(
            f"'{folder}' holds no pairs ({manifest['format']}): name a folder by 'attune data "
            f"prepare'; unpaired text is added to it with --set harvest=DIR"
        )
    return folder
