"""`attune data curate`: extract dialogues from subtitles, for `attune data prepare`.

    dialogs.parquet     one utterance per row: conversation_id, turn, role, text, split, start, end
    rejects.jsonl       damaged files, each with the reason
    manifest.json       sources, settings, statistics and the counts of each cleaning step

Lines are cleaned, merged into turns (`turns.py`) and split into dialogues at long silences; then
unwanted turns and dialogues are dropped (`cleaning.py`). Subtitles do not say who speaks, so turns
alternate between speaker and listener. A film is the folder that contains a file; all dialogues of
a film belong to one split.

Each Ray task processes some files and writes one, so an interrupted command can be resumed. Memory
does not grow with the corpus, except for 8 bytes per dialogue to find duplicates.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import file_checksum, write_atomically
from attune.platform.curation import subtitles, turns
from attune.platform.curation.cleaning import (
    DUPLICATES,
    Cleaning,
    count_tokens_for_cleaning,
    dialog_key,
    names_speaker,
    select_cleaning_steps,
)
from attune.platform.curation.subtitles import Line
from attune.platform.curation.turns import Turns, gap_between_lines
from attune.platform.data.conversations import LISTENER, SPEAKER, conversation_split_by_hash
from attune.platform.data.dataset_folder import (
    REJECTS,
    find_existing_dataset,
    publish_dataset_folder,
    serialize_rows,
    write_dataset_manifest,
)
from attune.platform.data.files import ParquetWriter, chunk_rows, file_extension
from attune.platform.services import cluster
from attune.platform.services.tasks import Progress, run_file_tasks, task_folder

NAME = "curation"
DIALOGS = "dialogs.parquet"
GAP = 5.0
"""Seconds of silence that end a dialogue (Xie and Pu 2021)."""
FILES_OF_A_PART = 64

_DIALOG_SCHEMA = pl.Schema(
    {
        "conversation_id": pl.String,
        "turn": pl.Int64,
        "role": pl.String,
        "text": pl.String,
        "split": pl.String,
        "start": pl.Float64,
        "end": pl.Float64,
    }
)
_KEYED_SCHEMA = pl.Schema({**_DIALOG_SCHEMA, "key": pl.Int64()})
"""With the hash by which duplicates are found."""


@dataclass(kw_only=True)
class Size:
    """The size of a set of dialogues."""

    dialogs: int = 0
    turns: int = 0
    tokens: int = 0

    def add(self, texts: Sequence[str]) -> None:
        """Count a dialogue with these turns."""
        self.dialogs += 1
        self.turns += len(texts)
        self.tokens += sum(map(count_tokens_for_cleaning, texts))

    def statistics(self) -> dict[str, float]:
        """Return totals and means, as in Tables 1 and 2 of Xie and Pu 2021."""
        return {
            **asdict(self),
            "turns_per_dialog": self.turns / max(self.dialogs, 1),
            "tokens_per_turn": self.tokens / max(self.turns, 1),
            "tokens_per_dialog": self.tokens / max(self.dialogs, 1),
        }


@dataclass(kw_only=True)
class Counts:
    """Counts of files, lines and dialogues, and of what each cleaning step changed."""

    files: int = 0
    lines: int = 0
    cpu_seconds: float = 0.0
    cut: Size = field(default_factory=Size)
    """The dialogues before cleaning steps drop turns and dialogues."""
    cleaned: Size = field(default_factory=Size)
    steps: Counter[str] = field(default_factory=Counter)
    damaged: list[dict[str, str]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the counts as JSON."""
        # asdict() breaks a Counter: it counts the pairs of name and count.
        path.write_text(json.dumps({**asdict(self), "steps": dict(self.steps)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Counts":
        """Read what `save` wrote."""
        read = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: Size(**read[name]) for name in ("cut", "cleaned")}
        return cls(**{**read, **sizes, "steps": Counter(read["steps"])})


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some subtitle files, and the file that a task writes for their dialogues."""

    files: tuple[tuple[str, str], ...]
    """The path of each file, and its name: the path within the source, without suffix."""
    turns: str | None
    steps: tuple[str, ...]
    gap: float
    file: str

    @property
    def rows(self) -> int:
        """The number of files, by which progress is counted."""
        return len(self.files)


def curate_part(part: Part) -> int:
    """Write the dialogues of some files and their counts; return the number of files."""
    started = time.process_time()
    counts = Counts()
    cleaning = Cleaning(part.steps, counts.steps)
    model = None if part.turns is None else turns.load_turns_model(Path(part.turns))
    path = Path(part.file)
    with write_atomically(path) as new:
        with ParquetWriter(new, _KEYED_SCHEMA) as writer:
            for subtitle_file, name in part.files:
                counts.files += 1
                try:
                    lines = subtitles.read_subtitles(Path(subtitle_file))
                except (DataError, OSError) as error:
                    counts.damaged.append({"file": subtitle_file, "problem": str(error)})
                    continue
                counts.lines += len(lines)
                dialogs = split_into_dialogs(lines, model, cleaning, part.gap)
                rows = list(_curate_dialogs(name, dialogs, cleaning, counts))
                writer.write(pl.DataFrame(rows, schema=_KEYED_SCHEMA, orient="row"))
        counts.cpu_seconds = time.process_time() - started
        counts.save(path.with_suffix(".json"))
    return part.rows


def _curate_dialogs(
    name: str, dialogs: Iterable[list[Line]], cleaning: Cleaning, counts: Counts
) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a file's dialogues after cleaning, each with the dialogue's hash."""
    split = conversation_split_by_hash(_curated_film_name(name))
    number = 0
    for dialog in dialogs:
        texts = [turn.text for turn in dialog]
        counts.cut.add(texts)
        for start, end in cleaning.pieces(texts):
            counts.cleaned.add(texts[start:end])
            key = dialog_key(texts[start:end])
            for place, turn in enumerate(dialog[start:end]):
                role = LISTENER if place % 2 else SPEAKER
                times = (turn.start, turn.end)
                yield f"{name}#{number}", place, role, turn.text, split, *times, key
            number += 1


def _curated_film_name(name: str) -> str:
    """Return the folder of a file, which OPUS has for each film, or else the file's own name."""
    return name.rpartition("/")[0] or name


def split_into_dialogs(
    lines: Sequence[Line], model: Turns | None, cleaning: Cleaning, gap: float
) -> Iterator[list[Line]]:
    """Yield dialogues as lists of turns; a silence longer than `gap` ends a dialogue.

    Lines without times never end one.
    """
    dialog: list[Line] = []
    turn: list[Line] = []
    pending_start = None  # of a dropped line, if the next line is shown together with it
    for line in lines:
        text = cleaning.line(line.text)
        if not text:
            # Lines that are shown together share a start and an end.
            if line.start is None and turn and turn[-1].end is None:
                turn[-1] = replace(turn[-1], end=line.end)
            pending_start = line.start if pending_start is None else pending_start
            pending_start = pending_start if line.end is None else None
            continue
        cleaned = Line(
            text=text, start=pending_start if line.start is None else line.start, end=line.end
        )
        pending_start = None
        silence = gap_between_lines(turn[-1], cleaned) if turn else None
        ends_dialog = silence is not None and silence > gap
        # A long silence also ends the turn. This is our choice: the paper measures silences
        # between turns only.
        begins = names_speaker(line.text) or model is None or ends_dialog
        if turn and (begins or (model is not None and model.changes(turn[-1], cleaned))):
            dialog.append(_join_curated_lines(turn))
            turn = []
        if ends_dialog:
            yield dialog
            dialog = []
        turn.append(cleaned)
    if turn:
        yield [*dialog, _join_curated_lines(turn)]


def _join_curated_lines(lines: Sequence[Line]) -> Line:
    text = " ".join(line.text for line in lines)
    return Line(text=text, start=lines[0].start, end=lines[-1].end)


def curate(
    sources: Sequence[Path],
    out: Path,
    *,
    model: Path | None,
    gap: float = GAP,
    without: Iterable[str] = (),
    workers: int | None = None,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> tuple[dict[str, Any], dict[str, float] | None]:
    """Write the dialogues of all subtitles in the sources to `out`.

    Returns the manifest and the speed, which is None if `out` is already the result. `model` is
    the file of a turn classifier; without one each line is a turn.
    """
    if not gap > 0:
        raise UsageError(f"--gap: expected a number of seconds above 0, got {gap}")
    if model is not None:
        turns.load_turns_model(model)  # raises here rather than in a task
    steps = select_cleaning_steps(without)
    files = _find_files_to_curate(sources)
    provenance = {
        "sources": [str(source) for source in sources],
        "files": len(files),
        "listing": _hash_curated_files(files),
        "turns": None if model is None else file_checksum(model),
        "gap": gap,
        "steps": list(steps),
    }
    if (manifest := find_existing_dataset(out, NAME, provenance)) is not None:
        return manifest, None
    total(len(files))
    with task_folder(out, NAME, provenance) as folder:
        parts = [
            Part(
                files=tuple(some),
                turns=None if model is None else str(model.resolve()),
                steps=steps,
                gap=gap,
                file=str(folder / f"{number:06d}.parquet"),
            )
            for number, some in enumerate(chunk_rows(files, FILES_OF_A_PART))
        ]
        left = [Path(part.file) for part in parts if not Path(part.file).is_file()]
        if left:
            cluster.connect()  # not part of the measured time: it does not depend on the corpus
        started = time.monotonic()
        run_file_tasks(curate_part, parts, progress, at_once=workers)
        speed = _measure_curation_speed(left, time.monotonic() - started)
        write = partial(_write_curated, [Path(part.file) for part in parts], provenance)
        return publish_dataset_folder(out, write), speed


def _measure_curation_speed(parts: Iterable[Path], seconds: float) -> dict[str, float]:
    """Return the speed at which these files were processed, not those of an interrupted run."""
    counts = _sum_curation_counts(Counts.load(part.with_suffix(".json")) for part in parts)
    return {
        "lines": counts.lines,
        "seconds": seconds,
        "lines_per_second": counts.lines / max(seconds, 1e-9),
        "lines_per_second_per_core": counts.lines / max(counts.cpu_seconds, 1e-9),
    }


def _find_files_to_curate(sources: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Return the path and the name of each subtitle file in the sources."""
    files = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"no such source: '{source}'; name a file or folder of subtitles")
        root = source.parent if source.is_file() else source
        for path in subtitles.find_subtitles(source):
            name = path.relative_to(root).as_posix().encode(errors="replace").decode()
            name = name[: name.lower().rindex(file_extension(path))]
            files.append((str(path.resolve()), name))
    if not files:
        suffixes = ", ".join(subtitles.EXTENSIONS)
        raise UsageError(
            f"no subtitles in {', '.join(map(str, sources))}: expected files that end in {suffixes}"
            f", also with .gz appended, at any depth"
        )
    names = Counter(name for _, name in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(
            f"two files are named '{twice[0]}': remove one, or curate the sources one by one"
        )
    return tuple(files)


def _hash_curated_files(files: Iterable[tuple[str, str]]) -> str:
    """Return a hash of the files' names and sizes; the list itself may have half a million."""
    digest = hashlib.sha256()
    for path, name in files:
        digest.update(f"{name} {Path(path).stat().st_size}\n".encode())
    return digest.hexdigest()


def _write_curated(
    parts: Sequence[Path], provenance: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Write the folder with the dialogues of all parts and return its manifest."""
    counts = _sum_curation_counts(Counts.load(part.with_suffix(".json")) for part in parts)
    first = _mark_first_curated_copies(parts) if DUPLICATES in provenance["steps"] else None
    duplicates = Size()
    digest = hashlib.sha256()
    with ParquetWriter(folder / DIALOGS, _DIALOG_SCHEMA) as dialogs:
        start = 0
        for part in parts:
            rows = pl.read_parquet(part)
            begins = (rows["turn"] == 0).to_numpy()
            if first is not None:
                keep = pl.Series(first[start + begins.cumsum() - 1], dtype=pl.Boolean)
                for texts in rows.filter(~keep).group_by("conversation_id").agg("text")["text"]:
                    duplicates.add(texts.to_list())
                rows = rows.filter(keep)
            start += int(begins.sum())
            rows = rows.select(_DIALOG_SCHEMA.names())
            digest.update(serialize_rows(rows))
            dialogs.write(rows)
    kept = Size(
        dialogs=counts.cleaned.dialogs - duplicates.dialogs,
        turns=counts.cleaned.turns - duplicates.turns,
        tokens=counts.cleaned.tokens - duplicates.tokens,
    )
    if not kept.dialogs:
        reasons = "; ".join(f"{name}: {count:,}" for name, count in counts.steps.items() if count)
        problem = counts.damaged[0]["problem"] if counts.damaged else reasons
        raise DataError(f"no dialogue is left of {counts.files:,} files ({problem})")
    counts.steps[DUPLICATES] = duplicates.dialogs
    manifest = {
        "hash": digest.hexdigest(),
        "format": NAME,
        "splits": {},
        "tolerated": {},
        "rejected": _write_curation_rejects(counts.damaged, folder / REJECTS),
        NAME: provenance,
        "lines": counts.lines,
        "steps": {step: counts.steps[step] for step in provenance["steps"]},
        "statistics": {"cut": counts.cut.statistics(), "cleaned": kept.statistics()},
    }
    return write_dataset_manifest(folder, manifest)


def _mark_first_curated_copies(parts: Sequence[Path]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each dialogue of all parts whether it is the first with its words."""
    keys = [
        pl.scan_parquet(part).filter(pl.col("turn") == 0).select("key").collect()["key"].to_numpy()
        for part in parts
    ]
    all_keys = np.concatenate(keys)
    _, indices = np.unique(all_keys, return_index=True)
    first = np.zeros(len(all_keys), dtype=bool)
    first[indices] = True
    return first


def _sum_curation_counts(parts: Iterable[Counts]) -> Counts:
    """Return the counts of all parts together."""
    whole = Counts()
    for part in parts:
        whole.files += part.files
        whole.lines += part.lines
        whole.cpu_seconds += part.cpu_seconds
        whole.steps.update(part.steps)
        whole.damaged.extend(part.damaged)
        for size, own in ((whole.cut, part.cut), (whole.cleaned, part.cleaned)):
            size.dialogs += own.dialogs
            size.turns += own.turns
            size.tokens += own.tokens
    return whole


def _write_curation_rejects(damaged: Sequence[dict[str, str]], path: Path) -> dict[str, Any]:
    """Write the damaged files to a file of rejects and return their summary."""
    if damaged:
        lines = "".join(json.dumps(one) + "\n" for one in damaged)
        path.write_text(lines, encoding="utf-8")
    return {
        "rows": len(damaged),
        "file": REJECTS if damaged else None,
        "reasons": {"damaged file": len(damaged)} if damaged else {},
    }
