"""Damaged files and full disks, through `attune train` and `attune data prepare`.

The run is trained in this process: what Ray does is tested in test_ray.py.
"""

import errno
import json
import shutil

import pytest
import torch
from mlflow import MlflowClient

from attune.jobs import cli
from attune.platform.core import disk
from attune.platform.data import prepare
from attune.platform.runs.metrics_file import read_metrics, write_metrics
from attune.platform.runs.record import find_run
from attune.platform.services import cluster
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.worker import train
from tests.commands import error_of, json_output

pytestmark = pytest.mark.xdist_group("training")

SETTINGS = ("--preset", "tiny", "--max-steps", "9", "--set", "log_every=1", "--set",
            "batch_size=8", "--set", "checkpoint_every=2", "--set", "evaluate_every=9")  # fmt: skip
RESUME = ("train", "dummy", "--name", "mine", "--resume")
STOP_AT = 5


def fit_until(step):
    """Return a stand-in for Ray Train that asks a run to stop at a step."""

    def fit(_, run, __):
        def watch(done, *_):
            if done == step:
                run.stop_file.touch()

        train(run, ProcessGroup(), watch)

    return fit


@pytest.fixture(scope="module")
def stopped_home(home_with_data):
    """A home with a run that was stopped at step 5, tracked in MLflow."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTUNE_HOME", str(home_with_data))
        replace_cluster(patched, STOP_AT)
        patched.setattr("sys.argv", ["attune", "train", "dummy", *SETTINGS, "--name", "mine"])
        with pytest.raises(SystemExit, match="130"):
            cli.main()
    return home_with_data


def replace_cluster(patched, stop_at):
    patched.setattr(cluster, "connect", lambda: None)
    patched.setattr(cluster, "plan_capacity", lambda *_: (1, 1))
    patched.setattr(cluster, "describe_missing_resources", lambda *_: "")
    patched.setattr(cluster, "fit", fit_until(stop_at))


@pytest.fixture
def run(stopped_home, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(stopped_home, home, symlinks=True)
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    replace_cluster(monkeypatch, 0)
    return find_run("mine")


def failure_of(result):
    """The error of a training that failed; what it printed before is on stdout."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def warnings(run):
    lines = map(json.loads, (run.folder / "log.jsonl").read_text().splitlines())
    return [line["message"] for line in lines if line["level"] == "warning"]


def test_a_truncated_metrics_file_is_restored_from_mlflow(run, call):
    lines = read_metrics(run.metrics_file)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    write_metrics(run.metrics_file, lines[:2])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 3, "ti')
    json_output(call(*RESUME, "--json"))
    assert read_metrics(run.metrics_file)[:5] == lines
    dropped, restored = warnings(run)
    assert "line 3: dropped the last line, which is truncated" in dropped
    assert "restored 3 steps from MLflow" in restored
    history = MlflowClient(tracking_uri=run.tracking).get_metric_history(run.run_id, "loss")
    assert [metric.step for metric in history] == list(range(1, 10))


def test_steps_that_nobody_has_are_counted(run, call):
    write_metrics(run.metrics_file, read_metrics(run.metrics_file)[:2])
    run.update(run_id=None)
    json_output(call(*RESUME, "--json"))
    assert "3 logged steps from 3 to 5 are missing" in warnings(run)[0]


def test_a_damaged_line_and_a_truncated_vocabulary_are_clear_errors(run, call):
    text = run.metrics_file.read_text()
    run.metrics_file.write_text(text.replace('"step": 2', '"step" 2'))
    assert "metrics.jsonl, line 2: expected" in failure_of(call(*RESUME))
    run.metrics_file.write_text(text)
    vocabulary = run.folder / "vocabulary.txt"
    vocabulary.write_bytes(vocabulary.read_bytes()[:5000])
    message = failure_of(call(*RESUME))
    assert f"{vocabulary} has changed since the run was started" in message
    assert find_run("mine").status == "stopped"


def fill_disk(monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))


@pytest.mark.usefixtures("run")
def test_a_checkpoint_that_does_not_fit_is_not_written(call, monkeypatch):
    monkeypatch.setattr(torch, "save", pytest.fail)
    fill_disk(monkeypatch)
    message = failure_of(call(*RESUME))
    assert "is full (0 MB free, a checkpoint of run 'mine' needs" in message
    assert "the checkpoint of step 5 is intact; free some space, then resume with" in message
    assert "'attune train dummy --name mine --resume'" in message
    assert find_run("mine").status == "failed"


def test_a_disk_that_fills_up_during_a_checkpoint(run, call, monkeypatch):
    def save(*_, **__):
        fill_disk(monkeypatch)
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", save)
    message = failure_of(call(*RESUME))
    assert "is full (0 MB free, a checkpoint of run 'mine' needs" in message
    assert "inline_container" not in message
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["00000004", "00000005"]  # nothing of the one that did not fit


def test_a_full_disk_ends_a_preparation(tmp_path, call, monkeypatch):
    def write_table(*_):
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr(prepare.pq.ParquetWriter, "write_table", write_table)
    command = ("data", "prepare", "--source", "bundled", "--out", tmp_path / "out")
    message = error_of(call(*command), 1)
    assert "the prepared data needs more than" in message
    assert "should not have happened" not in message
    assert not (tmp_path / "out").exists()


def test_an_error_names_a_log_that_exists_or_none(tmp_path, call, monkeypatch):
    """Its folder may be on a full disk, too."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(cli.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    monkeypatch.setattr("attune.jobs.runs.all_runs", lambda _: 1 / 0)
    result = call("runs")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "details are in" not in result.stderr
