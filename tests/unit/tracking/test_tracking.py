"""Logging to MLflow, in a real store; an unreachable one is simulated in its client."""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer

import polars as pl
import pytest

from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.runs.model import save_model
from attune.platform.runs.record import Run, read_run
from attune.platform.serving.responder import Responder
from attune.platform.tracking import connection, environment, run_logging, run_metadata

# The environment that `tracking` sets for MLflow comes first.
import mlflow  # isort: skip
from mlflow import MlflowClient  # isort: skip

PATIENCE = 60  # seconds until a test gives up; none of them needs it
RESULT = {
    "steps": 30,
    "seconds": 12.5,
    "best_step": 20,
    "metrics": {"valid_loss": 2.5, "valid_perplexity": float("inf"), "valid_accuracy": None},
}


@pytest.fixture
def home(home_with_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow creates stores by default
    monkeypatch.setattr("attune.platform.tracking.queue.PAUSE", 0.01)
    return home_with_store


@pytest.fixture
def new_run(home, prepared, build):
    model = build("dummy")

    def make(name="dummy-bundled-1", **fields):
        run = Run(
            name=name,
            folder=home / "runs" / name,
            variant="dummy",
            preset="tiny",
            config=asdict(model.variant.config),
            training={
                "learning_rate": 0.001,
                "word_vectors": None,
                "track_checkpoint": True,
                "deep": {"a": [1, 2]},
            },
            data={
                "name": "bundled",
                "folder": str(prepared),
                "hash": read_dataset_manifest(prepared)["hash"],
            },
            command="attune train dummy --preset tiny",
            commit="c0ffee",
            **fields,
        )
        run.write()
        save_model(model, run.model)
        model.vocabulary.save(run.folder / "vocabulary.txt")
        return run

    return make


@pytest.fixture
def run(new_run, prepared):
    return tracking.start_run(new_run(), read_dataset_manifest(prepared))


@pytest.fixture
def client(home):
    return MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")


def write(run, steps, *, time=0, path=None):
    with (path or run.metrics_file).open("a") as file:
        for step in steps:
            metrics = {"loss": 1 / step, "train/nll": float(time), "train/emotion": 0.5}
            file.write(json.dumps({"step": step, "time": time + step, "metrics": metrics}) + "\n")
            if step % 10 == 0:
                line = {"step": step, "time": time + step, "metrics": {"valid_loss": 1 / step}}
                file.write(json.dumps(line) + "\n")


def steps(client, run, key="loss"):
    return sorted(metric.step for metric in client.get_metric_history(run.run_id, key))


def table(client, run):
    """Return the sample answers as MLflow's page reads them."""
    actual = client.get_run(run.run_id)
    [shown] = json.loads(actual.data.tags["mlflow.loggedArtifacts"])
    assert shown["type"] == "table"
    content = mlflow.artifacts.load_dict(f"{actual.info.artifact_uri}/{shown['path']}")
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


@contextlib.contextmanager
def sending(*runs):
    with tracking.TrackingQueue() as queue:
        for run in runs:
            queue.start_sending(run)
        yield queue


def send(run):
    with sending(run) as queue:
        return queue.close(PATIENCE)


class Faults:
    """Replaces `MlflowClient.log_batch`: fails as planned, and records what was stored."""

    def __init__(self, monkeypatch):
        self.real = MlflowClient.log_batch
        self.planned, self.stored = [], []
        self.away = False
        self.failed, self.over = threading.Event(), threading.Event()
        faults = self
        monkeypatch.setattr(
            MlflowClient, "log_batch", lambda client, *a, **k: faults.log_batch(client, *a, **k)
        )

    def log_batch(self, client, run_id, metrics=(), **others):
        assert len(metrics) <= 1000
        fault = "away" if self.away else self.planned.pop(0) if self.planned else None
        if fault != "away":
            self.real(client, run_id, metrics=metrics, **others)
            self.stored += [(metric.step, metric.key) for metric in metrics]
        if not self.planned:
            self.over.set()
        if fault is not None:
            self.failed.set()
            raise ConnectionError(fault)


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def test_run_is_logged_with_settings_and_data(run, client, prepared, home):
    assert read_run(run.folder).run_id == run.run_id
    assert run.tracking == f"sqlite:///{home}/mlflow.db"
    experiment = client.get_experiment_by_name("dummy")
    assert "Dummy" in experiment.tags["mlflow.note.content"]
    assert experiment.artifact_location == (home / "mlartifacts/dummy").as_uri()
    actual = client.get_run(run.run_id)
    assert actual.info.experiment_id == experiment.experiment_id
    assert (actual.info.run_name, actual.info.status) == (run.name, "RUNNING")
    expected = {
        "width": "32", "learning_rate": "0.001", "word_vectors": "none", "deep.a": "[1, 2]",
        "preset": "tiny", "seed": "0", "workers": "1", "zero": "0", "data": "bundled",
        "max_steps": "none", "max_minutes": "none", "init": "none", "track_checkpoint": "true",
    }  # fmt: skip
    assert actual.data.params == expected
    tags = actual.data.tags
    assert tags["mlflow.source.git.commit"] == "c0ffee"
    assert tags["variant"] == "dummy"
    assert tags["data_hash"] == run.data["hash"]
    for part in ("a stand-in for tests", run.command, "bundled", "still running"):
        assert part in tags["mlflow.note.content"]
    [used] = actual.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("bundled", run.data["hash"][:12])
    assert json.loads(used.dataset.source) == {"uri": str(prepared)}
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    artifacts = {file.path for file in client.list_artifacts(run.run_id)}
    assert artifacts == {"data_manifest.json", "environment.json"}
    environment = mlflow.artifacts.load_dict(f"{actual.info.artifact_uri}/environment.json")
    assert {"torch", "ray", "deepspeed", "mlflow", "polars"} <= set(environment["packages"])


def test_unpaired_text_is_an_input_of_the_run(new_run, prepared, client):
    run = new_run()
    harvest = {"folder": "/data/open", "hash": "0123456789abcdef"}
    run = run.update(
        variant="dual-emp",
        config={**run.config, "harvest": "open", "harvest_threshold": 0.65},
        data={**run.data, "harvest": harvest},
    )
    actual = client.get_run(tracking.start_run(run, read_dataset_manifest(prepared)).run_id)
    assert actual.data.tags["harvest_hash"] == harvest["hash"]
    assert "Unpaired text: hash 0123456789ab" in actual.data.tags["mlflow.note.content"]
    assert actual.data.params["harvest_threshold"] == "0.65"
    by_context = {used.tags[0].value: used.dataset for used in actual.inputs.dataset_inputs}
    assert set(by_context) == {"training", "unpaired"}
    unpaired = by_context["unpaired"]
    assert (unpaired.name, unpaired.digest) == ("open", "0123456789ab")
    assert json.loads(unpaired.source) == {"uri": "/data/open"}
    assert json.loads(unpaired.profile) == {"threshold": 0.65}


def test_many_params_are_sent_in_parts(new_run, prepared, client):
    many = {f"key_{n}": "x" * 1000 for n in range(250)}
    run = new_run().update(training=many)
    params = client.get_run(
        tracking.start_run(run, read_dataset_manifest(prepared)).run_id
    ).data.params
    assert set(many) <= set(params)
    assert len(params["key_0"]) == run_metadata.MAX_VALUE_LENGTH


def test_runs_of_a_variant_share_an_experiment(run, new_run, prepared, client):
    other = tracking.start_run(new_run("another"), read_dataset_manifest(prepared))
    places = {client.get_run(r.run_id).info.experiment_id for r in (run, other)}
    assert len(places) == 1
    client.delete_experiment(places.pop())
    with pytest.raises(UsageError, match="mlflow experiments restore"):
        tracking.start_run(new_run("a-third"), read_dataset_manifest(prepared))


@pytest.mark.usefixtures("faults")  # which checks the size of requests
def _first_contact(home, begin):
    os.environ["ATTUNE_HOME"] = str(home)
    begin.wait()
    with connection.open_experiment("dummy"):
        pass


def test_concurrent_processes_create_one_store_in_a_new_home(tmp_path, monkeypatch):
    monkeypatch.delenv(connection.ADDRESS, raising=False)
    fork = multiprocessing.get_context("fork")
    begin = fork.Barrier(3)
    comers = [fork.Process(target=_first_contact, args=(tmp_path / "new", begin)) for _ in range(3)]
    for each in comers:
        each.start()
    for each in comers:
        each.join()
    assert [each.exitcode for each in comers] == [0] * 3


def test_every_step_is_sent_once(run, client):
    write(run, range(1, 571))  # 1,767 metrics: more than one batch
    with sending(run) as queue:
        write(run, range(571, 601))
        assert queue.close(PATIENCE) == {}
    assert steps(client, run) == list(range(1, 601))
    assert steps(client, run, "valid_loss") == list(range(10, 601, 10))
    # The run resumes from step 590, with other times, so that a repeated metric would be stored.
    run.metrics_file.unlink()
    write(run, range(1, 591))
    write(run, range(591, 621), time=7)
    assert send(run) == {}
    assert steps(client, run) == list(range(1, 621))
    assert steps(client, run, "valid_loss") == list(range(10, 621, 10))


def test_rewritten_file_is_sent_completely(run, client, faults):
    write(run, range(1, 31), time=10**12)
    with sending(run) as queue:
        assert faults.over.wait(PATIENCE)
        # The new file is longer, so that its size does not show that it was rewritten, and has
        # shorter lines, so that a sender that continued at the old position would miss some.
        new = run.metrics_file.with_suffix(".new")
        write(run, range(1, 11), time=10**12, path=new)
        write(run, range(11, 91), path=new)
        assert new.stat().st_size > run.metrics_file.stat().st_size
        new.replace(run.metrics_file)
        assert queue.close(PATIENCE) == {}
    assert steps(client, run) == list(range(1, 91))
    assert len(faults.stored) == len(set(faults.stored))


def test_closing_waits_for_an_unreachable_store(run, client, faults):
    faults.away = True
    write(run, range(1, 31))
    with sending(run) as queue:
        assert faults.failed.wait(PATIENCE)
    faults.away = False
    assert queue.close(PATIENCE) == {}
    assert steps(client, run) == list(range(1, 31))


def test_infinite_values_are_logged_as_nan_and_others_left_out(run, client):
    values = {"nan": float("nan"), "infinite": float("inf"), "none": None, "name": "x"}
    run.metrics_file.write_text(json.dumps({"step": 1, "time": 1, "metrics": values}) + "\n")
    assert send(run) == {}
    for key in ("nan", "infinite"):
        [metric] = client.get_metric_history(run.run_id, key)
        assert metric.value != metric.value


def test_failing_store_loses_and_repeats_no_metric(run, client, faults):
    # "unconfirmed": the store has the metrics, but the answer was lost on the way.
    faults.planned = ["away", "away", "unconfirmed", "away", "unconfirmed"]
    write(run, range(1, 401))
    with sending(run) as queue:
        assert faults.over.wait(PATIENCE)
        write(run, range(401, 421))
        assert queue.close(PATIENCE) == {}
    assert not faults.planned
    assert steps(client, run) == list(range(1, 421))
    assert len(faults.stored) == len(set(faults.stored))


def test_metrics_of_an_unreachable_store_are_sent_later(run, client, faults):
    faults.away = True
    write(run, range(1, 31))
    with sending(run) as queue:
        assert faults.failed.wait(PATIENCE)
    assert queue.close(0.1) == {run.name: 33}
    ended = run.update(status="stopped", result=RESULT)
    assert not tracking.finish_run(ended, pl.DataFrame({"answer": ["oh"]}))
    assert client.get_run(run.run_id).info.status == "RUNNING"
    faults.away = False
    assert tracking.flush_run(ended, PATIENCE) == 0
    assert steps(client, run) == list(range(1, 31))
    assert client.get_run(run.run_id).info.status == "KILLED"
    assert table(client, run) == [{"answer": "oh"}]


def test_run_finished_twice_is_registered_once(run, client):
    run = run.update(status="finished", result=RESULT)
    for _ in range(2):
        tracking.finish_run(run)
    assert len(client.search_model_versions("name='dummy'")) == 1


def test_finished_run_is_logged_with_outcome_and_model(run, client, tmp_path, monkeypatch):
    answers = pl.DataFrame({"context": [["My dog died.", "Oh.", "Yes."]], "answer": ["So sorry."]})
    for step in (20, 30):
        (run.checkpoints / f"{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"{step:08d}" / "standing.json").write_text("{}")
    run = run.update(status="finished", result=RESULT)
    tracking.finish_run(run, answers)
    assert not list(tmp_path.glob("ml*"))  # all of it is in ATTUNE_HOME
    assert "MLFLOW_TRACKING_URI" not in os.environ
    actual = client.get_run(run.run_id)
    assert actual.info.status == "FINISHED"
    assert actual.data.tags["best_step"] == "20"
    assert "finished; 30 steps in 12 s; best at step 20" in actual.data.tags["mlflow.note.content"]
    assert actual.data.metrics["best_valid_loss"] == 2.5
    assert "best_valid_accuracy" not in actual.data.metrics
    [checkpoint] = client.list_artifacts(run.run_id, "checkpoints/00000030")
    assert checkpoint.path.endswith("standing.json")
    files = {file.path for file in client.list_artifacts(run.run_id)}
    assert {"run.json", "vocabulary.txt", run_logging.SAMPLES} <= files
    assert table(client, run) == [{"context": "My dog died.\nOh.\nYes.", "answer": "So sorry."}]

    [version] = client.search_model_versions("name='dummy'")
    assert version.run_id == run.run_id
    [output] = actual.outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    assert {metric.key for metric in logged.metrics} == {"best_valid_loss", "best_valid_perplexity"}
    shutil.rmtree(run.model)  # what MLflow has is enough
    monkeypatch.setenv("MLFLOW_TRACKING_URI", run.tracking)
    loaded = mlflow.pyfunc.load_model(f"models:/dummy/{version.version}")
    asked = [{"context": ["My dog died.", "Oh.", "Yes."]}, {"context": "I won!"}]
    predicted = loaded.predict(asked)
    model = next(tmp_path.rglob("mlartifacts/**/model.safetensors")).parent
    expected = Responder(model).respond([["My dog died.", "Oh.", "Yes."], ["I won!"]])
    assert predicted == [answer.text for answer in expected]


def test_resumed_run_is_logged_to_the_same_run_once(run, client):
    answers = pl.DataFrame({"answer": ["one", "two"]})
    write(run, range(1, 21))
    send(run)
    run = run.update(status="stopped", result=RESULT)
    assert tracking.finish_run(run, answers)
    assert client.get_run(run.run_id).info.status == "KILLED"
    assert not client.search_registered_models()
    before = client.get_run(run.run_id).data.params

    tracking.reopen_run(run)
    resumed = client.get_run(run.run_id)
    assert (resumed.info.status, resumed.data.params) == ("RUNNING", before)
    assert "still running" in resumed.data.tags["mlflow.note.content"]
    write(run, range(11, 31), time=9)
    send(run)
    tracking.finish_run(run.update(status="finished", result=RESULT), answers)
    assert steps(client, run) == list(range(1, 31))
    assert steps(client, run, "best_valid_loss") == [20]
    experiment = client.get_run(run.run_id).info.experiment_id
    assert len(table(client, run)) == 2
    assert len(client.search_runs([experiment])) == 1
    assert len(client.search_model_versions("name='dummy'")) == 1


def test_failed_run_without_a_model_registers_none(run, client):
    shutil.rmtree(run.model)
    tracking.finish_run(run.update(status="failed"), None)
    assert client.get_run(run.run_id).info.status == "FAILED"
    assert not client.search_registered_models()


def test_evaluation_is_added_to_the_run(run, client, tmp_path):
    run = run.update(status="finished", result=RESULT)
    tracking.finish_run(run, None)
    answers = tmp_path / "test-greedy.parquet"
    pl.DataFrame({"answer": ["oh"]}).write_parquet(answers)
    metrics = {"perplexity": 30.0, "bleu": 2.0, "emotion_accuracy": None}
    tracking.log_evaluation(run, "test", "greedy", metrics, answers)
    actual = client.get_run(run.run_id)
    assert actual.info.status == "FINISHED"
    logged = {key: value for key, value in actual.data.metrics.items() if key.startswith("test/")}
    assert logged == {"test/perplexity": 30.0, "test/bleu": 2.0}
    assert actual.data.tags["test/decode"] == "greedy"
    [file] = client.list_artifacts(run.run_id, "answers")
    assert file.path == "answers/test-greedy.parquet"


def test_missing_server_is_an_error_without_password(new_run, prepared, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    run = new_run()
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:1 .*unset MLFLOW_TRACKING_URI") as e:
        tracking.start_run(run, read_dataset_manifest(prepared))
    assert "refused" in str(e.value)
    assert "secret" not in str(e.value)
    assert read_run(run.folder).run_id is None


def test_overloaded_server_is_asked_once(new_run, prepared, monkeypatch):
    asked = []

    class Overloaded(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(503)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(UsageError, match=address):
            tracking.start_run(new_run(), read_dataset_manifest(prepared))
        server.shutdown()
    assert len(asked) == 1
    for name in environment.SHORT_TIMEOUTS:
        assert os.environ[name] == environment.DEFAULTS[name]


def test_a_full_disk_is_no_damage_of_the_store(home):
    full = OSError(errno.ENOSPC, "No space left on device")
    explained = connection.explain_failures(f"sqlite:///{home}")
    with pytest.raises(UsageError, match="free some space"), explained:
        raise full
