"""The local stack: a Ray head, an MLflow server and the page, as processes of this machine.

Each part is started with a mark in its environment, which all processes that it starts inherit: by
it they are found again and stopped, those and no others. What runs is written to
`ATTUNE_HOME/stack/stack.json`; the secrets beside it can be read by their owner alone.
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
import socket
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

RAY, MLFLOW, PAGE = "ray", "mlflow", "page"
PARTS = (RAY, MLFLOW, PAGE)
USUAL_PORTS = {RAY: 8265, MLFLOW: 5000, PAGE: 7860}
PORT_OPTIONS = {RAY: "--dashboard-port", MLFLOW: "--mlflow-port", PAGE: "--ui-port"}
HOST = "127.0.0.1"
MARK = "ATTUNE_PART"
MLFLOW_USER = "admin"
OBJECT_STORE = 2**29
"""Bytes; only names, numbers and files pass between our processes."""
SECONDS_TO_START, SECONDS_TO_STOP, SECONDS_TO_ANSWER = 300, 20, 10
SECONDS_FOR_JOBS = 120.0
"""To write their checkpoints when the stack is stopped under them."""
PAUSE = 0.5
LOG_LINES = 15
MEGABYTE = 2**20

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the stack: its first process, and where it listens."""

    name: str
    pid: int
    started: float
    """When the process began: another one may get its number later."""
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
        """Where to look at it."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        """What it prints."""
        return folder() / f"{self.name}.log"

    def alive(self) -> bool:
        """Whether its first process runs."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and abs(process.create_time() - self.started) < 1
        return False

    def processes(self) -> list[psutil.Process]:
        """All that it has started, and itself."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def memory(self) -> float:
        """Megabytes of all its processes; what they share counts once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                used = process.memory_full_info()
                total += getattr(used, "pss", used.rss)
        return total / MEGABYTE

    def problem(self) -> str:
        """What keeps it from answering; empty where it answers."""
        if not self.alive():
            return "is not running"
        try:
            CHECKS[self.name](self)
        except (OSError, ValueError) as error:
            return f"does not answer: {error}"
        return ""


def folder() -> Path:
    """Where the stack keeps its state, secrets and logs."""
    return home() / "stack"


def token_file() -> Path:
    """The token that the stack's Ray asks for."""
    return folder() / "ray_token"


def password_file() -> Path:
    """The password that the stack's MLflow asks for, if it does."""
    return folder() / "mlflow_password"


def parts() -> dict[str, Part]:
    """What was started and not stopped, by name; some of it may have died."""
    path = folder() / "stack.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {each["name"]: Part(**each) for each in content["parts"]}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is damaged ({error}): remove it, and end by hand what it was about"
        ) from error


def running(name: str) -> Part | None:
    """A part, if it runs."""
    part = parts().get(name)
    return part if part is not None and part.alive() else None


def head_address(part: Part) -> str:
    """What RAY_ADDRESS is for the stack's Ray."""
    return f"{HOST}:{part.ports['head']}"


def ray_variables() -> dict[str, str]:
    """What Ray must find in the environment of whoever talks to the stack's Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file()),
        # Its name tells of other systems; what it does is to keep Ray on the loopback address,
        # which it would otherwise replace by one that others can reach.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def is_stack(address: str | None) -> bool:
    """Whether an address is that of the stack's Ray: its dashboard or its head."""
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
    say: Say = lambda _: None,
) -> dict[str, Part]:
    """Start what does not run yet; returns when all of it answers."""
    with _alone():
        if password and importlib.util.find_spec("flask_wtf") is None:
            raise UsageError("MLflow cannot ask for a password yet: pip install 'mlflow[auth]'")
        known = parts()
        _check_kept({name: part for name, part in known.items() if part.alive()}, ports, password)
        missing = [name for name in PARTS if name not in known or not known[name].alive()]
        for name in missing:
            _check_free(ports.get(name) or USUAL_PORTS[name], PORT_OPTIONS[name])
        if RAY in missing and head_port is not None:
            _check_free(head_port, "--ray-port")
        for name in missing:
            if name in known:
                say(f"{name} has died: starting it again")
                _stop([known.pop(name)])
        begun: dict[str, Part] = {}
        try:
            # One after the other: Ray gives its own processes 30 s to come up, which is little on a
            # busy machine.
            for name in missing:
                say(f"starting {name} ...")
                port = ports.get(name) or USUAL_PORTS[name]
                begun[name] = _started(name, port, head_port, cores, password)
                _write({**known, **begun})
                _wait(begun[name])
        except BaseException:
            _stop(list(begun.values()))
            _write(known)
            raise
        return {name: {**known, **begun}[name] for name in PARTS}


def down(say: Say = lambda _: None) -> list[Part]:
    """Stop all that was started here, jobs first, so that they keep what they have done."""
    with _alone():
        found = list(parts().values())
        for part in found:
            if part.name == RAY and part.alive():
                _stop_jobs(part, say)
        _stop(found)
        _write({})
    return found


def _check_kept(known: Mapping[str, Part], ports: Mapping[str, int | None], password: bool) -> None:
    """What runs stays as it is, so it must be what is asked for."""
    for name, part in known.items():
        port = ports.get(name)
        if port not in (None, part.port):
            raise UsageError(
                f"{name} runs already at port {part.port}: 'attune down' first to move it to {port}"
            )
    if password and MLFLOW in known and not known[MLFLOW].password:
        raise UsageError("mlflow runs already, without a password: 'attune down' first")


def _check_free(port: int, option: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            [other] = _free_ports(1)
            raise UsageError(
                f"port {port} cannot be used ({_holder(port) or error.strerror}): end that, or "
                f"choose another port with {option}, such as {option} {other}"
            ) from None


def _holder(port: int) -> str:
    """Who listens at a port, as far as one may know."""
    with suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                command = " ".join(psutil.Process(one.pid).cmdline())[:80]
                return f"process {one.pid} has it: {command}"
    return ""


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _started(
    name: str, port: int, head_port: int | None, cores: int | None, password: bool
) -> Part:
    mark = f"{name}-{secrets.token_hex(8)}"
    details: dict[str, Any] = {}
    environment = {**os.environ, MARK: mark}
    if name == RAY:
        others = ("head", "agent", "agent_grpc", "metrics", "client", "runtime_env")
        details["ports"] = dict(zip(others, _free_ports(len(others)), strict=True))
        if head_port is not None:
            details["ports"]["head"] = head_port
        details["scratch"] = tempfile.mkdtemp(prefix="attune-ray-")
        command = _ray(port, details["ports"], details["scratch"], cores)
        for variable in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            environment.pop(variable, None)
        _secret(token_file())
        environment |= ray_variables() | {
            # A busy machine takes longer than Ray would wait.
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(SECONDS_TO_START),
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(SECONDS_TO_START),
            # When it is stopped here no job is left to wait for.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # Ray looks there for the `python` and the `pip` of jobs.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
    elif name == MLFLOW:
        details["password"] = password
        command = _mlflow(port, password)
        environment |= _mlflow_environment(password)
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


def _ray(port: int, ports: Mapping[str, int], scratch: str, cores: int | None) -> list[str]:
    """All ports are ours: with the usual ones a second cluster on the machine takes no jobs."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--node-ip-address={HOST}",
        f"--port={ports['head']}",
        "--include-dashboard=true",
        f"--dashboard-host={HOST}",
        f"--dashboard-port={port}",
        f"--dashboard-agent-listen-port={ports['agent']}",
        f"--dashboard-agent-grpc-port={ports['agent_grpc']}",
        f"--metrics-export-port={ports['metrics']}",
        f"--ray-client-server-port={ports['client']}",
        f"--runtime-env-agent-port={ports['runtime_env']}",
        f"--temp-dir={scratch}",
        f"--object-store-memory={OBJECT_STORE}",
        "--disable-usage-stats",
        *([f"--num-cpus={cores}"] if cores else []),
    ]  # fmt: skip


def _mlflow(port: int, password: bool) -> list[str]:
    return [
        sys.executable, "-m", "mlflow", "server",
        "--host", HOST,
        "--port", str(port),
        "--workers", "1",
        "--backend-store-uri", f"sqlite:///{home() / 'mlflow.db'}",
        "--artifacts-destination", str(home() / "mlartifacts"),
        "--allowed-hosts", f"{HOST}:{port},localhost:{port}",
        *(["--app-name", "basic-auth"] if password else []),
    ]  # fmt: skip


def _mlflow_environment(password: bool) -> dict[str, str]:
    # Without its job runner it takes a third of the memory.
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    if not password:
        return variables
    settings = folder() / "mlflow_auth.ini"
    settings.write_text(
        f"[mlflow]\ndefault_permission = READ\nadmin_username = {MLFLOW_USER}\n"
        f"database_uri = sqlite:///{folder() / 'mlflow_auth.db'}\n",
        encoding="utf-8",
    )
    return variables | {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_PASSWORD": _secret(password_file()).read_text(encoding="utf-8"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
    }


def _secret(path: Path) -> Path:
    """A file with something nobody can guess, made once, for its owner alone."""
    if not path.exists():
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32), encoding="utf-8")
        new.replace(path)
    path.chmod(0o600)
    return path


def _wait(part: Part) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while problem := part.problem():
        if not part.alive() or time.monotonic() > end:
            raise ServiceError(
                f"{part.name} did not come up, it {problem}; the end of {part.log}:\n"
                f"{_tail(part.log)}"
            )
        time.sleep(PAUSE)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (it is empty)"


def _stop(found: list[Part]) -> None:
    """The first processes end their own; what is left after them is ended here."""
    first = [psutil.Process(part.pid) for part in found if part.alive()]
    _signal(first, psutil.Process.terminate, SECONDS_TO_STOP)
    left = [process for part in found for process in part.processes()]
    _signal(left, psutil.Process.kill, SECONDS_TO_STOP)
    for part in found:
        if part.scratch:
            shutil.rmtree(part.scratch, ignore_errors=True)


def _signal(
    processes: list[psutil.Process], send: Callable[[psutil.Process], None], seconds: float
) -> None:
    for process in processes:
        with suppress(psutil.Error):
            send(process)
    psutil.wait_procs(processes, seconds)


def _stop_jobs(part: Part, say: Say) -> None:
    with suppress(OSError, ValueError):
        for job in _live_jobs(part):
            say(f"stopping job {job}")
            ask(part, f"/api/jobs/{job}/stop", method="POST")
        end = time.monotonic() + SECONDS_FOR_JOBS
        while _live_jobs(part) and time.monotonic() < end:
            time.sleep(PAUSE)


def _live_jobs(part: Part) -> list[str]:
    jobs = ask(part, "/api/jobs/")
    live = ("PENDING", "RUNNING")
    return [each["submission_id"] for each in jobs if each["status"] in live and
            each["submission_id"]]  # fmt: skip


def ask(part: Part, path: str, *, port: int | None = None, method: str = "GET") -> Any:
    """What a part says at a path of its API."""
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
def _alone() -> Iterator[None]:
    """One command at a time starts and stops."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(found: Mapping[str, Part]) -> None:
    path = folder() / "stack.json"
    new = path.with_suffix(f".{os.getpid()}")
    content = {"parts": [dataclasses.asdict(part) for part in found.values()]}
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
