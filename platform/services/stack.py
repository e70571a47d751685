"""The local stack: a Ray head, an MLflow server and the page, as processes of this machine.

Each part is started with a marker in its environment, which its child processes inherit: it
identifies the processes to stop. The running parts are recorded in `ATTUNE_HOME/stack/stack.json`;
only their owner can read the secrets beside it.
"""

import base64
import dataclasses
import fcntl
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from attune.platform.core.errors import ServiceError, UsageError
from attune.platform.core.home import home
from attune.platform.services import stack_processes
from attune.platform.services.stack_processes import HOST, MLFLOW_USER
from attune.platform.services.tracking_store import relocate_tracking_store

RAY, MLFLOW, PAGE = "ray", "mlflow", "page"
PARTS = (RAY, MLFLOW, PAGE)
USUAL_PORTS = {RAY: 8265, MLFLOW: 5000, PAGE: 7860}
PORT_OPTIONS = {RAY: "--dashboard-port", MLFLOW: "--mlflow-port", PAGE: "--ui-port"}
MARK = "ATTUNE_PART"
SECONDS_TO_START, SECONDS_TO_STOP, SECONDS_TO_ANSWER = 300, 20, 10
SECONDS_FOR_JOBS = 120.0
"""Time for jobs to write their checkpoints before the stack stops."""
PAUSE = 0.5
MEGABYTE = 2**20

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the stack: its first process, and where it listens."""

    name: str
    pid: int
    started: float
    """Start time of the process: another process may get the same pid later."""
    mark: str
    port: int
    ports: dict[str, int] = field(default_factory=dict)
    """Ray's other ports: `head`, `agent`, `metrics` and so on."""
    scratch: str = ""
    """Ray's own folder; the paths of its sockets must be short, so it is not in ATTUNE_HOME."""
    password: bool = False
    """Whether MLflow asks for one."""

    @property
    def address(self) -> str:
        """Its URL."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        """The file with its output."""
        return folder() / f"{self.name}.log"

    def alive(self) -> bool:
        """Return whether its first process runs."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and abs(process.create_time() - self.started) < 1
        return False

    def processes(self) -> list[psutil.Process]:
        """Return its processes: the first one and all that it started."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    processes.append(process)
        return processes

    def memory(self) -> float:
        """Return the memory of all its processes in megabytes; shared pages count once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                used = process.memory_full_info()
                total += getattr(used, "pss", used.rss)
        return total / MEGABYTE

    def problem(self) -> str:
        """Describe why it does not respond; empty where it does."""
        if not self.alive():
            return "is not running"
        try:
            CHECKS[self.name](self)
        except (OSError, ValueError) as error:
            return f"does not respond: {error}"
        return ""


def folder() -> Path:
    """Return the folder of the stack's state, secrets and logs."""
    return home() / "stack"


def token_file() -> Path:
    """Return the file with the token of the stack's Ray, and of clusters that commands start."""
    return folder() / "ray_token"


def create_token() -> None:
    """Write the token for Ray, unless there is one."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    stack_processes.create_secret(token_file())


def password_file() -> Path:
    """Return the file with the password of the stack's MLflow, if it has one."""
    return folder() / "mlflow_password"


def running_parts() -> dict[str, Part]:
    """Return the parts that were started and not stopped, by name; some may have died."""
    path = folder() / "stack.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["home"] != str(home()):  # a copy: the processes belong to the original
            return {}
        return {each["name"]: Part(**each) for each in content["parts"]}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is damaged ({error}): remove it, and end the processes of the stack by hand"
        ) from error


def running(name: str) -> Part | None:
    """Return a part, if it runs."""
    part = running_parts().get(name)
    return part if part is not None and part.alive() else None


def head_address(part: Part) -> str:
    """Return the value of RAY_ADDRESS for the stack's Ray."""
    return f"{HOST}:{part.ports['head']}"


def ray_variables() -> dict[str, str]:
    """Return the environment variables that clients of the stack's Ray need."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file()),
        # Despite its name it matters on Linux: without it Ray replaces the loopback address by one
        # that other machines can reach.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def is_stack(address: str | None) -> bool:
    """Return whether an address is that of the stack's Ray: its dashboard or its head."""
    part = running(RAY)
    if part is None or not address:
        return False
    parsed = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
    try:
        local = parsed.hostname in (HOST, "localhost")
        return local and parsed.port in (part.port, part.ports["head"])
    except ValueError:  # not a port
        return False


def up(
    ports: Mapping[str, int | None],
    *,
    head_port: int | None = None,
    cores: int | None = None,
    password: bool = False,
    report: Report = lambda _: None,
) -> dict[str, Part]:
    """Start the parts that do not run yet; return all of them when they respond."""
    with _lock():
        if password and importlib.util.find_spec("flask_wtf") is None:
            raise UsageError("--mlflow-auth needs another package: pip install 'mlflow[auth]'")
        known = running_parts()
        _check_running_parts(
            {name: part for name, part in known.items() if part.alive()}, ports, password
        )
        missing = [name for name in PARTS if name not in known or not known[name].alive()]
        new_ports = {PORT_OPTIONS[name]: ports.get(name) or USUAL_PORTS[name] for name in missing}
        if RAY in missing and head_port is not None:
            new_ports["--ray-port"] = head_port
        stack_processes.check_ports(new_ports)
        for name in missing:
            if name in known:
                report(f"{name} has died: starting it again")
                _stop_parts([known.pop(name)])
        new_parts: dict[str, Part] = {}
        try:
            # One after the other: Ray gives its own processes 30 s to start, which is short on a
            # busy machine.
            for name in missing:
                report(f"starting {name} ...")
                port = ports.get(name) or USUAL_PORTS[name]
                new_parts[name] = _start_part(
                    name, port, head_port, cores, password, list(new_ports.values())
                )
                _write_state({**known, **new_parts})
                _wait_until_ready(new_parts[name])
        except BaseException:
            _stop_parts(list(new_parts.values()))
            _write_state(known)
            raise
        return {name: {**known, **new_parts}[name] for name in PARTS}


def down(report: Report = lambda _: None) -> list[Part]:
    """Stop all parts and return them; jobs are stopped first, so that they write checkpoints."""
    with _lock():
        stopped = list(running_parts().values())
        for part in stopped:
            if part.name == RAY and part.alive():
                _stop_ray_jobs(part, report)
        _stop_parts(stopped)
        _write_state({})
    return stopped


def _check_running_parts(
    known: Mapping[str, Part], ports: Mapping[str, int | None], password: bool
) -> None:
    """Raise UsageError where a running part has another port, or lacks the password."""
    for name, part in known.items():
        port = ports.get(name)
        if port not in (None, part.port):
            raise UsageError(
                f"{name} already runs at port {part.port}: 'attune down' first to move it to {port}"
            )
    if password and MLFLOW in known and not known[MLFLOW].password:
        raise UsageError("mlflow runs already, without a password: 'attune down' first")


def _start_part(
    name: str, port: int, head_port: int | None, cores: int | None, password: bool,
    reserved: list[int],
) -> Part:  # fmt: skip
    mark = f"{name}-{secrets.token_hex(8)}"
    details: dict[str, Any] = {}
    environment = {**os.environ, MARK: mark}
    if name == RAY:
        others = ("head", "agent", "agent_grpc", "metrics", "client", "runtime_env")
        free = stack_processes.free_ports(len(others), reserved)
        details["ports"] = dict(zip(others, free, strict=True))
        if head_port is not None:
            details["ports"]["head"] = head_port
        details["scratch"] = tempfile.mkdtemp(prefix="attune-ray-")
        command = stack_processes.ray_command(port, details["ports"], details["scratch"], cores)
        for variable in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            environment.pop(variable, None)
        create_token()
        environment |= ray_variables() | {
            # Ray's default timeouts are too short for a busy machine.
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(SECONDS_TO_START),
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(SECONDS_TO_START),
            # Jobs have ended before it is stopped, so there is nothing to drain.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # Jobs use the `python` and `pip` that Ray finds here.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
    elif name == MLFLOW:
        details["password"] = password
        relocate_tracking_store()
        command = stack_processes.mlflow_command(port, password)
        environment |= stack_processes.mlflow_environment(
            folder(), password_file() if password else None
        )
    else:
        command = [sys.executable, "-m", "attune.jobs.cli", "ui", "--without-runs",
                   "--port", str(port)]  # fmt: skip
    with (folder() / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=home(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives this terminal and its Ctrl-C
        )
    started = psutil.Process(process.pid).create_time()
    return Part(name=name, pid=process.pid, started=started, mark=mark, port=port, **details)


def _wait_until_ready(part: Part) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while problem := part.problem():
        if not part.alive() or time.monotonic() > end:
            tail = _keep_ray_logs(part, stack_processes.read_log_tail(part.log))
            raise ServiceError(
                f"{part.name} did not start: it {problem}; the end of {part.log}:\n{tail}"
            )
        time.sleep(PAUSE)


def _keep_ray_logs(part: Part, text: str) -> str:
    """Copy Ray's logs from its own folder, which is removed with it; return a text with the paths
    of the copies."""
    logs = (Path(part.scratch) / "session_latest" / "logs").resolve()
    if not part.scratch or not logs.is_dir():
        return text
    copies = folder() / "ray-logs"
    shutil.rmtree(copies, ignore_errors=True)
    shutil.copytree(logs, copies, ignore_dangling_symlinks=True)
    for path in (logs, Path(part.scratch) / "session_latest" / "logs"):
        text = text.replace(str(path), str(copies))
    return text


def _stop_parts(parts: list[Part]) -> None:
    """Terminate the first processes, which end their children; kill those that remain."""
    first = [psutil.Process(part.pid) for part in parts if part.alive()]
    stack_processes.signal_processes(first, psutil.Process.terminate, SECONDS_TO_STOP)
    left = [process for part in parts for process in part.processes()]
    stack_processes.signal_processes(left, psutil.Process.kill, SECONDS_TO_STOP)
    for part in parts:
        if part.scratch:
            shutil.rmtree(part.scratch, ignore_errors=True)


def _stop_ray_jobs(part: Part, report: Report) -> None:
    with suppress(OSError, ValueError):
        for job in _live_ray_jobs(part):
            report(f"stopping job {job}")
            ask(part, f"/api/jobs/{job}/stop", method="POST")
        end = time.monotonic() + SECONDS_FOR_JOBS
        while _live_ray_jobs(part) and time.monotonic() < end:
            time.sleep(PAUSE)


def _live_ray_jobs(part: Part) -> list[str]:
    jobs = ask(part, "/api/jobs/")
    live = ("PENDING", "RUNNING")
    return [each["submission_id"] for each in jobs if each["status"] in live and
            each["submission_id"]]  # fmt: skip


def ask(part: Part, path: str, *, port: int | None = None, method: str = "GET") -> Any:
    """Return the response of a part at a path of its API, decoded where it is JSON."""
    connection = http.client.HTTPConnection(HOST, port or part.port, timeout=SECONDS_TO_ANSWER)
    try:
        connection.request(method, path, headers=_headers(part))
        answer = connection.getresponse()
        text = answer.read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__} at {path}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise OSError(f"{answer.status} {answer.reason} at {path}: {text[:200]}")
    return json.loads(text) if text[:1] in ("{", "[") else text


def _headers(part: Part) -> dict[str, str]:
    if part.name == RAY:
        return {"Authorization": f"Bearer {token_file().read_text(encoding='utf-8')}"}
    if part.password:
        name = f"{MLFLOW_USER}:{password_file().read_text(encoding='utf-8')}"
        return {"Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"}
    return {}


def _check_ray(part: Part) -> None:
    ask(part, "/api/jobs/")
    ask(part, "/api/local_raylet_healthz", port=part.ports["agent"])  # which takes the jobs


def _check_mlflow(part: Part) -> None:
    ask(part, "/api/2.0/mlflow/experiments/search?max_results=1")


def _check_page(part: Part) -> None:
    ask(part, "/config")


CHECKS: dict[str, Callable[[Part], None]] = {
    RAY: _check_ray,
    MLFLOW: _check_mlflow,
    PAGE: _check_page,
}


@contextmanager
def _lock() -> Iterator[None]:
    """Hold a lock: only one command at a time starts or stops parts."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_state(parts: Mapping[str, Part]) -> None:
    path = folder() / "stack.json"
    new = path.with_suffix(f".{os.getpid()}")
    content = {"home": str(home()), "parts": [dataclasses.asdict(part) for part in parts.values()]}
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
