"""Paths in records: what lies in the home folder is stored relative to it.

A home folder can then be copied or moved.
"""

from pathlib import Path
from typing import Any

HOME = "$ATTUNE_HOME"
"""What a record has in the place of the home folder."""
_PREFIXES = ("", "file://", "sqlite:///")


def to_portable(content: Any, home: Path) -> Any:
    """Return the content of a record with paths and addresses in the home folder relative to it."""
    return _replace_portable_start(content, str(home), HOME)


def from_portable(content: Any, home: Path) -> Any:
    """Return the content of a record with the absolute paths and addresses of a home folder."""
    return _replace_portable_start(content, HOME, str(home))


def _replace_portable_start(content: Any, old: str, new: str) -> Any:
    if isinstance(content, dict):
        return {key: _replace_portable_start(value, old, new) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_replace_portable_start(value, old, new) for value in content]
    if isinstance(content, str):
        for prefix in _PREFIXES:
            if content == prefix + old or content.startswith(f"{prefix}{old}/"):
                return prefix + new + content[len(prefix + old) :]
    return content
