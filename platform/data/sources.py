"""`--source` and `--format`: which reader reads which files."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import polars as pl

from attune.platform.core.errors import DataError, UsageError, unknown_choice
from attune.platform.data import bundled
from attune.platform.data.files import extension, head, split_from_name
from attune.platform.data.readers import (
    dialogues,
    ed_causes,
    edos,
    empathetic_dialogues,
    empathetic_intents,
    meld,
    reccon,
)

READERS: dict[str, ModuleType] = {
    reader.NAME: reader
    for reader in (
        empathetic_dialogues, edos, reccon, meld, ed_causes, empathetic_intents, dialogues,
    )
}  # fmt: skip
OWN_FILES = ("manifest.json", "rejects.jsonl")
"""What stands beside data in folders that Attune makes, and is none."""
SUBTITLES = ("opus", "srt")
AUTO = "auto"
BUNDLED = "bundled"


class Source:
    """Files with the reader that understands them all."""

    def __init__(self, source: str, form: str = AUTO):
        if form in SUBTITLES:
            raise UsageError(
                f"--format {form}: subtitles become dialogs first, by 'attune data curate --source "
                f"{source} --turns FILE --out DIR'; prepare DIR then"
            )
        if form not in (AUTO, *READERS):
            raise UsageError(unknown_choice("format", form, (AUTO, *READERS)))
        self.paths: list[Path] = []
        self.reader: ModuleType = bundled
        if source != BUNDLED:
            self.paths, self.reader = _recognise_format(source, form)
        elif form != AUTO:
            raise UsageError("--format is for files of your own: leave it out with 'bundled'")

    @property
    def format(self) -> str:
        """The name of the format, as `--format` takes it."""
        return str(self.reader.NAME)

    @property
    def sizes(self) -> dict[str, int]:
        """The files' names and sizes in bytes."""
        return {path.name: path.stat().st_size for path in self.paths}

    def read(self, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
        """Conversations, a piece at a time; what a reader puts right on the way is counted."""
        if not self.paths:
            yield from bundled.read()
        for path in self.paths:
            rows = 0
            for frame in self.reader.read(path, tolerated):
                rows += frame.height
                yield frame
            if not rows:
                raise DataError(f"{path} holds no rows: take the file out or fill it")


def _recognise_format(source: str, form: str) -> tuple[list[Path], ModuleType]:
    root = Path(source)
    if not source or not root.exists():
        raise UsageError(f"no such source: '{source}'; give a file, a folder, or 'bundled'")
    files = sorted(p for p in root.iterdir() if p.is_file()) if root.is_dir() else [root]
    paths = [path for path in files if _may_hold_data(path)]
    if form != AUTO:
        # Read as told, even where a header is wrong: the reader says what is wrong with it.
        matching = [path for path in paths if extension(path) in READERS[form].SUFFIXES]
        if not matching:
            raise UsageError(f"no file of format '{form}' in '{root}'")
        return matching, READERS[form]
    formats = {path: _format(path) for path in paths}
    known = {name for name in formats.values() if name}
    if len(known) > 1:
        raise UsageError(
            f"'{root}' holds files of several formats ({', '.join(sorted(known))}): "
            f"give a single file, or keep each format in a folder of its own"
        )
    if not known:
        raise UsageError(
            f"no known format in '{root}' (folders inside it are not read): name it with --format "
            f"({', '.join(READERS)}); docs/data.md shows the form of your own dialogues"
        )
    [name] = known
    suffixes = READERS[name].SUFFIXES
    strange = [p.name for p, f in formats.items() if f is None and extension(p) in suffixes]
    if strange:
        raise UsageError(
            f"'{strange[0]}' is not {name} like the other files in '{root}': put its first line "
            f"right, or take it out"
        )
    return [path for path, format_name in formats.items() if format_name], READERS[name]


def _may_hold_data(path: Path) -> bool:
    """By its ending; most text files are notes, so that of those only a split's may."""
    if extension(path) == ".txt":
        return split_from_name(path) is not None
    known = {suffix for reader in READERS.values() for suffix in reader.SUFFIXES}
    return extension(path) in known and path.name not in OWN_FILES


def _format(path: Path) -> str | None:
    beginning = "" if extension(path) == ".parquet" else head(path)
    return next((name for name, r in READERS.items() if r.recognises(path, beginning)), None)
