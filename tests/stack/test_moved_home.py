"""A home folder that was copied or moved: everything continues there, and the original is left
alone."""

import hashlib
import json
import shutil
import sqlite3
from collections import OrderedDict
from contextlib import closing

import pytest
import ray
from mlflow.tracking._tracking_service import utils
from ray._raylet import AuthenticationTokenLoader

from attune.platform.data.prepare import prepare
from attune.platform.runs.record import find_run
from attune.platform.services import cluster
from attune.platform.training import driver, setup
from tests.commands import json_output

pytestmark = pytest.mark.xdist_group("cluster")

SETTINGS = {"batch_size": 4, "evaluate_every": 2, "checkpoint_every": 2, "log_every": 1}
WORDS = ("I won a prize", "My cat ran away", "I lost my keys", "We had a picnic")


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    """One Ray for the module, whose workers have no home folder of their own."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("RAY_ADDRESS", "ATTUNE_HOME", "MLFLOW_TRACKING_URI"):
            patched.delenv(name, raising=False)
        patched.setenv("RAY_worker_niceness", "0")  # the workers start in time on a busy machine
        patched.chdir(tmp_path_factory.mktemp("workers"))
        patched.setenv("RAY_AUTH_TOKEN", "0" * 64)
        cluster.connect()
        yield
        ray.shutdown()
    # Ray caches a process's token, and other tests in this one have another.
    AuthenticationTokenLoader.instance().reset_cache()


def write_data(folder):
    """Prepare a few conversations in each split."""
    conversations = [
        {
            "id": f"{split}{number}", "emotion": "proud", "split": split,
            "utterances": [
                {"role": "speaker", "text": f"{text} {number}."},
                {"role": "listener", "text": f"Tell me more about it, {number}."},
            ],
        }
        for split in ("train", "valid", "test")
        for number, text in enumerate(WORDS * 4)
    ]  # fmt: skip
    folder.parent.mkdir()
    source = folder.parent / "own.jsonl"
    source.write_text("\n".join(json.dumps(each) for each in conversations))
    prepare(str(source), folder)
    source.unlink()


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stop_early(name, data):
    """A run that was asked to stop, and has a checkpoint."""
    run = setup.new_run(
        "dummy", data=str(data), preset="tiny", overrides=SETTINGS, init="done", max_steps=8,
        name=name,
    )  # fmt: skip
    stopped = driver.train(run, lambda *_: run.stop_file.touch())
    assert stopped.status == "stopped"


def use_home(monkeypatch, home):
    """Use a home as a new process would: MLflow remembers where a run's artifacts are."""
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    monkeypatch.setattr(utils, "_artifact_repos_cache", OrderedDict())


def use_everything(call, open_run, samples):
    """Resume a run and a sweep, evaluate, promote and answer."""
    json_output(call("train", "dummy", "--name", open_run, "--resume", "--json"))
    assert find_run(open_run).status == "finished"
    tuned = call("tune", "--name", "s", "--resume", "--samples", samples, "--json")
    assert json_output(tuned)["trials"] == samples
    for command in (
        ("evaluate", "done", "--split", "test"),
        ("promote", open_run, "--split", "valid", "--force"),
        ("respond", "done", "--context", "I won!"),
    ):
        json_output(call(*command, "--json"))


def assert_only_in(home, other):
    """Records and artifact addresses have nothing of another home folder."""
    for path in (*home.glob("runs/*/run.json"), *home.glob("sweeps/*/sweep.json")):
        content = json.loads(path.read_text())
        content.pop("command")
        assert str(home) not in json.dumps(content)
        assert str(other) not in json.dumps(content)
    with closing(sqlite3.connect(home / "mlflow.db")) as store:
        for table, column in (
            ("experiments", "artifact_location"), ("runs", "artifact_uri"),
            ("logged_models", "artifact_location"), ("model_versions", "storage_location"),
        ):  # fmt: skip
            addresses = [row[0] for row in store.execute(f"SELECT {column} FROM {table}")]
            if table != "experiments":
                assert len(addresses) > 1
            for address in addresses:
                inside = address.startswith((home / "mlartifacts").as_uri())
                assert inside or not address.startswith("file:"), address


def test_a_copy_and_a_moved_home_continue_and_leave_the_original_alone(call, tmp_path, monkeypatch):
    original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
    monkeypatch.setenv("ATTUNE_HOME", str(original))
    original.mkdir()
    data = original / "data" / "few"
    write_data(data)
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    common = ("--data", data, "--preset", "tiny", "--max-steps", 4, *settings, "--json")
    json_output(call("train", "dummy", "--name", "done", *common))
    stop_early("open-1", data)
    stop_early("open-2", data)
    tune = ("tune", "dummy", "--name", "s", "--space", "optimizer", "--samples", 1)
    json_output(call(*tune, "--init", "done", *common))

    shutil.copytree(original, copy, symlinks=True)
    before = digests(original)
    hidden = tmp_path / "hidden"
    original.rename(hidden)  # as unreadable as for another user, also for root
    use_home(monkeypatch, copy)
    use_everything(call, "open-1", 2)
    assert_only_in(copy, original)
    assert not original.exists()
    assert digests(hidden) == before

    copy.rename(moved)
    use_home(monkeypatch, moved)
    use_everything(call, "open-2", 3)
    assert_only_in(moved, copy)
    assert not copy.exists()
