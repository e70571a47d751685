"""Streams of batches: bucketed by length, padded per batch, sharded by rank, resumable.

An epoch is planned as lists of row numbers, from the seed and the epoch number alone: pools of
shuffled samples are sorted by length and cut into batches, then the batches are shuffled. A run can
therefore start at any step of any epoch without replaying the steps before it. A plan consists of
*global* batches and does not depend on the number of ranks. Each of n ranks takes every n-th row,
so that the lengths on all ranks are similar, and an n-th of the global batch's counts of samples
and tokens as divisors.
"""

import functools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from attune.models.base import Batch
from attune.platform.batching.encoding import Columns, IntArray, Ragged
from attune.platform.core.errors import DataError

POOL = 256
"""Number of batches whose samples are sorted together. A higher number reduces padding and makes
batches less random."""


@dataclass(frozen=True, kw_only=True, order=True)
class Position:
    """Position in a stream: the epoch, and the number of the next batch in it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class PositionedBatch:
    """A batch, and the position of the batch after it."""

    batch: Batch
    next_position: Position


def _stream_lengths(columns: Columns, name: str) -> IntArray:
    column = columns.get(name)
    if column is None:
        return np.zeros(len(columns["index"]), dtype=np.int64)
    assert isinstance(column, Ragged)
    return column.lengths


class Stream:
    """Endless batches of one stream of samples, the same for the same seed."""

    def __init__(
        self,
        columns: Columns,
        *,
        size: int,
        by: Literal["samples", "tokens"] = "samples",
        seed: int = 0,
        shuffle: bool = True,
        by_context: bool = False,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 4,
    ):
        """`size` counts samples, or tokens of contexts and responses including padding.

        A batch has responses of similar lengths, or with `by_context` contexts of similar lengths
        (for decoding). Unpaired text has only contexts or only responses.
        """
        self.context_lengths = _stream_lengths(columns, "context")
        self.response_lengths = _stream_lengths(columns, "response")
        self.tokens = self.response_lengths if "response" in columns else self.context_lengths
        if len(self.response_lengths) < world_size:
            raise DataError(
                f"{len(self.response_lengths)} samples cannot be shared by {world_size} workers"
            )
        if by == "samples" and size < world_size:
            raise DataError(f"a batch of {size} samples cannot be shared by {world_size} workers")
        self.columns = columns
        self.size, self.by = size, by
        self.seed, self.shuffle, self.by_context = seed, shuffle, by_context
        self.rank, self.world_size = rank, world_size
        self.prefetch = prefetch
        self.plan = functools.lru_cache(2)(self._plan_stream_epoch)

    def batches(self, start: Position = Position()) -> Iterator[PositionedBatch]:  # noqa: B008
        """Yield batches from `start` without end. A thread prefetches them."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            ahead: deque[Future[PositionedBatch]] = deque()
            try:
                for rows, next_position in self._planned_stream_batches(start):
                    ahead.append(thread.submit(self._load_stream_batch, rows, next_position))
                    if len(ahead) > self.prefetch:
                        yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, which contains each sample exactly once."""
        for loaded in self.batches(Position(epoch=number)):
            yield loaded.batch
            if loaded.next_position.epoch > number:
                return

    def position(self, step: int) -> Position:
        """Return the position of batch number `step`, counted over all epochs."""
        epoch = 0
        while step >= len(self.plan(epoch)):
            step -= len(self.plan(epoch))
            epoch += 1
        return Position(epoch=epoch, batch=step)

    def _planned_stream_batches(self, here: Position) -> Iterator[tuple[IntArray, Position]]:
        """Yield the rows of each batch, with the position after it."""
        while True:
            plan = self.plan(here.epoch)
            for number in range(here.batch, len(plan) - 1):
                yield plan[number], Position(epoch=here.epoch, batch=number + 1)
            yield plan[-1], Position(epoch=here.epoch + 1)
            here = Position(epoch=here.epoch + 1)

    def _load_stream_batch(self, rows: IntArray, next_position: Position) -> PositionedBatch:
        mine = rows[self.rank :: self.world_size]
        tensors = {
            name: column.pad(mine) if isinstance(column, Ragged) else torch.from_numpy(column[mine])
            for name, column in self.columns.items()
        }
        tokens = int(self.tokens[rows].sum())
        batch = Batch(
            tensors=tensors,
            samples=len(rows) / self.world_size,
            tokens=tokens / self.world_size,
        )
        return PositionedBatch(batch=batch, next_position=next_position)

    def _plan_stream_epoch(self, epoch: int) -> list[IntArray]:
        """Return the global batches of an epoch, as row numbers."""
        count = len(self.response_lengths)
        if not self.shuffle:
            return self._cut_into_batches(self._bucket_by_length(np.arange(count)))
        draw = np.random.default_rng([self.seed, epoch])
        order = draw.permutation(count)
        pools = np.array_split(order, max(1, round(count / (self._typical_rows_of_batch() * POOL))))
        batches = [
            batch
            for pool in pools
            for batch in self._cut_into_batches(self._bucket_by_length(pool))
        ]
        return [batches[number] for number in draw.permutation(len(batches))]

    def _bucket_by_length(self, rows: IntArray) -> IntArray:
        """Return rows in an order in which neighbours have similar lengths.

        Rows are sorted by response length and cut into strips, and each strip is sorted by context
        length, in alternating directions, so that a batch across two strips has similar contexts,
        too. The contexts and the responses of a batch then have similar lengths, and the lengths of
        its responses still vary.
        """
        contexts, responses = self.context_lengths, self.response_lengths
        if self.by_context:
            return rows[np.lexsort((responses[rows], contexts[rows]))]
        rows = rows[np.lexsort((contexts[rows], responses[rows]))]
        count = max(1, round(math.sqrt(len(rows) / self._typical_rows_of_batch())))
        strips = [
            strip[np.lexsort((responses[strip], contexts[strip]))]
            for strip in np.array_split(rows, count)
        ]
        return np.concatenate([s[::-1] if number % 2 else s for number, s in enumerate(strips)])

    def _typical_rows_of_batch(self) -> float:
        if self.by == "samples":
            return self.size
        mean = float(np.mean(self.context_lengths + self.response_lengths))
        return max(1.0, self.size / mean)

    def _cut_into_batches(self, rows: IntArray) -> list[IntArray]:
        if self.by == "samples":
            # Parts of nearly equal size: a small last batch would have a noisy gradient.
            return np.array_split(rows, -(-len(rows) // self.size))
        ends: list[int] = []
        start = context = response = 0
        for place, row in enumerate(rows):
            context = max(context, int(self.context_lengths[row]))
            response = max(response, int(self.response_lengths[row]))
            full = (place + 1 - start) * (context + response) > self.size
            if full and place - start >= self.world_size:
                ends.append(place)
                start = place
                context, response = int(self.context_lengths[row]), int(self.response_lengths[row])
        parts = np.split(rows, ends)
        if len(parts) > 1 and len(parts[-1]) < self.world_size:
            parts[-2:] = [np.concatenate(parts[-2:])]
        return parts
