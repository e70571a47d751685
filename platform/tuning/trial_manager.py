"""Makes the runs of a sweep's trials, has them trained one after the other, and keeps what came of
each: the search in the sweep's folder, each trial in its run's."""

import collections
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ray.tune import Callback

from attune.platform import tracking
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.logging import current_job
from attune.platform.runs.record import RUN_RECORD, Run, Status, find_run, read_run, runs_folder
from attune.platform.training import checkpoints, setup, sharing
from attune.platform.training.driver import sample_answers
from attune.platform.training.loop import PROBLEM, RESULT
from attune.platform.tuning import halving
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.halving import TrialProgress
from attune.platform.tuning.sweep import (
    END_STATE,
    METRICS,
    REASON,
    RUNG,
    RUNS,
    SETTINGS,
    VALIDATIONS,
    EndState,
    Sweep,
)
from attune.platform.tuning.tracker import Tracker
from attune.platform.tuning.trial import (
    TASK,
    VALIDATION,
    WRONG_METRIC,
    Task,
    apply_settings,
    has_diverged,
    read_validations,
    select_counted,
)

RETRIES = 2
"""How often a trial whose process died is taken up again."""
SECONDS_TO_SEND = 60.0

Show = Callable[[str, int], None]
"""Called with a line for people (or '') and the number of trials that have ended or wait."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What came of one run of a trial, or of all of them."""

    ended: EndState | Literal["waits"]
    reason: str
    metrics: dict[str, float]
    validations: list[float]
    """The first metric's best so far, after each look that counts."""

    def __str__(self) -> str:
        return f"{self.ended}: {self.reason}"


class TrialManager(Callback):
    """Makes the runs of trials, and keeps what came of them; looks at the clock and at who asks for
    a stop."""

    def __init__(self, sweep: Sweep, tracker: Tracker, show: Show):
        self.sweep, self.tracker, self.show = sweep, tracker, show
        self.cores: float = 1
        self.stop_reason = self.problem = ""
        self.began, self.spent = time.monotonic(), sweep.spent
        self.queue: collections.deque[tuple[int, Run]] = collections.deque()
        self.live: dict[str, tuple[int, Run]] = {}
        self.restarts: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[int, dict[str, Outcome]] = collections.defaultdict(dict)
        self._ended_trials = {t.number for t in sweep.get_trials() if END_STATE in t.user_attrs}
        remembering = sweep.scheduler == "median"
        waiting = {each.number for each in self._waiting_trials()}
        for each in sweep.get_trials():
            known = each.user_attrs.get(END_STATE)
            interrupted = known is None and each.number not in waiting
            if interrupted or (remembering and known in ("finished", "stopped early")):
                self._enqueue(each.number)
            for run in sweep.load_runs(each) if known else ():
                tracker.finish_run(run, f"{known}: {each.user_attrs[REASON]}")

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def next_task(self) -> Task | None:
        """The next run of a trial; None where there is none now, or a stop was asked for."""
        if self.stop_reason or self.sweep.stop_file.exists():
            return None
        while not self.queue:
            number = self._choose_trial()
            if number is None:
                return None
            self._enqueue(number)
        return self._create_task(*self.queue.popleft())

    @property
    def waits(self) -> bool:
        """Whether there may be more to do when somebody comes to a rung."""
        return self._uses_halving and bool(self.live) and not self.stop_reason

    @property
    def _uses_halving(self) -> bool:
        return self.sweep.scheduler == "asha"

    def _waiting_trials(self) -> list[TrialProgress]:
        progress = self.sweep.collect_progress() if self._uses_halving else []
        return [trial for trial in progress if trial.waits]

    def _choose_trial(self) -> int | None:
        """Whom to train next: who goes on to the next rung, or a new trial."""
        progress = self.sweep.collect_progress() if self._uses_halving else []
        # Somebody should have come to the end when the time is over.
        late = self.sweep.budget is not None and self._elapsed_seconds() > self.sweep.budget / 2
        promoted = halving.select_promotion(
            progress, min_group=1 if late else halving.MIN_COHORT, highest_first=late
        )
        if promoted is None and (suggestion := self.sweep.suggest_trial()) is not None:
            return suggestion[0]
        busy = {run.variant for _, run in self.live.values()}
        promoted = promoted or halving.select_promotion(progress)
        promoted = promoted or halving.select_finalist(
            [each for each in progress if each.variant not in busy]
        )
        if promoted is None:
            return None
        self.outcomes.pop(promoted.number, None)
        self.sweep.set_trial_attributes(promoted.number, **{RUNG: halving.next_rung(promoted)})
        return promoted.number

    def create_population(self) -> list[Task]:
        """All members."""
        while (suggestion := self.sweep.suggest_trial()) is not None:
            self._enqueue(suggestion[0])
        return [self._create_task(*self.queue.popleft()) for _ in range(len(self.queue))]

    def _create_task(self, number: int, run: Run) -> Task:
        self.live[run.name] = (number, run)
        if number not in self._ended_trials:
            for left in (run.stop_file, run.folder / PROBLEM, run.folder / WRONG_METRIC):
                left.unlink(missing_ok=True)
            run = self.tracker.update_run(run.folder, status="running")
            self.tracker.start_run(run)
        kept = self.sweep.get_trial(number).user_attrs
        return Task(
            number=number,
            variant=run.variant,
            folder=str(run.folder),
            settings=kept[SETTINGS],
            metrics=self.sweep.metrics,
            rung=kept.get(RUNG, halving.FIRST_RUNG) if self._uses_halving else None,
            shared=self._shared_stage(run),
            population=self.sweep.scheduler == "pbt",
            over=number in self._ended_trials,
            cores=self.cores,
        )

    def _enqueue(self, number: int) -> None:
        """Have a trial's runs wait for their turn; settings that do not go together have failed."""
        try:
            runs = self._get_or_create_runs(number)
        except (UsageError, DataError) as error:
            self._record_outcome(
                number, Outcome(ended="failed", reason=str(error), metrics={}, validations=[])
            )
            return
        if runs and self.sweep.run_id is None:
            self._start_tracking(runs[0])
        parent = self.sweep.run_id
        runs = [
            run if run.parent else self.tracker.update_run(run.folder, parent=parent)
            for run in runs
        ]
        if len(runs) > 1:
            settings = self.sweep.get_trial(number).user_attrs[SETTINGS]
            self.tracker.start_group(runs, f"{self.sweep.name}-{number:03d}", settings)
        self.queue.extend((number, run) for run in runs)

    def _get_or_create_runs(self, number: int) -> list[Run]:
        """A trial's runs, which are made where they are not there."""
        attributes = self.sweep.get_trial(number).user_attrs
        names = [f"{self.sweep.name}-{number:03d}"]
        if self.sweep.repeat > 1:
            names = [f"{names[0]}-seed{index}" for index in range(self.sweep.repeat)]
        runs = []
        for index, name in enumerate(names):
            if (runs_folder() / name / RUN_RECORD).is_file():
                run = find_run(name)
                if number not in self._ended_trials:
                    run = self.tracker.update_run(run.folder, **current_job())
                runs.append(run)
            elif number not in self._ended_trials:
                runs.append(self._create_run(attributes, name, self.sweep.seed + index))
        if attributes.get(RUNS) != names and runs:
            self.sweep.set_trial_attributes(number, **{RUNS: names})
        return runs

    def _create_run(self, kept: Mapping[str, Any], name: str, seed: int) -> Run:
        asked = {key: value for key, value in self.sweep.asked.items() if key != "overrides"}
        overrides = {**self.sweep.asked.get("overrides", {}), **kept[SETTINGS]}
        run = setup.new_run(
            kept["variant"], name=name, seed=seed, overrides=overrides, workers=self.sweep.workers,
            **asked,
        )  # fmt: skip
        before = (each for trial in self.sweep.get_trials() for each in self.sweep.load_runs(trial))
        return sharing.start_after_shared_stage(run, before)

    def _start_tracking(self, first: Run) -> None:
        asked = {key: value for key, value in self.sweep.asked.items() if value is not None}
        params = {
            "variants": ",".join(self.sweep.spaces), "metric": ",".join(self.sweep.metrics),
            "search": self.sweep.search, "scheduler": self.sweep.scheduler,
            "samples": self.sweep.samples, "repeat": self.sweep.repeat, "seed": self.sweep.seed,
            **asked,
        }  # fmt: skip
        opened = tracking.start_group(self.sweep.name, params, first)
        self.sweep = self.sweep.update(run_id=opened)

    # What Tune calls.

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Stop all where it is time."""
        if self.stop_reason:
            return
        if self.sweep.stop_file.exists():
            self.stop_all("asked to stop")
        elif self.sweep.budget is not None and self._elapsed_seconds() > self.sweep.budget:
            self.stop_all("the budget is spent")

    def stop_all(self, why: str) -> None:
        """Ask every running trial to stop after its current step."""
        self.stop_reason = why
        for number, run in self.live.values():
            if number not in self._ended_trials:
                run.stop_file.touch()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Of a population: keep the settings that a member goes on with."""
        task = trial.config[TASK]
        if not task["population"]:
            return
        before = self.sweep.get_trial(task["number"]).user_attrs[SETTINGS]
        if before == task["settings"]:
            return
        self.sweep.set_trial_attributes(task["number"], **{SETTINGS: task["settings"]})
        changed = apply_settings(read_run(Path(task["folder"])), task["settings"])
        self.tracker.update_run(changed.folder, config=changed.config, training=changed.training)
        new_settings = _format_settings(
            {k: v for k, v in task["settings"].items() if before.get(k) != v}
        )
        self.tracker.tag_run(
            changed, {f"took over after look {_validation_count(trial)}": new_settings}
        )
        self.show(
            f"trial {task['number']} takes over a better one's weights, with {new_settings}", -1
        )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Keep what came of a run."""
        self._record_run_end(trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Keep that it failed, after all retries."""
        error = trial.get_error()
        if error is None and self._requeue(trial.config[TASK]):
            return
        lines = str(error or "").strip().splitlines()  # a traceback
        self._record_run_end(trial, lines[-1][:500] if lines else "it died")

    def _requeue(self, task: Mapping[str, Any]) -> bool:
        """Tune makes good the death of a process in a trial, but not before one: where the process
        that was to be used again is gone, the trial fails without an error."""
        name = Path(task["folder"]).name
        if task["population"] or self.restarts[name] >= RETRIES:
            return False
        self.restarts[name] += 1
        self.queue.appendleft(self.live.pop(name))
        return True

    def _record_run_end(self, trial: Any, error: str) -> None:
        task = Task(**trial.config[TASK])
        folder = Path(task.folder)
        number, run = self.live.pop(folder.name)
        if number in self._ended_trials:
            return
        outcome = self._determine_outcome(run, task.rung, error)
        status: Status = "stopped" if outcome is None else _run_status(outcome.ended)
        ended = self.tracker.update_run(folder, status=status, result=_read_result(run))
        if outcome is None:
            self.tracker.finish_run(ended, self.stop_reason)
            so_far = ended.result.get("metrics", {})
            self.sweep.set_trial_attributes(number, **{METRICS: so_far})
            return
        self.tracker.finish_run(ended, str(outcome), final=outcome.ended != "waits")
        together = self.outcomes[number]
        together[run.name] = outcome
        if len(together) == self.sweep.repeat:
            self._record_outcome(number, _combine_seeds(list(together.values())))

    def _determine_outcome(self, run: Run, rung: int | None, error: str) -> Outcome | None:
        """None where it was interrupted, and can go on."""
        best_values = self._best_so_far(run)
        problem, wrong = run.folder / PROBLEM, run.folder / WRONG_METRIC
        ended: EndState | Literal["waits"]
        if (run.folder / RESULT).exists():
            ended, reason = "finished", "all steps done, or no improvement any more"
        elif wrong.exists():  # so it is for all
            ended, reason = "failed", wrong.read_text(encoding="utf-8")
            self.problem = self.problem or reason
            self.stop_all(reason)
        elif problem.exists():
            ended, reason = "failed", problem.read_text(encoding="utf-8")
        elif error:
            ended, reason = "failed", error
        elif has_diverged(run):
            ended, reason = "diverged", "the loss is no number any more"
        elif rung is not None and len(best_values) >= rung:
            ended, reason = "waits", f"after look {len(best_values)}"
        elif self.stop_reason:
            return None
        elif self._uses_halving:
            ended, reason = "failed", f"it ended after look {len(best_values)}, and was not to"
        else:
            ended, reason = (
                "stopped early",
                f"by {self.sweep.scheduler} after look {len(best_values)}",
            )
        metrics = {
            k: float(v) for k, v in _read_result(run).get("metrics", {}).items() if v is not None
        }
        return Outcome(ended=ended, reason=reason, metrics=metrics, validations=best_values)

    def _shared_stage(self, run: Run) -> str | None:
        """The stage up to which all trials of a variant do the same."""
        return sharing.shared_stage(run, self.sweep.spaces[run.variant])

    def _best_so_far(self, run: Run) -> list[float]:
        name = self.sweep.metrics[0]
        more = sweeps.is_maximized(name)
        counted = select_counted(
            run, read_validations(run), self.sweep.metrics, self._shared_stage(run)
        )
        values = [sweeps.metric_value(metrics, name) for _, metrics in counted]
        worst = -math.inf if more else math.inf
        known = (worst if math.isnan(value) else value for value in values)
        return list(itertools.accumulate(known, max if more else min))

    def _record_outcome(self, number: int, outcome: Outcome) -> None:
        """Keep what came of a trial, for good unless it waits."""
        if outcome.ended == "waits":
            self.sweep.set_trial_attributes(
                number, **{METRICS: outcome.metrics, VALIDATIONS: outcome.validations}
            )
        else:
            self._record_trial_end(number, outcome)
        settings = self.sweep.get_trial(number).user_attrs[SETTINGS]
        shown = " ".join(
            f"{name.removeprefix('valid_')} {outcome.metrics[name]:.4g}"
            for name in self.sweep.metrics
            if name in outcome.metrics
        )
        reason = "" if outcome.ended == "finished" else f" ({outcome.reason})"
        line = f"trial {number} {outcome.ended}{reason}: {shown}  {_format_settings(settings)}"
        self.show(line, len(self._ended_trials) + len(self._waiting_trials()))
        self.sweep = self.sweep.update(spent=self._elapsed_seconds())

    def _record_trial_end(self, number: int, outcome: Outcome) -> None:
        assert outcome.ended != "waits"
        self.sweep.record_result(
            number, outcome.ended, outcome.reason, outcome.metrics, outcome.validations
        )
        self._ended_trials.add(number)
        runs = self.sweep.load_runs(self.sweep.get_trial(number))
        for run in runs:
            self.tracker.finish_run(run, str(outcome))
        if len(runs) > 1:
            self.tracker.finish_group(runs[0], _run_status(outcome.ended), outcome.metrics)

    def _elapsed_seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def finish(self) -> Sweep:
        """Say how it stands; unless it was asked to stop, the best trial's model is kept in MLflow:
        after a budget nobody may ever go on with it."""
        complete = not self.stop_reason and not self.sweep.stop_file.exists()
        for progress in self._waiting_trials() if complete else ():
            self._end_waiting_trial(progress)
        status: Status = "finished" if complete else "failed" if self.problem else "stopped"
        sweep = self.sweep.update(status=status, spent=self._elapsed_seconds())
        best = sweep.best_trial()
        best_finished = best is not None and best.user_attrs.get(END_STATE) == "finished"
        if best is not None and best_finished and not (self.problem or sweep.stop_file.exists()):
            for run in sweep.load_runs(best)[:1]:
                if run.name != sweep.registered:
                    self.tracker.register_model(run, sample_answers(run), {"best_of": sweep.name})
                    sweep = sweep.update(registered=run.name)
        self.tracker.close(SECONDS_TO_SEND)
        if sweep.run_id is not None:
            best_metrics = {} if best is None else best.user_attrs[METRICS]
            metrics = {f"best_{k}": v for k, v in best_metrics.items() if np.isfinite(v)}
            counts = {
                "trials": len(sweep.get_trials()),
                "stopped_early": sweep.count("stopped early"),
                "failed": sweep.count("failed", "diverged"),
            }
            tags = tracking.job_tags(sweep.job, sweep.dashboard)
            if best is not None:
                tags["best"] = f"trial {best.number}: {_format_settings(best.user_attrs[SETTINGS])}"
            tracking.finish_group(sweep.run_id, status, {**metrics, **counts}, tags)
        return sweep

    def _end_waiting_trial(self, progress: TrialProgress) -> None:
        """It waits, and nobody will take it up any more."""
        kept = self.sweep.get_trial(progress.number).user_attrs
        reason = f"by {self.sweep.scheduler} after look {len(progress.costs)}"
        outcome = Outcome(
            ended="stopped early",
            reason=reason,
            metrics=kept[METRICS],
            validations=kept[VALIDATIONS],
        )
        self._record_trial_end(progress.number, outcome)


def _validation_count(trial: Any) -> int:
    return int((trial.last_result or {}).get(VALIDATION, 0))


def _run_status(ended: EndState | Literal["waits"]) -> Status:
    if ended == "finished":
        return "finished"
    return "stopped" if ended in ("stopped early", "waits") else "failed"


def _read_result(run: Run) -> dict[str, Any]:
    """What a run has reached, whether or not it came to its end."""
    path = run.folder / RESULT
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result
    newest = run.newest_checkpoint()
    if newest is None:
        return {}
    state = checkpoints.read_state(newest)
    return {
        "steps": state.total,
        "seconds": state.total_seconds,
        "best_step": state.best_step,
        # Where it has begun after another's stage, what is known is that stage's last look.
        "metrics": state.best_metrics or next((m for _, m in reversed(read_validations(run))), {}),
    }


def _combine_seeds(outcomes: list[Outcome]) -> Outcome:
    """Several seeds as one: their means; the first that did not finish says how it ended."""
    if len(outcomes) == 1:
        return outcomes[0]
    order = ["failed", "diverged", "stopped early", "waits", "finished"]
    worst = min(outcomes, key=lambda outcome: order.index(outcome.ended))
    values = {name: [each.metrics.get(name, np.nan) for each in outcomes] for name in worst.metrics}
    values = {
        name: seed_values for name, seed_values in values.items() if np.isfinite(seed_values).all()
    }
    spread = {f"{name}_std": statistics.stdev(seed_values) for name, seed_values in values.items()}
    means = {name: statistics.fmean(seed_values) for name, seed_values in values.items()}
    most = max(len(each.validations) for each in outcomes)
    # Who finished before the others stays at its best.
    longest = [
        [*each.validations, *each.validations[-1:] * (most - len(each.validations))]
        for each in outcomes
    ]
    together = [statistics.fmean(values) for values in zip(*longest, strict=False)]
    return dataclasses.replace(worst, metrics={**means, **spread}, validations=together)


def _format_settings(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in settings.items()
    )
