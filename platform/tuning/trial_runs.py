"""The runs of a sweep's trials: one for each seed, created when the trial starts."""

from collections.abc import Collection
from typing import Any

from attune.platform.core.logging import current_job
from attune.platform.runs.record import RUN_RECORD, Run, find_run, runs_folder
from attune.platform.training import setup, sharing
from attune.platform.tuning.sweep import RUNS, SETTINGS, SPACE_NAME, Sweep
from attune.platform.tuning.tracker import Tracker


class TrialRuns:
    """Creates the runs of trials, or returns those of an earlier driver."""

    def __init__(self, sweep: Sweep, tracker: Tracker, ended_trials: Collection[int]):
        self.sweep, self.tracker = sweep, tracker
        self.ended_trials = ended_trials

    def get_or_create(self, number: int) -> list[Run]:
        """Return the runs of a trial; the missing ones are created unless the trial has ended."""
        attributes = self.sweep.get_trial(number).user_attrs
        names = self._names(number)
        runs = []
        for index, name in enumerate(names):
            if (runs_folder() / name / RUN_RECORD).is_file():
                run = find_run(name)
                if number not in self.ended_trials:
                    run = self.tracker.update_run(run.folder, **current_job())
                runs.append(run)
            elif number not in self.ended_trials:
                runs.append(self._create(attributes, name, self.sweep.seed + index))
        if runs and attributes.get(RUNS) != names:
            self.sweep.set_trial_attributes(number, **{RUNS: names})
        return runs

    def add_to_group(self, number: int, runs: list[Run], parent: str | None) -> list[Run]:
        """Return the runs with `parent` as their group in MLflow; seeds get their own group."""
        runs = [
            run if run.parent else self.tracker.update_run(run.folder, parent=parent)
            for run in runs
        ]
        if len(runs) > 1:
            settings = self.sweep.get_trial(number).user_attrs[SETTINGS]
            self.tracker.start_group(runs, self._trial_name(number), settings)
        return runs

    def _trial_name(self, number: int) -> str:
        return f"{self.sweep.name}-{number:03d}"

    def _names(self, number: int) -> list[str]:
        name = self._trial_name(number)
        if self.sweep.repeat == 1:
            return [name]
        return [f"{name}-seed{index}" for index in range(self.sweep.repeat)]

    def _create(self, attributes: dict[str, Any], name: str, seed: int) -> Run:
        options = {key: value for key, value in self.sweep.asked.items() if key != "overrides"}
        overrides = {**self.sweep.asked.get("overrides", {}), **attributes[SETTINGS]}
        run = setup.new_run(
            attributes[SPACE_NAME], name=name, seed=seed, overrides=overrides,
            workers=self.sweep.workers, **options,
        )  # fmt: skip
        earlier = (run for trial in self.sweep.get_trials() for run in self.sweep.load_runs(trial))
        return sharing.start_after_shared_stage(run, earlier)
