"""The task runner: run a function over many inputs as Ray tasks, and resume interrupted work."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attune.platform.core.errors import DataError, UsageError
from attune.platform.services import cluster

Progress = Callable[[int], None]
"""Called with the number of rows that were just processed."""

T = TypeVar("T")
R = TypeVar("R")


class FileTask(Protocol):
    """A task that writes a file."""

    @property
    def file(self) -> str:
        """The path of the file, which must be written atomically."""

    @property
    def rows(self) -> int:
        """The number of rows to process."""


F = TypeVar("F", bound=FileTask)


def run_tasks(
    work: Callable[[T], R], tasks: Sequence[T], at_once: int | None = None
) -> Iterator[R]:
    """Yield what `work` returns for each task, in the order of completion.

    Each task has one core of the cluster; at most `at_once` run concurrently, by default as many
    as there are cores.
    """
    if not tasks:
        return
    cluster.connect()
    import ray

    remote = ray.remote(num_cpus=1)(work)
    waiting = iter(tasks)
    left = [remote.remote(task) for task in itertools.islice(waiting, at_once)]
    try:
        while left:
            [done], left = ray.wait(left)
            left.extend(remote.remote(task) for task in itertools.islice(waiting, 1))
            yield ray.get(done)
    finally:
        for task in left:
            ray.cancel(task)


def run_file_tasks(
    work: Callable[[F], int],
    tasks: Sequence[F],
    progress: Progress,
    at_once: int | None = None,
) -> None:
    """Run the tasks whose files do not exist yet, so that an interrupted command can be resumed.

    `work` returns the number of rows that it processed, which is passed to `progress`.
    """
    missing = []
    for task in tasks:
        if Path(task.file).is_file():
            progress(task.rows)
        else:
            missing.append(task)
    for done in run_tasks(work, missing, at_once):
        progress(done)


@contextmanager
def task_folder(out: Path, name: str, inputs: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a hidden folder beside `out` for the files of tasks.

    Its name depends on the inputs, so that a repeated command finds the files of an interrupted
    one. It is removed when the work is done, and after a DataError or UsageError, which the same
    command would only raise again.
    """
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]
    folder = out.resolve().parent / f".{out.name}.{name}-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out '{out}': cannot write there: {error.strerror}") from error
    try:
        yield folder
    except (DataError, UsageError):
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
