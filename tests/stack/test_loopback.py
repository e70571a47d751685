"""A training that starts its own Ray: listening sockets, the token, and what the command prints."""

import contextlib
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import METRICS_FILE

pytestmark = pytest.mark.xdist_group("cluster")

COMMAND = (
    Path(sys.executable).parent / "attune", "train", "dummy", "--preset", "tiny", "--workers", "2",
    "--name", "r", "--max-steps", "100000", "--set", "max_epochs=100000",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loopback")


@pytest.fixture(scope="module")
def training(folder, prepared):
    """A training with two workers that has done some steps, in a home and a user's home folder."""
    (folder / "home" / "data").mkdir(parents=True)
    (folder / "home" / "data" / "bundled").symlink_to(prepared)
    (folder / "user").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_worker_niceness"] = "0"  # the workers start in time on a busy machine
    environment |= {"HOME": str(folder / "user"), "ATTUNE_HOME": str(folder / "home")}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(COMMAND, env=environment, stdout=output, stderr=output)
    wait = threading.Event()
    try:
        while not read_metrics(folder / "home" / "runs" / "r" / METRICS_FILE):
            assert process.poll() is None, (folder / "output").read_text()
            wait.wait(0.1)
        yield process
    finally:
        with contextlib.suppress(psutil.Error):
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
        process.wait()


def test_every_listening_socket_is_on_the_loopback_interface(training):
    listening = []
    for process in psutil.Process(training.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            listening += [
                (connection.laddr.ip.removeprefix("::ffff:"), process.name())
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    assert len(listening) > 5
    assert [each for each in listening if each[0] not in ("127.0.0.1", "::1")] == []


@pytest.mark.usefixtures("training")
def test_the_token_is_in_the_home_and_nothing_is_written_to_the_users_folder(folder):
    token = folder / "home" / "stack" / "ray_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert not (folder / "user" / ".ray").exists()


@pytest.mark.usefixtures("training")
def test_one_line_says_how_long_ray_took_to_start(folder):
    assert re.search(r"^starting Ray \.\.\. \d+ s$", (folder / "output").read_text(), re.M)
