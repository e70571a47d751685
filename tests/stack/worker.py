"""One of several workers of a run, without Ray: `python worker.py FOLDER STOP_AT`."""

import os
import sys
from pathlib import Path

import torch

from attune.platform import store
from attune.platform.training import start
from attune.platform.training.loop import Training, Worker


class Stopping(Training):
    """Stops as if asked to, after a given number of steps."""

    stop_at = 0

    def _limits(self, standing, steps):
        over, stopped = super()._limits(standing, steps)
        return over, stopped or standing.total == self.stop_at


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    run = store.read(Path(sys.argv[1]))
    model = start.model_of(run)
    data, valid = start.data_of(run, model)
    training = Stopping(run, model, data, valid, Worker(rank=rank, world_size=world_size))
    training.stop_at = int(sys.argv[2])
    training.go()


if __name__ == "__main__":
    main()
