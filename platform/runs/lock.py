"""The locks of runs and sweeps: one process at a time may write to a folder.

They are open file description locks of Linux. They end with the process that holds them, and a
process can query one without taking it, so that a query never makes a starting run fail.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attune.platform.core.errors import UsageError
from attune.platform.runs.record import Run, read_run

LOCK = "lock"
_FLOCK = "hhqqi4x"
"""`struct flock` of fcntl(2): type, whence, start, length, pid."""
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@contextmanager
def hold_lock(folder: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a folder; raise UsageError with `refusal` if another process has it."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise UsageError(refusal) from None
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    try:
        with (folder / LOCK).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    except FileNotFoundError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


@contextmanager
def lock_runs(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Hold the locks of runs and yield their records, read again: they may have changed before."""
    with ExitStack() as locks:
        for run in runs:
            refusal = f"run '{run.name}' is being trained by another process"
            locks.enter_context(hold_lock(run.folder, refusal))
        yield [read_run(run.folder) for run in runs]
