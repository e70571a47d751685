"""`attune train` on a real Ray cluster: as a command, as a job, and through every kind of death."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import find_run
from attune.platform.services import jobs, stack, stack_processes
from attune.platform.training.loop import PLAN
from tests.golden import commands
from tests.golden.interface import assert_json_keys
from tests.runs import last_checkpoint, last_step

pytestmark = pytest.mark.xdist_group("cluster")

BIN = Path(sys.executable).parent
STEPS, EVERY = 240, 80
SETTINGS = ("--preset", "tiny", "--max-steps", str(STEPS), "--set", f"evaluate_every={EVERY}",
            "--set", "checkpoint_every=20", "--set", "batch_size=64")  # fmt: skip


@pytest.fixture(scope="module")
def environment(prepared, tmp_path_factory):
    """A cluster with a job server, and a home that all commands share."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    (home / "data" / "bundled").symlink_to(prepared)
    # Ray looks for `pip` to install the wheel of a job with.
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", path)
        patched.setenv("ATTUNE_HOME", str(home))
        patched.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # Not `ray.init`, whose job server takes no jobs beside another cluster on the machine.
        patched.setattr(stack, "PARTS", (stack.RAY,))
        patched.delenv("RAY_ADDRESS", raising=False)
        [port] = stack_processes.free_ports(1)
        try:
            part = stack.up({stack.RAY: port}, cores=2)[stack.RAY]
            patched.setenv("RAY_ADDRESS", stack.head_address(part))
            patched.setenv("DASHBOARD", part.address)
            yield
        finally:
            stack.down()


def attune(*arguments, **options):
    return subprocess.Popen(
        [BIN / "attune", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def finished(process, code=0):
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, output + errors
    return output


def wait_for(condition, process):
    """Until it holds; a process that ends before is an error with its words."""
    never = threading.Event()
    while not condition():
        assert process.poll() is None, "".join(process.communicate())
        never.wait(0.05)


def kill_worker():
    """One of this test's own: others may be training on the same machine."""
    home = os.environ["ATTUNE_HOME"]
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            working = any("RayTrainWorker" in part for part in process.info["cmdline"] or ())
            if working and process.environ().get("ATTUNE_HOME") == home:
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("no worker found")


def submit_plainly(*entry):
    """As a job by Ray's own command, which knows nothing of Attune."""
    home = json.dumps({"env_vars": {"ATTUNE_HOME": os.environ["ATTUNE_HOME"]}})
    done = subprocess.run(
        [BIN / "ray", "job", "submit", "--runtime-env-json", home, "--", *entry],
        env={**os.environ, **stack.ray_variables(), "RAY_ADDRESS": os.environ["DASHBOARD"]},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def logged(run):
    return [
        (line["step"], {k: v for k, v in line["metrics"].items() if k != "samples_per_second"})
        for line in read_metrics(run.metrics_file)
    ]


def assert_tracked_once(run):
    """MLflow has one run of that name, and each value of the run's own log exactly once."""
    client = MlflowClient(tracking_uri=run.tracking)
    experiment = client.get_experiment_by_name(run.variant)
    names = [one.info.run_name for one in client.search_runs([experiment.experiment_id])]
    assert Counter(names)[run.name] == 1
    for key in ("loss", "nll", "valid_loss"):
        expected = [(step, metrics[key]) for step, metrics in logged(run) if key in metrics]
        history = client.get_metric_history(run.run_id, key)
        assert sorted((one.step, one.value) for one in history) == expected


@pytest.fixture(scope="module")
def uninterrupted(environment):  # noqa: ARG001
    command = ("train", "dummy", *SETTINGS, "--name", "whole", "--json")
    result = json.loads(finished(attune(*command)).splitlines()[-1])
    assert_json_keys(command, result)
    return result


def test_a_run_through_the_command(uninterrupted):
    run = find_run("whole")
    assert run.status == "finished"
    assert uninterrupted["run_id"] == run.run_id
    assert uninterrupted["steps"] == STEPS
    assert set(uninterrupted) == {"run_id", "name", "checkpoint", "steps", "seconds", "metrics"}
    assert {"valid_loss", "valid_perplexity", "valid_emotion_accuracy"} <= set(
        uninterrupted["metrics"]
    )
    assert_tracked_once(run)


@pytest.mark.usefixtures("uninterrupted")
def test_whatever_dies_the_result_is_the_same():
    command = ("train", "dummy", *SETTINGS, "--name", "unlucky", "--resume")
    process = attune(*command)
    wait_for(lambda: last_checkpoint("unlucky") >= 20, process)
    kill_worker()  # Ray starts another
    before = last_step("unlucky")
    wait_for(lambda: last_step("unlucky") > before, process)
    process.send_signal(signal.SIGINT)
    finished(process, 130)
    assert find_run("unlucky").status == "stopped"
    stopped_at = last_checkpoint("unlucky")
    assert 20 < stopped_at < STEPS

    process = attune(*command)
    wait_for(lambda: last_checkpoint("unlucky") > stopped_at, process)
    process.kill()  # the driver, and with it everything
    process.communicate()
    listed = json.loads(finished(attune("runs", "--json")).splitlines()[-1])["runs"]
    assert {run["name"]: run["status"] for run in listed}["unlucky"] == "interrupted"
    assert last_checkpoint("unlucky") < STEPS

    submit_plainly("python", "-m", "attune.jobs.train", *command[1:])
    run, whole = find_run("unlucky"), find_run("whole")
    assert run.status == "finished"
    assert logged(run) == logged(whole)
    assert run.result["metrics"] == whole.result["metrics"]
    assert_tracked_once(run)


@pytest.mark.usefixtures("uninterrupted")
def test_several_seeds_that_begin_with_another_run():
    command = ("train", "dummy", "--preset", "tiny", "--seeds", "1,2", "--init", "whole")
    output = finished(attune(*command, "--max-minutes", "0.001", "--name", "short", "--json"))
    result = json.loads(output.splitlines()[-1])
    assert_json_keys(command, result)
    assert [run["name"] for run in result["runs"]] == ["short-seed1", "short-seed2"]
    assert all(1 <= run["steps"] < STEPS for run in result["runs"])
    losses = [run["metrics"]["valid_loss"] for run in result["runs"]]
    assert result["mean"]["valid_loss"] == pytest.approx(sum(losses) / 2)
    assert losses[0] != losses[1]
    runs = [find_run(run["name"]) for run in result["runs"]]
    [parent] = {run.parent for run in runs}
    client = MlflowClient(tracking_uri=runs[0].tracking)
    together = client.get_run(parent)
    assert together.info.status == "FINISHED"
    assert together.data.metrics["valid_loss_mean"] == pytest.approx(sum(losses) / 2)
    tags = [client.get_run(run.run_id).data.tags for run in runs]
    assert [each["mlflow.parentRunId"] for each in tags] == [parent] * 2
    initial = find_run("whole").result["metrics"]["valid_loss"]
    assert losses == pytest.approx([initial] * 2, rel=0.1)  # a step or two away from where it began


@pytest.mark.usefixtures("uninterrupted")
def test_a_job_with_two_workers_gives_the_losses_of_one():
    address = os.environ["DASHBOARD"]
    some = ("--max-steps", str(EVERY))  # the option that comes last counts
    train = ("train", "dummy", *SETTINGS, *some, "--workers", "2", "--zero", "1", "--name", "job")
    finished(attune("submit", "--address", address, "--follow", "--", *train))
    run, whole = find_run("job"), find_run("whole")
    assert run.status == "finished"
    assert jobs.has_ended(run.job, run.dashboard)
    assert jobs.has_ended("unknown-to-the-server", run.dashboard)
    assert logged(run)[-1][0] == EVERY
    for (step, actual), (same, expected) in zip(logged(run), logged(whole), strict=False):
        assert step == same
        assert actual == pytest.approx(expected, rel=1e-3), step
    assert_tracked_once(run)


@pytest.mark.usefixtures("environment")
def test_who_stops_a_run_waits_for_its_checkpoint_unless_asked_twice():
    """A step takes seconds, and nothing but the stop causes a checkpoint."""
    settings = ("batch_size=4000", "accumulation=16", "log_every=1", "checkpoint_every=99",
                "evaluate_every=99")  # fmt: skip
    slow = ("--preset", "tiny", "--max-steps", "99", *(f"--set={each}" for each in settings))
    command = ("train", "dummy", *slow, "--name", "slow", "--resume")

    def train_past_checkpoint():
        before = last_checkpoint("slow")
        process = attune(*command)
        wait_for(lambda: last_step("slow") > before, process)
        return process

    process = train_past_checkpoint()
    process.terminate()
    assert "resume with 'attune train dummy --name slow --resume'" in finished(process, 143)
    assert last_checkpoint("slow") == last_step("slow") > 0
    assert find_run("slow").status == "stopped"

    process, saved = train_past_checkpoint(), last_checkpoint("slow")
    process.send_signal(signal.SIGINT)
    wait_for(find_run("slow").stop_file.exists, process)
    process.send_signal(signal.SIGINT)
    assert f"steps after its last checkpoint (step {saved}) are lost" in finished(process, 130)
    assert last_checkpoint("slow") == saved
    assert find_run("slow").status == "stopped"

    address = ("--address", os.environ["DASHBOARD"])
    submitted = finished(attune("submit", *address, "--json", "--", *command))
    job = json.loads(submitted.splitlines()[-1])["job_id"]
    follower = attune("jobs", "logs", job, "--follow", *address)
    wait_for(lambda: find_run("slow").job == job, follower)
    wait_for((find_run("slow").folder / PLAN).exists, follower)  # its metrics are those of the job
    wait_for(lambda: last_step("slow") > saved, follower)
    assert f"job {job}: STOPPED" in finished(attune("jobs", "stop", job, *address))
    finished(follower, 130)
    assert last_checkpoint("slow") == last_step("slow") > saved


@pytest.mark.usefixtures("environment")
def test_when_a_controller_is_killed_the_other_seeds_finish():
    """In a cluster without a dashboard, as a single command starts it; the second seed waits for
    the cores of the first."""
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    alone["ATTUNE_CPUS_PER_WORKER"] = str(os.cpu_count())
    options = ("--preset", "tiny", "--seeds", "1,2", "--max-minutes", "0.2", "--name", "killed")
    process = attune("train", "dummy", *options, "--set", "log_every=1", env=alone)
    wait_for(lambda: last_step("killed-seed1") > 0, process)
    [controller] = [
        child for child in psutil.Process(process.pid).children(recursive=True)
        if "TrainController" in child.name()
    ]  # fmt: skip
    controller.kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    assert "run 'killed-seed1' failed: the process that controls it was killed" in errors
    assert "use fewer seeds at once, fewer --workers, a smaller --set batch_size" in errors
    assert find_run("killed-seed1").status == "failed"
    assert find_run("killed-seed2").status == "finished"


@pytest.mark.usefixtures("environment")
def test_stages_on_a_cluster_match_the_record(golden_corpus, monkeypatch):
    monkeypatch.setenv("ATTUNE_CPUS_PER_WORKER", "1")  # and one thread
    output = finished(attune(*commands.arguments("empdg", golden_corpus)))
    result = json.loads(output.splitlines()[-1])
    commands.check("empdg", commands.measures_of("empdg", result["metrics"]))
