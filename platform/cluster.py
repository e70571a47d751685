"""Ray: joining or starting a cluster, and running a training job in it."""

import itertools
import logging
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attune.platform import wheel
from attune.platform.errors import UsageError
from attune.platform.home import home
from attune.platform.store import Run

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
JOB_SERVER = "http://127.0.0.1:8265"
SHIPPED_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")

RETRIES = 3
"""How often a run is taken up again after a worker died."""


def use_token() -> None:
    """Show Ray the user's token wherever there is one; its clients do not look by themselves."""
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or Path("~/.ray/auth_token").expanduser().is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine for this process."""
    use_token()
    import ray

    if ray.is_initialized():
        return
    # Ray repeats every worker's output on the driver's; ours goes to the run's folder.
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not os.environ.get("RAY_ADDRESS"):
        options["include_dashboard"] = False
    ray.init(**options)


def fit(run: Run, cores: int) -> None:
    """Train a run with Ray Train, so many cores a worker; returns when it has ended or was asked to
    stop."""
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
            resources_per_worker={"CPU": cores},
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
    each worker: the most with which all have a place; Ray gives a worker as many threads."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    at_once, cores = _shared([int(each.get("CPU", 0)) for each in machines], workers, runs)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus >= workers:  # then each worker has one
        at_once = min(at_once, gpus // workers)
    return at_once, cores


def _shared(machines: Sequence[int], workers: int, runs: int) -> tuple[int, int]:
    for cores in range(max(machines), 0, -1):
        if sum(each // cores for each in machines) >= workers * runs:
            return runs, cores
    return max(1, sum(machines) // workers), 1


def log_file(run: Run) -> Path:
    """What a run's workers had to say."""
    return run.folder / "log.txt"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a cluster."""

    id: str
    address: str
    client: Any

    def follow(self, show: Callable[[str], None]) -> str:
        """Pass on what the job prints until it ends; how it ended."""
        import asyncio

        async def tail() -> None:
            async for text in self.client.tail_job_logs(self.id):
                show(text)

        asyncio.run(tail())
        return str(self.client.get_job_status(self.id).value)


def submit(command: Sequence[str], address: str | None = None) -> Job:
    """Start an attune command as a job, with the code that runs here."""
    use_token()
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    address = address or os.environ.get("RAY_ADDRESS") or JOB_SERVER
    try:
        client = JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UsageError(
            f"the Ray cluster at {address} wants its token: put it into ~/.ray/auth_token or "
            f"RAY_AUTH_TOKEN"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray job server answers at {address}: start one with 'ray start --head', or name "
            f"it with --address http://HOST:8265 ({error})"
        ) from error
    variables = {name: os.environ[name] for name in SHIPPED_VARIABLES if name in os.environ}
    with tempfile.TemporaryDirectory() as folder:
        try:
            job = client.submit_job(
                entrypoint=f"python -m attune.jobs.cli {shlex.join(command)}",
                runtime_env={
                    "py_modules": [str(wheel.build(Path(folder)))],
                    "env_vars": {**variables, "ATTUNE_HOME": str(home())},
                },
                metadata={"command": shlex.join(["attune", *command])},
            )
        except RuntimeError as error:
            raise UsageError(
                f"the Ray job server at {address} does not take the job: {error} (two clusters on "
                f"one machine keep each other from taking jobs: 'ray status' shows which are there)"
            ) from error
    return Job(id=job, address=address, client=client)
