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
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attune.models.base import DialogueVariant, Variant
from attune.platform.core.errors import DataError, UsageError, unknown_choice
from attune.platform.core.home import home
from attune.platform.core.records import (
    FORMAT_KEY,
    FormatVersionError,
    check_format,
    report_skipped,
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
"""How a trial ended; one without waits for others or was interrupted, and may go on."""
FINAL_METRICS = ("bleu", "distinct_1", "distinct_2", "different_answers", "perplexity_sample_mean")
"""Metrics that need answers to all of valid, and so are there when a trial has finished."""
LOCK_GRACE_SECONDS = 5
MAXIMIZED_METRICS = ("accuracy", "bleu", "distinct", "different", "f1", "precision", "recall")
RUNS, END_STATE, REASON, SETTINGS, METRICS, SPACE_NAME, VALIDATIONS, RUNG = (
    "runs", "ended", "reason", "settings", "metrics", "variant", "validations", "rung",
)  # fmt: skip
"""What is kept of a trial beside Optuna's own. Of looks it is the first metric's best so far; the
rung is the look that a trial may be trained to, where trials are halved."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep's folder says of it."""

    name: str
    folder: Path
    kind: Literal["training", "decoding"] = "training"
    spaces: dict[str, dict[str, Any]]
    """By variant (by way of decoding), each setting's space as `attune variants --json` has it."""
    metrics: tuple[str, ...]
    """The first decides where there are several."""
    search: str = "optuna"
    scheduler: str = "asha"
    samples: int = 16
    repeat: int = 1
    """Seeds for each trial."""
    concurrent: int | None = None
    workers: int = 1
    budget: float | None = None
    """Seconds for all of it."""
    seed: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    """What every run is begun with: data, preset, changes, init, zero, limits; or what is decoded
    with: run, data, split."""
    command: str = ""
    commit: str = ""
    created: str = ""
    job: str = ""
    """The Ray job that it runs in, or did last."""
    dashboard: str = ""
    """Where Ray shows that job."""
    run_id: str | None = None
    """MLflow's, of the run that all trials are parts of."""
    registered: str = ""
    """The best trial's run, once its model is registered."""
    status: Status = "running"
    spent: float = 0.0
    """Seconds so far."""

    @property
    def stop_file(self) -> Path:
        """Asks for a stop."""
        return self.folder / STOP

    @property
    def search_spaces(self) -> dict[str, Space]:
        """By variant, what may be tried."""
        return {
            name: {key: spaces.from_json(content) for key, content in space.items()}
            for name, space in self.spaces.items()
        }

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Optuna's, one a metric."""
        return ["maximize" if is_maximized(name) else "minimize" for name in self.metrics]

    @cached_property
    def study(self) -> "Study":
        """Optuna's record of the trials, on the disk after each call."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = self.folder / STUDY
        # A lock that a killed driver has left is waited for no longer than this.
        lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_GRACE_SECONDS)
        exists = path.is_file() and path.stat().st_size > 0
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        if exists:  # only read: it may be another process's
            return optuna.load_study(storage=storage, study_name=self.name)
        return optuna.create_study(
            storage=storage, study_name=self.name, directions=self.directions
        )

    def update(self, **changes: Any) -> "Sweep":
        """The sweep with some fields changed, written to its folder."""
        sweep = dataclasses.replace(self, **changes)
        if "study" in vars(self):  # opened already
            vars(sweep)["study"] = self.study
        sweep.write()
        return sweep

    def write(self) -> None:
        """Write sweep.json, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [each.name for each in dataclasses.fields(self) if each.name != "folder"]
        content = {FORMAT_KEY: SWEEP_FORMAT} | {name: getattr(self, name) for name in names}
        new = self.folder / f".{RECORD}.{os.getpid()}"
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        new.replace(self.folder / RECORD)

    def lock(self) -> AbstractContextManager[None]:
        """Hold the sweep's lock, so that no other process runs it."""
        return hold_lock(self.folder, f"sweep '{self.name}' is being run by another process")

    @property
    def current_status(self) -> Status:
        """The status; a sweep whose process was killed counts as stopped."""
        killed = self.status == "running" and not is_locked(self.folder)
        return "stopped" if killed else self.status

    def suggest_trial(self) -> "tuple[int, str, dict[str, Any]] | None":
        """The next trial: its number, variant and settings; None where all have been asked for."""
        from optuna.trial import Trial

        trials = self.study.get_trials(deepcopy=False)
        started = [trial for trial in trials if trial.state.name != "WAITING"]
        if incomplete := [trial for trial in started if SETTINGS not in trial.user_attrs]:
            # A driver has died while it asked.
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
        """What the search wants to try next. It learns from trials that wait as from those that
        were stopped; Optuna's samplers do not see what has not ended."""
        import optuna
        from optuna.samplers import RandomSampler, TPESampler

        # Seeded by the trial's number: a sweep that goes on draws what it would have drawn.
        words = np.random.SeedSequence([self.seed, len(trials)]).generate_state(1)
        sampler = (TPESampler if self.search == "optuna" else RandomSampler)(seed=int(words[0]))
        known = optuna.create_study(directions=self.directions, sampler=sampler)
        known.add_trials(each for trial in trials if (each := _to_sampler_trial(trial)) is not None)
        if len(self.spaces) > 1 and self.kind == "training":
            # Variants take turns, so that each has its share of the trials to be its best with.
            known.enqueue_trial({spaces.VARIANT: list(self.spaces)[len(trials) % len(self.spaces)]})
        trial = known.ask()
        spaces.suggest(trial, self.search_spaces)
        return trial.params

    def enqueue_grid(self) -> None:
        """Have the search ask for every combination, once."""
        if self.search == "grid":
            known = len(self.study.get_trials(deepcopy=False))  # a driver may have died on the way
            for parameters in itertools.islice(
                spaces.iterate_grid(self.search_spaces), known, None
            ):
                self.study.enqueue_trial(parameters)

    def recover_unreported_trials(self) -> None:
        """Tell the search of trials that ended when a driver died before it could."""
        for trial in self.get_trials():
            kept = trial.user_attrs
            if END_STATE in kept and not trial.state.is_finished():
                reason = kept.get(REASON, "")
                self.record_result(
                    trial.number, kept[END_STATE], reason, kept[METRICS], kept.get(VALIDATIONS, ())
                )

    def record_result(
        self, number: int, ended: EndState, reason: str, metrics: Mapping[str, float],
        validations: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Keep what came of a trial; `looks` are its first metric's best on the way."""
        from optuna.trial import Trial, TrialState

        trial = Trial(self.study, self.get_trial(number)._trial_id)
        known = [value for value in validations if math.isfinite(value)]
        # With as many looks as its rung it would seem to wait, were it not known that it has ended.
        kept = {METRICS: dict(metrics), END_STATE: ended, REASON: reason, VALIDATIONS: known}
        for key, value in kept.items():
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

    def set_trial_attributes(self, number: int, **kept: Any) -> None:
        """Keep something of a trial that is under way."""
        from optuna.trial import Trial

        trial = Trial(self.study, self.get_trial(number)._trial_id)
        for key, value in kept.items():
            trial.set_user_attr(key, value)

    def get_trial(self, number: int) -> "FrozenTrial":
        """A trial by its number."""
        return self.study.get_trials(deepcopy=False)[number]

    def get_trials(self) -> "list[FrozenTrial]":
        """All that were begun."""
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if SETTINGS in trial.user_attrs]

    def collect_progress(self) -> list[TrialProgress]:
        """The trials as halving sees them; those that failed leave their places to others."""
        sign = -1 if is_maximized(self.metrics[0]) else 1
        return [
            TrialProgress(
                number=trial.number,
                variant=kept[SPACE_NAME],
                costs=[sign * value for value in kept.get(VALIDATIONS, ())],
                rung=kept.get(RUNG, halving.FIRST_RUNG),
                ended=END_STATE in kept,
                finished=kept.get(END_STATE) == "finished",
            )
            for trial in self.get_trials()
            if (kept := trial.user_attrs).get(END_STATE) not in ("failed", "diverged")
        ]

    def load_runs(self, trial: "FrozenTrial") -> list[Run]:
        """A trial's runs, one for each seed."""
        names = trial.user_attrs.get(RUNS, ())
        folders = [runs_folder() / name for name in names]
        return [read_run(folder) for folder in folders if (folder / RUN_RECORD).is_file()]

    def best_trial(self, variant: str | None = None) -> "FrozenTrial | None":
        """The finished trial (of a variant) with the best value of the first metric; where none has
        finished, the best so far."""
        sign = -1 if is_maximized(self.metrics[0]) else 1

        def worth(trial: "FrozenTrial") -> tuple[float, int]:
            return sign * metric_value(
                trial.user_attrs.get(METRICS, {}), self.metrics[0]
            ), trial.number

        own = (t for t in self.get_trials() if variant in (None, t.user_attrs[SPACE_NAME]))
        able = [trial for trial in own if math.isfinite(worth(trial)[0])]
        done = [trial for trial in able if trial.user_attrs.get(END_STATE) == "finished"]
        return min(done or able, key=worth, default=None)

    def pareto_front(self) -> "list[FrozenTrial]":
        """Where there are two metrics, the trials that no other is better than in both."""
        if len(self.metrics) < 2:
            return []
        return sorted(self.study.best_trials, key=lambda trial: trial.values[0])

    def count(self, *ended: EndState) -> int:
        """How many trials ended in one of these ways."""
        return sum(trial.user_attrs.get(END_STATE) in ended for trial in self.get_trials())

    def summarize(self) -> dict[str, Any]:
        """What `attune tune --json` says."""
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
        """A trial in the same words."""
        runs = self.load_runs(trial)
        kept = trial.user_attrs
        chosen = "decode" if self.kind == "decoding" else "variant"
        return {
            "config": {chosen: kept[SPACE_NAME], **kept[SETTINGS]},
            "metrics": kept.get(METRICS, {}),
            "run_id": (runs[0].run_id if len(runs) == 1 else runs[0].parent) if runs else None,
        }


def _to_sampler_trial(trial: "FrozenTrial") -> "FrozenTrial | None":
    """A trial as a search may learn from it; None where there is nothing to learn yet."""
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
    """A metric as a number, which it is not where it does not apply."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def is_maximized(metric: str) -> bool:
    """Whether a metric is to be large."""
    return any(part in metric for part in MAXIMIZED_METRICS)


def parse_metrics(text: str | None, variants: Sequence[str]) -> tuple[str, ...]:
    """`perplexity,distinct_2` as the names that looks at valid have."""
    if text is None:
        answering = all(issubclass(find_variant(name)[0], DialogueVariant) for name in variants)
        text = "perplexity" if answering else "loss"
    names = [part.strip().removeprefix("valid_") for part in text.split(",")]
    if not all(names) or len(set(names)) != len(names) or len(names) > 2:
        raise UsageError(f"--metric {text}: one metric or two are expected, as in 'perplexity'")
    for variant in variants:
        known = _known_metrics(find_variant(variant)[0])
        for name in names:
            if name not in known:
                raise UsageError(f"--metric: {unknown_choice(f'metric of {variant}', name, known)}")
    return tuple(f"valid_{name}" for name in names)


def _known_metrics(variant: type[Variant]) -> tuple[str, ...]:
    """Return the metrics that a sweep over a variant can use."""
    answers = ("perplexity", *FINAL_METRICS) if issubclass(variant, DialogueVariant) else ()
    return ("loss", *variant.validation_metrics, *answers)


def sweeps_folder() -> Path:
    """Where sweeps are kept."""
    return home() / "sweeps"


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder."""
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            check_format(path, content, SWEEP_FORMAT, "start the sweep again")
            content.pop(FORMAT_KEY)
        return Sweep(**{**content, "folder": folder, "metrics": tuple(content["metrics"])})
    except FormatVersionError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def read_all_sweeps() -> Iterator[Sweep]:
    """Iterate over the sweeps, oldest first; those of another format version are skipped with one
    line on stderr."""
    sweeps = []
    for path in sweeps_folder().glob(f"*/{RECORD}"):
        try:
            sweeps.append(read_sweep(path.parent))
        except FormatVersionError as error:
            report_skipped(error)
    yield from sorted(sweeps, key=lambda sweep: (sweep.created, sweep.name))


def find_sweep(name: str) -> Sweep:
    """A sweep by its name."""
    if (sweeps_folder() / name / RECORD).is_file() and "/" not in name:
        return read_sweep(sweeps_folder() / name)
    names = [sweep.name for sweep in read_all_sweeps()]
    if not names:
        raise UsageError(f"unknown sweep '{name}': there are none in {sweeps_folder()} yet")
    raise UsageError(f"{unknown_choice('sweep', name, names)} ('attune tune list' lists all)")


def new_sweep_name(start: str) -> str:
    """`<start>-<n>`, with the first n that is free."""
    number = 1
    while (sweeps_folder() / f"{start}-{number}").exists():
        number += 1
    return f"{start}-{number}"
