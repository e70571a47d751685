"""The trial manager: outcomes of trials, retries and the best model."""

import collections
import math
from types import SimpleNamespace

import polars as pl
import pytest

from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import DASHBOARD, JOB
from attune.platform.runs.record import find_run
from attune.platform.tuning import recorder, trial_manager, trial_runs
from attune.platform.tuning.outcomes import Outcome, combine_seeds
from attune.platform.tuning.trial import TASK, WRONG_METRIC
from tests.runs import write_run
from tests.sweeps import update_run, write_sweep


def test_combined_seeds_have_mean_metrics_and_the_worst_outcome():
    def one(ended, value):
        metrics = {"valid_loss": value}
        return Outcome(ended=ended, reason=ended, metrics=metrics, validations=[])

    both = combine_seeds([one("finished", 1.0), one("finished", 3.0)])
    assert both.metrics == {"valid_loss": 2.0, "valid_loss_std": pytest.approx(math.sqrt(2))}
    assert combine_seeds([one("finished", 1.0), one("stopped early", 3.0)]).ended == "stopped early"
    assert combine_seeds([one("finished", 1.0), one("diverged", math.nan)]).metrics == {}
    early, late = one("finished", 1.0), one("waits", 3.0)
    early.validations, late.validations = [5.0], [7.0, 3.0]
    both = combine_seeds([early, late])
    assert (both.ended, both.validations) == ("waits", [6.0, 4.0])


def test_trial_whose_process_died_before_start_is_requeued(monkeypatch):
    """Tune does not retry it: it fails without an error."""
    manager = object.__new__(trial_manager.TrialManager)
    manager.restarts, manager.queue = collections.Counter(), collections.deque()
    manager.live = {"s-000": (0, "run")}
    errors = []
    monkeypatch.setattr(manager, "_record_run_end", lambda _, error: errors.append(error))
    task = {"folder": "runs/s-000", "population": False}
    gone = SimpleNamespace(get_error=lambda: None, config={TASK: task})
    for _ in range(trial_manager.RETRIES):
        manager.on_trial_error(0, [], gone)
        assert manager.queue == collections.deque([(0, "run")])
        manager.live["s-000"] = manager.queue.popleft()
    manager.on_trial_error(0, [], gone)
    assert errors == ["its process died"]
    assert not manager.queue


def test_sweep_and_trials_record_their_job(prepared, monkeypatch):
    monkeypatch.setattr(recorder.tracking, "start_group", lambda *_: "group")
    sweep = write_sweep(samples=2, asked={"data": str(prepared), "preset": "tiny"})
    for job in ("tune-1", "tune-2"):  # submitted again, after a stop
        monkeypatch.setenv(JOB, job)
        monkeypatch.setenv(DASHBOARD, f"http://head/{job}")
        manager = trial_manager.TrialManager(
            sweep, SimpleNamespace(update_run=update_run), lambda *_: None
        )
        manager._enqueue_trial(0 if job == "tune-2" else sweep.suggest_trial()[0])
        trial = find_run("s-000")
        assert (trial.job, trial.dashboard) == (job, f"http://head/{job}")
        sweep = manager.sweep
    assert tracking.job_tags(trial.job, "") == {"ray_job": "tune-2"}


@pytest.mark.parametrize("why", ["", "the budget is spent", "a stop was requested"])
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
    monkeypatch.setattr(recorder, "sample_answers", lambda _: pl.DataFrame())
    monkeypatch.setattr(recorder.tracking, "finish_group", lambda *_: None)
    if why == "a stop was requested":
        sweep.stop_file.touch()
    for _ in range(2):  # the second time it is there already
        manager = trial_manager.TrialManager(sweep, tracker, lambda *_: None)
        manager.stop_reason = why
        sweep = manager.finish()
    assert kept == ([] if why == "a stop was requested" else ["s-000"])
    assert sweep.status == ("stopped" if why else "finished")


def test_invalid_settings_fail_the_trial_and_not_the_sweep(monkeypatch):
    sweep = write_sweep(samples=2)
    monkeypatch.setattr(recorder.tracking, "start_group", lambda *_: "group")
    manager = trial_manager.TrialManager(sweep, SimpleNamespace(), lambda *_: None)
    reasons = iter(["harvest_threshold=0.7: none is left", "no such data"])
    monkeypatch.setattr(
        trial_runs.setup,
        "new_run",
        lambda *_, **__: (_ for _ in ()).throw(UsageError(next(reasons))),
    )
    assert manager.next_task() is None
    assert sweep.count("failed") == 2


@pytest.mark.parametrize(
    ("file", "stops_sweep"), [(trial_manager.PROBLEM, False), (WRONG_METRIC, True)]
)
def test_only_an_unknown_metric_stops_the_sweep(home, file, stops_sweep):
    sweep = write_sweep(samples=1)
    tracker = SimpleNamespace(update_run=update_run, finish_run=lambda *_, **__: None)
    manager = trial_manager.TrialManager(sweep, tracker, lambda *_: None)
    number, _, settings = sweep.suggest_trial()
    run = write_run(home, "s-000", "dummy")
    manager.live["s-000"] = (number, run)
    (run.folder / file).write_text("the reason")
    task = {"number": number, "variant": "dummy", "folder": str(run.folder),
            "settings": settings, "metrics": sweep.metrics}  # fmt: skip
    manager.on_trial_complete(0, [], SimpleNamespace(config={TASK: task}))
    assert sweep.count("failed") == 1
    reason = "the reason" if stops_sweep else ""
    assert manager.stop_reason == manager.problem == reason
