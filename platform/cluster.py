"""Ray: joining or starting a cluster, and running a training job in it."""

import logging
import os
from pathlib import Path
from typing import Any

from attune.platform.store import Run

RETRIES = 3
"""How often a run is taken up again after a worker died."""


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine for this process."""
    import ray

    if ray.is_initialized():
        return
    # Ray repeats every worker's output on the driver's; ours goes to the run's folder.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        options["include_dashboard"] = False
    ray.init(**options)


def fit(run: Run) -> None:
    """Train a run with Ray Train; returns when it has ended or was asked to stop."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from attune.platform.training.worker import work

    gpus = ray.cluster_resources().get("GPU", 0)
    use_gpu = gpus >= run.workers
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(run.folder)},
        scaling_config=ScalingConfig(
            num_workers=run.workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": cpus_per_worker(run.workers)},
        ),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=RunConfig(
            # A name of its own for each start: Ray would take up a run of the same name by itself,
            # and what to go on from is for our own checkpoints to say.
            name=f"{run.name}-{os.getpid()}",
            storage_path=str(run.folder / "ray"),
            failure_config=FailureConfig(max_failures=RETRIES),
        ),
    )
    trainer.fit()


def cpus_per_worker(workers: int) -> int:
    """An even share of the largest machine; Ray gives a worker that many threads."""
    import ray

    largest = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    return max(1, largest // workers)


def log_file(run: Run) -> Path:
    """What a run's workers had to say."""
    return run.folder / "log.txt"
