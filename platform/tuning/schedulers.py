"""Who is stopped, or takes over another's weights: Ray Tune's schedulers, as far as they fit. For
`asha` see `halving.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import tune
from ray.tune.schedulers import (
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from attune.models.base import Range
from attune.platform.core.errors import UsageError
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.spaces import Space
from attune.platform.tuning.sweep import Sweep
from attune.platform.tuning.trial import TASK, VALIDATION

NEVER: Any = np.inf
"""The median rule would let trials take turns while there are few: each goes on instead."""


def check_compatibility(
    scheduler: str, search: str, metrics: tuple[str, ...], spaces: Mapping[str, Space], workers: int
) -> None:
    """Refuse options that do not work together, before anything is started."""
    late = [m for m in metrics if m.removeprefix("valid_") in sweeps.FINAL_METRICS]
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
    ranges = [key for space in spaces.values() for key in space if isinstance(space[key], Range)]
    for wrong, why in (
        (len(spaces) > 1, "copies weights from one trial to another: give one VARIANT"),
        (search != "random", "perturbs what it began with at random: leave --search out"),
        (workers > 1, "trains its members with one worker each: leave --workers-per-trial out"),
        (not ranges, "perturbs numbers, and the space has only choices: choose another --space"),
    ):
        if wrong:
            raise UsageError(f"--scheduler pbt {why}")


def build_scheduler(sweep: Sweep) -> TrialScheduler:
    """Ray Tune's part of it, which is none where trials are halved or nobody is stopped."""
    if sweep.scheduler == "median":
        return MedianScheduler(time_attr=VALIDATION, grace_period=1, min_time_slice=NEVER)
    if sweep.scheduler == "pbt":
        [space] = sweep.search_spaces.values()
        return PopulationScheduler(
            {key: dimension for key, dimension in space.items() if isinstance(dimension, Range)}
        )
    return FIFOScheduler()


class MedianScheduler(MedianStoppingRule):
    """Tune's, which trips over trials that ended before their first look."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Tune's own, for those that had one."""
        if VALIDATION in result:
            super().on_trial_complete(tune_controller, trial, result)


class PopulationScheduler(PopulationBasedTraining):
    """Tune's, in which a member would take over the other's number and folder too. All members wait
    for each other at a look, so that who takes over from whom does not hang on the machine."""

    def __init__(self, ranges: Mapping[str, Range]):
        self.ranges = ranges
        super().__init__(
            time_attr=VALIDATION,
            perturbation_interval=1,
            hyperparam_mutations={TASK: {"settings": {k: _domain(v) for k, v in ranges.items()}}},
            require_attrs=False,
            synch=True,
        )

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Tune's would let the others wait for ever for a member that ended before its look."""
        super().on_trial_complete(tune_controller, trial, result)
        self._advance_sync_point(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """As when it ends by itself."""
        super().on_trial_error(tune_controller, trial)
        self._advance_sync_point(tune_controller, trial)

    def _advance_sync_point(self, tune_controller: Any, ended: Any) -> None:
        """Tune still counts who has just ended among the living."""
        others = (t for t in tune_controller.get_live_trials() if t is not ended)
        live = [t for t in others if not t.is_finished()]
        at = [self._trial_state[each].last_train_time for each in live]
        if at and min(at) >= self._next_perturbation_sync:
            self._next_perturbation_sync = min(at) + self._perturbation_interval

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        settings = _clip_to_ranges(config[TASK]["settings"], self.ranges)
        return {**config, TASK: {**trial.config[TASK], "settings": settings}}, operations


def _domain(dimension: Range) -> Any:
    if dimension.scale == "int":
        return tune.randint(int(dimension.low), int(dimension.high) + 1)
    sampler = tune.loguniform if dimension.scale == "loguniform" else tune.uniform
    return sampler(dimension.low, dimension.high)


def _clip_to_ranges(settings: Mapping[str, Any], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Perturbed settings, none of them outside its range."""
    clipped = {
        key: type(settings[key])(min(max(settings[key], dimension.low), dimension.high))
        for key, dimension in ranges.items()
    }
    return {**settings, **clipped}
