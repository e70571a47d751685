"""What a worker does with an error: Ray restarts workers that raise."""

import errno
from types import SimpleNamespace

import pytest

from attune.platform.core.disk import DiskFullError
from attune.platform.training import worker
from attune.platform.training.loop import PROBLEM
from tests.runs import write_run


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A function that runs a worker of a group whose training raises an error."""
    run = write_run(tmp_path, "mine", "dummy", status="running")

    def start(world_size, error):
        def fail(*_, **__):
            raise error

        context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: world_size)
        monkeypatch.setattr(worker.ray.train, "get_context", lambda: context)
        monkeypatch.setattr(worker, "train", fail)
        worker.work({"folder": str(run.folder), "ids": {}})

    start.problem = run.folder / PROBLEM
    return start


def test_an_expected_error_is_not_retried(work):
    full = DiskFullError("the disk at /data is full")
    with pytest.raises(DiskFullError):  # so that the other worker does not wait for this one
        work(2, full)
    assert work.problem.read_text() == "the disk at /data is full"
    work(2, AssertionError("trained again"))  # as Ray restarts it: it ends without training


def test_the_error_of_an_only_worker_ends_it(work):
    work(1, ZeroDivisionError("no samples"))
    assert work.problem.read_text().endswith("ZeroDivisionError: no samples\n")


def test_another_error_of_several_workers_is_retried(work):
    with pytest.raises(ZeroDivisionError):
        work(2, ZeroDivisionError("no samples"))
    assert not work.problem.exists()


def test_an_error_that_cannot_be_written_is_raised(work, monkeypatch):
    def write_text(path, *_, **__):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker.Path, "write_text", write_text)
    with pytest.raises(DiskFullError):
        work(1, DiskFullError("full"))
    assert not work.problem.exists()
