"""Ray: joining or starting a cluster, and training or doing tasks in it."""

import itertools
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attune.platform.core.errors import UsageError
from attune.platform.core.logging import job_environment
from attune.platform.runs.record import Run
from attune.platform.services import stack

T = TypeVar("T")
R = TypeVar("R")


class FileTask(Protocol):
    """Work that leaves a file."""

    @property
    def file(self) -> str:
        """The file, which must appear whole or not at all."""

    @property
    def rows(self) -> int:
        """How much work it is."""


F = TypeVar("F", bound=FileTask)
CPUS, GPUS = "ATTUNE_CPUS_PER_WORKER", "ATTUNE_GPUS_PER_WORKER"
"""What `attune submit` was told that a worker needs."""

SECONDS_TO_LOOK = 120
RETRIES = 3
"""How often a run is taken up again after a worker died."""


def use_token(address: str | None = None) -> None:
    """Show Ray the token wherever there is one: the local stack's for its address, otherwise the
    user's. Before Ray is imported, which looks for it only then."""
    if stack.is_stack(address or os.environ.get("RAY_ADDRESS")):
        ours = stack.ray_variables()
        if "RAY_AUTH_TOKEN" in os.environ:  # what is given counts, even if it is wrong
            del ours["RAY_AUTH_TOKEN_PATH"]
        for name, value in ours.items():
            os.environ.setdefault(name, value)
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or Path("~/.ray/auth_token").expanduser().is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect(address: str | None = None) -> None:
    """Join the cluster that is given or that RAY_ADDRESS names, or start one on this machine for
    this process."""
    address = _head(address or os.environ.get("RAY_ADDRESS"))
    use_token(address)
    import ray

    if ray.is_initialized():
        return
    # Ray repeats every worker's output on the driver's; ours goes to the run's folder.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        options["include_dashboard"] = False
    ray.init(address, **options)


def _head(address: str | None) -> str | None:
    """What to join for an address: `attune submit` takes a job server's, which cannot be joined."""
    if not address or not address.startswith(("http://", "https://")):
        return address
    if part := stack.running(stack.RAY) if stack.is_stack(address) else None:
        return stack.head_address(part)
    raise UsageError(
        f"{address} is the address of a job server, which is for 'attune submit -- COMMAND'; to "
        f"join the cluster from here set RAY_ADDRESS to that of its head, such as HOST:6379"
    )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine of a cluster says of itself."""

    address: str
    cpus: float
    gpus: float
    versions: dict[str, str]
    sees: bool
    """Whether the file that was looked for is there."""
    unreachable: str
    """What is wrong with the tracking server, from there."""


def survey(probe: Path, tracking: str) -> list[Machine]:
    """Look around on each machine of the cluster: its versions, whether it sees a file, and whether
    it reaches a tracking server, if there is one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machines = [node for node in ray.nodes() if node["Alive"]]
    looks = [
        ray.remote(_look)
        .options(
            num_cpus=0,  # a cluster may be busy
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(str(probe), tracking)
        for node in machines
    ]
    return [
        Machine(
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0),
            gpus=node["Resources"].get("GPU", 0),
            **found,
        )
        for node, found in zip(machines, ray.get(looks, timeout=SECONDS_TO_LOOK), strict=True)
    ]


def _look(probe: str, tracking: str) -> dict[str, Any]:
    import platform
    import urllib.request
    from importlib import metadata

    unreachable = ""
    if tracking.startswith(("http:", "https:")):
        try:
            with urllib.request.urlopen(f"{tracking.rstrip('/')}/version", timeout=10):
                pass
        except (OSError, ValueError) as error:
            unreachable = str(error)
    packages = ("ray", "torch", "deepspeed", "mlflow", "polars")
    versions = {name: metadata.version(name) for name in packages}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "sees": Path(probe).exists(),
        "unreachable": unreachable,
    }


def fit(work: Callable[[dict[str, Any]], None], run: Run, cores: int) -> None:
    """Train a run with Ray Train; returns when it has ended or was asked to stop.

    Each worker calls `work` with the run's folder and the job's environment, and has `cores` cores.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    needs = needs_of(run, cores)
    use_gpu = "GPU" in needs
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(run.folder), "ids": job_environment()},
        scaling_config=ScalingConfig(
            num_workers=run.workers, use_gpu=use_gpu, resources_per_worker=needs
        ),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=RunConfig(
            # A name of its own for each start: Ray would take up a run of the same name by itself,
            # and what to go on from is for our own checkpoints to say.
            name=f"{run.name}-{uuid.uuid4().hex}",
            storage_path=str(run.folder / "ray"),
            failure_config=FailureConfig(max_failures=RETRIES),
        ),
    )
    trainer.fit()


def needs_of(run: Run, cores: int) -> dict[str, float]:
    """What each worker of a run takes: cores, and GPUs where there are enough or some are asked
    for."""
    import ray

    usual = 1 if ray.cluster_resources().get("GPU", 0) >= run.workers else 0
    gpus = _asked(GPUS, usual)
    return {"CPU": cores, **({"GPU": gpus} if gpus else {})}


def _asked(variable: str, otherwise: int) -> int:
    return int(os.environ.get(variable) or otherwise)


def waits_for(run: Run, cores: int) -> str:
    """What a run's workers have asked for and not got, for people; empty where they have it."""
    import ray
    from ray.util import placement_group_table

    needs = needs_of(run, cores)
    for group in placement_group_table().values():
        asked = list(group["bundles"].values())
        if group["state"] == "PENDING" and asked == [needs] * run.workers:
            whole = {name: amount * run.workers for name, amount in needs.items()}
            return unmet(whole, ray.available_resources(), ray.cluster_resources())
    return ""


def unmet(
    wanted: Mapping[str, float], free: Mapping[str, float], total: Mapping[str, float]
) -> str:
    """`2 CPUs: 0 of 2 free`, for each resource there is not enough of; or for all, where they are
    free but not on one machine, or were until just now."""
    lacking = {name: n for name, n in wanted.items() if free.get(name, 0) < n}
    return ", ".join(
        f"{amount:g} {name}{'s' if amount > 1 else ''}: {free.get(name, 0):g} of "
        f"{total.get(name, 0):g} free"
        for name, amount in (lacking or wanted).items()
    )


def run_tasks(
    work: Callable[[T], R], tasks: Sequence[T], at_once: int | None = None
) -> Iterator[R]:
    """What `work` returns for each task, as they are done, each on a core of the cluster: on all
    of them, or on so many at once."""
    if not tasks:
        return
    connect()
    import ray

    remote = ray.remote(num_cpus=1)(work)
    waiting = iter(tasks)
    left = [remote.remote(task) for task in itertools.islice(waiting, at_once)]
    try:
        while left:
            [done], left = ray.wait(left)
            left.extend(remote.remote(task) for task in itertools.islice(waiting, 1))
            yield ray.get(done)
    finally:
        for task in left:
            ray.cancel(task)


def make_files(
    work: Callable[[F], int],
    tasks: Sequence[F],
    progress: Callable[[int], None],
    at_once: int | None = None,
) -> None:
    """Do the tasks whose files are not there yet, so that what was done before an interruption is
    not done again. `work` returns the rows that it did."""
    missing = []
    for task in tasks:
        if Path(task.file).is_file():
            progress(task.rows)
        else:
            missing.append(task)
    for done in run_tasks(work, missing, at_once):
        progress(done)


def room(workers: int, runs: int) -> tuple[int, int]:
    """How many of some runs, of so many workers each, can be trained at once, and the cores for
    each worker: the most with which all have a place, unless it was said how many; Ray gives a
    worker as many threads."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(each.get("CPU", 0)) for each in machines]
    at_once, cores = _shared(cpus, workers, runs, _asked(CPUS, 0))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus >= workers:  # then each worker has one, or as many as were asked for
        at_once = max(1, min(at_once, gpus // (workers * max(1, _asked(GPUS, 1)))))
    return at_once, cores


def _shared(machines: Sequence[int], workers: int, runs: int, asked: int = 0) -> tuple[int, int]:
    def places(cores: int) -> int:
        return sum(each // cores for each in machines)

    if asked:
        return max(1, min(runs, places(asked) // workers)), asked
    for cores in range(max(machines), 0, -1):
        if places(cores) >= workers * runs:
            return runs, cores
    return max(1, places(1) // workers), 1
