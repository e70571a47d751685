"""Learning rate and dropout at each step. Both depend on the step alone, so they have no state."""

import math

from attune.models.base import Stage
from attune.platform.training.settings import TrainingConfig


def rate(training: TrainingConfig, stage: Stage, step: int, steps: int) -> float:
    """Return the learning rate of update number `step` (from 0) of the `steps` of a stage.

    `learning_rate` is the peak of the schedule. Papers usually give a factor for the Noam schedule
    (Vaswani et al. 2017): factor 1 at width 300 and warm-up 8,000 has the peak 6.5e-4.
    """
    peak = stage.rate * training.learning_rate
    done, warmup = step + 1, round(training.warmup_share * steps)
    if stage.schedule is None:
        warmup = max(warmup, training.warmup_steps)
    if done <= warmup:
        return peak * done / warmup
    left = max(0.0, (steps - step) / max(1, steps - warmup))  # from 1 to nearly 0
    factor = {
        "constant": 1.0,
        "noam": math.sqrt(max(warmup, 1) / done),
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
    }[stage.schedule or training.schedule]
    return peak * factor


def scheduled_dropout_factor(training: TrainingConfig, step: int, steps: int) -> float:
    """Return the factor of all dropout rates in update number `step` (from 0) of `steps`."""
    decay = training.dropout_decay_share * steps
    return min(1.0, (steps - 1 - step) / decay) if decay else 1.0


def has_dropout_decayed(training: TrainingConfig, step: int, steps: int) -> bool:
    """Return whether dropout was reduced at the last of `step` updates, or never decays."""
    return (
        not training.dropout_decay_share or scheduled_dropout_factor(training, step - 1, steps) < 1
    )
