"""The format version of records (JSON files that Attune writes and reads again)."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attune.platform.core.errors import UsageError

FORMAT_KEY = "format"

_reported: set[str] = set()


class FormatVersionError(UsageError):
    """A record was written in another format version than the one that this code reads."""


def check_format(path: Path, content: Mapping[str, Any], supported: int, fix: str) -> None:
    """Raise FormatVersionError unless a record has the supported format version."""
    version = content.get(FORMAT_KEY)
    if version != supported:
        stated = "no format version" if version is None else f"format version {version}"
        raise FormatVersionError(
            f"{path} has {stated}, but this version of Attune reads version {supported}: {fix}, "
            f"or use the version of Attune that wrote it"
        )


def report_skipped(error: FormatVersionError) -> None:
    """Print one line on stderr about a record that is skipped, once in the life of a process: the
    page lists the runs each time it is opened."""
    line = f"skipped: {error}"
    if line not in _reported:
        _reported.add(line)
        print(line, file=sys.stderr)
