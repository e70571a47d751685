"""`attune runs`: the status of runs whose process was killed."""

import socket

import pytest

from attune.platform import tracking
from attune.platform.runs.lock import hold_lock
from attune.platform.services import jobs
from tests.commands import json_output
from tests.runs import write_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def statuses(call):
    def read():
        return {run["name"]: run["status"] for run in json_output(call("runs", "--json"))["runs"]}

    return read


def write_running(home, name, **fields):
    return write_run(home, name, "dummy", status="running", data={"name": "few"}, **fields)


def test_a_run_that_no_process_trains_is_interrupted(home, statuses, call):
    run = write_running(home, "one")
    with hold_lock(run.folder, "taken"):
        assert statuses() == {"one": "running"}
        assert "resume" not in call("runs").stdout
    assert statuses() == {"one": "interrupted"}
    resume = "one is interrupted: resume it with 'attune train dummy --name one --resume'"
    assert resume in call("runs").stdout


def test_a_trial_is_running_as_long_as_its_sweep(home, statuses, call):
    write_running(home, "mine-003-seed1")
    sweep = home / "sweeps" / "mine"
    sweep.mkdir(parents=True)
    with hold_lock(sweep, "taken"):
        assert statuses() == {"mine-003-seed1": "running"}
    assert statuses() == {"mine-003-seed1": "interrupted"}
    assert "resume it with 'attune tune dummy --name mine --resume'" in call("runs").stdout


def test_a_job_that_cannot_be_queried_leaves_the_status_unknown(home, statuses, call):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"  # nobody listens
        run = write_running(home, "one", job="train-1", dashboard=f"{address}/#/jobs/train-1")
        assert statuses() == {"one": "unknown"}
        shown = call("runs").stdout
        assert "job server of its Ray job train-1 does not answer" in shown
        assert "'attune submit -- train dummy --name one --resume'" in shown
        with hold_lock(run.folder, "taken"):
            assert statuses() == {"one": "running"}


@pytest.mark.parametrize(("ended", "status"), [(True, "interrupted"), (False, "running")])
def test_a_job_that_is_alive_trains_its_run(home, statuses, monkeypatch, ended, status):
    """Its lock may be held on another machine, where this one cannot see it."""
    write_running(home, "one", job="train-1", dashboard="http://head:8265/#/jobs/train-1")
    monkeypatch.setattr(jobs, "has_ended", lambda *_: ended)
    assert statuses() == {"one": status}


def test_send_leaves_a_run_alone_that_is_being_finished(home, call, monkeypatch):
    """Its own process registers the model; a second version would follow otherwise."""
    finished = [
        write_run(home, name, "dummy", data={"name": "few"}, run_id=name) for name in ("a", "b")
    ]
    sent = []
    monkeypatch.setattr(tracking, "flush_run", lambda run, _: sent.append(run.name))
    monkeypatch.setattr("attune.platform.evaluation.promotion.update_aliases", lambda _: None)
    with hold_lock(finished[0].folder, "taken"):
        json_output(call("runs", "--send", "--json"))
    assert sent == ["b"]
