"""`attune data curate`: dialogs out of subtitles, as `attune data prepare` reads them.

    dialogs.parquet     an utterance a row: conversation_id, turn, role, text, split, start, end
    rejects.jsonl       files that are damaged, each with the reason
    manifest.json       what the folder is: how it was made, statistics, what each step did

Lines are cleaned, joined to turns (`turns.py`), and cut into dialogs where nobody speaks for long;
then turns and dialogs that are undesired are left out (`cleaning.py`). Who speaks is not known, so
turns alternate between speaker and listener. All dialogs of a film, which is the folder that a file
lies in, are of one split.

Ray tasks take some files each and leave one, so that what was done before an interruption is not
done again. Memory does not grow with the corpus but for 8 bytes a dialog, to find duplicates by.
"""

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import checksum
from attune.platform.curation import subtitles, turns
from attune.platform.curation.cleaning import (
    DUPLICATES,
    Cleaning,
    count_tokens,
    dialog_key,
    names_speaker,
    select_steps,
)
from attune.platform.curation.subtitles import Line
from attune.platform.curation.turns import Turns, gap_between
from attune.platform.data.conversations import LISTENER, SPEAKER, split_by_hash
from attune.platform.data.dataset_folder import (
    REJECTS,
    OutputFolder,
    find_existing,
    serialize_rows,
    write_manifest,
)
from attune.platform.data.files import ParquetWriter, chunked, extension
from attune.platform.services import cluster
from attune.platform.services.tasks import run_file_tasks

NAME = "curation"
DIALOGS = "dialogs.parquet"
GAP = 5.0
"""Seconds of silence that end a dialog, as in Xie and Pu 2021."""
FILES_OF_A_PART = 64

_ROWS = pl.Schema(
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
_KEYED = pl.Schema({**_ROWS, "key": pl.Int64()})

Progress = Callable[[int], None]
"""Called with the number of files that were just done."""


@dataclass(kw_only=True)
class Size:
    """How much there is of dialogs."""

    dialogs: int = 0
    turns: int = 0
    tokens: int = 0

    def add(self, texts: Sequence[str]) -> None:
        """Count a dialog in."""
        self.dialogs += 1
        self.turns += len(texts)
        self.tokens += sum(map(count_tokens, texts))

    def statistics(self) -> dict[str, float]:
        """As in the paper's Tables 1 and 2."""
        return {
            **asdict(self),
            "turns_per_dialog": self.turns / max(self.dialogs, 1),
            "tokens_per_turn": self.tokens / max(self.turns, 1),
            "tokens_per_dialog": self.tokens / max(self.dialogs, 1),
        }


@dataclass(kw_only=True)
class Counts:
    """What became of the lines of some files."""

    files: int = 0
    lines: int = 0
    cpu_seconds: float = 0.0
    cut: Size = field(default_factory=Size)
    """Before turns and dialogs were left out."""
    cleaned: Size = field(default_factory=Size)
    steps: Counter[str] = field(default_factory=Counter)
    damaged: list[dict[str, str]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write them where `load` finds them."""
        # asdict() spoils a Counter: it counts its items anew.
        path.write_text(json.dumps({**asdict(self), "steps": dict(self.steps)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Counts":
        """What `save` wrote."""
        read = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: Size(**read[name]) for name in ("cut", "cleaned")}
        return cls(**{**read, **sizes, "steps": Counter(read["steps"])})


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some subtitles, and the file for their dialogs."""

    files: tuple[tuple[str, str], ...]
    """Where each lies, and its name, from the source on and without its ending."""
    turns: str | None
    steps: tuple[str, ...]
    gap: float
    file: str

    @property
    def rows(self) -> int:
        """How much work it is."""
        return len(self.files)


def curate_part(part: Part) -> int:
    """Write the dialogs of some files, with the counts beside them; the number of files."""
    started = time.process_time()
    counts = Counts()
    cleaning = Cleaning(part.steps, counts.steps)
    model = None if part.turns is None else turns.load_turns_model(Path(part.turns))
    path = Path(part.file)
    new = path.with_suffix(".new")
    with ParquetWriter(new, _KEYED) as dialogs:
        for place, name in part.files:
            counts.files += 1
            try:
                lines = subtitles.read(Path(place))
            except (DataError, OSError) as error:
                counts.damaged.append({"file": place, "problem": str(error)})
                continue
            counts.lines += len(lines)
            rows = _rows(name, _dialogs(lines, model, cleaning, part.gap), cleaning, counts)
            dialogs.write(pl.DataFrame(list(rows), schema=_KEYED, orient="row"))
    counts.cpu_seconds = time.process_time() - started
    counts.save(path.with_suffix(".json"))
    new.replace(path)  # last, since it says that all is there
    return part.rows


def _rows(
    name: str, dialogs: Iterable[list[Line]], cleaning: Cleaning, counts: Counts
) -> Iterator[tuple[object, ...]]:
    split = split_by_hash(_film(name))
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


def _film(name: str) -> str:
    """A folder of OPUS holds the subtitles of one film; files in none are of different ones."""
    return name.rpartition("/")[0] or name


def _dialogs(
    lines: Sequence[Line], model: Turns | None, cleaning: Cleaning, gap: float
) -> Iterator[list[Line]]:
    """Turns, cut where nobody speaks for longer than `gap`. What has no time stays together."""
    dialog: list[Line] = []
    turn: list[Line] = []
    pending_start = None  # when what is left out was shown, where the next line is shown with it
    for line in lines:
        text = cleaning.line(line.text)
        if not text:
            # Lines that are shown at once have one start and one end between them.
            if line.start is None and turn and turn[-1].end is None:
                turn[-1] = replace(turn[-1], end=line.end)
            pending_start = line.start if pending_start is None else pending_start
            pending_start = pending_start if line.end is None else None
            continue
        cleaned = Line(
            text=text, start=pending_start if line.start is None else line.start, end=line.end
        )
        pending_start = None
        silence = gap_between(turn[-1], cleaned) if turn else None
        ends_dialog = silence is not None and silence > gap
        # A long silence ends the turn, too, whoever speaks after it: ours, since the paper only
        # looks between turns.
        begins = names_speaker(line.text) or model is None or ends_dialog
        if turn and (begins or (model is not None and model.changes(turn[-1], cleaned))):
            dialog.append(_join_lines(turn))
            turn = []
        if ends_dialog:
            yield dialog
            dialog = []
        turn.append(cleaned)
    if turn:
        yield [*dialog, _join_lines(turn)]


def _join_lines(lines: Sequence[Line]) -> Line:
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
    """Make `out`: the dialogs of all subtitles in the sources; returns its manifest, and how fast
    it went, which is not known where it was there already.

    `model` is the file of a classifier of turns; without one each line is a turn.
    """
    if not gap > 0:
        raise UsageError(f"--gap {gap}: seconds above 0 are expected")
    if model is not None:
        turns.load_turns_model(model)  # refused here, and not in a task
    steps = select_steps(without)
    files = _files(sources)
    maker = {
        "sources": [str(source) for source in sources],
        "files": len(files),
        "listing": _hash_file_list(files),
        "turns": None if model is None else checksum(model),
        "gap": gap,
        "steps": list(steps),
    }
    target = OutputFolder(out, overwrite=False)
    if (manifest := find_existing(out, NAME, maker)) is not None:
        return manifest, None
    total(len(files))
    key = hashlib.sha256(json.dumps(maker).encode()).hexdigest()[:12]
    work = out.resolve().parent / f".{out.name}.{NAME}-{key}"
    work.mkdir(parents=True, exist_ok=True)
    parts = [
        Part(
            files=tuple(some),
            turns=None if model is None else str(model.resolve()),
            steps=steps,
            gap=gap,
            file=str(work / f"{number:06d}.parquet"),
        )
        for number, some in enumerate(chunked(files, FILES_OF_A_PART))
    ]
    left = [Path(part.file) for part in parts if not Path(part.file).is_file()]
    if left:
        cluster.connect()  # which takes as long for ten files as for all of OpenSubtitles
    started = time.monotonic()
    run_file_tasks(curate_part, parts, progress, at_once=workers)
    speed = _measure_speed(left, time.monotonic() - started)
    with target.temporary_folder() as new:
        manifest = _write([Path(part.file) for part in parts], new, maker)
        target.publish(new, manifest)
    shutil.rmtree(work)
    return manifest, speed


def _measure_speed(parts: Iterable[Path], seconds: float) -> dict[str, float]:
    """Of what was done just now, not before an interruption."""
    counts = _sum_counts(Counts.load(part.with_suffix(".json")) for part in parts)
    return {
        "lines": counts.lines,
        "seconds": seconds,
        "lines_per_second": counts.lines / max(seconds, 1e-9),
        "lines_per_second_per_core": counts.lines / max(counts.cpu_seconds, 1e-9),
    }


def _files(sources: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Where each file lies, and its name."""
    files = []
    for source in sources:
        if not source.exists():
            raise UsageError(f"no such source: '{source}'; give a file or a folder of subtitles")
        root = source.parent if source.is_file() else source
        for path in subtitles.find(source):
            name = path.relative_to(root).as_posix().encode(errors="replace").decode()
            name = name[: name.lower().rindex(extension(path))]
            files.append((str(path.resolve()), name))
    if not files:
        wanted = ", ".join(subtitles.EXTENSIONS)
        raise UsageError(
            f"no subtitles in {', '.join(map(str, sources))}: files that end in {wanted} (or with "
            f".gz behind) are read, in folders inside folders too"
        )
    names = Counter(name for _, name in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(
            f"two files are named '{twice[0]}': give the sources one by one, or take one out"
        )
    return tuple(files)


def _hash_file_list(files: Iterable[tuple[str, str]]) -> str:
    """A hash of the files' names and sizes: a list of half a million would swamp the manifest."""
    whole = hashlib.sha256()
    for place, name in files:
        whole.update(f"{name} {Path(place).stat().st_size}\n".encode())
    return whole.hexdigest()


def _write(parts: Sequence[Path], folder: Path, maker: dict[str, Any]) -> dict[str, Any]:
    """The folder's files."""
    counts = _sum_counts(Counts.load(part.with_suffix(".json")) for part in parts)
    first = _first_copies(parts) if DUPLICATES in maker["steps"] else None
    again = Size()
    digest = hashlib.sha256()
    with ParquetWriter(folder / DIALOGS, _ROWS) as dialogs:
        start = 0
        for part in parts:
            rows = pl.read_parquet(part)
            begins = (rows["turn"] == 0).to_numpy()
            if first is not None:
                keep = pl.Series(first[start + begins.cumsum() - 1], dtype=pl.Boolean)
                for texts in rows.filter(~keep).group_by("conversation_id").agg("text")["text"]:
                    again.add(texts.to_list())
                rows = rows.filter(keep)
            start += int(begins.sum())
            rows = rows.select(_ROWS.names())
            digest.update(serialize_rows(rows))
            dialogs.write(rows)
    kept = Size(
        dialogs=counts.cleaned.dialogs - again.dialogs,
        turns=counts.cleaned.turns - again.turns,
        tokens=counts.cleaned.tokens - again.tokens,
    )
    if not kept.dialogs:
        reasons = "; ".join(f"{name}: {count:,}" for name, count in counts.steps.items() if count)
        problem = counts.damaged[0]["problem"] if counts.damaged else reasons
        raise DataError(f"no dialog is left of {counts.files:,} files ({problem})")
    counts.steps[DUPLICATES] = again.dialogs
    manifest = {
        "hash": digest.hexdigest(),
        "format": NAME,
        "splits": {},
        "tolerated": {},
        "rejected": _write_rejects(counts.damaged, folder / REJECTS),
        NAME: maker,
        "lines": counts.lines,
        "steps": {step: counts.steps[step] for step in maker["steps"]},
        "statistics": {"cut": counts.cut.statistics(), "cleaned": kept.statistics()},
    }
    return write_manifest(folder, manifest)


def _first_copies(parts: Sequence[Path]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each dialog of all parts, whether it is the first that says so."""
    keys = [
        pl.scan_parquet(part).filter(pl.col("turn") == 0).select("key").collect()["key"].to_numpy()
        for part in parts
    ]
    together = np.concatenate(keys)
    _, places = np.unique(together, return_index=True)
    first = np.zeros(len(together), dtype=bool)
    first[places] = True
    return first


def _sum_counts(parts: Iterable[Counts]) -> Counts:
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


def _write_rejects(damaged: Sequence[dict[str, str]], path: Path) -> dict[str, Any]:
    if damaged:
        lines = "".join(json.dumps(one) + "\n" for one in damaged)
        path.write_text(lines, encoding="utf-8")
    return {
        "rows": len(damaged),
        "file": REJECTS if damaged else None,
        "reasons": {"damaged file": len(damaged)} if damaged else {},
    }
