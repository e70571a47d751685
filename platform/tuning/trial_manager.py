"""Start the runs of a sweep's trials and react to their ends: the callback of Ray Tune.

Runs are created in `trial_runs.py`, their ends are interpreted in `outcomes.py`, and `recorder.py`
records them.
"""

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune import Callback

from attune.platform.core.errors import DataError, UsageError
from attune.platform.runs.record import Run, Status, read_run
from attune.platform.training.loop import PROBLEM
from attune.platform.tuning import halving
from attune.platform.tuning.outcomes import (
    Outcome,
    combine_seeds,
    determine_outcome,
    read_result,
    shared_stage,
)
from attune.platform.tuning.population import validation_count
from attune.platform.tuning.recorder import Show, SweepRecorder, format_settings
from attune.platform.tuning.sweep import END_STATE, METRICS, REASON, RUNG, SETTINGS, Sweep
from attune.platform.tuning.tracker import Tracker
from attune.platform.tuning.trial import TASK, WRONG_METRIC, Task, apply_settings
from attune.platform.tuning.trial_runs import TrialRuns

RETRIES = 2
"""How often a trial whose process died is restarted."""
MAX_ERROR_LENGTH = 500


class TrialManager(Callback):
    """Chooses the next trial, and stops all trials on request or when the budget is spent."""

    def __init__(self, sweep: Sweep, tracker: Tracker, show: Show):
        self.tracker, self.show = tracker, show
        self.recorder = SweepRecorder(sweep, tracker, show)
        self.runs = TrialRuns(sweep, tracker, self.recorder.ended_trials)
        self.cores: float = 1
        self.stop_reason = self.problem = ""
        self.queue: collections.deque[tuple[int, Run]] = collections.deque()
        """The runs to train next, each with the number of its trial."""
        self.live: dict[str, tuple[int, Run]] = {}
        """The runs in training, by name."""
        self.restarts: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[int, dict[str, Outcome]] = collections.defaultdict(dict)
        """The outcomes of the runs of each trial, by name."""
        self._restore_trials()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks to restore them, which sweeps never do

    @property
    def sweep(self) -> Sweep:
        """The sweep as it is recorded now."""
        return self.recorder.sweep

    @property
    def waits(self) -> bool:
        """Whether more trials may follow when a live one reaches its rung."""
        return self.recorder.uses_halving and bool(self.live) and not self.stop_reason

    def _restore_trials(self) -> None:
        """Queue the trials that an earlier driver left, and log the ends that it did not send."""
        repeats_reports = self.sweep.scheduler == "median"  # it compares with all earlier trials
        waiting = {each.number for each in self.recorder.waiting_trials()}
        for trial in self.sweep.get_trials():
            ended = trial.user_attrs.get(END_STATE)
            is_interrupted = ended is None and trial.number not in waiting
            if is_interrupted or (repeats_reports and ended in ("finished", "stopped early")):
                self._enqueue_trial(trial.number)
            for run in self.sweep.load_runs(trial) if ended else ():
                self.tracker.finish_run(run, f"{ended}: {trial.user_attrs[REASON]}")

    # Choosing what to train.

    def next_task(self) -> Task | None:
        """Return the next run to train; None if there is none now, or the sweep is stopping."""
        if self.stop_reason or self.sweep.stop_file.exists():
            return None
        while not self.queue:
            number = self._choose_trial()
            if number is None:
                return None
            self._enqueue_trial(number)
        return self._create_task(*self.queue.popleft())

    def create_population(self) -> list[Task]:
        """Return the tasks of all members of a population."""
        while (suggestion := self.sweep.suggest_trial()) is not None:
            self._enqueue_trial(suggestion[0])
        return [self._create_task(*self.queue.popleft()) for _ in range(len(self.queue))]

    def _choose_trial(self) -> int | None:
        """Return the trial to train next: one promoted to its next rung, or a new one."""
        progress = self.sweep.collect_progress() if self.recorder.uses_halving else []
        budget = self.sweep.budget
        # Some trial must finish before the budget is spent.
        is_late = budget is not None and self.recorder.elapsed_seconds() > budget / 2
        promoted = halving.select_promotion(
            progress, min_group=1 if is_late else halving.MIN_COHORT, highest_first=is_late
        )
        if promoted is None and (suggestion := self.sweep.suggest_trial()) is not None:
            return suggestion[0]
        live_variants = {run.variant for _, run in self.live.values()}
        promoted = promoted or halving.select_promotion(progress)
        promoted = promoted or halving.select_finalist(
            [each for each in progress if each.variant not in live_variants]
        )
        if promoted is None:
            return None
        self.outcomes.pop(promoted.number, None)
        self.sweep.set_trial_attributes(promoted.number, **{RUNG: halving.next_rung(promoted)})
        return promoted.number

    def _enqueue_trial(self, number: int) -> None:
        """Queue the runs of a trial; a trial whose settings are invalid has failed."""
        try:
            runs = self.runs.get_or_create(number)
        except (UsageError, DataError) as error:
            outcome = Outcome(ended="failed", reason=str(error), metrics={}, validations=[])
            self.recorder.record(number, outcome)
            return
        if runs:
            parent = self.recorder.ensure_tracked(runs[0])
            runs = self.runs.add_to_group(number, runs, parent)
        self.queue.extend((number, run) for run in runs)

    def _create_task(self, number: int, run: Run) -> Task:
        """Return what Tune passes to a trial's process, and mark the run as running."""
        self.live[run.name] = (number, run)
        has_ended = number in self.recorder.ended_trials
        if not has_ended:
            for left in (run.stop_file, run.folder / PROBLEM, run.folder / WRONG_METRIC):
                left.unlink(missing_ok=True)
            run = self.tracker.update_run(run.folder, status="running")
            self.tracker.start_run(run)
        attributes = self.sweep.get_trial(number).user_attrs
        rung = attributes.get(RUNG, halving.FIRST_RUNG)
        return Task(
            number=number,
            variant=run.variant,
            folder=str(run.folder),
            settings=attributes[SETTINGS],
            metrics=self.sweep.metrics,
            rung=rung if self.recorder.uses_halving else None,
            shared=shared_stage(self.sweep, run),
            population=self.sweep.scheduler == "pbt",
            over=has_ended,
            cores=self.cores,
        )

    # Stopping.

    def stop_all(self, reason: str) -> None:
        """Ask every running trial to stop after its current step."""
        self.stop_reason = reason
        for number, run in self.live.values():
            if number not in self.recorder.ended_trials:
                run.stop_file.touch()

    def finish(self) -> Sweep:
        """Record the end of the sweep."""
        return self.recorder.finish(is_interrupted=bool(self.stop_reason), problem=self.problem)

    # The hooks that Tune calls.

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Stop on request, or when the budget is spent."""
        if self.stop_reason:
            return
        if self.sweep.stop_file.exists():
            self.stop_all("a stop was requested")
        elif self.sweep.budget is not None and self.recorder.elapsed_seconds() > self.sweep.budget:
            self.stop_all("the budget is spent")

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the settings that a member of a population continues with."""
        task = trial.config[TASK]
        if not task["population"]:
            return
        before = self.sweep.get_trial(task["number"]).user_attrs[SETTINGS]
        if before == task["settings"]:
            return
        self.sweep.set_trial_attributes(task["number"], **{SETTINGS: task["settings"]})
        changed = apply_settings(read_run(Path(task["folder"])), task["settings"])
        self.tracker.update_run(changed.folder, config=changed.config, training=changed.training)
        new_settings = format_settings(
            {key: value for key, value in task["settings"].items() if before.get(key) != value}
        )
        tag = f"took over after validation {validation_count(trial)}"
        self.tracker.tag_run(changed, {tag: new_settings})
        self.show(
            f"trial {task['number']} continues with the weights of a better one, and "
            f"{new_settings}", -1,
        )  # fmt: skip

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the end of a run."""
        self._record_run_end(trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the failure of a run, after all retries."""
        error = trial.get_error()
        if error is None and self._requeue_run(trial.config[TASK]):
            return
        traceback = str(error or "").strip().splitlines()
        last_line = traceback[-1] if traceback else "its process died"
        self._record_run_end(trial, last_line[:MAX_ERROR_LENGTH])

    def _requeue_run(self, task: Mapping[str, Any]) -> bool:
        """Queue a run again whose process died before the trial started; return whether it was.

        Tune retries a trial whose process dies during it. If a process that was to be reused has
        died before, the trial fails without an error and is not retried.
        """
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
        if number in self.recorder.ended_trials:
            return
        outcome = determine_outcome(
            self.sweep, run, task.rung, error, is_stopping=bool(self.stop_reason)
        )
        status: Status = "stopped" if outcome is None else outcome.run_status
        ended = self.tracker.update_run(folder, status=status, result=read_result(run))
        if outcome is None:
            self.tracker.finish_run(ended, self.stop_reason)
            self.sweep.set_trial_attributes(number, **{METRICS: ended.result.get("metrics", {})})
            return
        if outcome.fails_sweep:
            self.problem = self.problem or outcome.reason
            self.stop_all(outcome.reason)
        self.tracker.finish_run(ended, str(outcome), final=outcome.ended != "waits")
        seeds = self.outcomes[number]
        seeds[run.name] = outcome
        if len(seeds) == self.sweep.repeat:
            self.recorder.record(number, combine_seeds(list(seeds.values())))
