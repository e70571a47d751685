"""Jobs of a Ray cluster: submit, follow, wait for and stop any attune command.

The project is shipped as a wheel; data that the cluster cannot see is shipped as folders. The
working folder is never shipped.
"""

import asyncio
import functools
import hashlib
import logging
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attune.platform.core.commit import VARIABLE, commit
from attune.platform.core.errors import ServiceError, UsageError, unknown_choice_error
from attune.platform.core.home import home
from attune.platform.core.logging import DASHBOARD, JOB
from attune.platform.services import cluster, stack, wheel

JOB_SERVER = "http://127.0.0.1:8265"
SHIPPED_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
LIVE = ("PENDING", "RUNNING")
SECONDS_TO_STOP = 300
"""Time to write a checkpoint before a stopped job is killed; Ray's default of 3 is too short."""
POLL_SECONDS, CONNECT_SECONDS = 1.0, 3.0
MAX_UPLOAD = 500 * 2**20
"""Bytes of all uploads of a job; Ray keeps them in the memory of its head."""
UPLOADS = "uploads"
ENTRY = "python -m attune.jobs.cli"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as its cluster knows it."""

    id: str
    state: str
    command: str
    options: str
    """The options of `attune submit` besides the command."""
    run: str
    """The name of its run or sweep; empty if it has none."""
    began: float
    """Start time in seconds since the epoch."""
    ended: float | None = None
    message: str = ""
    waits_for: str = ""
    """The resources that it waits for."""
    driver: str | None = None
    """Ray's internal id, which its tasks carry."""

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self.state not in LIVE


def resolve_address(address: str | None) -> str:
    """Return the address of the job server: the argument, RAY_ADDRESS or the local stack's."""
    part = stack.running(stack.RAY)
    return address or os.environ.get("RAY_ADDRESS") or (part.address if part else JOB_SERVER)


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, address: str | None = None):
        self.address = resolve_address(address)
        cluster.use_token(self.address)
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        try:
            with _address_wins(self.address):
                self.client = JobSubmissionClient(self.address)
        except AuthenticationError as error:
            raise UsageError(
                f"the Ray cluster at {self.address} rejected the token, or none was set: put its "
                f"token into ~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"no Ray job server responds at {self.address}: start one with 'attune up', or set "
                f"--address http://HOST:8265 ({error})"
            ) from error
        for name in ("ray", *(each.__module__ for each in type(self.client).__mro__)):
            logging.getLogger(name).setLevel(logging.WARNING)  # Ray sets them to INFO

    def submit(
        self,
        command: Sequence[str],
        *,
        options: Sequence[str] = (),
        run: str = "",
        uploads: Sequence[Path] = (),
        place: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Start an attune command with the code that runs here; return the job's id.

        `place` is ATTUNE_HOME on the cluster, if it differs. The options are only displayed.
        """
        job = f"{command[0]}-{secrets.token_hex(4)}"
        there = place or str(home())
        environment = {name: os.environ[name] for name in SHIPPED_VARIABLES if name in os.environ}
        environment |= {
            "ATTUNE_HOME": there,
            JOB: job,
            DASHBOARD: self.dashboard(job),
            VARIABLE: commit(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(SECONDS_TO_STOP),
            **(variables or {}),
        }
        metadata = {
            "command": shlex.join(["attune", *command]),
            "options": shlex.join(options),
            **({"run": run} if run else {}),
        }
        with tempfile.TemporaryDirectory() as folder:
            shipped: dict[str, Any] = {"py_modules": [str(wheel.build(Path(folder)))]}
            entry = ENTRY
            if uploads:
                packed, places = pack(uploads, Path(folder) / UPLOADS, f"{there}/{UPLOADS}")
                command = [places.get(str(Path(part)), part) for part in command]
                shipped["working_dir"] = str(packed)
                entry = "python -m attune.jobs.unpack"
            try:
                self.client.submit_job(
                    entrypoint=f"{entry} {shlex.join(command)}",
                    submission_id=job,
                    runtime_env={**shipped, "env_vars": environment},
                    metadata=metadata,
                )
            except RuntimeError as error:
                raise ServiceError(
                    f"the Ray job server at {self.address} did not accept the job: {error} (two "
                    f"clusters on one machine must use different ports: start one of them with "
                    f"'attune up', which chooses free ones)"
                ) from error
        return job

    def dashboard(self, job: str) -> str:
        """Return the address of a job's page on the dashboard."""
        base = self.address if self.address.startswith("http") else ""
        return f"{base}/#/jobs/{job}" if base else ""

    def all(self) -> list[Job]:
        """Return every job, oldest first, with the resources that waiting ones wait for."""
        jobs = [_to_job(details) for details in self.client.list_jobs() if details.submission_id]
        demands = self._demands() if any(not job.over for job in jobs) else {}
        waiting = [
            job if job.over or job.driver not in demands
            else replace(
                job, waits_for=cluster.describe_shortage(demands[job.driver], *self._resources())
            )
            for job in jobs
        ]  # fmt: skip
        return sorted(waiting, key=lambda job: job.began)

    def find(self, text: str) -> Job:
        """Return a job by its id, or the latest job of a run or sweep by its name."""
        jobs = self.all()
        for job in reversed(jobs):
            if text in (job.id, job.run):
                return job
        if not jobs:
            raise UsageError(f"unknown job '{text}': the cluster at {self.address} has no jobs yet")
        names = [job.id for job in jobs]
        raise UsageError(
            f"{unknown_choice_error('job', text, names)} ('attune jobs list' lists all)"
        )

    def logs(self, job: str) -> str:
        """Return the output of a job."""
        return str(self.client.get_job_logs(job))

    def follow(self, job: str, show: Callable[[str], None]) -> Job:
        """Pass the output of a job to `show` until it ends; return the ended job."""

        async def tail() -> None:
            async for text in self.client.tail_job_logs(job):
                show(text)

        asyncio.run(tail())
        return self.wait(job)

    def wait(self, job: str, report: Callable[[str], None] = lambda _: None) -> Job:
        """Return the job once it has ended; report the resources that it waits for meanwhile."""
        reported = ""
        while not (current := self.find(job)).over:
            if current.waits_for != reported:
                reported = current.waits_for
                report(f"job {job} waits for {reported}" if reported else f"job {job} continues")
            time.sleep(POLL_SECONDS)
        return current

    def stop(self, job: str) -> None:
        """Stop a job as Ctrl-C would: it writes a checkpoint first."""
        self.client.stop_job(job)

    def _demands(self) -> dict[str, dict[str, float]]:
        """Return the pending resources by job, of placement groups and of single tasks."""
        from ray.util.state import list_placement_groups, list_tasks

        demands: dict[str, dict[str, float]] = {}
        groups = list_placement_groups(
            self.address, filters=[("state", "=", "PENDING")], detail=True
        )
        for group in groups:
            for bundle in group.bundles or ():
                _add_resources(
                    demands.setdefault(group.creator_job_id, {}), bundle["unit_resources"]
                )
        tasks = list_tasks(
            self.address, filters=[("state", "=", "PENDING_NODE_ASSIGNMENT")], detail=True
        )
        for task in tasks:
            if task.job_id not in demands:
                _add_resources(demands.setdefault(task.job_id, {}), task.required_resources or {})
        return demands

    def _resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the free and the total resources of the cluster."""
        answer = self.client._do_request("GET", "/api/cluster_status").json()
        usage = answer["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
        return (
            {name: total - used for name, (used, total) in usage.items()},
            {name: total for name, (_, total) in usage.items()},
        )


def has_ended(job: str, dashboard: str) -> bool | None:
    """Return whether a job has ended, by the address of its page; None if its server cannot tell.

    A server that does not know the job has been started since.
    """
    from ray.exceptions import RayError

    address = dashboard.partition("/#/")[0]
    if not _accepts_connections(address):
        return None
    try:
        known = {each.submission_id: each for each in Jobs(address).client.list_jobs()}
        return _to_job(known[job]).over if job in known else True
    except (UsageError, RayError, RuntimeError, OSError):
        return None


@contextmanager
def _address_wins(address: str) -> Iterator[None]:
    """Hide RAY_ADDRESS while Ray connects to a job server: it would override the address."""
    ray_address = os.environ.pop("RAY_ADDRESS", None) if "://" in address else None
    try:
        yield
    finally:
        if ray_address is not None:
            os.environ["RAY_ADDRESS"] = ray_address


@functools.cache
def _accepts_connections(address: str) -> bool:
    """Return whether a server listens at an address; Ray's client would try for minutes."""
    parts = urllib.parse.urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def _add_resources(sums: dict[str, float], resources: Mapping[str, float]) -> None:
    for name, amount in resources.items():
        sums[name] = sums.get(name, 0) + amount


def _to_job(details: Any) -> Job:
    metadata = details.metadata or {}
    return Job(
        id=details.submission_id,
        state=details.status.value,
        command=metadata.get("command", details.entrypoint),
        options=metadata.get("options", ""),
        run=metadata.get("run", ""),
        began=(details.start_time or 0) / 1000,
        ended=None if details.end_time is None else details.end_time / 1000,
        message=details.message or "",
        driver=details.job_id,
    )


def pack(uploads: Sequence[Path], folder: Path, there: str) -> tuple[Path, dict[str, str]]:
    """Copy files and folders into one folder to be shipped, each under a hash of its contents.

    Return the folder, and the path on the cluster by the path that was typed.
    """
    places = {}
    size = 0
    for path in uploads:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        size += sum(p.stat().st_size for p in files)
        if size > MAX_UPLOAD:
            raise UsageError(
                f"--upload {path}: expected at most {MAX_UPLOAD // 2**20} MB in total: put it on a "
                f"disk that the cluster sees, and use its path there"
            )
        digest = hashlib.sha256()
        for file in files:
            digest.update(str(file.relative_to(path.parent)).encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        into = folder / f"{path.name}-{digest.hexdigest()[:12]}" / path.name
        into.parent.mkdir(parents=True)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, into)
        places[str(path)] = f"{there}/{into.relative_to(folder)}"
    return folder, places
