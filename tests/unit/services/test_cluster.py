"""How runs share the machines of a cluster."""

import os
import re
import stat

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError
from ray.train import TrainingFailedError

from attune.platform.core.errors import UsageError
from attune.platform.runs.record import Run, read_run
from attune.platform.services import cluster, stack
from attune.platform.services.cluster import _share_cores
from attune.platform.training import driver


@pytest.mark.parametrize(
    ("machines", "workers", "runs", "at_once", "cores"),
    [
        ([2], 1, 1, 1, 2),  # alone: all of it
        ([2], 2, 1, 1, 1),
        ([2], 1, 3, 2, 1),  # two at a time, a core each
        ([16], 1, 3, 3, 5),
        ([4, 4], 1, 3, 3, 2),  # three would not fit with more: two on one machine
        ([5, 5], 3, 1, 1, 2),
        ([4, 4], 1, 2, 2, 4),
        ([2], 4, 1, 1, 1),  # too many workers is for Ray to say
    ],
)
def test_cores_are_shared_equally(machines, workers, runs, at_once, cores):
    assert _share_cores(machines, workers, runs) == (at_once, cores)


@pytest.mark.parametrize(
    ("machines", "workers", "runs", "asked", "at_once"),
    [([8], 1, 3, 2, 3), ([8], 2, 3, 2, 2), ([2], 1, 2, 4, 1), ([4, 4], 1, 9, 3, 2)],
)
def test_requested_cores_are_used(machines, workers, runs, asked, at_once):
    assert _share_cores(machines, workers, runs, asked) == (at_once, asked)


def test_the_address_of_a_job_server_is_an_error(monkeypatch):
    """RAY_ADDRESS may be the address of a job server or of a head; Ray joins a head only."""
    part = stack.Part(name=stack.RAY, pid=1, started=0, mark="", port=8265, ports={"head": 6000})
    monkeypatch.setattr(stack, "running", lambda _: part)
    assert cluster._head("http://localhost:8265") == "127.0.0.1:6000"
    for joined in (None, "127.0.0.1:6000", "head:6379", "auto"):
        assert cluster._head(joined) == joined
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    with pytest.raises(UsageError, match=r"for 'attune submit .* such as HOST:6379"):
        cluster.connect()


def test_a_kill_is_distinguished_from_other_errors():
    memory = "Task was killed due to the node running low on memory."
    for error in (OutOfMemoryError("workers were killed"), TrainingFailedError(memory)):
        assert "memory ran out" in cluster.describe_kill(error)
    assert "was killed, by the system if memory ran out" in cluster.describe_kill(ActorDiedError())
    for error in (None, ValueError("no number"), TrainingFailedError("no number")):
        assert cluster.describe_kill(error) == ""


def test_a_run_that_finds_no_cluster_has_failed(tmp_path, monkeypatch):
    """It must not be listed as running or logged to MLflow."""
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    run = Run(
        name="r", folder=tmp_path, variant="dummy", preset="tiny", config={}, training={}, data={}
    )
    run.write()
    with pytest.raises(UsageError, match="job server"):
        driver.train(run)
    stored = read_run(tmp_path)
    assert (stored.status, stored.run_id) == ("failed", None)
    assert "job server" in stored.error


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """A home without Ray's variables and without a user's token."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cluster, "USER_TOKEN", tmp_path / "auth_token")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def test_a_cluster_of_our_own_gets_a_token_in_the_home_that_only_its_owner_can_read(variables):
    cluster.use_token()
    path = stack.token_file()
    assert variables["RAY_AUTH_TOKEN_PATH"] == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text()
    cluster.use_token()
    assert path.read_text() == token


def test_a_users_token_is_used_and_left_alone(variables):
    cluster.USER_TOKEN.write_text("mine")
    cluster.use_token()
    assert "RAY_AUTH_TOKEN_PATH" not in variables
    assert not stack.token_file().exists()
    assert cluster.USER_TOKEN.read_text() == "mine"
    cluster.use_token("head:6379")
    assert variables["RAY_AUTH_MODE"] == "token"


def test_another_cluster_does_not_get_the_token_of_the_home(variables):
    cluster.use_token("head:6379")
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & set(variables)
    assert not stack.token_file().exists()


def test_starting_ray_is_reported_in_one_line(capsys):
    with cluster._report_duration("starting Ray"):
        assert capsys.readouterr().err == "starting Ray ..."
    assert re.fullmatch(r" \d+ s\n", capsys.readouterr().err)
