"""Losses are the same within a tolerance with one worker, two, or a changing number.

Sums are computed in another order, hence the tolerance: 1e-4 of a loss after a dozen steps.
"""

import multiprocessing
import socket

import pytest

from attune.platform.runs.metrics_file import read_metrics
from attune.platform.training import setup
from attune.platform.training.process_group import ProcessGroup
from tests.stack import worker

pytestmark = pytest.mark.xdist_group("workers")

TOLERANCE = 1e-4
STEPS = 12


@pytest.fixture(scope="module")
def begin(prepared, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTUNE_HOME", str(tmp_path_factory.mktemp("home")))

        def make(name, zero=0):
            overrides = {"log_every": 1, "evaluate_every": 6, "batch_size": 16}
            return setup.new_run(
                "multi-trs", data=str(prepared), preset="tiny", overrides=overrides,
                max_steps=STEPS, name=name, zero=zero,
            )  # fmt: skip

        yield make


@pytest.fixture(scope="module")
def alone(begin):
    run = begin("alone")
    work(run, 1)
    return run


def work(run, world_size, stop_at=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    workers = [
        context.Process(
            target=worker.work,
            args=(run.folder, ProcessGroup(rank=rank, world_size=world_size), port, stop_at),
        )
        for rank in range(world_size)
    ]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert [each.exitcode for each in workers] == [0] * world_size


def losses(run):
    lines = read_metrics(run.metrics_file)
    keys = ("loss", "nll", "emotion", "valid_loss", "valid_emotion_accuracy")
    return [(line["step"], k, line["metrics"][k]) for line in lines for k in keys
            if k in line["metrics"]]  # fmt: skip


def assert_alike(one, other):
    assert [key for *key, _ in losses(one)] == [key for *key, _ in losses(other)]
    for (step, key, expected), (*_, actual) in zip(losses(one), losses(other), strict=True):
        assert actual == pytest.approx(expected, rel=TOLERANCE), (step, key)


@pytest.mark.parametrize("zero", [0, 2])
def test_losses_do_not_depend_on_the_number_of_workers(begin, alone, zero):
    run = begin(f"zero-{zero}", zero)
    for world_size, stop_at in ((2, 4), (1, 8), (2, 0)):
        work(run, world_size, stop_at)
    assert_alike(alone, run)
