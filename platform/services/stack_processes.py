"""The processes of the local stack: their commands, environment variables, ports and secrets."""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from attune.platform.core.errors import UsageError
from attune.platform.core.home import home

HOST = "127.0.0.1"
MLFLOW_USER = "admin"
OBJECT_STORE = 2**29
"""Bytes of Ray's object store; only names, numbers and files pass between our processes."""
LOG_LINES = 15
WORKER_PORTS = range(10_002, 20_000)
"""The ports that Ray gives to its workers."""


def check_ports(ports: Mapping[str, int]) -> None:
    """Raise UsageError where two options have the same port, or a port is Ray's or in use."""
    for option, port in ports.items():
        same = [other for other in ports if other != option and ports[other] == port]
        if same:
            raise UsageError(
                f"{option} {port} is also the port of {same[0]}: choose another port for one of "
                f"them"
            )
        if port in WORKER_PORTS:
            [other] = free_ports(1)
            raise UsageError(
                f"{option} {port}: Ray gives the ports {WORKER_PORTS[0]} to {WORKER_PORTS[-1]} to "
                f"its workers; choose another port, such as {option} {other}"
            )
        check_port_free(port, option)


def check_port_free(port: int, option: str) -> None:
    """Raise UsageError where a port is in use; the message names the option that changes it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            [other] = free_ports(1)
            raise UsageError(
                f"port {port} cannot be used ({_describe_port_user(port) or error.strerror}): stop "
                f"that process, or choose another port, such as {option} {other}"
            ) from None


def _describe_port_user(port: int) -> str:
    """Describe the process that listens at a port; empty where the system does not tell."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f"in use by process {connection.pid}: {command}"
    return ""


def free_ports(count: int, without: Container[int] = ()) -> list[int]:
    """Return ports that are free now, not those of Ray's workers and none of `without`."""
    sockets: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            sockets.append(socket.socket())
            sockets[-1].bind((HOST, 0))
            port = sockets[-1].getsockname()[1]
            if port not in WORKER_PORTS and port not in without:
                ports.append(port)
        return ports
    finally:
        for each in sockets:
            each.close()


def ray_command(port: int, ports: Mapping[str, int], scratch: str, cores: int | None) -> list[str]:
    """Return the command that starts a Ray head.

    All ports are set: with the default ones a second cluster on the machine takes no jobs.
    """
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


def mlflow_command(port: int, password: bool) -> list[str]:
    """Return the command that starts an MLflow server."""
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


def mlflow_environment(folder: Path, password_file: Path | None) -> dict[str, str]:
    """Return MLflow's variables; with a password file, those that make it ask for a password."""
    # Without its job runner MLflow uses a third of the memory.
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    if password_file is None:
        return variables
    settings = folder / "mlflow_auth.ini"
    settings.write_text(
        f"[mlflow]\ndefault_permission = READ\nadmin_username = {MLFLOW_USER}\n"
        f"database_uri = sqlite:///{folder / 'mlflow_auth.db'}\n",
        encoding="utf-8",
    )
    return variables | {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_PASSWORD": create_secret(password_file).read_text(encoding="utf-8"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
    }


def create_secret(path: Path) -> Path:
    """Write a random secret to a file that only its owner can read, unless the file exists."""
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32), encoding="utf-8")
        with suppress(FileExistsError):  # another process was faster: its secret is used
            os.link(new, path)
        new.unlink()
    path.chmod(0o600)
    return path


def read_log_tail(path: Path) -> str:
    """Return the last lines of a log, indented."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (it is empty)"


def signal_processes(
    processes: list[psutil.Process], send: Callable[[psutil.Process], None], seconds: float
) -> None:
    """Send a signal to processes, and wait for them to end for at most so many seconds."""
    for process in processes:
        with suppress(psutil.Error):
            send(process)
    psutil.wait_procs(processes, seconds)
