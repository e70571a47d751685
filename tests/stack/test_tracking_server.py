"""MLflow for a team: a server with PostgreSQL, artifacts and accounts; concurrency; restarts."""

import base64
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

import polars as pl
import pytest

from attune.platform import tracking
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.evaluation import answers, promotion
from attune.platform.runs.model import save_model
from attune.platform.runs.record import Run, read_run

from mlflow import MlflowClient  # isort: skip

pytestmark = pytest.mark.xdist_group("tracking-server")  # which is started once

PATIENCE = 900  # seconds until a test gives up; no test needs as many
PROCESSES, STEPS = 8, 150
USER, PASSWORD = "admin", "a long password"
ALLOWED = "127.0.0.1:*"


def postgres_programs():
    """The folder with initdb and pg_ctl, where PostgreSQL is installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name))
    if on_path := shutil.which("initdb"):
        places.append(Path(on_path).resolve().parent)
    folders = [place for place in places if (place / "initdb").exists()]
    return folders[-1] if folders else None


def free_screenshot_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def database():
    """The address of a PostgreSQL server; started as `postgres`, not as root."""
    for package in ("psycopg", "flask_wtf"):
        pytest.importorskip(package, reason=f"{package} is missing: pip install 'attune[team]'")
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    # Not in pytest's folder, which other accounts cannot enter.
    place = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    as_owner = []
    if os.geteuid() == 0:
        shutil.chown(place, "postgres", "postgres")
        place.chmod(0o700)
        as_owner = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    port = free_screenshot_port()

    def call(*command):
        done = subprocess.run(
            [*as_owner, str(programs / command[0]), *command[1:]],
            cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    data, log = str(place / "data"), str(place / "log")
    call("initdb", "--pgdata", data, "--username=mlflow", "--auth=trust", "--no-sync")
    settings = f"-c listen_addresses=127.0.0.1 -p {port} -c unix_socket_directories={place}"
    # The server keeps pg_ctl's output open, hence a log file.
    call("pg_ctl", "--pgdata", data, "--log", log, "--wait", "-o", f"{settings} -F", "start")
    call("createdb", "--host=127.0.0.1", f"--port={port}", "--username=mlflow", "mlflow")
    yield f"postgresql://mlflow@127.0.0.1:{port}/mlflow"
    call("pg_ctl", "--pgdata", data, "--mode=immediate", "stop")
    shutil.rmtree(place)


class Server:
    """An MLflow server as in infra/compose.yaml, which can be stopped and started again."""

    def __init__(self, database, folder):
        self.database, self.folder, self.port = database, folder, free_screenshot_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        config = self.folder / "accounts.ini"
        config.write_text(
            "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
            f"database_uri = sqlite:///{self.folder / 'accounts.db'}\n"
        )
        # The client settings of the test do not apply to the server.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        environment = {
            **inherited,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_AUTH_CONFIG_PATH": str(config),
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "only for this test",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1", "--app-name", "basic-auth"),
            *("--backend-store-uri", self.database, "--allowed-hosts", ALLOWED),
            *("--artifacts-destination", (self.folder / "artifacts").as_uri()),
        ]
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        for _ in range(10 * PATIENCE):
            if self.status() == 200:
                return
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            try:
                self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(PATIENCE)

    def status(self, password=PASSWORD, host=None):
        """Return the status of a request to the API."""
        request = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/experiments/get?experiment_id=0"
        )
        if password is not None:
            credentials = base64.b64encode(f"{USER}:{password}".encode()).decode()
            request.add_header("Authorization", f"Basic {credentials}")
        if host is not None:
            request.add_header("Host", host)
        try:
            return urllib.request.urlopen(request, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None


@pytest.fixture(scope="module")
def server(database, tmp_path_factory):
    pytest.importorskip(
        "flask_wtf", reason="Flask-WTF is not installed: pip install 'attune[team]'"
    )
    server = Server(database, tmp_path_factory.mktemp("server"))
    try:
        server.start()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def home(server, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    # On a busy machine, a request may take longer than the default timeout.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(PATIENCE))
    monkeypatch.setattr("attune.platform.tracking.queue.PAUSE", 0.05)
    return tmp_path / "home"


@pytest.fixture
def new_run(home, prepared, build):
    model, manifest = build("dummy"), read_dataset_manifest(prepared)

    def make(name):
        run = Run(
            name=name, folder=home / "runs" / name, variant="dummy", preset="tiny",
            config=asdict(model.variant.config), training={"track_checkpoint": False},
            data={"name": "bundled", "folder": str(prepared), "hash": manifest["hash"]},
        )  # fmt: skip
        run.write()
        save_model(model, run.model)
        return tracking.start_run(run, manifest)

    return make


def write(run, first, last):
    with run.metrics_file.open("a") as file:
        for step in range(first, last + 1):
            line = {"step": step, "time": step, "metrics": {"loss": 1 / step, "nll": step / 2}}
            file.write(json.dumps(line) + "\n")


def logged(client, run, key):
    return {m.step: m.value for m in client.get_metric_history(run.run_id, key)}


def log_all(folder):
    """Send a run's metrics while they are written, as its driver does."""
    run = read_run(Path(folder))
    with tracking.TrackingQueue() as queue:
        queue.start_sending(run)
        for first in range(1, STEPS, 50):
            write(run, first, first + 49)
        assert queue.close(PATIENCE) == {}


def test_server_rejects_wrong_passwords_and_hosts(server):
    assert server.status() == 200
    assert server.status("wrong") == 401
    assert server.status(None) == 401
    assert server.status(host="somewhere.example.org") == 403


def test_eight_concurrent_processes_lose_no_metric(server, new_run):
    runs = [new_run(f"run-{number}") for number in range(PROCESSES)]
    processes = multiprocessing.get_context("fork")
    with processes.Pool(PROCESSES) as pool:
        pool.map(log_all, [str(run.folder) for run in runs], chunksize=1)
    client = MlflowClient(tracking_uri=server.address)
    for run in runs:
        assert logged(client, run, "loss") == {s: 1 / s for s in range(1, STEPS + 1)}
        assert logged(client, run, "nll") == {s: s / 2 for s in range(1, STEPS + 1)}
    assert len({client.get_run(run.run_id).info.experiment_id for run in runs}) == 1


def test_metrics_are_complete_after_a_restart_of_the_server(server, new_run):
    trained, ended = new_run("trained-on"), new_run("ended-alone")
    client = MlflowClient(tracking_uri=server.address)
    write(ended, 1, 20)
    with tracking.TrackingQueue() as queue:
        queue.start_sending(trained)
        write(trained, 1, 50)
        while 50 not in logged(client, trained, "loss"):
            assert queue._thread.is_alive()
        server.stop()
        assert server.status() is None
        write(trained, 51, 100)  # training continues
        with tracking.TrackingQueue() as other:  # another run ends meanwhile
            other.start_sending(ended)
        assert other.close(0.1) == {ended.name: 20}
        ended = ended.update(status="finished", result={"best_step": 20, "steps": 20, "seconds": 1})
        assert not tracking.finish_run(ended, pl.DataFrame({"answer": ["oh"]}))
        server.start()
        write(trained, 101, 150)
        assert queue.close(PATIENCE) == {}
    assert logged(client, trained, "loss") == {s: 1 / s for s in range(1, 151)}

    assert tracking.flush_run(ended, PATIENCE) == 0
    assert set(logged(client, ended, "loss")) == set(range(1, 21))
    actual = client.get_run(ended.run_id)
    assert actual.info.status == "FINISHED"
    # Artifacts went through the server: clients need no access to its folder.
    assert actual.info.artifact_uri.startswith("mlflow-artifacts:")
    assert "run.json" in {file.path for file in client.list_artifacts(ended.run_id)}
    assert list((server.folder / "artifacts").rglob("model.safetensors"))


def test_champion_is_shared_through_the_server(server, new_run):
    run = new_run("best").update(
        status="finished", result={"best_step": 1, "steps": 1, "seconds": 1.0}
    )
    assert tracking.finish_run(run)
    path = run.folder / "answers" / promotion.answers_name("valid")
    answers.write(pl.DataFrame({"answer": ["oh"], "response": ["oh"]}), path)
    tracking.log_evaluation(run, "valid", "greedy", {"perplexity": 30.0}, path)
    assert promotion.promote(run, split="valid", metric="perplexity").promoted
    client = MlflowClient(tracking_uri=server.address)
    assert client.get_model_version_by_alias("attune", "champion").run_id == run.run_id
