"""The Ray cluster: join or start one, probe its machines, train runs in it."""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attune.platform.core.errors import UsageError
from attune.platform.core.logging import job_environment
from attune.platform.runs.record import Run
from attune.platform.services import stack
from attune.platform.services.stack_processes import HOST

CPUS, GPUS = "ATTUNE_CPUS_PER_WORKER", "ATTUNE_GPUS_PER_WORKER"
"""Environment variables with the resources per worker, set by `attune submit`."""

OUT_OF_MEMORY = ("OutOfMemoryError", "running low on memory", "NODE_OUT_OF_MEMORY")
"""Parts of the errors of Ray's memory monitor."""
USER_TOKEN = Path("~/.ray/auth_token")
"""Where Ray looks for the user's token."""
PROBE_SECONDS = 120
RETRIES = 3
"""How often a run is resumed after a worker died."""


def use_token(address: str | None = None) -> None:
    """Set Ray's authentication variables, best before Ray is imported.

    The local stack and a cluster that this process starts use the token in `ATTUNE_HOME`, unless
    the user has a token; Ray would write one to `~/.ray`, readable for everyone.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if stack.is_stack(address):
        _set_variables(stack.ray_variables())
    elif address:
        if _user_has_token():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    else:  # `ray.init` turns authentication on by itself, also if Ray was imported before
        variables = stack.ray_variables()
        del variables["RAY_AUTH_MODE"]
        if _user_has_token():
            del variables["RAY_AUTH_TOKEN_PATH"]
        elif os.environ.get("RAY_AUTH_MODE", "token") == "token":
            stack.create_token()
        _set_variables(variables)
    _refresh_variables()


def _refresh_variables() -> None:
    """Make Ray read its variables again if it was imported before they were set."""
    if "ray" not in sys.modules:
        return
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    if not ray.is_initialized():
        Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _user_has_token() -> bool:
    variables = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(name in os.environ for name in variables) or USER_TOKEN.expanduser().is_file()


def _set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set. A token in RAY_AUTH_TOKEN takes
    precedence over a file, even if it is wrong."""
    for name, value in variables.items():
        if name != "RAY_AUTH_TOKEN_PATH" or "RAY_AUTH_TOKEN" not in os.environ:
            os.environ.setdefault(name, value)


def connect(address: str | None = None) -> None:
    """Join the cluster at an address or at RAY_ADDRESS, or start one for this process, which only
    this machine can reach."""
    address = _head(address or os.environ.get("RAY_ADDRESS"))
    use_token(address)
    import ray

    if ray.is_initialized():
        return
    # Ray repeats every worker's output on the driver's; ours goes to the run's folder.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    handler = signal.getsignal(signal.SIGTERM)
    if address:
        ray.init(address, **options)
    else:
        with _report_duration("starting Ray"):
            ray.init(include_dashboard=False, _node_ip_address=HOST, **options)
    if threading.current_thread() is threading.main_thread():
        # Ray has replaced it by one that exits with 15 instead of 143.
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _report_duration(text: str) -> Iterator[None]:
    """Print one line on stderr: a text at the start, and the seconds at the end."""
    start = time.monotonic()
    print(f"{text} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f" {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _head(address: str | None) -> str | None:
    """Return the head's address: `attune submit` takes a job server's, which cannot be joined."""
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
    """A machine of a cluster, as a task on it reports."""

    address: str
    cpus: float
    gpus: float
    versions: dict[str, str]
    sees_home: bool
    """Whether it sees the file that this process wrote."""
    unreachable: str
    """Why it does not reach the tracking server; empty where it does."""


def probe_machines(probe: Path, tracking: str) -> list[Machine]:
    """Run a task on each machine of the cluster that reports its versions, whether it sees a file,
    and whether it reaches a tracking server, if there is one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    pending = [
        ray.remote(_probe_machine)
        .options(
            num_cpus=0,  # a cluster may be busy
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(str(probe), tracking)
        for node in nodes
    ]
    return [
        Machine(
            address=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0),
            gpus=node["Resources"].get("GPU", 0),
            **report,
        )
        for node, report in zip(nodes, ray.get(pending, timeout=PROBE_SECONDS), strict=True)
    ]


def _probe_machine(probe: str, tracking: str) -> dict[str, Any]:
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
        "sees_home": Path(probe).exists(),
        "unreachable": unreachable,
    }


def fit(work: Callable[[dict[str, Any]], None], run: Run, cores: int) -> None:
    """Train a run with Ray Train; returns when it has ended or was asked to stop.

    Each worker calls `work` with the run's folder and the job's environment, and has `cores` cores.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from attune.platform.services.torch_backend import torch_config

    resources = worker_resources(run, cores)
    use_gpu = "GPU" in resources
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(run.folder), "ids": job_environment()},
        scaling_config=ScalingConfig(
            num_workers=run.workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        torch_config=torch_config("nccl" if use_gpu else "gloo", run.folder / "ray"),
        run_config=RunConfig(
            # A new name for each start: Ray would resume a run of the same name by itself, and we
            # resume from our own checkpoints.
            name=f"{run.name}-{uuid.uuid4().hex}",
            storage_path=str(run.folder / "ray"),
            failure_config=FailureConfig(max_failures=RETRIES),
        ),
    )
    trainer.fit()


def release_resources_of_killed_runs() -> None:
    """Remove the placement groups whose creator, the controller of a run, was killed.

    Other runs would wait forever for their resources. Ray Train's own clean-up queries the
    dashboard, which is not started for a single command.
    """
    import ray
    from ray._private.state import state
    from ray._raylet import PlacementGroupID
    from ray.core.generated import gcs_pb2
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    if not ray.is_initialized():  # asking for the job would start it
        return
    job = ray.get_runtime_context().get_job_id()
    data: Any = gcs_pb2.PlacementGroupTableData  # type: ignore[attr-defined]
    for content in state._connect_and_get_accessor().get_placement_group_table():
        group = data.FromString(content)
        is_removed = group.state == data.REMOVED
        if group.creator_actor_dead and not is_removed and group.creator_job_id.hex() == job:
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))


def describe_kill(error: BaseException | None) -> str:
    """Describe why a process of a run was killed; empty if none was."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    text = str(error)
    if isinstance(error, OutOfMemoryError) or any(each in text for each in OUT_OF_MEMORY):
        return "memory ran out, and Ray killed one of its processes"
    if isinstance(error, RayActorError):
        return "the process that controls it was killed, by the system if memory ran out"
    return ""


def worker_resources(run: Run, cores: int) -> dict[str, float]:
    """Return the resources of each worker of a run: cores, and GPUs where the cluster has enough
    or the user requested some."""
    import ray

    default = 1 if ray.cluster_resources().get("GPU", 0) >= run.workers else 0
    gpus = _read_count(GPUS, default)
    return {"CPU": cores, **({"GPU": gpus} if gpus else {})}


def _read_count(variable: str, default: int) -> int:
    return int(os.environ.get(variable) or default)


def describe_missing_resources(run: Run, cores: int) -> str:
    """Describe the resources that a run's workers wait for; empty where they have them."""
    import ray
    from ray.util import placement_group_table

    resources = worker_resources(run, cores)
    for group in placement_group_table().values():
        bundles = list(group["bundles"].values())
        if group["state"] == "PENDING" and bundles == [resources] * run.workers:
            total = {name: amount * run.workers for name, amount in resources.items()}
            return describe_shortage(total, ray.available_resources(), ray.cluster_resources())
    return ""


def describe_shortage(
    wanted: Mapping[str, float], free: Mapping[str, float], total: Mapping[str, float]
) -> str:
    """Describe each resource that is short, such as `2 CPUs: 0 of 2 free`.

    Where all are free, but not on one machine or only since just now, describe all.
    """
    missing = {name: n for name, n in wanted.items() if free.get(name, 0) < n}
    return ", ".join(
        f"{amount:g} {name}{'s' if amount > 1 else ''}: {free.get(name, 0):g} of "
        f"{total.get(name, 0):g} free"
        for name, amount in (missing or wanted).items()
    )


def plan_capacity(workers: int, runs: int) -> tuple[int, int]:
    """Return how many of the runs can be trained at once, and the cores of each worker.

    A worker gets as many cores as leave a place for all runs, unless the user requested a number;
    Ray gives a worker as many threads.
    """
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(each.get("CPU", 0)) for each in machines]
    at_once, cores = _share_cores(cpus, workers, runs, _read_count(CPUS, 0))
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus >= workers:  # each worker has one, or as many as requested
        at_once = max(1, min(at_once, gpus // (workers * max(1, _read_count(GPUS, 1)))))
    return at_once, cores


def _share_cores(
    machines: Sequence[int], workers: int, runs: int, requested: int = 0
) -> tuple[int, int]:
    def places(cores: int) -> int:
        return sum(each // cores for each in machines)

    if requested:
        return max(1, min(runs, places(requested) // workers)), requested
    for cores in range(max(machines), 0, -1):
        if places(cores) >= workers * runs:
            return runs, cores
    return max(1, places(1) // workers), 1
