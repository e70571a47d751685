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
from attune.platform.tuning.halving import Climber
from attune.platform.tuning.sweep import (
    ENDED,
    LOOKS,
    METRICS,
    REASON,
    RUNG,
    RUNS,
    SETTINGS,
    Ended,
    Sweep,
)
from attune.platform.tuning.tracker import Tracker
from attune.platform.tuning.trial import (
    LOOK,
    TASK,
    WRONG_METRIC,
    Task,
    counting,
    diverged,
    looks,
    with_settings,
)

RETRIES = 2
"""How often a trial whose process died is taken up again."""
SECONDS_TO_SEND = 60.0

Show = Callable[[str, int], None]
"""Called with a line for people (or '') and the number of trials that have ended or wait."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What came of one run of a trial, or of all of them."""

    ended: Ended | Literal["waits"]
    reason: str
    metrics: dict[str, float]
    looks: list[float]
    """The first metric's best so far, after each look that counts."""

    def __str__(self) -> str:
        return f"{self.ended}: {self.reason}"


class Keeper(Callback):
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
        self.outcomes: dict[int, dict[str, Outcome]] = collections.defaultdict(dict)
        self._told = {t.number for t in sweep.trials() if ENDED in t.user_attrs}
        remembering = sweep.scheduler == "median"
        waiting = {each.number for each in self._waiting()}
        for each in sweep.trials():
            known = each.user_attrs.get(ENDED)
            interrupted = known is None and each.number not in waiting
            if interrupted or (remembering and known in ("finished", "stopped early")):
                self._enqueue(each.number)
            for run in sweep.runs_of(each) if known else ():
                tracker.end(run, f"{known}: {each.user_attrs[REASON]}")

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def next(self) -> Task | None:
        """The next run of a trial; None where there is none now, or a stop was asked for."""
        if self.stopping or self.sweep.stop_file.exists():
            return None
        while not self.queue:
            number = self._chosen()
            if number is None:
                return None
            self._enqueue(number)
        return self._task(*self.queue.popleft())

    @property
    def waits(self) -> bool:
        """Whether there may be more to do when somebody comes to a rung."""
        return self._halves and bool(self.live) and not self.stopping

    @property
    def _halves(self) -> bool:
        return self.sweep.scheduler == "asha"

    def _waiting(self) -> list[Climber]:
        found = self.sweep.climbers() if self._halves else []
        return [each for each in found if each.waits]

    def _chosen(self) -> int | None:
        """Whom to train next: who goes on to the next rung, or a new trial."""
        climbers = self.sweep.climbers() if self._halves else []
        # Somebody should have come to the end when the time is over.
        late = self.sweep.budget is not None and self._seconds() > self.sweep.budget / 2
        up = halving.best_to_go_on(climbers, least=1 if late else halving.COHORT, highest=late)
        if up is None and (asked := self.sweep.ask()) is not None:
            return asked[0]
        busy = {run.variant for _, run in self.live.values()}
        up = up or halving.best_to_go_on(climbers)
        up = up or halving.best_of_the_last([c for c in climbers if c.variant not in busy])
        if up is None:
            return None
        self.outcomes.pop(up.number, None)
        self.sweep.note(up.number, **{RUNG: halving.above(up)})
        return up.number

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
            run = self.tracker.amend(run.folder, status="running")
            self.tracker.begin(run)
        kept = self.sweep.frozen(number).user_attrs
        return Task(
            number=number,
            variant=run.variant,
            folder=str(run.folder),
            settings=kept[SETTINGS],
            metrics=self.sweep.metrics,
            rung=kept.get(RUNG, halving.FIRST) if self._halves else None,
            shared=self._shared(run),
            population=self.sweep.scheduler == "pbt",
            over=number in self._told,
            cores=self.cores,
        )

    def _enqueue(self, number: int) -> None:
        """Have a trial's runs wait for their turn; settings that do not go together have failed."""
        try:
            made = self._runs(number)
        except (UsageError, DataError) as error:
            self._tell(number, Outcome(ended="failed", reason=str(error), metrics={}, looks=[]))
            return
        if made and self.sweep.run_id is None:
            self._open(made[0])
        parent = self.sweep.run_id
        made = [
            run if run.parent else self.tracker.amend(run.folder, parent=parent) for run in made
        ]
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
            if (runs_folder() / name / RUN_RECORD).is_file():
                found = find_run(name)
                if number not in self._told:
                    found = self.tracker.amend(found.folder, **current_job())
                made.append(found)
            elif number not in self._told:
                made.append(self._new_run(kept, name, self.sweep.seed + place))
        if kept.get(RUNS) != names and made:
            self.sweep.note(number, **{RUNS: names})
        return made

    def _new_run(self, kept: Mapping[str, Any], name: str, seed: int) -> Run:
        asked = {key: value for key, value in self.sweep.asked.items() if key != "overrides"}
        overrides = {**self.sweep.asked.get("overrides", {}), **kept[SETTINGS]}
        run = setup.new_run(
            kept["variant"], name=name, seed=seed, overrides=overrides, workers=self.sweep.workers,
            **asked,
        )  # fmt: skip
        before = (each for trial in self.sweep.trials() for each in self.sweep.runs_of(trial))
        return sharing.start_after_shared_stage(run, before)

    def _open(self, first: Run) -> None:
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
        changed = with_settings(read_run(Path(task["folder"])), task["settings"])
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
        task = Task(**trial.config[TASK])
        folder = Path(task.folder)
        number, run = self.live.pop(folder.name)
        if number in self._told:
            return
        outcome = self._outcome(run, task.rung, error)
        status: Status = "stopped" if outcome is None else _status(outcome.ended)
        ended = self.tracker.amend(folder, status=status, result=_result(run))
        if outcome is None:
            self.tracker.end(ended, self.stopping)
            so_far = ended.result.get("metrics", {})
            self.sweep.note(number, **{METRICS: so_far})
            return
        self.tracker.end(ended, str(outcome), for_good=outcome.ended != "waits")
        together = self.outcomes[number]
        together[run.name] = outcome
        if len(together) == self.sweep.repeat:
            self._tell(number, _together(list(together.values())))

    def _outcome(self, run: Run, rung: int | None, error: str) -> Outcome | None:
        """None where it was interrupted, and can go on."""
        found = self._looks(run)
        problem, wrong = run.folder / PROBLEM, run.folder / WRONG_METRIC
        ended: Ended | Literal["waits"]
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
        elif rung is not None and len(found) >= rung:
            ended, reason = "waits", f"after look {len(found)}"
        elif self.stopping:
            return None
        elif self._halves:
            ended, reason = "failed", f"it ended after look {len(found)}, and was not to"
        else:
            ended, reason = "stopped early", f"by {self.sweep.scheduler} after look {len(found)}"
        metrics = {k: float(v) for k, v in _result(run).get("metrics", {}).items() if v is not None}
        return Outcome(ended=ended, reason=reason, metrics=metrics, looks=found)

    def _shared(self, run: Run) -> str | None:
        """The stage up to which all trials of a variant do the same."""
        return sharing.shared_stage(run, self.sweep.spaces[run.variant])

    def _looks(self, run: Run) -> list[float]:
        name = self.sweep.metrics[0]
        more = sweeps.more_is_better(name)
        counted = counting(run, looks(run), self.sweep.metrics, self._shared(run))
        values = [sweeps.value_of(metrics, name) for _, metrics in counted]
        worst = -math.inf if more else math.inf
        known = (worst if math.isnan(value) else value for value in values)
        return list(itertools.accumulate(known, max if more else min))

    def _tell(self, number: int, outcome: Outcome) -> None:
        """Keep what came of a trial, for good unless it waits."""
        if outcome.ended == "waits":
            self.sweep.note(number, **{METRICS: outcome.metrics, LOOKS: outcome.looks})
        else:
            self._end(number, outcome)
        settings = self.sweep.frozen(number).user_attrs[SETTINGS]
        shown = " ".join(
            f"{name.removeprefix('valid_')} {outcome.metrics[name]:.4g}"
            for name in self.sweep.metrics
            if name in outcome.metrics
        )
        reason = "" if outcome.ended == "finished" else f" ({outcome.reason})"
        line = f"trial {number} {outcome.ended}{reason}: {shown}  {_text(settings)}"
        self.show(line, len(self._told) + len(self._waiting()))
        self.sweep = self.sweep.update(spent=self._seconds())

    def _end(self, number: int, outcome: Outcome) -> None:
        assert outcome.ended != "waits"
        self.sweep.tell(number, outcome.ended, outcome.reason, outcome.metrics, outcome.looks)
        self._told.add(number)
        runs = self.sweep.runs_of(self.sweep.frozen(number))
        for run in runs:
            self.tracker.end(run, str(outcome))
        if len(runs) > 1:
            self.tracker.end_group(runs[0], _status(outcome.ended), outcome.metrics)

    def _seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def finish(self) -> Sweep:
        """Say how it stands; unless it was asked to stop, the best trial's model is kept in MLflow:
        after a budget nobody may ever go on with it."""
        over = not self.stopping and not self.sweep.stop_file.exists()
        for climber in self._waiting() if over else ():
            self._give_up(climber)
        status: Status = "finished" if over else "failed" if self.problem else "stopped"
        sweep = self.sweep.update(status=status, spent=self._seconds())
        best = sweep.best()
        done = best is not None and best.user_attrs.get(ENDED) == "finished"
        if best is not None and done and not (self.problem or sweep.stop_file.exists()):
            for run in sweep.runs_of(best)[:1]:
                if run.name != sweep.registered:
                    self.tracker.keep(run, sample_answers(run), {"best_of": sweep.name})
                    sweep = sweep.update(registered=run.name)
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

    def _give_up(self, climber: Climber) -> None:
        """It waits, and nobody will take it up any more."""
        kept = self.sweep.frozen(climber.number).user_attrs
        reason = f"by {self.sweep.scheduler} after look {len(climber.costs)}"
        outcome = Outcome(
            ended="stopped early", reason=reason, metrics=kept[METRICS], looks=kept[LOOKS]
        )
        self._end(climber.number, outcome)


def _look(trial: Any) -> int:
    return int((trial.last_result or {}).get(LOOK, 0))


def _status(ended: Ended | Literal["waits"]) -> Status:
    if ended == "finished":
        return "finished"
    return "stopped" if ended in ("stopped early", "waits") else "failed"


def _result(run: Run) -> dict[str, Any]:
    """What a run has reached, whether or not it came to its end."""
    path = run.folder / RESULT
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    newest = run.newest_checkpoint()
    if newest is None:
        return {}
    standing = checkpoints.read_state(newest)
    return {
        "steps": standing.total,
        "seconds": standing.total_seconds,
        "best_step": standing.best_step,
        # Where it has begun after another's stage, what is known is that stage's last look.
        "metrics": standing.best_metrics or next((m for _, m in reversed(looks(run))), {}),
    }


def _together(outcomes: list[Outcome]) -> Outcome:
    """Several seeds as one: their means; the first that did not finish says how it ended."""
    if len(outcomes) == 1:
        return outcomes[0]
    order = ["failed", "diverged", "stopped early", "waits", "finished"]
    worst = min(outcomes, key=lambda outcome: order.index(outcome.ended))
    values = {name: [each.metrics.get(name, np.nan) for each in outcomes] for name in worst.metrics}
    values = {name: found for name, found in values.items() if np.isfinite(found).all()}
    spread = {f"{name}_std": statistics.stdev(found) for name, found in values.items()}
    means = {name: statistics.fmean(found) for name, found in values.items()}
    most = max(len(each.looks) for each in outcomes)
    # Who finished before the others stays at its best.
    longest = [[*each.looks, *each.looks[-1:] * (most - len(each.looks))] for each in outcomes]
    together = [statistics.fmean(values) for values in zip(*longest, strict=False)]
    return dataclasses.replace(worst, metrics={**means, **spread}, looks=together)


def _text(settings: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in settings.items()
    )
