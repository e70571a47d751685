"""Population-based training (Jaderberg et al. 2017): Ray Tune's scheduler, adapted to our trials.

This is the only module that touches private members of Ray Tune. `PRIVATE_MEMBERS` lists them, and
`tests/stack/test_population.py` exercises each in a real experiment.
"""

from collections.abc import Mapping
from typing import Any

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from attune.models.base import Range
from attune.platform.tuning.trial import TASK, VALIDATION

INTERVAL = 1
"""Validations between two exchanges of weights."""
PRIVATE_MEMBERS: Mapping[str, str] = {
    "_get_new_config": "returns the config of a member that copies another, and the operations; "
    "overridden so that the member keeps its number and folder",
    "_next_perturbation_sync": "the validation at which all members wait for each other; increased "
    "when the last member that they wait for ends",
}
"""The private members of `PopulationBasedTraining` that are used here, and what for."""


class PopulationScheduler(PopulationBasedTraining):
    """Population-based training of trials that are runs.

    All members wait for each other at each validation, so that the outcome does not depend on the
    speed of the machine.
    """

    def __init__(self, ranges: Mapping[str, Range]):
        self.ranges = ranges
        super().__init__(
            time_attr=VALIDATION,
            perturbation_interval=INTERVAL,
            hyperparam_mutations={
                TASK: {"settings": {key: _to_domain(each) for key, each in ranges.items()}}
            },
            require_attrs=False,
            synch=True,
        )

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Continue without a member that has ended; Tune would wait for it."""
        super().on_trial_complete(tune_controller, trial, result)
        self._advance_sync_point(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Continue without a member that has failed."""
        super().on_trial_error(tune_controller, trial)
        self._advance_sync_point(tune_controller, trial)

    def _advance_sync_point(self, tune_controller: Any, ended: Any) -> None:
        """Let the other members continue if all of them are at the validation they wait for."""
        # Tune still counts the trial that has just ended as live.
        others = [t for t in tune_controller.get_live_trials() if t is not ended]
        counts = [validation_count(each) for each in others if not each.is_finished()]
        if counts and min(counts) >= self._next_perturbation_sync:
            self._next_perturbation_sync = min(counts) + INTERVAL

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], Any]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        settings = _clip_to_ranges(config[TASK]["settings"], self.ranges)
        return {**config, TASK: {**trial.config[TASK], "settings": settings}}, operations


def validation_count(trial: Any) -> int:
    """Return the number of validations that a trial of Tune has reported."""
    return int((trial.last_result or {}).get(VALIDATION, 0))


def _to_domain(dimension: Range) -> Any:
    """Return a range as Tune's search space."""
    if dimension.scale == "int":
        return tune.randint(int(dimension.low), int(dimension.high) + 1)
    sampler = tune.loguniform if dimension.scale == "loguniform" else tune.uniform
    return sampler(dimension.low, dimension.high)


def _clip_to_ranges(settings: Mapping[str, Any], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Return perturbed settings, each within its range."""
    clipped = {
        key: type(settings[key])(min(max(settings[key], dimension.low), dimension.high))
        for key, dimension in ranges.items()
    }
    return {**settings, **clipped}
