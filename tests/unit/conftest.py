"""A small prepared dataset, a home with runs, and a home with an empty MLflow store."""

import json
import shutil

import pytest

from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.data.prepare import prepare
from attune.platform.runs.model import save_model
from attune.platform.runs.record import find_run
from tests.runs import write_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder of four conversations, quick to answer; train is empty."""
    folder = tmp_path_factory.mktemp("few")
    conversations = [
        {
            "id": f"c{number}",
            "emotion": emotion,
            "split": split,
            "utterances": [
                {"role": "speaker", "text": f'I feel {emotion} today, and I said "no".'},
                {"role": "listener", "text": 'You said "why", and it\'s fine. I am sorry!'},
                {"role": "speaker", "text": "Thank you."},
                {"role": "listener", "text": f"Number {number} is not a problem."},
            ],
        }
        for number, (emotion, split) in enumerate(
            [("sad", "test"), ("joyful", "test"), ("angry", "test"), ("proud", "valid")]
        )
    ]
    (folder / "few.jsonl").write_text("\n".join(json.dumps(c) for c in conversations))
    prepare(str(folder / "few.jsonl"), folder / "data")
    return folder / "data"


@pytest.fixture
def home(tmp_path, monkeypatch, build, data):
    """A home with three runs: two with a model, and one without."""
    home = tmp_path / "home"
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    record = {"name": "few", "folder": str(data), "hash": read_dataset_manifest(data)["hash"]}
    for name, variant, status in (
        ("first", "dummy", "finished"),
        ("second", "multi-trs", "stopped"),
        ("third", "dummy", "running"),
    ):
        created = f"2026-01-01T00:00:0{len(list(home.glob('runs/*')))}"
        run = write_run(
            home, name, variant, data=record, seed=len(name), created=created, status=status
        )
        if status != "running":
            save_model(build(variant), run.model)
    metrics = {"valid_loss": 2.0, "valid_perplexity": 7.4, "valid_emotion_accuracy": 0.5}
    find_run("second").update(result={"metrics": metrics})
    return home


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """The file of an empty MLflow store; creating one takes seconds, copying it does not."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def home_with_store(tmp_path, empty_store, monkeypatch):
    """A home with an empty MLflow store and without runs."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return home
