"""The driver's wait for workers: signals, and runs that fail beside others."""

import atexit
import os
import signal
import threading

import pytest
from ray.exceptions import ActorDiedError

from attune.platform import tracking
from attune.platform.core.errors import ServiceError
from attune.platform.runs.record import find_run
from attune.platform.services import cluster
from attune.platform.training import driver
from attune.platform.training.loop import PLAN
from attune.platform.training.signals import StopSignals
from tests.runs import write_run

PATIENCE = 60  # seconds until a test gives up; none of them needs it


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs, with stand-ins for Ray, the workers and MLflow."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(cluster, "plan_capacity", lambda *_: (1, 1))
    monkeypatch.setattr(cluster, "describe_missing_resources", lambda *_: "")
    monkeypatch.setattr(tracking, "start_run", lambda run, _: run)
    monkeypatch.setattr(tracking, "finish_run", lambda *_: True)
    monkeypatch.setattr(tracking.TrackingQueue, "start_sending", lambda *_: None)
    monkeypatch.setattr(driver, "read_dataset_manifest", lambda _: {})
    monkeypatch.setattr(driver, "sample_answers", lambda _: None)
    data = {"folder": str(tmp_path)}
    return [write_run(tmp_path, name, "dummy", data=data) for name in ("one", "two")]


def ignore(*_):
    """Show nothing."""


@pytest.fixture
def polls(monkeypatch):
    """Is released each time the driver reads what a run has logged."""
    released, show = threading.Semaphore(0), driver._RunDisplay.show

    def counted(self, callback):
        show(self, callback)
        released.release()

    monkeypatch.setattr(driver._RunDisplay, "show", counted)
    return released


def start_and_send(run, number, polls):
    """Send a signal to the driver as soon as a worker trains, and let it poll several times."""
    (run.folder / PLAN).write_text('{"steps": {"train": 9}, "done": 0}')
    os.kill(os.getpid(), number)
    while polls.acquire(blocking=False):  # those before the worker started
        pass
    for _ in range(4):
        assert polls.acquire(timeout=PATIENCE)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_waits_for_the_checkpoint(runs, monkeypatch, polls, number, code):
    saved = threading.Event()

    def fit(_, run, __):
        start_and_send(run, number, polls)
        assert run.stop_file.exists()
        saved.set()

    monkeypatch.setattr(cluster, "fit", fit)
    signals = StopSignals()
    [ended] = driver.train_all(runs[:1], ignore, signals)
    assert saved.is_set()
    assert ended.status == "stopped"
    assert signals.exit_code == code


def test_second_signal_stops_at_once(runs, monkeypatch, polls):
    over, shown, at_exit = threading.Event(), [], []

    def fit(_, run, __):
        (run.checkpoints / "00000004").mkdir(parents=True)
        start_and_send(run, signal.SIGINT, polls)
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(PATIENCE)

    monkeypatch.setattr(cluster, "fit", fit)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with pytest.raises(SystemExit, match="130"):
        driver.train_all(runs[:1], lambda _, line: shown.append(line.get("message", "")))
    over.set()
    assert "the steps after its last checkpoint (step 4) are lost" in shown[-1]
    assert "resume with 'attune train dummy --name one --resume'" in shown[-1]
    assert find_run("one").status == "stopped"
    assert len(at_exit) == 1  # Ray's clean-up would crash under the thread that waits in it


def test_killed_run_frees_its_resources_for_the_others(runs, monkeypatch):
    released = threading.Event()

    def fit(_, run, __):
        if run.name == "one":
            raise ActorDiedError
        assert released.wait(PATIENCE)
        (run.folder / "result.json").write_text("{}")

    monkeypatch.setattr(cluster, "fit", fit)
    monkeypatch.setattr(cluster, "release_resources_of_killed_runs", released.set)
    with pytest.raises(ServiceError, match=r"run 'one' failed: .* use fewer seeds at once"):
        driver.train_all(runs, ignore)
    assert [find_run(name).status for name in ("one", "two")] == ["failed", "finished"]
