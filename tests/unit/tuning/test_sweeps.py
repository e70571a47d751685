"""What a sweep survives, refuses and keeps; no cluster."""

from types import SimpleNamespace

import polars as pl
import pytest

from attune.jobs import tune as command
from attune.models.base import Range
from attune.platform.core.errors import UsageError
from attune.platform.tuning import decoding, schedulers, spaces, trial_manager
from attune.platform.tuning import sweep as sweeps
from tests.commands import error_of
from tests.runs import write_run
from tests.sweeps import SPACE, suggest_all, write_sweep


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


def test_variants_alternate_and_each_has_a_best_trial():
    sweep = write_sweep(space={"dummy": SPACE, "mime": SPACE}, search="optuna", samples=8)
    drawn = []
    while (one := sweep.suggest_trial()) is not None:
        drawn.append(one)
        value = one[0] + (100.0 if one[1] == "mime" else 0.0)
        sweep.record_result(one[0], "finished", "", {"valid_perplexity": value})
        sweep = sweeps.read_sweep(sweep.folder)  # as a driver that goes on would
    assert [chosen for _, chosen, _ in drawn] == ["dummy", "mime"] * 4
    assert len({settings["learning_rate"] for _, _, settings in drawn}) == 8
    best = sweep.summarize()["best_of_each"]
    assert {n: one["metrics"]["valid_perplexity"] for n, one in best.items()} == {
        "dummy": 0.0, "mime": 101.0,
    }  # fmt: skip
    assert "best_of_each" not in write_sweep("one").summarize()


class Member:
    """A trial of Tune's that runs, as it says."""

    def is_finished(self):
        return False


def test_population_does_not_wait_for_an_ended_member():
    """Tune counts it among the living while it tells of its end."""
    population = schedulers.PopulationScheduler({"rate": Range(low=0.1, high=1.0)})
    members = [Member(), Member(), Member()]
    population._trial_state = {
        each: SimpleNamespace(last_train_time=validations)
        for each, validations in zip(members, (0, 1, 1), strict=True)
    }
    population._next_perturbation_sync = 1
    controller = SimpleNamespace(get_live_trials=lambda: members)
    population._advance_sync_point(controller, members[1])
    assert population._next_perturbation_sync == 1  # the first has not looked yet
    population._advance_sync_point(controller, members[0])
    assert population._next_perturbation_sync == 2


def test_unreported_result_is_recovered_after_driver_death(monkeypatch):
    sweep = write_sweep()
    number, _, _ = sweep.suggest_trial()
    monkeypatch.setattr(type(sweep.study), "tell", lambda *_, **__: None)  # and here it dies
    sweep.record_result(number, "finished", "all done", {"valid_perplexity": 3.0})
    monkeypatch.undo()
    monkeypatch.setenv("ATTUNE_HOME", str(sweep.folder.parent.parent))
    again = sweeps.read_sweep(sweep.folder)
    assert again.get_trial(number).state.name == "RUNNING"
    again.recover_unreported_trials()
    assert again.get_trial(number).values == [3.0]


def test_partially_enqueued_grid_is_completed():
    sweep = write_sweep(search="grid")
    every = list(spaces.iterate_grid(sweep.search_spaces))
    for parameters in every[:3]:
        sweep.study.enqueue_trial(parameters)
    sweep.enqueue_grid()
    sweep.enqueue_grid()
    assert [one[2] for one in suggest_all(sweep)] == every


def test_oversized_grid_is_rejected_without_enumeration():
    tried = {"dummy": {str(n): Range(low=0.0, high=1.0) for n in range(40)}}
    with pytest.raises(UsageError, match="choose fewer settings"):
        spaces.count_grid_points(tried)
    assert spaces.count_grid_points({"a": SPACE, "b": SPACE}) == 20


def test_sweep_without_a_process_counts_as_stopped(call):
    sweep = write_sweep(status="running")
    assert sweep.current_status == "stopped"
    assert "is not running: it is stopped" in error_of(call("tune", "stop", "s"))
    with sweep.lock():
        assert sweep.current_status == "running"
        assert call("tune", "stop", "s").returncode == 0
    assert sweep.stop_file.exists()


def test_decoding_sweep_stops_on_request(monkeypatch, prepared, home):
    write_run(home, "mine", "dummy")
    monkeypatch.setattr("attune.platform.services.cluster.connect", lambda: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2})
    sweep = write_sweep(
        kind="decoding", metrics=("bleu",), scheduler="none", space={"beam": SPACE},
        asked={"run": "mine", "data": str(prepared), "split": "valid", "contexts": 1,
               "overrides": {}},
    )  # fmt: skip

    def measured(_, tasks):
        for task in tasks:
            sweep.stop_file.touch()
            yield task.number, {"bleu": 1.0}

    monkeypatch.setattr("attune.platform.services.tasks.run_tasks", measured)
    stopped = decoding.run(sweep, lambda *_: None)
    assert (stopped.status, stopped.count("finished")) == ("stopped", 1)


def test_new_sweep_rejects_existing_runs_with_its_trial_names(call, home):
    write_run(home, "mine-000", "dummy")
    options = ("tune", "dummy", "--space", "optimizer", "--preset", "tiny", "--name", "mine")
    assert "there is a run 'mine-000' already" in error_of(call(*options))


def test_resuming_with_different_options_is_rejected(call):
    write_sweep(search="optuna", asked={"preset": "small", "overrides": {}})
    options = ("tune", "--name", "s", "--resume")
    for other in (
        ("--metric", "loss"), ("--space", "optimizer"), ("--data", "bundled", "--init", "x"),
        ("--max-steps", "3"), ("--set", "width=3"),
    ):  # fmt: skip
        assert "was begun with other" in error_of(call(*options, *other))
    write_sweep("ways", kind="decoding", asked={"run": "mine"})
    assert "attune tune-decoding mine" in error_of(call("tune", "--name", "ways", "--resume"))


def test_standard_deviation_needs_two_seeds(call):
    sweep = write_sweep()
    sweep.suggest_trial()
    assert "two seeds at least" in error_of(call("tune", "report", "s", "--seeds", "1"))


@pytest.mark.parametrize("why", ["", "the budget is spent", "asked to stop"])
def test_best_model_is_registered_unless_the_sweep_was_stopped(home, monkeypatch, why):
    sweep = write_sweep(run_id="parent")
    number, _, _ = sweep.suggest_trial()
    write_run(home, "s-000", "dummy")
    sweep.set_trial_attributes(number, runs=["s-000"])
    sweep.record_result(number, "finished", "", {"valid_perplexity": 3.0})
    kept = []
    tracker = SimpleNamespace(
        register_model=lambda run, *_: kept.append(run.name), finish_run=lambda *_: None,
        close=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(trial_manager, "sample_answers", lambda _: pl.DataFrame())
    monkeypatch.setattr(trial_manager.tracking, "finish_group", lambda *_: None)
    if why == "asked to stop":
        sweep.stop_file.touch()
    for _ in range(2):  # the second time it is there already
        manager = trial_manager.TrialManager(sweep, tracker, lambda *_: None)
        manager.stop_reason = why
        sweep = manager.finish()
    assert kept == ([] if why == "asked to stop" else ["s-000"])
    assert sweep.status == ("stopped" if why else "finished")


def test_invalid_settings_fail_the_trial_and_not_the_sweep(home, monkeypatch):
    sweep = write_sweep(samples=2)
    monkeypatch.setattr(trial_manager.tracking, "start_group", lambda *_: "group")
    manager = trial_manager.TrialManager(sweep, SimpleNamespace(), lambda *_: None)
    reasons = iter(["harvest_threshold=0.7: none is left", "no such data"])
    monkeypatch.setattr(
        trial_manager.setup,
        "new_run",
        lambda *_, **__: (_ for _ in ()).throw(UsageError(next(reasons))),
    )
    assert manager.next_task() is None
    assert sweep.count("failed") == 2
    run = write_run(home, "s-009", "dummy")
    (run.folder / trial_manager.PROBLEM).write_text("it leaves nothing")
    assert manager._determine_outcome(run, None, "").ended == "failed"
    assert not manager.stop_reason
    (run.folder / trial_manager.WRONG_METRIC).write_text("--metric x: there is none")
    assert manager._determine_outcome(run, None, "").ended == "failed"
    assert manager.stop_reason == manager.problem == "--metric x: there is none"


def test_grid_trials_are_not_stopped_early_by_default():
    typed = {"variants": ["dummy"], "space": "optimizer"}
    assert command._create_sweep("usual", typed).scheduler == "asha"
    assert command._create_sweep("grid", {**typed, "search": "grid"}).scheduler == "none"
    asked_for = {**typed, "search": "grid", "scheduler": "asha"}
    assert command._create_sweep("asked", asked_for).scheduler == "asha"
    assert command._create_sweep("ready", {"sweep": "empdg-steps"}).scheduler == "none"
    population = command._create_sweep("population", {**typed, "scheduler": "pbt"})
    assert population.search == "random"
