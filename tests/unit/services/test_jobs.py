"""Jobs without a cluster: arguments, uploads, and the job in the record of its run."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from attune.jobs import cli, unpack
from attune.jobs.jobs import _build_job_resume_command
from attune.jobs.submit import _add_submitted_name, _find_submitted_option, parse_submitted_command
from attune.platform.core.commit import VARIABLE, commit
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import JOB, TRIAL, job_environment
from attune.platform.runs.log import LINES, log_file, write_log
from attune.platform.runs.record import Run, all_runs
from attune.platform.services import jobs
from attune.platform.services.cluster import describe_shortage


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [
        ({"CPU": 2.0}, {}, "2 CPUs: 0 of 2 free"),
        ({"CPU": 1.0}, {"CPU": 0.5}, "1 CPU: 0.5 of 2 free"),
        ({"CPU": 1.0, "GPU": 2.0}, {"CPU": 2.0}, "2 GPUs: 0 of 0 free"),
        ({"CPU": 2.0}, {"CPU": 2.0}, "2 CPUs: 2 of 2 free"),  # on two machines, say
    ],
)
def test_describe_shortage(wanted, free, expected):
    assert describe_shortage(wanted, free, {"CPU": 2.0}) == expected


def attune(*arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attune", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("submit", "--", "trian", "mime"), "did you mean 'train'?"),
        (("submit", "--", "up"), "unknown command 'up'"),
        (("submit", "--", "train", "mime", "--stpes", "1"), "--stpes"),
        (("submit", "train", "mime", "--preset", "tiny", "--stpes", "1"), "--stpes"),
        (("submit", "--", "data", "prepare", "--sorce", "x"), "--sorce"),
        (("submit", "--home", "there", "--", "runs"), "expected an absolute path"),
        (("submit", "--", "train", "mime", "--max-minutes", "0"), "--max-minutes 0: expected"),
        (("submit", "--upload", "nowhere", "--", "runs"), "does not exist"),
        (("submit", "--upload", ".", "--", "runs"), "expected a path that occurs in COMMAND"),
        (("submit", "--gpus-per-worker", "-1", "--", "runs"), "gpus-per-worker"),
        (("jobs", "logs"), "JOB"),
        (("jobs", "list", "--address", "http://127.0.0.1:9"), "'attune up'"),
    ],
)
@pytest.mark.usefixtures("home")
def test_wrong_arguments_are_reported_before_submission(arguments, expected, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, errors = attune(*arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert code == 2
    assert expected in errors


@pytest.fixture
def parsed():
    import typer

    group = typer.main.get_command(cli.app)
    return lambda command: parse_submitted_command(group, command)


def test_a_run_or_sweep_is_named_when_it_is_submitted(home, parsed):
    train = ["train", "dummy", "--max-steps", "2"]
    for number in (1, 2):  # the second is submitted before the first has begun
        expected = [*train, "--name", f"dummy-bundled-{number}"]
        assert _add_submitted_name(train, parsed(train)) == expected
    with_data = ["train", "dummy", "--data", "some/folder"]
    assert _add_submitted_name(with_data, parsed(with_data))[-1] == "dummy-folder-1"
    tune = ["tune", "dummy", "--space", "optimizer"]
    assert _add_submitted_name(tune, parsed(tune)) == [*tune, "--name", "tune-dummy-1"]
    for other in (
        ["train", "dummy", "--name", "mine"],
        ["train", "dummy", "--resume"],
        ["tune", "list"],
        ["runs"],
    ):
        assert _add_submitted_name(other, parsed(other)) == other
    assert not list(all_runs())  # names that are kept free are no runs
    assert home.is_dir()
    assert _find_submitted_option(["train", "--name=mine"], "--name") == "mine"


def test_uploads_are_stored_by_their_contents(tmp_path, home, monkeypatch):
    folder, file = tmp_path / "mine", tmp_path / "words.txt"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    file.write_text("b")
    packed, places = jobs.pack([folder, file], tmp_path / "packed", f"{home}/{jobs.UPLOADS}")
    again = jobs.pack([folder, file], tmp_path / "again", f"{home}/{jobs.UPLOADS}")[1]
    assert places == again
    for _ in range(2):  # the second job finds it there
        unpack.unpack(packed)
    assert (home / jobs.UPLOADS).is_dir()
    for path, content in ((folder, "a"), (file, "b")):
        place = places[str(path)]
        unpacked = os.path.join(place, "a.txt") if path.is_dir() else place  # noqa: PTH118
        with open(unpacked) as there:  # noqa: PTH123
            assert there.read() == content
    (folder / "a.txt").write_text("changed")
    assert jobs.pack([folder], tmp_path / "changed", "x")[1] != {
        str(folder): places[str(folder)].replace(str(home / jobs.UPLOADS), "x")
    }
    monkeypatch.setattr(jobs, "MAX_UPLOAD", 3)
    with pytest.raises(UsageError, match="on a disk that the cluster sees"):
        jobs.pack([folder], tmp_path / "large", "x")


def test_the_address_of_the_server(home, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert jobs.resolve_address(None) == jobs.JOB_SERVER
    monkeypatch.setenv("RAY_ADDRESS", "http://head:1")
    assert jobs.resolve_address(None) == "http://head:1"
    assert jobs.resolve_address("http://other:2") == "http://other:2"
    assert not home.exists()  # to ask leaves nothing behind


class Client:
    """A job server that records its requests."""

    def submit_job(self, **sent):
        self.sent = sent


def test_a_job_has_its_commit_and_the_command_to_resume(home, monkeypatch):
    """The code of a job is a wheel without a Git history."""
    monkeypatch.setattr(jobs.wheel, "build", lambda folder: folder / "attune.whl")
    cluster = object.__new__(jobs.Jobs)
    cluster.address, cluster.client = "http://head:8265", Client()
    options = ["--address", "http://head:8265", "--upload", "my data"]
    train = ["train", "dummy", "--data", "my data", "--name", "mine"]
    cluster.submit(train, options=options, run="mine")
    sent = cluster.client.sent
    variables = sent["runtime_env"]["env_vars"]
    assert variables["ATTUNE_HOME"] == str(home)
    assert variables[VARIABLE] == commit()
    monkeypatch.setenv(VARIABLE, "abc")  # as the job finds it
    assert commit() == "abc"
    job = jobs.Job(id="j", state="STOPPED", began=0, **sent["metadata"])
    again = "attune submit --address http://head:8265 --upload 'my data' -- "
    assert (
        _build_job_resume_command(job)
        == f"{again}train dummy --data 'my data' --name mine --resume"
    )


def test_log_lines_carry_all_ids(tmp_path, monkeypatch):
    run = Run(
        name="r", folder=tmp_path, variant="dummy", preset="tiny", config={}, training={}, data={},
        run_id="m1",
    )  # fmt: skip
    monkeypatch.setenv(JOB, "train-1")
    monkeypatch.setenv(TRIAL, "t7")
    write_log(run, "something happened", "warning")
    assert log_file(run).read_text() == "something happened\n"
    line = json.loads((tmp_path / LINES).read_text())
    expected = {"level": "warning", "message": "something happened", "run": "r", "run_id": "m1",
                "trial": "t7", "job": "train-1"}  # fmt: skip
    assert expected.items() <= line.items()
    assert job_environment() == {JOB: "train-1", TRIAL: "t7"}


class JobServer(BaseHTTPRequestHandler):
    """Answers as the job server of a Ray cluster that knows one job, which has succeeded."""

    def do_GET(self):
        answer = {"ray_version": "2.60.0", "version": "4", "ray_commit": "", "session_name": ""}
        job = {
            "type": "SUBMISSION", "submission_id": "ended", "job_id": None,
            "status": "SUCCEEDED", "entrypoint": "attune",
        }  # fmt: skip
        body = json.dumps([job] if self.path.startswith("/api/jobs") else answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def job_server():
    with HTTPServer(("127.0.0.1", 0), JobServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("home")
def test_the_job_server_is_asked_although_ray_address_names_a_cluster(job_server, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # Ray's client prefers it to its argument
    assert jobs.has_ended("ended", f"{job_server}/#/jobs/ended") is True
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1"


@pytest.mark.usefixtures("home")
def test_it_is_unknown_whether_a_job_has_ended_if_its_server_is_gone():
    assert jobs.has_ended("any", "http://127.0.0.1:1/#/jobs/any") is None
