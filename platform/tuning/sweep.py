"""Sweeps as folders under `ATTUNE_HOME/sweeps`: the search space and the trials.

sweep.json      the definition and the status (`Sweep`)
study.log       Optuna's journal: settings, values and state of each trial
stop            a request to stop the sweep, which can be resumed later
report/         tables and figures of `attune tune report`
ray/            files of Ray Tune, not needed afterwards

A trial is an ordinary run (`runs/record.py`), or one for each seed, named after the sweep.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attune.models.base import DialogueVariant, Variant
from attune.platform.core.errors import DataError, UsageError, unknown_choice_error
from attune.platform.core.home import home
from attune.platform.core.records import (
    FormatVersionError,
    read_record,
    report_skipped_record,
    write_record,
)
from attune.platform.core.settings import find_variant
from attune.platform.runs.lock import hold_lock, is_locked
from attune.platform.runs.record import RUN_RECORD, Run, Status, read_run, runs_folder
from attune.platform.tuning import halving, spaces
from attune.platform.tuning.halving import TrialProgress
from attune.platform.tuning.spaces import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

RECORD, STUDY, STOP = "sweep.json", "study.log", "stop"
SWEEP_FORMAT = 1
"""The format version of sweep.json; a change that older code cannot read increases it."""
EndState = Literal["finished", "stopped early", "diverged", "failed"]
"""How a trial ended; one without it waits at a rung or was interrupted, and can be resumed."""
FINAL_METRICS = ("bleu", "distinct_1", "distinct_2", "different_answers", "perplexity_sample_mean")
"""Metrics that need answers to all of valid, and are therefore computed when a trial finishes."""
LOCK_GRACE_SECONDS = 5
MAXIMIZED_METRICS = ("accuracy", "bleu", "distinct", "different", "f1", "precision", "recall")
RUNS, END_STATE, REASON, SETTINGS, METRICS, SPACE_NAME, VALIDATIONS, RUNG = (
    "runs", "ended", "reason", "settings", "metrics", "variant", "validations", "rung",
)  # fmt: skip
"""The attributes of a trial that are stored with it in Optuna.

`validations` has the best value of the first metric so far at each validation; `rung` is the
validation that the trial is trained to, if trials are halved."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The record of a sweep, stored as sweep.json in its folder."""

    name: str
    folder: Path
    kind: Literal["training", "decoding"] = "training"
    spaces: dict[str, dict[str, Any]]
    """By variant (or decoding method), the range or values of each setting, as in the output of
    `attune variants --json`."""
    metrics: tuple[str, ...]
    """One or two; trials are ranked by the first."""
    search: str = "optuna"
    scheduler: str = "asha"
    samples: int = 16
    repeat: int = 1
    """The number of seeds of each trial."""
    concurrent: int | None = None
    workers: int = 1
    budget: float | None = None
    """Seconds for all trials together."""
    seed: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    """The options of every run: data, preset, overrides, init, zero, limits; or of a sweep over
    decoding: run, data, split, contexts, overrides."""
    command: str = ""
    commit: str = ""
    created: str = ""
    job: str = ""
    """The Ray job that runs it or ran it last."""
    dashboard: str = ""
    """The address of that job on Ray's dashboard."""
    run_id: str | None = None
    """The id of its run in MLflow, the parent of all trials."""
    registered: str = ""
    """The name of the run whose model is registered as the best."""
    status: Status = "running"
    spent: float = 0.0
    """Seconds used so far."""

    @property
    def stop_file(self) -> Path:
        """The file whose presence requests a stop."""
        return self.folder / STOP

    @property
    def search_spaces(self) -> dict[str, Space]:
        """The search space of each variant."""
        return {
            name: {key: spaces.from_json(content) for key, content in space.items()}
            for name, space in self.spaces.items()
        }

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Optuna's direction of each metric."""
        return ["maximize" if is_maximized(name) else "minimize" for name in self.metrics]

    @cached_property
    def study(self) -> "Study":
        """Optuna's study of the trials; every change is on disk at once."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = self.folder / STUDY
        # The lock of a killed driver is ignored after this time.
        lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_GRACE_SECONDS)
        exists = path.is_file() and path.stat().st_size > 0
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        if exists:  # do not write: another process may be running the sweep
            return optuna.load_study(storage=storage, study_name=self.name)
        return optuna.create_study(
            storage=storage, study_name=self.name, directions=self.directions
        )

    def update(self, **changes: Any) -> "Sweep":
        """Write the sweep with some fields changed, and return it."""
        sweep = dataclasses.replace(self, **changes)
        if "study" in vars(self):  # it is open
            vars(sweep)["study"] = self.study
        sweep.write()
        return sweep

    def write(self) -> None:
        """Write sweep.json atomically."""
        names = [each.name for each in dataclasses.fields(self) if each.name != "folder"]
        fields = {name: getattr(self, name) for name in names}
        write_record(self.folder / RECORD, SWEEP_FORMAT, fields)

    def lock(self) -> AbstractContextManager[None]:
        """Hold the sweep's lock, so that no other process runs it."""
        return hold_lock(self.folder, f"sweep '{self.name}' is being run by another process")

    @property
    def current_status(self) -> Status:
        """The status; a sweep whose process was killed counts as stopped."""
        killed = self.status == "running" and not is_locked(self.folder)
        return "stopped" if killed else self.status

    def suggest_trial(self) -> "tuple[int, str, dict[str, Any]] | None":
        """Return number, variant and settings of the next trial, or None if there is none left."""
        from optuna.trial import Trial

        trials = self.study.get_trials(deepcopy=False)
        started = [trial for trial in trials if trial.state.name != "WAITING"]
        if incomplete := [trial for trial in started if SETTINGS not in trial.user_attrs]:
            # A driver died between asking for the trial and storing its settings.
            trial = Trial(self.study, incomplete[0]._trial_id)
        else:
            if len(started) == len(trials):
                if self.search == "grid" or len(trials) >= self.samples:
                    return None
                self.study.enqueue_trial(self._sample_parameters(trials))
            trial = self.study.ask()
        chosen, settings = spaces.suggest(trial, self.search_spaces)
        trial.set_user_attr(SPACE_NAME, chosen)
        trial.set_user_attr(SETTINGS, settings)
        return trial.number, chosen, settings

    def _sample_parameters(self, trials: "Sequence[FrozenTrial]") -> dict[str, Any]:
        """Return the parameters that the search suggests next.

        Waiting trials are passed to Optuna as pruned ones, because its samplers ignore trials that
        have not ended.
        """
        import optuna
        from optuna.samplers import RandomSampler, TPESampler

        # Seeded by the trial's number, so that a resumed sweep suggests the same trials.
        words = np.random.SeedSequence([self.seed, len(trials)]).generate_state(1)
        sampler = (TPESampler if self.search == "optuna" else RandomSampler)(seed=int(words[0]))
        known = optuna.create_study(directions=self.directions, sampler=sampler)
        known.add_trials(each for trial in trials if (each := _to_sampler_trial(trial)) is not None)
        if len(self.spaces) > 1 and self.kind == "training":
            # Variants take turns, so that each gets the same number of trials.
            known.enqueue_trial({spaces.VARIANT: list(self.spaces)[len(trials) % len(self.spaces)]})
        trial = known.ask()
        spaces.suggest(trial, self.search_spaces)
        return trial.params

    def enqueue_grid(self) -> None:
        """Enqueue every combination of a grid search that is not enqueued yet."""
        if self.search == "grid":
            known = len(
                self.study.get_trials(deepcopy=False)
            )  # an earlier driver may have died here
            for parameters in itertools.islice(
                spaces.iterate_grid(self.search_spaces), known, None
            ):
                self.study.enqueue_trial(parameters)

    def recover_unreported_trials(self) -> None:
        """Report to Optuna the trials whose end an earlier driver stored but did not report."""
        for trial in self.get_trials():
            attributes = trial.user_attrs
            if END_STATE in attributes and not trial.state.is_finished():
                reason = attributes.get(REASON, "")
                self.record_result(
                    trial.number,
                    attributes[END_STATE],
                    reason,
                    attributes[METRICS],
                    attributes.get(VALIDATIONS, ()),
                )

    def record_result(
        self, number: int, ended: EndState, reason: str, metrics: Mapping[str, float],
        validations: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Store the outcome of a trial and report it to Optuna.

        `validations` are the best values of the first metric so far.
        """
        from optuna.trial import Trial, TrialState

        trial = Trial(self.study, self.get_trial(number)._trial_id)
        known = [value for value in validations if math.isfinite(value)]
        # Stored before `tell`: without its end the trial would seem to wait at its rung.
        attributes = {METRICS: dict(metrics), END_STATE: ended, REASON: reason, VALIDATIONS: known}
        for key, value in attributes.items():
            trial.set_user_attr(key, value)
        values = [metrics.get(name, math.nan) for name in self.metrics]
        usable = all(math.isfinite(value) for value in values)
        if ended == "stopped early" and len(self.metrics) == 1:
            for place, best_so_far in enumerate(known):
                trial.report(best_so_far, place)
            self.study.tell(number, state=TrialState.PRUNED)
        elif ended in ("finished", "stopped early") and usable:
            self.study.tell(number, values)
        else:
            self.study.tell(number, state=TrialState.FAIL)

    def set_trial_attributes(self, number: int, **attributes: Any) -> None:
        """Store attributes of a trial."""
        from optuna.trial import Trial

        trial = Trial(self.study, self.get_trial(number)._trial_id)
        for key, value in attributes.items():
            trial.set_user_attr(key, value)

    def get_trial(self, number: int) -> "FrozenTrial":
        """Return a trial by its number."""
        return self.study.get_trials(deepcopy=False)[number]

    def get_trials(self) -> "list[FrozenTrial]":
        """Return the trials that were started."""
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if SETTINGS in trial.user_attrs]

    def collect_progress(self) -> list[TrialProgress]:
        """Return the progress of the trials that have not failed."""
        sign = -1 if is_maximized(self.metrics[0]) else 1
        return [
            TrialProgress(
                number=trial.number,
                variant=attributes[SPACE_NAME],
                costs=[sign * value for value in attributes.get(VALIDATIONS, ())],
                rung=attributes.get(RUNG, halving.FIRST_RUNG),
                ended=END_STATE in attributes,
                finished=attributes.get(END_STATE) == "finished",
            )
            for trial in self.get_trials()
            if (attributes := trial.user_attrs).get(END_STATE) not in ("failed", "diverged")
        ]

    def load_runs(self, trial: "FrozenTrial") -> list[Run]:
        """Return a trial's runs, one for each seed."""
        names = trial.user_attrs.get(RUNS, ())
        folders = [runs_folder() / name for name in names]
        return [read_run(folder) for folder in folders if (folder / RUN_RECORD).is_file()]

    def best_trial(self, variant: str | None = None) -> "FrozenTrial | None":
        """Return the finished trial (of a variant) with the best value of the first metric.

        If none has finished, return the best one so far.
        """
        sign = -1 if is_maximized(self.metrics[0]) else 1

        def cost(trial: "FrozenTrial") -> tuple[float, int]:
            metrics = trial.user_attrs.get(METRICS, {})
            return sign * metric_value(metrics, self.metrics[0]), trial.number

        own = (t for t in self.get_trials() if variant in (None, t.user_attrs[SPACE_NAME]))
        measured = [trial for trial in own if math.isfinite(cost(trial)[0])]
        finished = [t for t in measured if t.user_attrs.get(END_STATE) == "finished"]
        return min(finished or measured, key=cost, default=None)

    def pareto_front(self) -> "list[FrozenTrial]":
        """Return the trials that no other trial beats in both of two metrics."""
        if len(self.metrics) < 2:
            return []
        return sorted(self.study.best_trials, key=lambda trial: trial.values[0])

    def count(self, *ended: EndState) -> int:
        """Return the number of trials that ended in one of these ways."""
        return sum(trial.user_attrs.get(END_STATE) in ended for trial in self.get_trials())

    def summarize(self) -> dict[str, Any]:
        """Return the JSON of `attune tune`."""
        best = self.best_trial()
        summary: dict[str, Any] = {
            "name": self.name,
            "best": None if best is None else self.summarize_trial(best),
            "trials": len(self.get_trials()),
            "stopped_early": self.count("stopped early"),
            "failed": self.count("failed", "diverged"),
        }
        if len(self.spaces) > 1:
            each = {name: self.best_trial(name) for name in self.spaces}
            summary["best_of_each"] = {
                name: None if one is None else self.summarize_trial(one)
                for name, one in each.items()
            }
        if len(self.metrics) > 1:
            summary["front"] = [self.summarize_trial(trial) for trial in self.pareto_front()]
        return summary

    def summarize_trial(self, trial: "FrozenTrial") -> dict[str, Any]:
        """Return a trial as in that JSON."""
        runs = self.load_runs(trial)
        attributes = trial.user_attrs
        chosen = "decode" if self.kind == "decoding" else "variant"
        return {
            "config": {chosen: attributes[SPACE_NAME], **attributes[SETTINGS]},
            "metrics": attributes.get(METRICS, {}),
            "run_id": (runs[0].run_id if len(runs) == 1 else runs[0].parent) if runs else None,
        }


def _to_sampler_trial(trial: "FrozenTrial") -> "FrozenTrial | None":
    """Return a trial as Optuna's samplers can use it, or None before its first validation."""
    from optuna.trial import TrialState, create_trial

    if trial.state.is_finished():
        return trial
    if VALIDATIONS not in trial.user_attrs:
        return None
    return create_trial(
        state=TrialState.PRUNED, params=trial.params, distributions=trial.distributions,
        intermediate_values=dict(enumerate(trial.user_attrs[VALIDATIONS])),
    )  # fmt: skip


def metric_value(metrics: Mapping[str, Any], name: str) -> float:
    """Return a metric as a number, or NaN if it is missing or does not apply."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def is_maximized(metric: str) -> bool:
    """Return whether higher values of a metric are better."""
    return any(part in metric for part in MAXIMIZED_METRICS)


def parse_metrics(text: str | None, variants: Sequence[str]) -> tuple[str, ...]:
    """Return the names of logged metrics for a text such as `perplexity,distinct_2`."""
    if text is None:
        answering = all(issubclass(find_variant(name)[0], DialogueVariant) for name in variants)
        text = "perplexity" if answering else "loss"
    names = [part.strip().removeprefix("valid_") for part in text.split(",")]
    if not all(names) or len(set(names)) != len(names) or len(names) > 2:
        raise UsageError(
            f"--metric {text}: expected one metric or two, such as 'perplexity,distinct_2'"
        )
    for variant in variants:
        known = _known_metrics(find_variant(variant)[0])
        for name in names:
            if name not in known:
                raise UsageError(
                    f"--metric: {unknown_choice_error(f'metric of {variant}', name, known)}"
                )
    return tuple(f"valid_{name}" for name in names)


def _known_metrics(variant: type[Variant]) -> tuple[str, ...]:
    """Return the metrics that a sweep over a variant can use."""
    answers = ("perplexity", *FINAL_METRICS) if issubclass(variant, DialogueVariant) else ()
    return ("loss", *variant.validation_metrics, *answers)


def sweeps_folder() -> Path:
    """Return the folder of all sweeps."""
    return home() / "sweeps"


def read_sweep(folder: Path) -> Sweep:
    """Read the sweep in a folder."""
    path = folder / RECORD
    try:
        fields = read_record(path, SWEEP_FORMAT, "start the sweep again")
        return Sweep(**{**fields, "folder": folder, "metrics": tuple(fields["metrics"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def read_all_sweeps() -> Iterator[Sweep]:
    """Iterate over the sweeps, oldest first; those of another format version are skipped with one
    line on stderr."""
    sweeps = []
    for path in sweeps_folder().glob(f"*/{RECORD}"):
        try:
            sweeps.append(read_sweep(path.parent))
        except FormatVersionError as error:
            report_skipped_record(error)
    yield from sorted(sweeps, key=lambda sweep: (sweep.created, sweep.name))


def find_sweep(name: str) -> Sweep:
    """Return a sweep by its name."""
    if (sweeps_folder() / name / RECORD).is_file() and "/" not in name:
        return read_sweep(sweeps_folder() / name)
    names = [sweep.name for sweep in read_all_sweeps()]
    if not names:
        raise UsageError(f"unknown sweep '{name}': there are none in {sweeps_folder()} yet")
    raise UsageError(f"{unknown_choice_error('sweep', name, names)} ('attune tune list' lists all)")


def new_sweep_name(start: str) -> str:
    """Return `<start>-<n>` with the first free n."""
    number = 1
    while (sweeps_folder() / f"{start}-{number}").exists():
        number += 1
    return f"{start}-{number}"
