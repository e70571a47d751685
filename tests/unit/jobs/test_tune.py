"""`attune tune`: options, resuming and names."""

import pytest

from attune.jobs import tune as command
from attune.platform.core.errors import UsageError
from tests.commands import error_of
from tests.runs import write_run
from tests.sweeps import write_sweep


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


def test_budget_is_parsed_as_a_duration():
    assert [command._parse_tune_seconds(text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]
    with pytest.raises(UsageError, match="expected a duration such as 90s"):
        command._parse_tune_seconds("2 hours")


def test_grid_trials_are_not_stopped_early_by_default():
    typed = {"variants": ["dummy"], "space": "optimizer"}
    assert command._create_tune_sweep("usual", typed).scheduler == "asha"
    assert command._create_tune_sweep("grid", {**typed, "search": "grid"}).scheduler == "none"
    asked_for = {**typed, "search": "grid", "scheduler": "asha"}
    assert command._create_tune_sweep("asked", asked_for).scheduler == "asha"
    assert command._create_tune_sweep("ready", {"sweep": "empdg-steps"}).scheduler == "none"
    population = command._create_tune_sweep("population", {**typed, "scheduler": "pbt"})
    assert population.search == "random"


def test_new_sweep_rejects_existing_runs_with_its_trial_names(call, home):
    write_run(home, "mine-000", "dummy")
    options = ("tune", "dummy", "--space", "optimizer", "--preset", "tiny", "--name", "mine")
    assert "a run named 'mine-000' exists already" in error_of(call(*options))


def test_resuming_with_different_options_is_rejected(call):
    write_sweep(search="optuna", asked={"preset": "small", "overrides": {}})
    options = ("tune", "--name", "s", "--resume")
    for other in (
        ("--metric", "loss"), ("--space", "optimizer"), ("--data", "bundled", "--init", "x"),
        ("--max-steps", "3"), ("--set", "width=3"),
    ):  # fmt: skip
        assert "was started with other" in error_of(call(*options, *other))
    write_sweep("ways", kind="decoding", asked={"run": "mine"})
    assert "attune tune-decoding mine" in error_of(call("tune", "--name", "ways", "--resume"))


def test_standard_deviation_needs_two_seeds(call):
    sweep = write_sweep()
    sweep.suggest_trial()
    assert "at least two seeds" in error_of(call("tune", "report", "s", "--seeds", "1"))
