"""The learning rate at each step, as a function of the step alone: nothing to save or restore."""

import math

from attune.platform.training.settings import TrainingConfig


def rate(training: TrainingConfig, step: int, steps: int) -> float:
    """The rate of update number `step` (from 0) of `steps`.

    Noam's schedule (Vaswani et al. 2017) is usually written with a factor: factor 1 at width 300
    and warm-up 8,000 has its peak, which is what `learning_rate` means here, at 6.5e-4.
    """
    done, warmup = step + 1, training.warmup_steps
    if done <= warmup:
        return training.learning_rate * done / warmup
    left = max(0.0, (steps - step) / max(1, steps - warmup))  # from 1 to nearly 0
    factor = {
        "constant": 1.0,
        "noam": math.sqrt(max(warmup, 1) / done),
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
    }[training.schedule]
    return training.learning_rate * factor
