"""What each Ray Train worker runs."""

import gc
import logging
from pathlib import Path

import ray.train
import ray.train.torch
import torch

from attune.platform import memory, store
from attune.platform.store import Run
from attune.platform.training import engine, start
from attune.platform.training.loop import Training, Watch, Worker


def work(settings: dict[str, str]) -> None:
    """Train the run in a folder, from its last checkpoint on."""
    context = ray.train.get_context()
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    worker = Worker(
        rank=context.get_world_rank(), world_size=context.get_world_size(), device=device
    )
    train(store.read(Path(settings["folder"])), worker)


def train(run: Run, worker: Worker, watch: Watch = lambda *_: None) -> bool:
    """Train a run as one of its workers; False where it was asked to stop before its end."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    memory.keep_freed()
    engine.join_workers()
    gc.unfreeze()  # a process may train one run after another
    model = start.model_of(run)
    data, valid = start.data_of(run, model)
    gc.collect()
    gc.freeze()  # what the imports made stays: the collector need not look at it between steps
    return Training(run, model, data, valid, worker, watch).go()
