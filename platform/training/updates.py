"""The parts of an update: divisors of loss terms, total loss, trained weights, random seed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from attune.models.base import PAIRED, Batch, Losses, Update, Variant
from attune.platform.batching.streams import Stream
from attune.platform.training.settings import TrainingConfig


class LossScale:
    """The divisors of loss terms in training, for each part of a worker's batch.

    A sum over tokens is divided by n L and a sum over samples by n, where n is the mean number of
    samples in a batch of the stream and L the mean response length of train. Both are constants of
    the run. Batches contain responses of similar lengths: divided by its own tokens, a token of a
    short response would weigh several times as much as one of a long response.
    """

    def __init__(self, settings: TrainingConfig, streams: Mapping[str, Stream], world_size: int):
        self.is_public = settings.loss_scale == "public"
        self.accumulation, self.world_size = settings.accumulation, world_size
        self.mean_samples = {
            name: len(stream.tokens) / len(stream.plan(0)) / world_size
            for name, stream in streams.items()
        }
        """Mean number of samples per batch and worker, by stream."""
        self.response_length = float(streams[PAIRED].tokens.mean())
        """L, in tokens of the variant's tokenizer, including `<eos>`."""

    def scaled_batch(self, stream: str, batch: Batch, tensors: Mapping[str, Tensor]) -> Batch:
        """Return a part of a stream's batch, `tensors`, with the divisors of its loss terms."""
        if self.is_public:  # token terms are summed over the batch, sample terms are its mean
            samples, tokens = batch.samples, 1 / self.world_size
        else:
            samples = self.mean_samples[stream]
            tokens = samples * self.response_length
        parts = self.accumulation
        return Batch(tensors=tensors, samples=samples / parts, tokens=tokens / parts)


def update_loss(update: Update, terms: Losses) -> Tensor:
    """Return the loss that an update minimises: the weighted sum of the given terms."""
    total = sum(weight * terms[name] for name, weight in update.weights.items() if name in terms)
    assert isinstance(total, Tensor)
    return total


@contextmanager
def train_only_updated(variant: Variant, parts: tuple[str, ...]) -> Iterator[None]:
    """Freeze all weights except those of `parts`. With gradients of other weights DeepSpeed raises
    an error or silently computes wrong updates."""
    own = {id(p) for part in parts for p in getattr(variant, part).parameters()}
    frozen = [p for p in variant.parameters() if id(p) not in own and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def seed_update(seed: int) -> None:
    """Seed torch. Without CUDA this avoids `torch.manual_seed`, which records a traceback for a
    later seeding of CUDA; that takes half a millisecond per step."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def update_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """Return the seed of one worker's random numbers in one step of a stage."""
    words = np.random.SeedSequence([seed, stage, step, rank])
    return int(words.generate_state(1, np.uint64)[0])
