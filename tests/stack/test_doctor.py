"""`attune doctor` beside a real Ray cluster and a real MLflow store."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from mlflow import MlflowClient

from tests.golden.interface import assert_json_keys

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


def test_doctor_sees_the_cluster_and_the_runs(cluster, tmp_path):
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    for _ in range(2):
        client.log_metric(client.create_run("0").info.run_id, "loss", 1.0)
    environment = {**os.environ, "ATTUNE_HOME": str(tmp_path), "RAY_ADDRESS": cluster}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "attune"), "doctor", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads(done.stdout)
    assert_json_keys(done.args[1:], output)
    actual = {check["name"]: check["found"] for check in output["checks"]}
    assert actual["cluster"] == "Ray is running, nodes: 1"
    assert actual["tracking"].endswith("with 2 runs")
