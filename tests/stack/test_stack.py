"""The local stack through its commands: up, jobs that wait, stop, resume and fail, down."""

import http.client
import json
import os
import subprocess
import sys
import threading
from base64 import b64encode
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from attune.platform.runs.log import LINES, TEXT
from attune.platform.runs.record import find_run, runs_folder
from attune.platform.services import stack, stack_processes
from tests.golden.interface import assert_json_keys
from tests.runs import last_checkpoint, last_step

pytestmark = pytest.mark.xdist_group("cluster")

BIN = Path(sys.executable).parent
TRAIN = ("train", "dummy", "--preset", "tiny", "--set", "checkpoint_every=20",
         "--set", "evaluate_every=100000", "--set", "log_every=1")  # fmt: skip
LONG = ("--name", "long", "--resume")
ERROR = "nonsense"  # part of the error message


@pytest.fixture(scope="module", autouse=True)
def up(home_with_data):
    """Start the stack in a new home with a password for MLflow; yield what `attune up` prints."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTUNE_HOME", str(home_with_data))
        patched.setenv("RAY_metrics_report_interval_ms", "500")
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
            patched.delenv(name, raising=False)
        ports = [str(port) for port in stack_processes.free_ports(3)]
        options = zip(("--dashboard-port", "--mlflow-port", "--ui-port"), ports, strict=True)
        try:
            yield attune("up", "--cpus", "2", "--mlflow-auth", *sum(options, ()), "--json")
        finally:
            stack.down()


def attune(*arguments, code=0, **variables):
    """Run a command; return its JSON object, or its output without --json."""
    done = subprocess.run(
        [BIN / "attune", *arguments], env={**os.environ, **variables},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    if "--json" not in arguments:
        return done.stdout + done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert_json_keys(arguments, output)
    return output


def wait_for(condition, job):
    """Wait until a condition holds; it is an error if the job ends before."""
    never = threading.Event()
    while not (value := condition()):
        jobs = {each["submission_id"]: each for each in stack.ask(part(stack.RAY), "/api/jobs/")}
        assert jobs[job]["status"] in ("PENDING", "RUNNING"), jobs[job]["message"]
        never.wait(0.1)
    return value


def part(name):
    return stack.running_parts()[name]


def asked(port, path, authorization):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Authorization": authorization})
    status = connection.getresponse().status
    connection.close()
    return status


def exported():
    """Return the metrics for Prometheus."""
    return stack.ask(part(stack.RAY), "/metrics", port=part(stack.RAY).ports["metrics"])


def test_all_parts_respond_and_starting_again_changes_nothing(up):
    assert [each["name"] for each in up["parts"]] == list(stack.PARTS)
    again = attune("up", "--json")
    assert [each["pid"] for each in again["parts"]] == [each["pid"] for each in up["parts"]]
    status = attune("status", "--json")
    assert status["ok"]
    assert [each["health"] for each in status["parts"]] == ["ok"] * 3
    assert sum(each["memory_mb"] for each in status["parts"]) < 4096
    assert "already runs at port" in attune("up", "--mlflow-port", "1", code=2)


def test_requests_without_the_secret_are_rejected():
    ray, mlflow = part(stack.RAY), part(stack.MLFLOW)
    token, password = stack.token_file().read_text(), stack.password_file().read_text()
    tokens = {"": 401, "Bearer wrong": 403, f"Bearer {token}": 200}
    assert {each: asked(ray.port, "/api/jobs/", each) for each in tokens} == tokens
    names = {"": 401, "admin:wrong": 401, f"admin:{password}": 200}
    search = "/api/2.0/mlflow/experiments/search?max_results=1"
    for name, status in names.items():
        basic = f"Basic {b64encode(name.encode()).decode()}" if name else ""
        assert asked(mlflow.port, search, basic) == status
    assert "rejected the token" in attune("jobs", "list", code=2, RAY_AUTH_TOKEN="wrong" * 8)


def test_doctor_checks_every_machine():
    actual = attune("doctor", "--cluster", "--json")
    assert [check["name"] for check in actual["checks"]] == [
        "address", "machines", "versions", "home", "tracking",
    ]  # fmt: skip
    assert actual["checks"][1]["found"] == "1, with 2 CPUs and 0 GPUs"


def test_jobs_wait_stop_fail_and_resume(tmp_path):
    """Three trainings in one test, since each has to start workers: one is stopped and resumed, and
    one that waits for it fails."""
    vectors = tmp_path / "vectors.txt"
    vectors.write_text(f"full {ERROR}\n")
    first = attune("submit", "--json", "--", *TRAIN, *LONG, "--max-steps", "1000000")
    assert first["run"] == "long"
    job = first["job_id"]
    wait_for(lambda: last_checkpoint("long") >= 20, job)

    failing = ("train", "dummy", "--preset", "tiny", "--set", f"word_vectors={vectors}")
    second = attune("submit", "--json", "--", *failing)
    assert second["run"] == "dummy-bundled-1"
    wait_for(lambda: says("dummy-bundled-1", "waits for 2 CPUs: 0 of 2 free"), second["job_id"])
    jobs = {each["id"]: each for each in attune("jobs", "list", "--json")["jobs"]}
    assert jobs[second["job_id"]]["waits_for"] == "2 CPUs: 0 of 2 free"
    assert jobs[job]["waits_for"] == ""
    assert [jobs[each]["run"] for each in (job, second["job_id"])] == ["long", "dummy-bundled-1"]

    wait_for(lambda: "ray_attune_loss{" in exported(), job)
    measured = [line for line in exported().splitlines() if line.startswith("ray_attune_loss{")]
    assert all('run="long"' in line and f'job="{job}"' in line for line in measured)

    stopped = attune("jobs", "stop", "long", "--json")
    assert (stopped["id"], stopped["state"]) == (job, "STOPPED")
    run = find_run("long")
    assert (run.status, run.job, run.dashboard) == ("stopped", job, first["dashboard"])
    done = last_step("long")
    assert last_checkpoint("long") == done

    assert attune("jobs", "wait", second["job_id"], "--json", code=1)["state"] == "FAILED"
    failed = find_run("dummy-bundled-1")
    assert failed.status == "failed"
    assert ERROR in failed.error
    assert ERROR in attune("jobs", "logs", "dummy-bundled-1")

    goes_on = ("submit", "--follow", "--json", "--", *TRAIN, *LONG, "--max-steps", str(done + 3))
    third = attune(*goes_on)
    assert third["state"] == "SUCCEEDED"
    assert find_run("long").status == "finished"
    assert last_step("long") == done + 3
    assert says("long", f"resuming from step {done:,}")

    client = MlflowClient(tracking_uri=run.tracking)
    known = {name: client.get_run(find_run(name).run_id) for name in ("long", "dummy-bundled-1")}
    assert known["long"].data.tags["ray_job"] == third["job_id"]
    assert known["long"].data.tags["ray_dashboard"].endswith(f"/#/jobs/{third['job_id']}")
    assert known["dummy-bundled-1"].info.status == "FAILED"
    assert ERROR in known["dummy-bundled-1"].data.tags["error"]
    lines = [json.loads(line) for line in (run.folder / LINES).read_text().splitlines()]
    assert [line["job"] for line in lines] == [job] * 2 + [third["job_id"]] * 3
    assert {line["run_id"] for line in lines} == {run.run_id}


def says(name, message):
    path = runs_folder() / name / TEXT
    return path.exists() and message in path.read_text()


def test_down_stops_all_parts():
    ours = [process for each in stack.running_parts().values() for process in each.processes()]
    assert len(ours) > 5
    assert attune("down", "--json") == {"stopped": list(stack.PARTS)}
    assert not psutil.wait_procs(ours, 0)[1]
    assert attune("status", "--json", code=1) == {"ok": False, "parts": []}
    assert "nothing was running" in attune("down")
