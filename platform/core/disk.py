"""Full disks: free space, and an error that says which disk is full."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attune.platform.core.errors import ServiceError

MEGABYTE = 10**6
_CODES = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = ("No space left on device", "Disk quota exceeded", "disk is full")
_TORCH_TEXTS = ("inline_container", "PytorchStreamWriter")
"""torch reports any failed write in these words, without a code."""
_NEARLY_FULL = 64 * MEGABYTE
"""With less free space, a failed write of torch is taken for a full disk."""


class DiskFullError(ServiceError):
    """A disk is full; the message says which one, how much is free and needed, and what to do."""


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Return whether an error, or one that caused it, is due to the full disk of a folder."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _CODES:
            return True
        text = str(cause)
        if any(each in text for each in _TEXTS):
            return True
        if any(each in text for each in _TORCH_TEXTS) and free_disk_bytes(folder) < _NEARLY_FULL:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def describe_full_disk(folder: Path, needed: str = "", advice: str = "") -> str:
    """Return a message such as `the disk at /data is full: 3 MB free, ... needs 20 MB; ...`."""
    free = f"{free_disk_bytes(folder) / MEGABYTE:,.0f} MB free"
    facts = ", ".join(filter(None, (free, needed)))
    return f"the disk at {_mount_point(folder)} is full ({facts}): {advice or 'free some space'}"


@contextmanager
def explain_full_disk(
    folder: Path, describe: Callable[[], tuple[str, str]] = lambda: ("", "")
) -> Iterator[None]:
    """Turn an error that is due to the full disk of a folder into a DiskFullError.

    `describe` returns what is needed and what to do.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if not is_disk_full(error, folder):
            raise
        raise DiskFullError(describe_full_disk(folder, *describe())) from error


def free_disk_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_existing_folder_on_disk(folder)).free


def folder_bytes_on_disk(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mount_point(folder: Path) -> Path:
    place = _existing_folder_on_disk(folder.absolute())
    while not os.path.ismount(place):
        place = place.parent
    return place


def _existing_folder_on_disk(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
