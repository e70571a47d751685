"""One of several workers of a run, without Ray."""

import os
import sys

import torch

from attune.platform.runs.record import read_run
from attune.platform.training import data, engine, setup
from attune.platform.training.loop import Training

engine.import_deepspeed()  # takes a while: once for all that are forked


class Stopping(Training):
    """Stops as if asked to, after a given number of steps."""

    stop_at = 0

    def _check_limits(self, state, steps):
        over, stopped = super()._check_limits(state, steps)
        return over, stopped or state.total == self.stop_at


def work(folder, worker, port, stop_at):
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(worker.rank))  # DeepSpeed looks for it
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=worker.rank, world_size=worker.world_size
    )
    engine.init_deepspeed()
    assert "mlflow" not in sys.modules  # it would take a worker as long to start again
    run = read_run(folder)
    model = setup.set_up_run_model(run)
    streams, valid = data.load_training_streams(run, model)
    training = Stopping(run, model, streams, valid, worker)
    training.stop_at = stop_at
    training.run()
