"""Fixtures of the tuning tests."""

import dataclasses

import pytest

from attune.platform.runs.model import save_model
from attune.platform.runs.record import Run, runs_folder
from attune.platform.training.settings import configure


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def trained(build, prepared):
    """A finished run of an untrained model."""
    model = build("dummy")
    run = Run(
        name="mine", folder=runs_folder() / "mine", variant="dummy", preset="tiny",
        config=dataclasses.asdict(model.variant.config),
        training=dataclasses.asdict(configure("dummy", "tiny")[1]),
        data={"name": "bundled", "folder": str(prepared), "hash": "x"}, status="finished",
    )  # fmt: skip
    run.write()
    save_model(model, run.model)
    return run
