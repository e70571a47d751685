"""The outcome of a trial: why its runs ended, and their metrics."""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from attune.platform.runs.record import Run, Status
from attune.platform.training import checkpoints, sharing
from attune.platform.training.loop import PROBLEM, RESULT
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.sweep import EndState, Sweep
from attune.platform.tuning.trial import (
    WRONG_METRIC,
    has_diverged,
    read_validations,
    select_counted,
)

SEVERITY = ("failed", "diverged", "stopped early", "waits", "finished")
"""The seed that comes first in this order determines the outcome of a trial."""


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The outcome of one run of a trial, or of all its seeds together."""

    ended: EndState | Literal["waits"]
    reason: str
    metrics: dict[str, float]
    validations: list[float]
    """The best value of the first metric so far, at each validation that counts."""
    fails_sweep: bool = False
    """Whether all trials would fail for the same reason."""

    def __str__(self) -> str:
        return f"{self.ended}: {self.reason}"

    @property
    def run_status(self) -> Status:
        """The status of its runs."""
        if self.ended == "finished":
            return "finished"
        return "stopped" if self.ended in ("stopped early", "waits") else "failed"


def determine_outcome(
    sweep: Sweep, run: Run, rung: int | None, error: str, *, is_stopping: bool
) -> Outcome | None:
    """Return why a run ended, or None if it was interrupted and can be resumed.

    `rung` is the validation at which it had to pause, `error` the exception of its process.
    """
    validations = best_so_far(sweep, run)
    problem, wrong_metric = run.folder / PROBLEM, run.folder / WRONG_METRIC
    after = f"after validation {len(validations)}"
    ended: EndState | Literal["waits"]
    if (run.folder / RESULT).exists():
        ended, reason = "finished", "all steps done, or no further improvement"
    elif wrong_metric.exists():
        ended, reason = "failed", wrong_metric.read_text(encoding="utf-8")
    elif problem.exists():
        ended, reason = "failed", problem.read_text(encoding="utf-8")
    elif error:
        ended, reason = "failed", error
    elif has_diverged(run):
        ended, reason = "diverged", "the loss became NaN or infinite"
    elif rung is not None and len(validations) >= rung:
        ended, reason = "waits", after
    elif is_stopping:
        return None
    elif rung is not None:
        ended, reason = "failed", f"it ended {after}, before its rung at validation {rung}"
    else:
        ended, reason = "stopped early", f"by {sweep.scheduler} {after}"
    metrics = {
        name: float(value)
        for name, value in read_result(run).get("metrics", {}).items()
        if value is not None
    }
    return Outcome(
        ended=ended, reason=reason, metrics=metrics, validations=validations,
        fails_sweep=wrong_metric.exists() and ended == "failed",
    )  # fmt: skip


def shared_stage(sweep: Sweep, run: Run) -> str | None:
    """Return the last stage that is the same in all trials of a variant."""
    return sharing.shared_stage(run, sweep.spaces[run.variant])


def best_so_far(sweep: Sweep, run: Run) -> list[float]:
    """Return the best value of the first metric so far, at each validation that counts."""
    name = sweep.metrics[0]
    is_maximized = sweeps.is_maximized(name)
    counted = select_counted(run, read_validations(run), sweep.metrics, shared_stage(sweep, run))
    values = [sweeps.metric_value(metrics, name) for _, metrics in counted]
    worst = -math.inf if is_maximized else math.inf
    numbers = (worst if math.isnan(value) else value for value in values)
    return list(itertools.accumulate(numbers, max if is_maximized else min))


def read_result(run: Run) -> dict[str, Any]:
    """Return a run's result, or its state at the last checkpoint if it has not finished."""
    path = run.folder / RESULT
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result
    newest = run.newest_checkpoint()
    if newest is None:
        return {}
    state = checkpoints.read_checkpoint_state(newest)
    return {
        "steps": state.total,
        "seconds": state.total_seconds,
        "best_step": state.best_step,
        # A run that starts after a shared stage has only the last validation of that stage.
        "metrics": state.best_metrics or next((m for _, m in reversed(read_validations(run))), {}),
    }


def combine_seeds(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a trial: the means of its seeds, and how the worst of them ended."""
    if len(outcomes) == 1:
        return outcomes[0]
    worst = min(outcomes, key=lambda outcome: SEVERITY.index(outcome.ended))
    by_name = {
        name: [each.metrics.get(name, np.nan) for each in outcomes] for name in worst.metrics
    }
    by_name = {name: values for name, values in by_name.items() if np.isfinite(values).all()}
    means = {name: statistics.fmean(values) for name, values in by_name.items()}
    deviations = {f"{name}_std": statistics.stdev(values) for name, values in by_name.items()}
    longest = max(len(each.validations) for each in outcomes)
    # A seed that finished before the others keeps its best value.
    padded = [
        [*each.validations, *each.validations[-1:] * (longest - len(each.validations))]
        for each in outcomes
    ]
    validations = [statistics.fmean(values) for values in zip(*padded, strict=False)]
    return dataclasses.replace(worst, metrics={**means, **deviations}, validations=validations)
