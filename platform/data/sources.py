"""`--source` and `--format`: which reader reads which files."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import polars as pl

from attune.platform.core.errors import DataError, UsageError, unknown_choice_error
from attune.platform.data import bundled
from attune.platform.data.files import file_extension, file_head, split_from_file_name
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
"""Files without data in folders that Attune writes."""
SUBTITLES = ("opus", "srt")
AUTO = "auto"
BUNDLED = "bundled"


class Source:
    """Files of one format, with its reader."""

    def __init__(self, source: str, form: str = AUTO):
        if form in SUBTITLES:
            raise UsageError(
                f"--format {form}: extract dialogues from subtitles first with 'attune data curate "
                f"--source {source} --turns FILE --out DIR', then prepare DIR"
            )
        if form not in (AUTO, *READERS):
            raise UsageError(unknown_choice_error("format", form, (AUTO, *READERS)))
        self.paths: list[Path] = []
        self.reader: ModuleType = bundled
        if source != BUNDLED:
            self.paths, self.reader = _recognise_source_format(source, form)
        elif form != AUTO:
            raise UsageError("--format applies to your own files: leave it out with 'bundled'")

    @property
    def format(self) -> str:
        """The name of the format, as `--format` takes it."""
        return str(self.reader.NAME)

    @property
    def source_file_sizes(self) -> dict[str, int]:
        """The files' names and sizes in bytes."""
        return {path.name: path.stat().st_size for path in self.paths}

    def read(self, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
        """Yield conversations in chunks; a reader's corrections are counted in `tolerated`."""
        if not self.paths:
            yield from bundled.read()
        for path in self.paths:
            rows = 0
            for frame in self.reader.read(path, tolerated):
                rows += frame.height
                yield frame
            if not rows:
                raise DataError(f"{path} has no rows: remove the file, or add its rows")


def _recognise_source_format(source: str, form: str) -> tuple[list[Path], ModuleType]:
    root = Path(source)
    if not source or not root.exists():
        raise UsageError(f"no such source: '{source}'; name a file, a folder or 'bundled'")
    files = sorted(p for p in root.iterdir() if p.is_file()) if root.is_dir() else [root]
    paths = [path for path in files if _may_be_source_file(path)]
    if form != AUTO:
        # Without recognition: if a header is wrong, the reader says so.
        matching = [path for path in paths if file_extension(path) in READERS[form].SUFFIXES]
        if not matching:
            raise UsageError(f"no file of format '{form}' in '{root}'")
        return matching, READERS[form]
    formats = {path: _recognise_source_file(path) for path in paths}
    known = {name for name in formats.values() if name}
    if len(known) > 1:
        raise UsageError(
            f"'{root}' contains files of several formats ({', '.join(sorted(known))}): "
            f"name a single file, or keep each format in its own folder"
        )
    if not known:
        raise UsageError(
            f"no known format in '{root}' (subfolders are not read): name it with --format "
            f"({', '.join(READERS)}); docs/data.md describes the format of your own dialogues"
        )
    [name] = known
    suffixes = READERS[name].SUFFIXES
    strange = [p.name for p, f in formats.items() if f is None and file_extension(p) in suffixes]
    if strange:
        raise UsageError(
            f"'{strange[0]}' is not {name} like the other files in '{root}': correct its first "
            f"line, or remove the file"
        )
    return [path for path, format_name in formats.items() if format_name], READERS[name]


def _may_be_source_file(path: Path) -> bool:
    """Return whether a file has a known suffix; text files must be named after a split, because
    most are notes."""
    if file_extension(path) == ".txt":
        return split_from_file_name(path) is not None
    known = {suffix for reader in READERS.values() for suffix in reader.SUFFIXES}
    return file_extension(path) in known and path.name not in OWN_FILES


def _recognise_source_file(path: Path) -> str | None:
    """Return the format of a file by its suffix and first lines, or None."""
    beginning = "" if file_extension(path) == ".parquet" else file_head(path)
    return next((name for name, r in READERS.items() if r.recognises(path, beginning)), None)
