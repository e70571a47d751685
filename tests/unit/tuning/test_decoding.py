"""Sweeps over the decoding of a trained run."""

import pytest

from attune.platform.core.logging import JOB
from attune.platform.services import cluster
from attune.platform.services import tasks as ray_tasks
from attune.platform.tuning import (
    decoding,
    spaces,
)
from attune.platform.tuning import sweep as sweeps
from tests.runs import write_run
from tests.sweeps import SPACE, write_sweep


@pytest.mark.usefixtures("trained")
def test_decoding_sweep_needs_no_training_and_resumes(prepared, monkeypatch):
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2})
    measured = []

    def inline(work, tasks):
        for task in tasks:
            measured.append(task)
            yield work(task)
            if len(measured) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(ray_tasks, "run_tasks", inline)
    ready = spaces.find_definition("mime-beams")
    asked_for = {"run": "mine", "data": str(prepared), "split": "valid", "contexts": 4,
                 "overrides": {"max_tokens": "5"}}  # fmt: skip
    sweep = write_sweep(
        kind="decoding", metrics=("bleu",), search="grid", scheduler="none", asked=asked_for,
        space=spaces.build_decoding_spaces(["beam"], ready, {"max_tokens": "5"}),
    )  # fmt: skip
    shown = []
    stopped = decoding.run(sweep, lambda text, done: shown.append((text, done)))
    assert stopped.status == "stopped"
    monkeypatch.setenv(JOB, "tune-decoding-1")
    ended = decoding.run(
        sweeps.read_sweep(sweep.folder), lambda text, done: shown.append((text, done))
    )
    assert (ended.status, ended.job) == ("finished", "tune-decoding-1")
    assert sorted(task.settings["beams"] for task in measured) == [1, 2, 3, 5, 8, 10]
    assert len(ended.get_trials()) == 6
    assert ended.count("finished") == 6
    assert shown[-1][1] == 6
    assert ended.summarize()["best"]["config"]["decode"] == "beam"


def test_decoding_sweep_stops_on_request(monkeypatch, prepared, home):
    write_run(home, "mine", "dummy")
    monkeypatch.setattr("attune.platform.services.cluster.connect", lambda: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2})
    sweep = write_sweep(
        kind="decoding", metrics=("bleu",), scheduler="none", space={"beam": SPACE},
        asked={"run": "mine", "data": str(prepared), "split": "valid", "contexts": 1,
               "overrides": {}},
    )  # fmt: skip

    def measured(_, tasks):
        for task in tasks:
            sweep.stop_file.touch()
            yield task.number, {"bleu": 1.0}

    monkeypatch.setattr("attune.platform.services.tasks.run_tasks", measured)
    stopped = decoding.run(sweep, lambda *_: None)
    assert (stopped.status, stopped.count("finished")) == ("stopped", 1)
