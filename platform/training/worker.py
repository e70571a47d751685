"""The entry point of a Ray Train worker."""

import gc
import logging
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from attune.platform.core.allocator import keep_freed_memory, limit_kernel_cache
from attune.platform.core.disk import explain_full_disk
from attune.platform.core.errors import DataError, ServiceError, UsageError
from attune.platform.core.logging import JOB
from attune.platform.runs.record import Run, read_run
from attune.platform.training import data, engine, setup
from attune.platform.training.checkpoints import describe_checkpoint_need
from attune.platform.training.loop import PROBLEM, Export, Training, Watch
from attune.platform.training.process_group import ProcessGroup


def work(settings: dict[str, Any]) -> None:
    """Train the run in a folder, from its last checkpoint."""
    os.environ.update(settings["ids"])
    context = ray.train.get_context()
    device = ray.train.torch.get_device() if torch.cuda.is_available() else torch.device("cpu")
    worker = ProcessGroup(
        rank=context.get_world_rank(), world_size=context.get_world_size(), device=device
    )
    run = read_run(Path(settings["folder"]))
    problem = run.folder / PROBLEM
    if problem.exists():  # Ray has restarted the workers after an error that would recur
        return
    try:
        train(run, worker, export=worker_gauges(run))
    except Exception as error:
        is_expected = isinstance(error, UsageError | DataError | ServiceError)
        if worker.world_size > 1 and not is_expected:  # the cause may be another worker's failure
            raise
        # Ray would restart the workers only to fail again.
        text = str(error) if is_expected else traceback.format_exc()
        try:
            problem.write_text(text, encoding="utf-8")
        except OSError:  # the disk is full: Ray passes the error on
            problem.unlink()
            raise error from None
        if worker.world_size > 1:  # the others wait for this one
            raise


def worker_gauges(run: Run) -> Export:
    """Return a function that exports a run's metrics to Prometheus, as `ray_attune_loss` and so
    on, through Ray's own exporter on each machine."""
    from ray.util.metrics import Gauge

    tags = {"run": run.name, "variant": run.variant, "job": os.environ.get(JOB, "")}
    gauge_by_name: dict[str, Gauge] = {}

    def export(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"step": step, **metrics}.items():
            if name not in gauge_by_name:
                about = f"What a run logs as {name}."
                gauge_by_name[name] = Gauge(f"attune_{name}", about, tag_keys=tuple(tags))
                gauge_by_name[name].set_default_tags(tags)
            gauge_by_name[name].set(value)

    return export


def train(
    run: Run,
    worker: ProcessGroup,
    watch: Watch = lambda *_: None,
    export: Export = lambda *_: None,
) -> bool:
    """Train a run as one of its workers; return False if it was stopped before its end."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    keep_freed_memory()
    limit_kernel_cache()
    engine.init_deepspeed()
    gc.unfreeze()  # a process may train one run after another
    model = setup.set_up_run_model(run)
    streams, valid = data.load_training_streams(run, model)
    gc.collect()
    gc.freeze()  # imported objects stay: the collector need not scan them between steps
    training = Training(run, model, streams, valid, worker, watch, export)
    with explain_full_disk(
        run.folder, lambda: describe_checkpoint_need(run, training.weights_bytes)
    ):
        return training.run()
