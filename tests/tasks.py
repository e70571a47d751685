"""Ray tasks that run in the test's process, and interruptions of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attune.platform.services import tasks as ray_tasks


def run_in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run tasks in this process; return the list to which the file of each task is added."""
    files: list[str] = []

    def run_tasks(work, tasks, at_once=None):  # noqa: ARG001
        for task in tasks:
            files.append(task.file)
            yield work(task)

    monkeypatch.setattr(ray_tasks, "run_tasks", run_tasks)
    return files


@contextmanager
def interrupted_after(count: int) -> Iterator[None]:
    """Interrupt the tasks that are run in this context after some of them."""
    run_tasks = ray_tasks.run_tasks

    def run_some(work, tasks, at_once=None):
        yield from run_tasks(work, tasks[:count], at_once)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_tasks, "run_tasks", run_some)
        with pytest.raises(KeyboardInterrupt):
            yield
