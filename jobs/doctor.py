"""`attune doctor`: check that everything a run needs is present, and say how to fix the rest."""

import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.platform.core.errors import UsageError
from attune.platform.core.home import home
from attune.platform.services import stack

GIGABYTE = 2**30
ENOUGH_DISK = 10 * GIGABYTE
MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]!![/yellow]", "error": "[red]no[/red]"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str
    """What the check measured; `found` in the JSON output."""
    fix: str | None = None


def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Check the Ray cluster instead: token, machines, versions, shared disk, MLflow.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check versions, devices, compiler, cluster, tracking store, data and disk; say what to fix.

    The exit code is 1 if something is missing that Attune cannot run without. With --cluster it
    checks the Ray cluster at RAY_ADDRESS, or the one that `attune up` started. Submit it as a job
    to check a cluster that cannot be joined from here.

    Examples:

    - `attune doctor`
    - `attune doctor --cluster`
    - `attune submit --address http://head:8265 --follow -- doctor --cluster`
    """
    checks = [
        check for run in (CLUSTER_CHECKS if cluster else CHECKS) for check in _run_doctor_check(run)
    ]
    ok = all(check.status != "error" for check in checks)
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(MARKS[check.status], check.name, escape(check.detail))
        if check.fix:
            table.add_row("", "", f"[bold]fix:[/bold] {escape(check.fix)}")
    screen = console(as_json)
    screen.print(table)
    screen.print("Everything is in place." if ok else "Something is missing: see 'fix' above.")
    if as_json:
        print_json({"ok": ok, "checks": [_doctor_check_to_json(check) for check in checks]})
    raise typer.Exit(0 if ok else 1)


def _doctor_check_to_json(check: Check) -> dict[str, str | None]:
    return {"name": check.name, "status": check.status, "found": check.detail, "fix": check.fix}


def _run_doctor_check(run: Callable[[], list[Check]]) -> list[Check]:
    try:
        return run()
    except Exception as error:  # a failing check must not hide the others
        name = run.__name__.removeprefix("_check_")
        detail = f"{type(error).__name__}: {error}"
        return [
            Check(
                name=name,
                status="error",
                detail=detail,
                fix="read the message; it names what is wrong",
            )
        ]


def _diagnose_python() -> list[Check]:
    version = platform.python_version()
    if version.startswith("3.11."):
        return [Check(name="python", status="ok", detail=version)]
    fix = "create a virtual environment with Python 3.11"
    return [Check(name="python", status="error", detail=version, fix=fix)]


def _diagnose_packages() -> list[Check]:
    """Compare the requirements of our distribution with the installed packages."""
    needed = [Requirement(line) for line in metadata.requires("attune") or []]
    checks = []
    for requirement in needed:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        right = version is not None and requirement.specifier.contains(version, prereleases=True)
        fix = None if right else f"pip install --constraint constraints.txt '{requirement}'"
        checks.append(
            Check(
                name=requirement.name,
                status="ok" if right else "error",
                detail=version or "not installed",
                fix=fix,
            )
        )
    return checks


def _diagnose_devices() -> list[Check]:
    import torch  # takes a second to import, which would slow down `attune --help`

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    checks = [
        Check(
            name="cpu",
            status="ok",
            detail=f"{cores} cores, {memory.available / GIGABYTE:.0f} of "
            f"{memory.total / GIGABYTE:.0f} GB of memory free",
        )
    ]
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    detail = ", ".join(names) or "none: training uses the CPU, with gloo"
    return [*checks, Check(name="gpu", status="ok", detail=detail)]


def _diagnose_compiler() -> list[Check]:
    """Look for a C++ compiler: DeepSpeed may compile extensions on GPUs, never on CPUs."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return [Check(name="compiler", status="ok", detail=path)]
    fix = "install a C++ compiler, such as g++ (DeepSpeed may need it on GPUs, never on CPUs)"
    return [Check(name="compiler", status="warning", detail="none", fix=fix)]


def _diagnose_cluster() -> list[Check]:
    part = stack.running(stack.RAY)
    if part is not None:
        problem = part.problem()
        detail = f"the local stack, at {part.address}" + (f": it {problem}" if problem else "")
        fix = "'attune down', then 'attune up'" if problem else None
        return [Check(name="cluster", status="warning" if fix else "ok", detail=detail, fix=fix)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        fix = "check the Ray cluster with 'ray status', or end it with 'ray stop'"
        return [Check(name="cluster", status="warning", detail="no response in 60 s", fix=fix)]
    if done.returncode == 0:
        active = sum(line.strip().startswith("1 ") for line in done.stdout.splitlines())
        return [Check(name="cluster", status="ok", detail=f"Ray is running, nodes: {active}")]
    detail = "no Ray cluster is running: a run starts its own"
    return [Check(name="cluster", status="ok", detail=detail)]


def _diagnose_tracking_store() -> list[Check]:
    address = os.environ.get("MLFLOW_TRACKING_URI", "")
    if address.startswith(("http://", "https://")):
        return [_diagnose_tracking_server(address)]
    store = home() / "mlflow.db"
    if not store.exists():
        return [Check(name="tracking", status="ok", detail=f"{store} (the first run creates it)")]
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as database:
            count = database.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
    except sqlite3.Error as error:
        fix = f"{store} is damaged ({error}): restore it from a copy, or move it away"
        return [Check(name="tracking", status="error", detail=str(store), fix=fix)]
    return [Check(name="tracking", status="ok", detail=f"{store} with {count:,} runs")]


def _diagnose_tracking_server(address: str) -> Check:
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/version", timeout=5) as answer:
            detail = f"{address}, MLflow {answer.read().decode()}"
            return Check(name="tracking", status="ok", detail=detail)
    except (OSError, ValueError) as error:
        fix = "start the tracking server, or unset MLFLOW_TRACKING_URI to use the local store"
        return Check(name="tracking", status="error", detail=f"{address}: {error}", fix=fix)


def _diagnose_data() -> list[Check]:
    from attune.platform.data.dataset_folder import MANIFEST, read_dataset_manifest

    folders = sorted(path.parent for path in (home() / "data").glob(f"*/{MANIFEST}"))
    if not folders:
        detail = "nothing prepared yet; the bundled corpus needs no preparation"
        return [Check(name="data", status="ok", detail=detail)]
    splits = {folder.name: read_dataset_manifest(folder)["splits"] for folder in folders}
    counts = [
        f"{name} ({sum(split['samples'] for split in stored.values()):,})"
        for name, stored in splits.items()
    ]
    return [Check(name="data", status="ok", detail=", ".join(counts) + " samples")]


def _diagnose_disk() -> list[Check]:
    place: Path = home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{free / GIGABYTE:.0f} GB free at {home()}"
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = f"{place} is not a writable folder: set ATTUNE_HOME to one that is"
        return [Check(name="disk", status="error", detail=detail, fix=fix)]
    if free < ENOUGH_DISK:
        fix = f"checkpoints need {ENOUGH_DISK // GIGABYTE} GB: set ATTUNE_HOME to a larger disk"
        return [Check(name="disk", status="warning", detail=detail, fix=fix)]
    return [Check(name="disk", status="ok", detail=detail)]


def _diagnose_machines() -> list[Check]:
    """Check the cluster with one task on each of its machines."""
    from attune.platform import tracking
    from attune.platform.services import cluster

    part = stack.running(stack.RAY)
    address = os.environ.get("RAY_ADDRESS") or (stack.head_address(part) if part else None)
    if address is None:
        fix = "start one here with 'attune up', set RAY_ADDRESS, or submit the check as a job: "
        fix += "'attune submit --address http://HOST:8265 --follow -- doctor --cluster'"
        return [Check(name="address", status="error", detail="no cluster is configured", fix=fix)]
    try:
        cluster.connect(address)
    except UsageError as error:
        fix = (
            f"submit it as a job: 'attune submit --address {address} --follow -- doctor --cluster'"
        )
        return [Check(name="address", status="error", detail=str(error), fix=fix)]
    except (OSError, RuntimeError, ValueError) as error:
        short = str(error).strip().splitlines()[0][:300]
        fix = "check that it runs ('ray status' on it), its address, and that you have its token"
        return [Check(name="address", status="error", detail=f"{address}: {short}", fix=fix)]
    home().mkdir(parents=True, exist_ok=True)
    store = tracking.store_uri()
    with tempfile.NamedTemporaryFile(dir=home(), prefix=".doctor-") as probe:
        machines = cluster.probe_machines(Path(probe.name), store)
    cpus, gpus = sum(each.cpus for each in machines), sum(each.gpus for each in machines)
    resources = f"{len(machines)}, with {cpus:g} CPUs and {gpus:g} GPUs"
    own = next((each.versions for each in machines), {})
    others = {
        f"{name} {each.versions[name]} at {each.address}"
        for each in machines
        for name in own
        if each.versions[name] != own[name]
    }
    blind = [each.address for each in machines if not each.sees_home]
    cut_off = [f"{each.address} ({each.unreachable})" for each in machines if each.unreachable]
    versions = ", ".join(f"{name} {version}" for name, version in own.items())
    return [
        Check(name="address", status="ok", detail=f"{address}, which accepts the token"),
        Check(name="machines", status="ok" if cpus else "error", detail=resources),
        _diagnose_all(
            "versions", f"{versions}, on all machines", sorted(others),
            "install the same versions on all machines",
        ),
        _diagnose_all(
            "home", f"all machines see {home()}", [f"{each} does not see it" for each in blind],
            "put ATTUNE_HOME on a disk that all machines mount at the same path",
        ),
        _diagnose_all(
            "tracking", f"all machines reach {store.rpartition('@')[2]}", cut_off,
            "start a tracking server that all machines reach, or set MLFLOW_TRACKING_URI",
        ),
    ]  # fmt: skip


def _diagnose_all(name: str, detail: str, problems: list[str], fix: str) -> Check:
    if problems:
        return Check(name=name, status="error", detail="; ".join(problems), fix=fix)
    return Check(name=name, status="ok", detail=detail)


CLUSTER_CHECKS: tuple[Callable[[], list[Check]], ...] = (_diagnose_machines,)
CHECKS: tuple[Callable[[], list[Check]], ...] = (
    _diagnose_python,
    _diagnose_packages,
    _diagnose_devices,
    _diagnose_compiler,
    _diagnose_cluster,
    _diagnose_tracking_store,
    _diagnose_data,
    _diagnose_disk,
)
