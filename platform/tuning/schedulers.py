"""The schedulers of `--scheduler`, and which options they work with.

`asha` is not among Ray Tune's schedulers here: the trial manager decides with `halving.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ray.tune.schedulers import FIFOScheduler, MedianStoppingRule, TrialScheduler

from attune.models.base import Range
from attune.platform.core.errors import UsageError
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.population import PopulationScheduler
from attune.platform.tuning.spaces import Space
from attune.platform.tuning.sweep import Sweep
from attune.platform.tuning.trial import VALIDATION

NEVER: Any = np.inf
"""The median rule pauses trials while there are few; with this time slice each continues."""


def check_compatibility(
    scheduler: str, search: str, metrics: tuple[str, ...], spaces: Mapping[str, Space], workers: int
) -> None:
    """Raise UsageError for options that do not work together."""
    late = [m for m in metrics if m.removeprefix("valid_") in sweeps.FINAL_METRICS]
    if scheduler != "none" and (len(metrics) > 1 or late):
        named = "two metrics" if len(metrics) > 1 else f"{late[0].removeprefix('valid_')}"
        raise UsageError(
            f"--scheduler {scheduler} needs one metric that every validation has: with {named} use "
            f"--scheduler none"
        )
    if scheduler == "median" and len(spaces) > 1:
        raise UsageError(
            f"--scheduler median compares all trials with each other: give one VARIANT, not "
            f"{len(spaces)}"
        )
    if scheduler != "pbt":
        return
    ranges = [key for space in spaces.values() for key in space if isinstance(space[key], Range)]
    for is_wrong, why in (
        (len(spaces) > 1, "copies weights from one trial to another: give one VARIANT"),
        (search != "random", f"perturbs settings at random: leave out --search {search}"),
        (workers > 1, "trains each member with one worker: leave out --workers-per-trial"),
        (not ranges, "perturbs numbers, and the space has only choices: choose another --space"),
    ):
        if is_wrong:
            raise UsageError(f"--scheduler pbt {why}")


def build_scheduler(sweep: Sweep) -> TrialScheduler:
    """Return Ray Tune's scheduler of a sweep; it stops no trial with `asha` and `none`."""
    if sweep.scheduler == "median":
        return MedianScheduler(time_attr=VALIDATION, grace_period=1, min_time_slice=NEVER)
    if sweep.scheduler == "pbt":
        [space] = sweep.search_spaces.values()
        return PopulationScheduler(
            {key: dimension for key, dimension in space.items() if isinstance(dimension, Range)}
        )
    return FIFOScheduler()


class MedianScheduler(MedianStoppingRule):
    """Tune's median rule, which fails on trials that end before their first validation."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Count only trials that have a validation."""
        if VALIDATION in result:
            super().on_trial_complete(tune_controller, trial, result)
