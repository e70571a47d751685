"""What each Ray Train worker runs."""

import gc
import logging
from pathlib import Path

import ray.train
import ray.train.torch
import torch

from attune.platform import memory, store
from attune.platform.training import engine, start
from attune.platform.training.loop import Training, Worker


def work(settings: dict[str, str]) -> None:
    """Train the run in a folder, from its last checkpoint on."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    memory.keep_freed()
    run = store.read(Path(settings["folder"]))
    context = ray.train.get_context()
    engine.join_workers()
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    worker = Worker(
        rank=context.get_world_rank(), world_size=context.get_world_size(), device=device
    )
    model = start.model_of(run)
    data, valid = start.data_of(run, model)
    gc.collect()
    gc.freeze()  # what the imports made stays: the collector need not look at it between steps
    Training(run, model, data, valid, worker).go()
