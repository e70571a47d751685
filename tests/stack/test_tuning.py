"""`attune tune` on a real Ray cluster: early stopping, dying processes, populations."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import find_run, runs_folder
from attune.platform.tuning import sweep as sweeps
from tests.golden.interface import assert_json_keys

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.usefixtures("cluster_home")]

BIN = Path(sys.executable).parent
STEPS, EVERY = 36, 12  # validation takes most of the time
SETTINGS = ("--preset", "tiny", "--max-steps", str(STEPS), "--set", f"evaluate_every={EVERY}",
            "--set", "patience=0")  # fmt: skip


def attune(*arguments):
    return subprocess.Popen(
        [BIN / "attune", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process, code=0):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, output + errors
    if code:
        return output + errors
    result = json.loads(output.splitlines()[-1])
    assert_json_keys(process.args[1:], result)
    return result


def wait_for(condition, process):
    never = threading.Event()
    while not condition():
        assert process.poll() is None, "".join(process.communicate())
        never.wait(0.05)


def ended(name):
    """Return how the ended trials of a sweep ended, by number."""
    path = sweeps.sweeps_folder() / name / sweeps.STUDY
    if not path.is_file() or not path.stat().st_size:
        return {}
    trials = sweeps.find_sweep(name).get_trials()
    return {t.number: t.user_attrs["ended"] for t in trials if "ended" in t.user_attrs}


def kill_trial():
    home = os.environ["ATTUNE_HOME"]
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            working = any("ImplicitFunc" in part for part in process.info["cmdline"] or ())
            if working and process.environ().get("ATTUNE_HOME") == home:
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("no trial found")


def file(name, text):
    path = Path(os.environ["ATTUNE_HOME"]) / name
    path.write_text(text)
    return str(path)


def test_sweep_stops_early_and_resumes_after_dead_trials_and_drivers():
    """With very different learning rates, asha keeps the good ones and marks the diverged one."""
    space = file("rates.yaml", "space: {learning_rate: [1.0e-2, 1.0e-3, 1.0e-6, 1.0e-7, 1.0e+2]}\n"
                 "search: grid\n")  # fmt: skip
    command = ("tune", "dummy", "--sweep", space, *SETTINGS, "--set", "gradient_clipping=0",
               "--set", "weight_decay=2",  # with the highest rate, the weights overflow
               "--set", "log_every=1", "--name", "rates", "--resume", "--concurrent", "2",
               "--scheduler", "asha", "--json")  # fmt: skip
    process = attune(*command)
    wait_for(lambda: any(runs_folder().glob("rates-*/checkpoints/[0-9]*")), process)
    kill_trial()  # Tune restarts it
    wait_for(lambda: len(ended("rates")) >= 2, process)
    process.kill()
    process.communicate()
    before = ended("rates")
    kept = {n: find_run(f"rates-{n:03d}").metrics_file.read_bytes() for n in before}

    result = finished(attune(*command))
    assert set(result) == {"name", "best", "trials", "stopped_early", "failed"}
    assert (result["trials"], result["failed"]) == (5, 1)
    assert list(ended("rates").values()).count("diverged") == 1
    assert result["stopped_early"] >= 1
    assert result["best"]["config"]["learning_rate"] == 1e-2
    assert {n: ended("rates")[n] for n in before} == before
    assert kept == {n: find_run(f"rates-{n:03d}").metrics_file.read_bytes() for n in before}
    assert_tracked("rates", result)


def assert_tracked(name, result):
    """The sweep has a run in MLflow, and below it one for each trial with the reason of its end."""
    client = MlflowClient(tracking_uri=find_run(f"{name}-000").tracking)
    parent = client.get_run(sweeps.find_sweep(name).run_id)
    assert parent.info.status == "FINISHED"
    for number in range(result["trials"]):
        run = find_run(f"{name}-{number:03d}")
        known = client.get_run(run.run_id)
        assert known.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert known.data.tags["ended"].startswith(ended(name)[number])
        validation_steps = [line["step"] for line in read_metrics(run.metrics_file)
                 if "valid_loss" in line["metrics"]]  # fmt: skip
        history = client.get_metric_history(run.run_id, "valid_loss")
        assert sorted(one.step for one in history) == validation_steps
        statuses = {"finished": "finished", "diverged": "failed"}
        assert run.status == statuses.get(ended(name)[number], "stopped")
        assert (len(validation_steps) == STEPS / EVERY) == (run.status == "finished")
    best = find_run(result["best"]["run_id"])
    assert client.get_run(best.run_id).data.tags["best_of"] == name
    assert [v.run_id for v in client.search_model_versions("name='dummy'")].count(best.run_id) == 1


def test_population_copies_weights_and_settings():
    space = file("pbt.yaml", "space: {learning_rate: {low: 1.0e-6, high: 1.0e-2, scale: "
                 "loguniform}}\n")  # fmt: skip
    result = finished(attune("tune", "dummy", "--sweep", space, *SETTINGS, "--name", "pbt",
                             "--scheduler", "pbt", "--samples", "2", "--json"))  # fmt: skip
    assert (result["trials"], result["failed"]) == (2, 0)
    members = [find_run(f"pbt-{number:03d}") for number in range(2)]
    copied = [run for run in members if "continuing with a better member" in _log(run)]
    assert copied
    assert [run.status for run in members] == ["finished"] * 2
    for run in copied:
        settings = sweeps.find_sweep("pbt").get_trial(int(run.name[-3:])).user_attrs["settings"]
        assert run.training["learning_rate"] == settings["learning_rate"]
        first = sweeps.find_sweep("pbt").get_trial(int(run.name[-3:])).params["learning_rate"]
        assert settings["learning_rate"] != first
        logged = {line["metrics"]["learning_rate"] for line in read_metrics(run.metrics_file)
                  if "learning_rate" in line["metrics"]}  # fmt: skip
        assert len(logged) > 1  # it continued with another rate
        assert run.result["steps"] == STEPS


def _log(run):
    path = run.folder / "log.txt"
    return path.read_text() if path.is_file() else ""
