"""Record a sweep: the outcomes of its trials, its status, and its run in MLflow."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attune.platform import tracking
from attune.platform.runs.record import Run, Status
from attune.platform.training.driver import sample_answers
from attune.platform.tuning.halving import TrialProgress
from attune.platform.tuning.outcomes import Outcome
from attune.platform.tuning.sweep import END_STATE, METRICS, SETTINGS, VALIDATIONS, Sweep
from attune.platform.tuning.tracker import Tracker

SECONDS_TO_SEND = 60.0

Show = Callable[[str, int], None]
"""Called with a message (or '') and the number of trials that have ended or wait."""


class SweepRecorder:
    """Records what happens to trials: in the sweep's folder, in MLflow and on the screen."""

    def __init__(self, sweep: Sweep, tracker: Tracker, show: Show):
        self.sweep, self.tracker, self.show = sweep, tracker, show
        self.started, self.spent_before = time.monotonic(), sweep.spent
        self.ended_trials = {t.number for t in sweep.get_trials() if END_STATE in t.user_attrs}

    @property
    def uses_halving(self) -> bool:
        """Whether trials pause at rungs."""
        return self.sweep.scheduler == "asha"

    def elapsed_seconds(self) -> float:
        """Return the duration of the sweep, earlier drivers included."""
        return self.spent_before + time.monotonic() - self.started

    def waiting_trials(self) -> list[TrialProgress]:
        """Return the trials that have paused at a rung."""
        progress = self.sweep.collect_progress() if self.uses_halving else []
        return [trial for trial in progress if trial.waits]

    def ensure_tracked(self, first: Run) -> str | None:
        """Return the id of the sweep's run in MLflow; a new one has the tags of `first`."""
        if self.sweep.run_id is None:
            sweep = self.sweep
            options = {key: value for key, value in sweep.asked.items() if value is not None}
            params = {
                "variants": ",".join(sweep.spaces), "metric": ",".join(sweep.metrics),
                "search": sweep.search, "scheduler": sweep.scheduler, "samples": sweep.samples,
                "repeat": sweep.repeat, "seed": sweep.seed, **options,
            }  # fmt: skip
            self.sweep = sweep.update(run_id=tracking.start_group(sweep.name, params, first))
        return self.sweep.run_id

    def record(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a trial; a waiting trial may get another one later."""
        if outcome.ended == "waits":
            attributes = {METRICS: outcome.metrics, VALIDATIONS: outcome.validations}
            self.sweep.set_trial_attributes(number, **attributes)
        else:
            self._record_end(number, outcome)
        self.show(
            self._format_outcome(number, outcome),
            len(self.ended_trials) + len(self.waiting_trials()),
        )
        self.sweep = self.sweep.update(spent=self.elapsed_seconds())

    def finish(self, *, is_interrupted: bool, problem: str) -> Sweep:
        """Record the end of the sweep, and register the best trial's model in MLflow.

        The model is registered after an exhausted budget, too, because the sweep may never be
        resumed; it is not if somebody asked for a stop.
        """
        is_complete = not is_interrupted and not self.sweep.stop_file.exists()
        for progress in self.waiting_trials() if is_complete else ():
            self._end_waiting_trial(progress)
        status: Status = "finished" if is_complete else "failed" if problem else "stopped"
        self.sweep = self.sweep.update(status=status, spent=self.elapsed_seconds())
        if not problem and not self.sweep.stop_file.exists():
            self._register_best_model()
        self.tracker.close(SECONDS_TO_SEND)
        if self.sweep.run_id is not None:
            self._finish_group(self.sweep.run_id)
        return self.sweep

    def _record_end(self, number: int, outcome: Outcome) -> None:
        assert outcome.ended != "waits"
        self.sweep.record_result(
            number, outcome.ended, outcome.reason, outcome.metrics, outcome.validations
        )
        self.ended_trials.add(number)
        runs = self.sweep.load_runs(self.sweep.get_trial(number))
        for run in runs:
            self.tracker.finish_run(run, str(outcome))
        if len(runs) > 1:
            self.tracker.finish_group(runs[0], outcome.run_status, outcome.metrics)

    def _end_waiting_trial(self, progress: TrialProgress) -> None:
        """Record a trial as stopped early, because no other will start."""
        attributes = self.sweep.get_trial(progress.number).user_attrs
        outcome = Outcome(
            ended="stopped early",
            reason=f"by {self.sweep.scheduler} after validation {len(progress.costs)}",
            metrics=attributes[METRICS],
            validations=attributes[VALIDATIONS],
        )
        self._record_end(progress.number, outcome)

    def _format_outcome(self, number: int, outcome: Outcome) -> str:
        settings = self.sweep.get_trial(number).user_attrs[SETTINGS]
        metrics = " ".join(
            f"{name.removeprefix('valid_')} {outcome.metrics[name]:.4g}"
            for name in self.sweep.metrics
            if name in outcome.metrics
        )
        reason = "" if outcome.ended == "finished" else f" ({outcome.reason})"
        return f"trial {number} {outcome.ended}{reason}: {metrics}  {format_settings(settings)}"

    def _register_best_model(self) -> None:
        best = self.sweep.best_trial()
        if best is None or best.user_attrs.get(END_STATE) != "finished":
            return
        for run in self.sweep.load_runs(best)[:1]:
            if run.name != self.sweep.registered:
                self.tracker.register_model(run, sample_answers(run), {"best_of": self.sweep.name})
                self.sweep = self.sweep.update(registered=run.name)

    def _finish_group(self, run_id: str) -> None:
        sweep, best = self.sweep, self.sweep.best_trial()
        best_metrics = {} if best is None else best.user_attrs[METRICS]
        metrics = {f"best_{k}": v for k, v in best_metrics.items() if np.isfinite(v)}
        counts = {
            "trials": len(sweep.get_trials()),
            "stopped_early": sweep.count("stopped early"),
            "failed": sweep.count("failed", "diverged"),
        }
        tags = tracking.job_tags(sweep.job, sweep.dashboard)
        if best is not None:
            tags["best"] = f"trial {best.number}: {format_settings(best.user_attrs[SETTINGS])}"
        tracking.finish_group(run_id, sweep.status, {**metrics, **counts}, tags)


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as `key=value ...`."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in settings.items()
    )
