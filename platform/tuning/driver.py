"""The process that a user starts: asks for trials, has Ray Tune run them, keeps what came of each.

What counts is on the disk: the search in the sweep's folder, each trial in its run's. A sweep that
goes on begins a new experiment of Tune's; earlier trials then tell their looks again, at no cost,
so that a scheduler knows what it knew.
"""

import collections
import copy
import dataclasses
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune
from ray.tune import Callback
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from attune.models.base import Between
from attune.platform import cluster, logs, store, tracking
from attune.platform.errors import DataError, UsageError
from attune.platform.store import Run
from attune.platform.training import checkpoints, start
from attune.platform.training.driver import sample_answers
from attune.platform.training.loop import PROBLEM, RESULT
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.spaces import Space
from attune.platform.tuning.sweep import ENDED, METRICS, REASON, RUNS, SETTINGS, Ended, Sweep
from attune.platform.tuning.tracker import Tracker
from attune.platform.tuning.trial import (
    LOOK,
    TASK,
    WRONG_METRIC,
    Task,
    diverged,
    looks,
    trial,
    with_settings,
)

RETRIES = 2
"""How often a trial whose process died is taken up again."""
NEVER: Any = np.inf
"""The median rule would let trials take turns while there are few: each goes on instead."""
KEEPING_STEP, MOST_LOOKS = 3, 10_000
"""ASHA lets a third of the trials go on after 1, 3, 9, ... looks."""
SECONDS_TO_SEND = 60.0
KEPT_CHECKPOINTS = 4
"""Of each member of a population, so that one is there as long as another may take it over."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our metrics files have it all
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # who ends before its first look has none
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints to stdout however silent it is asked to be
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would kill what can end by itself
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}

Show = Callable[[str, int], None]
"""Called with a line for people (or '') and the number of trials that have ended."""


def run(sweep: Sweep, show: Show = lambda *_: None) -> Sweep:
    """Run a sweep, or go on with it; Ctrl-C, SIGTERM and `attune tune stop` leave it resumable."""
    os.environ.update(ENVIRONMENT)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if sweep.run_id is None:  # better to hear now that there is no store than from each trial
        with tracking.opened(next(iter(sweep.spaces))):
            pass
    with sweep.alone():
        sweep.stop_file.unlink(missing_ok=True)
        sweep.mend()
        sweep = sweep.changed(status="running", **logs.job())
        sweep.fill_grid()
        # Only PBT draws from these; every other draw is seeded by its trial's number.
        random.seed(sweep.seed)
        np.random.seed(sweep.seed)
        cluster.connect()
        with Tracker() as tracker, _interruptible(sweep, show):
            keeper = _Keeper(sweep, tracker, show)
            _fit(sweep, keeper)
            while keeper.queue and not keeper.stopping:  # who is to begin again after all others
                _fit(sweep, keeper)
            ended = keeper.finish()
    if keeper.problem:
        raise UsageError(keeper.problem)
    return ended


@contextmanager
def _interruptible(sweep: Sweep, show: Show) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for a stop, the second is obeyed at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: Any) -> None:
        if sweep.stop_file.exists():
            raise SystemExit(128 + number)
        sweep.stop_file.touch()
        show("stopping after this step, with checkpoints; again to stop at once", -1)

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _fit(sweep: Sweep, keeper: "_Keeper") -> None:
    population = sweep.scheduler == "pbt"
    at_once, resources = _room(sweep, keeper)
    tasks = [dataclasses.asdict(task) for task in keeper.population()] if population else []
    if population and not tasks:
        return
    one_metric = len(sweep.metrics) == 1 and sweep.scheduler != "none"
    mode = "max" if sweeps.more_is_better(sweep.metrics[0]) else "min"
    tuner = tune.Tuner(
        tune.with_resources(trial, resources),
        # A population is known from the start; any other trial is asked for when there is room.
        param_space={TASK: tune.grid_search(tasks)} if population else {},
        tune_config=tune.TuneConfig(
            metric=sweep.metrics[0] if one_metric else None,
            mode=mode if one_metric else None,
            search_alg=None if population else _Asker(keeper),
            scheduler=_scheduler(sweep),
            num_samples=1 if population else -1,
            max_concurrent_trials=None if population else at_once,
            reuse_actors=sweep.workers == 1,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{os.getpid()}-{sum(keeper.restarts.values())}",
            storage_path=str(sweep.folder / "ray"),
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT_CHECKPOINTS),
            callbacks=[keeper, _Silent()],
            verbose=0,
        ),
    )
    tuner.fit()


def _room(sweep: Sweep, keeper: "_Keeper") -> tuple[int, Any]:
    """How many trials at once, and what each takes of the cluster."""
    import ray

    wanted = sweep.concurrent or sweep.samples * sweep.repeat
    at_once, whole = cluster.room(sweep.workers, wanted)
    cores: float = whole
    if sweep.workers > 1:
        keeper.cores = cores
        # Ray Train asks for the workers' cores itself; a driver that took some, too, could wait for
        # ever. Tune wants it to take something: a byte.
        return at_once, tune.PlacementGroupFactory([{"memory": 1.0}])
    if sweep.concurrent and sweep.concurrent > at_once:  # more than cores: each gets a part of one
        cores = int(1000 * ray.cluster_resources()["CPU"] / sweep.concurrent) / 1000
        at_once = sweep.concurrent
    keeper.cores = cores
    gpus = ray.cluster_resources().get("GPU", 0)
    bundle = {"CPU": cores, **({"GPU": min(1.0, gpus / at_once)} if gpus else {})}
    return at_once, tune.PlacementGroupFactory([bundle])


def _scheduler(sweep: Sweep) -> TrialScheduler:
    if sweep.scheduler == "asha":
        return _Halving(sweep.spaces)
    if sweep.scheduler == "median":
        return _Median(time_attr=LOOK, grace_period=1, min_time_slice=NEVER)
    if sweep.scheduler == "pbt":
        [space] = sweep.tried.values()
        return _Population(
            {key: tried for key, tried in space.items() if isinstance(tried, Between)}
        )
    return FIFOScheduler()


class _Halving(AsyncHyperBandScheduler):
    """Tune's, which holds each trial against those of its own variant: of several, one that learns
    slowly would never come to its best."""

    def __init__(self, variants: Iterable[str]):
        super().__init__(
            time_attr=LOOK, grace_period=1, max_t=MOST_LOOKS, reduction_factor=KEEPING_STEP
        )
        self.bracket_of = {name: copy.deepcopy(self._brackets[0]) for name in variants}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        self._trial_info[trial.trial_id] = self.bracket_of[trial.config[TASK]["variant"]]


class _Median(MedianStoppingRule):
    """Tune's, which trips over trials that ended before their first look."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if LOOK in result:
            super().on_trial_complete(tune_controller, trial, result)


class _Population(PopulationBasedTraining):
    """Tune's, in which a member would take over the other's number and folder too. All members wait
    for each other at a look, so that who takes over from whom does not hang on the machine."""

    def __init__(self, ranges: Mapping[str, Between]):
        self.ranges = ranges
        super().__init__(
            time_attr=LOOK,
            perturbation_interval=1,
            hyperparam_mutations={TASK: {"settings": {k: _domain(v) for k, v in ranges.items()}}},
            require_attrs=False,
            synch=True,
        )

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Tune's would let the others wait for ever for a member that ended before its look."""
        super().on_trial_complete(tune_controller, trial, result)
        self._no_longer_wait(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """As when it ends by itself."""
        super().on_trial_error(tune_controller, trial)
        self._no_longer_wait(tune_controller, trial)

    def _no_longer_wait(self, tune_controller: Any, ended: Any) -> None:
        """Tune still counts who has just ended among the living."""
        others = (t for t in tune_controller.get_live_trials() if t is not ended)
        live = [t for t in others if not t.is_finished()]
        at = [self._trial_state[each].last_train_time for each in live]
        if at and min(at) >= self._next_perturbation_sync:
            self._next_perturbation_sync = min(at) + self._perturbation_interval

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        settings = _within(config[TASK]["settings"], self.ranges)
        return {**config, TASK: {**trial.config[TASK], "settings": settings}}, operations


def _domain(tried: Between) -> Any:
    if tried.scale == "int":
        return tune.randint(int(tried.low), int(tried.high) + 1)
    make = tune.loguniform if tried.scale == "loguniform" else tune.uniform
    return make(tried.low, tried.high)


def _within(settings: Mapping[str, Any], ranges: Mapping[str, Between]) -> dict[str, Any]:
    """Perturbed settings, none of them outside its range."""
    held = {
        key: type(settings[key])(min(max(settings[key], tried.low), tried.high))
        for key, tried in ranges.items()
    }
    return {**settings, **held}


class _Asker(Searcher):
    """Tune's questions for the next trial, answered from the sweep's own search."""

    def __init__(self, keeper: "_Keeper"):
        super().__init__()
        self.keeper = keeper

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy to restore from, which we never do

    def suggest(self, trial_id: str) -> Any:
        task = self.keeper.next()
        return self.FINISHED if task is None else {TASK: dataclasses.asdict(task)}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        pass


@dataclasses.dataclass(kw_only=True)
class _Outcome:
    """What came of one run of a trial."""

    ended: Ended
    reason: str
    metrics: dict[str, float]
    looks: list[float]


class _Silent(TrialProgressCallback):
    """Tune's own, which prints to stdout of trials that had no look before their end, however
    silent it is asked to be; stdout is `--json`'s."""

    def _print(self, msg: str) -> None:
        pass


class _Keeper(Callback):
    """Makes the runs of trials, and keeps what came of them; looks at the clock and at who asks for
    a stop."""

    def __init__(self, sweep: Sweep, tracker: Tracker, show: Show):
        self.sweep, self.tracker, self.show = sweep, tracker, show
        self.cores: float = 1
        self.stopping = self.problem = ""
        self.began, self.spent = time.monotonic(), sweep.spent
        self.queue: collections.deque[tuple[int, Run]] = collections.deque()
        self.live: dict[str, tuple[int, Run]] = {}
        self.restarts: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[int, dict[str, _Outcome]] = collections.defaultdict(dict)
        self._told = {t.number for t in sweep.trials() if ENDED in t.user_attrs}
        remembering = sweep.scheduler in ("asha", "median")
        for each in sweep.trials():
            known = each.user_attrs.get(ENDED)
            if known is None or (remembering and known in ("finished", "stopped early")):
                self._enqueue(each.number)
            for run in sweep.runs_of(each) if known else ():
                tracker.end(run, f"{known}: {each.user_attrs[REASON]}")

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def next(self) -> Task | None:
        """The next run of a trial, until there are no more or a stop was asked for."""
        if self.stopping or self.sweep.stop_file.exists():
            return None
        while not self.queue:
            asked = self.sweep.ask()
            if asked is None:
                return None
            self._enqueue(asked[0])
        number, run = self.queue.popleft()
        return self._task(number, run)

    def population(self) -> list[Task]:
        """All members."""
        while (asked := self.sweep.ask()) is not None:
            self._enqueue(asked[0])
        return [self._task(*self.queue.popleft()) for _ in range(len(self.queue))]

    def _task(self, number: int, run: Run) -> Task:
        self.live[run.name] = (number, run)
        if number not in self._told:
            for left in (run.stop_file, run.folder / PROBLEM, run.folder / WRONG_METRIC):
                left.unlink(missing_ok=True)
            self.tracker.begin(run)
        return Task(
            number=number,
            variant=run.variant,
            folder=str(run.folder),
            settings=self.sweep.frozen(number).user_attrs[SETTINGS],
            metrics=self.sweep.metrics,
            population=self.sweep.scheduler == "pbt",
            over=number in self._told,
            cores=self.cores,
        )

    def _enqueue(self, number: int) -> None:
        """Have a trial's runs wait for their turn; settings that do not go together have failed."""
        try:
            made = self._runs(number)
        except (UsageError, DataError) as error:
            self._tell(number, _Outcome(ended="failed", reason=str(error), metrics={}, looks=[]))
            return
        if made and self.sweep.run_id is None:
            self._open(made[0])
        parent = self.sweep.run_id
        made = [run if run.parent else run.changed(parent=parent) for run in made]
        if len(made) > 1:
            settings = self.sweep.frozen(number).user_attrs[SETTINGS]
            self.tracker.group(made, f"{self.sweep.name}-{number:03d}", settings)
        self.queue.extend((number, run) for run in made)

    def _runs(self, number: int) -> list[Run]:
        """A trial's runs, which are made where they are not there."""
        kept = self.sweep.frozen(number).user_attrs
        names = [f"{self.sweep.name}-{number:03d}"]
        if self.sweep.repeat > 1:
            names = [f"{names[0]}-seed{place}" for place in range(self.sweep.repeat)]
        made = []
        for place, name in enumerate(names):
            if (store.folder_of_runs() / name / store.RECORD).is_file():
                found = store.find(name)
                made.append(found if number in self._told else found.changed(**logs.job()))
            elif number not in self._told:
                made.append(self._new_run(kept, name, self.sweep.seed + place))
        if kept.get(RUNS) != names and made:
            self.sweep.note(number, **{RUNS: names})
        return made

    def _new_run(self, kept: Mapping[str, Any], name: str, seed: int) -> Run:
        asked = {key: value for key, value in self.sweep.asked.items() if key != "changes"}
        changes = {**self.sweep.asked.get("changes", {}), **kept[SETTINGS]}
        return start.new_run(
            kept["variant"], name=name, seed=seed, changes=changes, workers=self.sweep.workers,
            **asked,
        )  # fmt: skip

    def _open(self, first: Run) -> None:
        asked = {key: value for key, value in self.sweep.asked.items() if value is not None}
        params = {
            "variants": ",".join(self.sweep.spaces), "metric": ",".join(self.sweep.metrics),
            "search": self.sweep.search, "scheduler": self.sweep.scheduler,
            "samples": self.sweep.samples, "repeat": self.sweep.repeat, "seed": self.sweep.seed,
            **asked,
        }  # fmt: skip
        opened = tracking.start_group(self.sweep.name, params, first)
        self.sweep = self.sweep.changed(run_id=opened)

    # What Tune calls.

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Stop all where it is time."""
        if self.stopping:
            return
        if self.sweep.stop_file.exists():
            self._stop("asked to stop")
        elif self.sweep.budget is not None and self._seconds() > self.sweep.budget:
            self._stop("the budget is spent")

    def _stop(self, why: str) -> None:
        self.stopping = why
        for number, run in self.live.values():
            if number not in self._told:
                run.stop_file.touch()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Of a population: keep the settings that a member goes on with."""
        task = trial.config[TASK]
        if not task["population"]:
            return
        before = self.sweep.frozen(task["number"]).user_attrs[SETTINGS]
        if before == task["settings"]:
            return
        self.sweep.note(task["number"], **{SETTINGS: task["settings"]})
        changed = with_settings(store.read(Path(task["folder"])), task["settings"])
        self.tracker.amend(changed.folder, config=changed.config, training=changed.training)
        said = _text({k: v for k, v in task["settings"].items() if before.get(k) != v})
        self.tracker.tag(changed, {f"took over after look {_look(trial)}": said})
        self.show(f"trial {task['number']} takes over a better one's weights, with {said}", -1)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Keep what came of a run."""
        self._ended(trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Keep that it failed, after all retries."""
        error = trial.get_error()
        if error is None and self._begins_again(trial.config[TASK]):
            return
        lines = str(error or "").strip().splitlines()  # a traceback
        self._ended(trial, lines[-1][:500] if lines else "it died")

    def _begins_again(self, task: Mapping[str, Any]) -> bool:
        """Tune makes good the death of a process in a trial, but not before one: where the process
        that was to be used again is gone, the trial fails without an error."""
        name = Path(task["folder"]).name
        if task["population"] or self.restarts[name] >= RETRIES:
            return False
        self.restarts[name] += 1
        self.queue.appendleft(self.live.pop(name))
        return True

    def _ended(self, trial: Any, error: str) -> None:
        folder = Path(trial.config[TASK]["folder"])
        number, run = self.live.pop(folder.name)
        if number in self._told:
            return
        outcome = self._outcome(run, error)
        status: store.Status = "stopped" if outcome is None else _status(outcome.ended)
        ended = self.tracker.amend(folder, status=status, result=_result(run))
        if outcome is None:
            self.tracker.end(ended, self.stopping)
            so_far = ended.result.get("metrics", {})
            self.sweep.note(number, **{METRICS: so_far})
            return
        self.tracker.end(ended, f"{outcome.ended}: {outcome.reason}")
        together = self.outcomes[number]
        together[run.name] = outcome
        if len(together) == self.sweep.repeat:
            outcome = _together(list(together.values()))
            self._tell(number, outcome)
            if self.sweep.repeat > 1:
                self.tracker.end_group(run, _status(outcome.ended), outcome.metrics)

    def _outcome(self, run: Run, error: str) -> _Outcome | None:
        """None where it was interrupted, and can go on."""
        found = [(step, sweeps.value_of(m, self.sweep.metrics[0])) for step, m in looks(run)]
        problem, wrong = run.folder / PROBLEM, run.folder / WRONG_METRIC
        ended: Ended
        if (run.folder / RESULT).exists():
            ended, reason = "finished", "all steps done, or no improvement any more"
        elif wrong.exists():  # so it is for all
            ended, reason = "failed", wrong.read_text(encoding="utf-8")
            self.problem = self.problem or reason
            self._stop(reason)
        elif problem.exists():
            ended, reason = "failed", problem.read_text(encoding="utf-8")
        elif error:
            ended, reason = "failed", error
        elif diverged(run):
            ended, reason = "diverged", "the loss is no number any more"
        elif self.stopping:
            return None
        else:
            ended, reason = "stopped early", f"by {self.sweep.scheduler} after look {len(found)}"
        metrics = {k: float(v) for k, v in _result(run).get("metrics", {}).items() if v is not None}
        return _Outcome(ended=ended, reason=reason, metrics=metrics, looks=[v for _, v in found])

    def _tell(self, number: int, outcome: _Outcome) -> None:
        self.sweep.tell(number, outcome.ended, outcome.reason, outcome.metrics, outcome.looks)
        self._told.add(number)
        settings = self.sweep.frozen(number).user_attrs[SETTINGS]
        shown = " ".join(
            f"{name.removeprefix('valid_')} {outcome.metrics[name]:.4g}"
            for name in self.sweep.metrics
            if name in outcome.metrics
        )
        reason = "" if outcome.ended == "finished" else f" ({outcome.reason})"
        line = f"trial {number} {outcome.ended}{reason}: {shown}  {_text(settings)}"
        self.show(line, len(self._told))
        self.sweep = self.sweep.changed(spent=self._seconds())

    def _seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def finish(self) -> Sweep:
        """Say how it stands; unless it was asked to stop, the best trial's model is kept in MLflow:
        after a budget nobody may ever go on with it."""
        over = not self.stopping and not self.sweep.stop_file.exists()
        status: store.Status = "finished" if over else "failed" if self.problem else "stopped"
        sweep = self.sweep.changed(status=status, spent=self._seconds())
        best = sweep.best()
        done = best is not None and best.user_attrs.get(ENDED) == "finished"
        if best is not None and done and not (self.problem or sweep.stop_file.exists()):
            for run in sweep.runs_of(best)[:1]:
                if run.name != sweep.registered:
                    self.tracker.keep(run, sample_answers(run), {"best_of": sweep.name})
                    sweep = sweep.changed(registered=run.name)
        self.tracker.close(SECONDS_TO_SEND)
        if sweep.run_id is not None:
            found = {} if best is None else best.user_attrs[METRICS]
            metrics = {f"best_{k}": v for k, v in found.items() if np.isfinite(v)}
            counts = {"trials": len(sweep.trials()), "stopped_early": sweep.count("stopped early"),
                      "failed": sweep.count("failed", "diverged")}  # fmt: skip
            tags = tracking.job_tags(sweep.job, sweep.dashboard)
            if best is not None:
                tags["best"] = f"trial {best.number}: {_text(best.user_attrs[SETTINGS])}"
            tracking.finish_group(sweep.run_id, status, {**metrics, **counts}, tags)
        return sweep


def _look(trial: Any) -> int:
    return int((trial.last_result or {}).get(LOOK, 0))


def _status(ended: Ended) -> store.Status:
    if ended == "finished":
        return "finished"
    return "stopped" if ended == "stopped early" else "failed"


def _result(run: Run) -> dict[str, Any]:
    """What a run has reached, whether or not it came to its end."""
    path = run.folder / RESULT
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    newest = checkpoints.newest(run.checkpoints)
    if newest is None:
        return {}
    standing = checkpoints.standing_of(newest)
    return {
        "steps": standing.total,
        "seconds": standing.total_seconds,
        "best_step": standing.best_step,
        "metrics": standing.best_metrics,
    }


def _together(outcomes: list[_Outcome]) -> _Outcome:
    """Several seeds as one: their means; the first that did not finish says how it ended."""
    if len(outcomes) == 1:
        return outcomes[0]
    order: list[Ended] = ["failed", "diverged", "stopped early", "finished"]
    worst = min(outcomes, key=lambda outcome: order.index(outcome.ended))
    values = {name: [each.metrics.get(name, np.nan) for each in outcomes] for name in worst.metrics}
    values = {name: found for name, found in values.items() if np.isfinite(found).all()}
    spread = {f"{name}_std": statistics.stdev(found) for name, found in values.items()}
    means = {name: statistics.fmean(found) for name, found in values.items()}
    return dataclasses.replace(worst, metrics={**means, **spread})


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in settings.items()
    )


def check(scheduler: str, search: str, metrics: tuple[str, ...], spaces: Mapping[str, Space],
          workers: int) -> None:  # fmt: skip
    """What does not go together, told before anything begins."""
    late = [m for m in metrics if m.removeprefix("valid_") in sweeps.AT_THE_END]
    if scheduler != "none" and (len(metrics) > 1 or late):
        what = "two metrics" if len(metrics) > 1 else f"{late[0].removeprefix('valid_')}"
        raise UsageError(
            f"--scheduler {scheduler} decides on the way, by one metric that each look at valid "
            f"has: with {what} use --scheduler none"
        )
    if scheduler == "median" and len(spaces) > 1:
        raise UsageError("--scheduler median holds all trials against each other: give one VARIANT")
    if scheduler != "pbt":
        return
    ranges = [key for space in spaces.values() for key in space if isinstance(space[key], Between)]
    for wrong, why in (
        (len(spaces) > 1, "copies weights from one trial to another: give one VARIANT"),
        (search != "random", "perturbs what it began with at random: leave --search out"),
        (workers > 1, "trains its members with one worker each: leave --workers-per-trial out"),
        (not ranges, "perturbs numbers, and the space has only choices: choose another --space"),
    ):
        if wrong:
            raise UsageError(f"--scheduler pbt {why}")
