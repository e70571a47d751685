"""What one update of a stage consists of: its loss, the weights it trains, its random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from attune.models.base import Losses, Update, Variant


def total_loss(update: Update, terms: Losses) -> Tensor:
    """Return the weighted sum that an update minimises, over the terms computed so far."""
    total = sum(weight * terms[name] for name, weight in update.weights.items() if name in terms)
    assert isinstance(total, Tensor)
    return total


@contextmanager
def trainable_only(variant: Variant, parts: tuple[str, ...]) -> Iterator[None]:
    """Freeze all weights but those of `parts`: DeepSpeed is silently wrong or raises otherwise."""
    own = {id(p) for part in parts for p in getattr(variant, part).parameters()}
    frozen = [p for p in variant.parameters() if id(p) not in own and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def seed_generators(seed: int) -> None:
    """Seed torch. Without CUDA `torch.manual_seed` still records a traceback for it, which takes
    half a millisecond a step."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def step_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """Return the seed of one worker's random numbers in one step of a stage."""
    words = np.random.SeedSequence([seed, stage, step, rank])
    return int(words.generate_state(1, np.uint64)[0])
