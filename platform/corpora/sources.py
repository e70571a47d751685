"""`--source` and `--format`: which reader reads which files."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import polars as pl

from attune.platform.corpora import bundled, dialogues, edos, empathetic_dialogues, meld, reccon
from attune.platform.corpora.files import first_line
from attune.platform.errors import UsageError, unknown

READERS: dict[str, ModuleType] = {
    reader.NAME: reader for reader in (empathetic_dialogues, edos, reccon, meld, dialogues)
}
AUTO = "auto"
BUNDLED = "bundled"


class Source:
    """Files with the reader that understands them all."""

    def __init__(self, source: str, form: str = AUTO):
        if form not in (AUTO, *READERS):
            raise UsageError(unknown("format", form, (AUTO, *READERS)))
        self.paths: list[Path] = []
        self.reader: ModuleType = bundled
        if source != BUNDLED:
            self.paths, self.reader = _recognised(Path(source), form)

    @property
    def format(self) -> str:
        """The name of the format, as `--format` takes it."""
        return str(self.reader.NAME)

    def read(self, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
        """Conversations, a piece at a time; what a reader puts right on the way is counted."""
        if not self.paths:
            yield from bundled.read()
        for path in self.paths:
            yield from self.reader.read(path, tolerated)


def _recognised(root: Path, form: str) -> tuple[list[Path], ModuleType]:
    if not root.exists():
        raise UsageError(f"no such source: '{root}'; give a file, a folder, or 'bundled'")
    paths = sorted(p for p in root.iterdir() if p.is_file()) if root.is_dir() else [root]
    by_format: dict[str, list[Path]] = {}
    for path in paths:
        for name in _formats(path):
            by_format.setdefault(name, []).append(path)
    if form != AUTO:
        # A single file is read as told, even where its header is wrong: its reader says what is.
        return by_format.get(form) or _told(root, paths, form), READERS[form]
    if len(by_format) > 1:
        raise UsageError(
            f"'{root}' holds files of several formats ({', '.join(sorted(by_format))}): "
            f"name one with --format, or give a single file"
        )
    if not by_format:
        raise UsageError(
            f"no known format in '{root}': name it with --format ({', '.join(READERS)}); "
            f"your own dialogues are described in docs/data.md"
        )
    [(name, found)] = by_format.items()
    return found, READERS[name]


def _formats(path: Path) -> list[str]:
    if path.suffix in (".md", ".txt", ".yaml") or path.name.startswith("."):
        return []
    head = "" if path.suffix == ".parquet" else first_line(path)
    return [name for name, reader in READERS.items() if reader.recognises(path, head)]


def _told(root: Path, paths: list[Path], form: str) -> list[Path]:
    endings = {
        "reccon": (".json",),
        "dialogues": (".jsonl", ".ndjson", ".json", ".csv", ".parquet"),
    }
    found = [p for p in paths if p.name.removesuffix(".gz").endswith(endings.get(form, (".csv",)))]
    if not found:
        raise UsageError(f"no file of format '{form}' in '{root}'")
    return found
