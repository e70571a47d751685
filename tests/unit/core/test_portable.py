"""Records and MLflow's store of a home folder that was copied or moved."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from attune.platform.core.portable import from_portable, to_portable
from attune.platform.runs.record import read_run
from attune.platform.services.tracking_store import relocate_tracking_store
from tests.runs import write_run

HOME = Path("/a/home")


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("/a/home", "$ATTUNE_HOME"),
        ("/a/home/data/ed", "$ATTUNE_HOME/data/ed"),
        ("sqlite:////a/home/mlflow.db", "sqlite:///$ATTUNE_HOME/mlflow.db"),
        ("file:///a/home/x", "file://$ATTUNE_HOME/x"),
        ("/a/homes/data", "/a/homes/data"),
        ("/b/data", "/b/data"),
        ("http://host:5000", "http://host:5000"),
        ("--data /a/home/x", "--data /a/home/x"),
    ],
)
def test_only_what_lies_in_the_home_is_relative(path, stored):
    content = {"folder": [path], "number": 1, "nothing": None}
    assert to_portable(content, HOME) == {"folder": [stored], "number": 1, "nothing": None}
    assert from_portable(to_portable(content, HOME), HOME) == content


def test_a_copied_run_has_the_paths_of_its_own_home(tmp_path):
    data = {"name": "d", "folder": str(tmp_path / "a" / "data" / "d"), "hash": "h"}
    outside = {"folder": "/elsewhere/harvest", "hash": "h"}
    init = str(tmp_path / "a" / "runs" / "first" / "model")
    write_run(tmp_path / "a", "r", "dummy", data={**data, "harvest": outside}, init=init)
    (tmp_path / "a").rename(tmp_path / "b")
    run = read_run(tmp_path / "b" / "runs" / "r")
    assert run.data["folder"] == str(tmp_path / "b" / "data" / "d")
    assert run.data["harvest"] == outside
    assert run.init == str(tmp_path / "b" / "runs" / "first" / "model")
    assert str(tmp_path) not in json.dumps(json.loads((run.folder / "run.json").read_text()))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A function that runs SQL in the store of a home."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()

    def execute(text, *values):
        with closing(sqlite3.connect(tmp_path / "home" / "mlflow.db")) as database, database:
            return database.execute(text, values).fetchall()

    for table, columns in (
        ("experiments", "name, artifact_location"), ("runs", "artifact_uri"),
        ("logged_models", "artifact_location"), ("model_versions", "storage_location, source"),
    ):  # fmt: skip
        execute(f"CREATE TABLE {table} ({columns})")
    return execute


def test_addresses_of_a_former_home_are_rewritten_and_others_stay(store, tmp_path):
    new = (tmp_path / "home" / "mlartifacts").as_uri()
    for name, location in (
        ("mime", "file:///old/home/mlartifacts/mime"),
        ("mine", "file:///elsewhere/artifacts"),
        ("Default", "mlflow-artifacts:/0"),
    ):
        store("INSERT INTO experiments VALUES (?, ?)", name, location)
    store("INSERT INTO runs VALUES (?)", "file:///old/home/mlartifacts/mime/1/artifacts")
    store("INSERT INTO runs VALUES (?)", "file:///old/home/mlartifacts-2/x")
    store("INSERT INTO model_versions VALUES (?, ?)", None, "models:/m-1")
    relocate_tracking_store()
    assert [row[0] for row in store("SELECT artifact_location FROM experiments")] == [
        f"{new}/mime", "file:///elsewhere/artifacts", "mlflow-artifacts:/0",
    ]  # fmt: skip
    assert [row[0] for row in store("SELECT artifact_uri FROM runs")] == [
        f"{new}/mime/1/artifacts", "file:///old/home/mlartifacts-2/x",
    ]  # fmt: skip
    assert store("SELECT * FROM model_versions") == [(None, "models:/m-1")]


def test_a_store_in_place_or_damaged_is_not_touched(store, tmp_path):
    here = (tmp_path / "home" / "mlartifacts" / "mime").as_uri()
    store("INSERT INTO experiments VALUES (?, ?)", "mime", here)
    path = tmp_path / "home" / "mlflow.db"
    for content in (path.read_bytes(), b"no database"):
        path.write_bytes(content)
        relocate_tracking_store()
        assert path.read_bytes() == content
