"""Streams: each sample once per epoch, the same order by seed, shards that add up, resuming."""

import itertools
import threading

import numpy as np
import pytest
import torch

from attune.platform.batching.encoding import Ragged
from attune.platform.batching.streams import Position, Stream
from attune.platform.core.errors import DataError


@pytest.mark.parametrize(("size", "by"), [(16, "samples"), (1500, "tokens")])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_epoch_has_each_sample_once_for_any_number_of_ranks(columns, size, by, world_size):
    streams = [
        Stream(columns, size=size, by=by, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    seen: list[int] = []
    for parts in zip(*(stream.epoch(2) for stream in streams), strict=True):
        rows = [part["index"] for part in parts]
        assert all(len(row) for row in rows)
        assert sum(map(len, rows)) == pytest.approx(parts[0].samples * world_size)
        tokens = sum(int((part["response"] != 0).sum()) for part in parts)
        assert tokens == pytest.approx(parts[0].tokens * world_size)
        assert parts[0].tokens == parts[-1].tokens
        seen.extend(torch.cat(rows).tolist())
    assert sorted(seen) == list(range(len(columns["response"])))


def test_global_batches_do_not_depend_on_the_ranks(columns):
    plans = [Stream(columns, size=16, world_size=n).plan(0) for n in (1, 4)]
    assert all(np.array_equal(one, other) for one, other in zip(*plans, strict=True))


def test_seed_and_epoch_decide_the_order(columns):
    def order(seed, epoch):
        return np.concatenate(Stream(columns, size=16, seed=seed).plan(epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize(("size", "by"), [(16, "samples"), (1500, "tokens")])
def test_resuming_anywhere_gives_the_same_batches(columns, size, by):
    stream = Stream(columns, size=size, by=by, seed=3)
    steps = len(stream.plan(0)) + 5
    whole = list(itertools.islice(stream.batches(), steps + 3))
    for stop in (1, len(stream.plan(0)) - 1, len(stream.plan(0)), steps):
        fresh = Stream(columns, size=size, by=by, seed=3)
        assert fresh.position(stop) == whole[stop - 1].next_position
        resumed = itertools.islice(fresh.batches(whole[stop - 1].next_position), 3)
        for loaded, expected in zip(resumed, whole[stop : stop + 3], strict=True):
            assert loaded.next_position == expected.next_position
            for name, tensor in loaded.batch.tensors.items():
                assert torch.equal(tensor, expected.batch[name])


def test_resuming_builds_no_earlier_batch(columns, monkeypatch):
    loaded_rows = []
    real = Stream._load_stream_batch
    monkeypatch.setattr(
        Stream, "_load_stream_batch", lambda self, *a: loaded_rows.append(a) or real(self, *a)
    )
    stream = Stream(columns, size=16, prefetch=2)
    next(stream.batches(Position(epoch=5, batch=100)))
    assert len(loaded_rows) <= 4


def test_bucketing_reduces_padding_and_shuffles(columns):
    stream = Stream(columns, size=16)
    real, padded = np.zeros(2), np.zeros(2)
    lengths = []
    for batch in stream.epoch():
        both = (batch["context"], batch["response"])
        real += [int((tokens != 0).sum()) for tokens in both]
        padded += [tokens.numel() for tokens in both]
        lengths.append(batch["response"].shape[1])
    assert (real / padded > 0.85).all(), real / padded
    # Short and long batches alternate: neighbours are not sorted.
    assert np.abs(np.diff(lengths)).mean() > 2


def test_token_batches_keep_their_budget(columns):
    stream = Stream(columns, size=1500, by="tokens")
    for batch in stream.epoch():
        context, response = batch["context"], batch["response"]
        assert context.numel() + response.numel() <= 1500


def test_sample_batches_are_nearly_equal(columns):
    sizes = {len(batch) for batch in Stream(columns, size=16).plan(0)}
    assert max(sizes) == 16
    assert min(sizes) >= 14


def test_batches_for_decoding_are_sorted_by_context(columns):
    stream = Stream(columns, size=50, shuffle=False, by_context=True)
    lengths = [int(batch["context"].shape[1]) for batch in stream.epoch()]
    assert lengths == sorted(lengths)


def test_too_few_samples_for_the_workers(columns):
    few = {
        name: Ragged(column.values[:3], np.array([1, 1, 1]))
        if isinstance(column, Ragged)
        else column
        for name, column in columns.items()
    }
    with pytest.raises(DataError, match="3 samples cannot be shared by 4 workers"):
        Stream(few, size=16, world_size=4)
    with pytest.raises(DataError, match="a batch of 2 samples"):
        Stream(columns, size=2, world_size=4)


def test_an_error_in_the_thread_reaches_the_caller_and_no_thread_is_left(columns, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken batch")

    monkeypatch.setattr(Stream, "_load_stream_batch", broken)
    with pytest.raises(RuntimeError, match="broken batch"):
        next(Stream(columns, size=16).batches())
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]
