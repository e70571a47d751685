"""Starting and stopping the parts of the local stack, replaced by small servers."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys

import psutil
import pytest

from attune.platform.core.errors import ServiceError, UsageError
from attune.platform.core.home import home
from attune.platform.services import stack, stack_processes

SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)\\
    .serve_forever()
"""
DEAD = "print('no room in here'); raise SystemExit(1)"


@pytest.fixture
def ports(tmp_path, monkeypatch):
    """Replace Ray and MLflow by small servers, and leave the page out; return their ports."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(stack, "PARTS", (stack.RAY, stack.MLFLOW))
    monkeypatch.setattr(stack_processes, "ray_command", lambda port, *_: command(SERVER, port))
    monkeypatch.setattr(stack_processes, "mlflow_command", lambda port, *_: command(SERVER, port))
    for name in stack.CHECKS:
        monkeypatch.setitem(stack.CHECKS, name, lambda part: stack.ask(part, "/"))
    yield dict(zip((stack.RAY, stack.MLFLOW), stack_processes.free_ports(2), strict=True))
    stack.down()


def command(code, port):
    return [sys.executable, "-c", code, str(port)]


def test_starting_twice_changes_nothing_and_restarts_dead_parts(ports):
    first = stack.up(ports)
    assert all(part.problem() == "" for part in first.values())
    assert stack.up({}) == first == stack.running_parts()
    os.kill(first[stack.RAY].pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first[stack.RAY].pid)], 10)
    assert "not running" in first[stack.RAY].problem()
    messages = []
    again = stack.up(ports, report=messages.append)
    assert messages == ["ray has died: starting it again", "starting ray ..."]
    assert again[stack.MLFLOW] == first[stack.MLFLOW]
    assert again[stack.RAY].pid != first[stack.RAY].pid
    assert first[stack.RAY].processes() == []  # what the dead one had started is gone, too


def test_down_stops_exactly_the_started_processes(ports):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    parts = stack.up(ports)
    ours = [process for part in parts.values() for process in part.processes()]
    assert len(ours) == 4  # each with a child, in its own session
    assert [part.name for part in stack.down()] == [stack.RAY, stack.MLFLOW]
    assert not any(process.is_running() for process in ours)
    assert stack.running_parts() == {}
    assert stack.down() == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_another_process_with_the_same_pid_is_not_stopped(ports):
    part = stack.up(ports)[stack.RAY]
    stack.down()
    other = {**vars(part), "pid": os.getpid()}
    (stack.folder() / "stack.json").write_text(json.dumps({"home": str(home()), "parts": [other]}))
    assert not stack.running_parts()[stack.RAY].alive()
    assert stack.running(stack.RAY) is None
    stack.down()  # and this test is still there to tell


def test_a_part_that_fails_to_start_stops_the_others_and_shows_its_log(ports, monkeypatch):
    monkeypatch.setattr(stack_processes, "mlflow_command", lambda port, *_: command(DEAD, port))
    started = []
    start_part = stack._start_part

    def record_part(*arguments):
        started.append(start_part(*arguments))
        return started[-1]

    monkeypatch.setattr(stack, "_start_part", record_part)
    with pytest.raises(ServiceError, match=r"mlflow did not start[^$]*no room in here"):
        stack.up(ports)
    assert [part.name for part in started] == [stack.RAY, stack.MLFLOW]
    assert not any(part.processes() for part in started)
    assert stack.running_parts() == {}


def test_a_port_in_use_is_reported_with_its_process_and_the_option(ports):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"port {port} .*process {os.getpid()}.*--mlflow-port \d+"
        ):
            stack.up({**ports, stack.MLFLOW: port})
        with pytest.raises(UsageError, match="--ray-port"):
            stack.up(ports, head_port=port)
    assert stack.running_parts() == {}


def test_ports_of_ray_workers_and_equal_ports_are_rejected_before_anything_starts(ports):
    with pytest.raises(UsageError, match=r"--dashboard-port 18265: Ray gives the ports 10002 to"):
        stack.up({**ports, stack.RAY: 18265})
    with pytest.raises(UsageError, match=r"--ray-port 19999: Ray gives .* such as --ray-port \d+"):
        stack.up(ports, head_port=19999)
    port = ports[stack.RAY]
    with pytest.raises(UsageError, match=rf"{port} is also the port of --mlflow-port"):
        stack.up({**ports, stack.MLFLOW: port})
    with pytest.raises(UsageError, match=rf"--dashboard-port {port} is also the .* of --ray-port"):
        stack.up(ports, head_port=port)
    assert stack.running_parts() == {}


def test_free_ports_avoid_those_of_ray_workers_and_reserved_ones(monkeypatch):
    offered = iter([15_000, 40_000, 40_001, 40_002])

    class Socket:
        def bind(self, _):
            self.port = next(offered)

        def getsockname(self):
            return ("127.0.0.1", self.port)

        def close(self):
            pass

    monkeypatch.setattr(stack_processes.socket, "socket", Socket)
    assert stack_processes.free_ports(2, [40_000]) == [40_001, 40_002]


def test_a_copied_home_does_not_own_the_processes_of_the_original(ports, tmp_path, monkeypatch):
    stack.up(ports)
    copy = tmp_path / "copy"
    shutil.copytree(stack.folder(), copy / "stack")
    with monkeypatch.context() as patch:
        patch.setenv("ATTUNE_HOME", str(copy))
        assert stack.down() == []
    assert all(part.alive() for part in stack.running_parts().values())


def test_options_of_a_running_part_cannot_change(ports):
    stack.up(ports)
    with pytest.raises(UsageError, match="ray already runs at port"):
        stack.up({stack.RAY: 1})
    with pytest.raises(UsageError, match="without a password"):
        stack.up({}, password=True)


def test_secrets_are_readable_by_their_owner_only_and_persist(ports):
    stack.up(ports, password=True)
    kept = {path: path.read_text() for path in (stack.token_file(), stack.password_file())}
    for path, text in kept.items():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(text) == 64
    stack.down()
    stack.up(ports)
    assert kept[stack.token_file()] == stack.token_file().read_text()


def test_is_stack(ports):
    part = stack.up(ports)[stack.RAY]
    assert stack.is_stack(part.address)
    assert stack.is_stack(part.address.replace("127.0.0.1", "localhost"))
    assert stack.is_stack(stack.head_address(part))
    for other in (f"http://127.0.0.1:{ports[stack.MLFLOW]}", f"http://head:{part.port}", "auto"):
        assert not stack.is_stack(other)


def test_a_damaged_state_file_is_reported(ports):
    (stack.folder()).mkdir(exist_ok=True)
    (stack.folder() / "stack.json").write_text("{")
    with pytest.raises(UsageError, match=r"stack\.json is damaged"):
        stack.up(ports)
    (stack.folder() / "stack.json").unlink()


DEAD_RAY = """
import pathlib, sys
session = pathlib.Path(sys.argv[1], "session_1")
(session / "logs").mkdir(parents=True)
(session / "logs" / "gcs_server.out").write_text("out of ports")
(session.parent / "session_latest").symlink_to(session)
print("check", session / "logs" / "gcs_server.out")
raise SystemExit(1)
"""


def test_the_log_that_a_failed_ray_refers_to_is_kept(ports, monkeypatch):
    """Ray's own folder is removed with it."""
    monkeypatch.setattr(
        stack_processes, "ray_command", lambda _, __, scratch, ___: command(DEAD_RAY, scratch)
    )
    with pytest.raises(ServiceError) as failure:
        stack.up(ports)
    kept = stack.folder() / "ray-logs" / "gcs_server.out"
    assert str(failure.value).endswith(f"check {kept}")
    assert kept.read_text() == "out of ports"
