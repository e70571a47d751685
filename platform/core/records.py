"""Records: JSON files with a format version that Attune writes and reads again."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.portable import from_portable, to_portable

FORMAT_KEY = "format"

_reported: set[str] = set()


class FormatVersionError(UsageError):
    """A record was written in another format version than the one that this code reads."""


def write_record(path: Path, version: int, fields: Mapping[str, Any]) -> None:
    """Write a record, `HOME/KIND/NAME/FILE`, atomically; its paths in the home are relative."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {FORMAT_KEY: version, **to_portable(fields, path.absolute().parents[2])}
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)


def read_record(path: Path, version: int, fix: str) -> dict[str, Any]:
    """Return the fields of a record; `fix` says what to do about one of another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: expected a JSON object, got {content!r:.60}")
    check_record_format(path, content, version, fix)
    fields = {key: value for key, value in content.items() if key != FORMAT_KEY}
    return {**from_portable(fields, path.absolute().parents[2])}


def check_record_format(path: Path, content: Mapping[str, Any], supported: int, fix: str) -> None:
    """Raise FormatVersionError unless a record has the supported format version."""
    version = content.get(FORMAT_KEY)
    if version != supported:
        stated = "no format version" if version is None else f"format version {version}"
        raise FormatVersionError(
            f"{path} has {stated}, but this version of Attune reads version {supported}: {fix}, "
            f"or use the version of Attune that wrote it"
        )


def report_skipped_record(error: FormatVersionError) -> None:
    """Print one line on stderr about a record that is skipped, once in the life of a process: the
    page lists the runs each time it is opened."""
    line = f"skipped: {error}"
    if line not in _reported:
        _reported.add(line)
        print(line, file=sys.stderr)
