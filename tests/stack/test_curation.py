"""Subtitles are curated by real Ray tasks, several at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attune.platform.curation import curate
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.services import cluster
from attune.platform.services import tasks as ray_tasks
from tests.golden.interface import assert_json_keys
from tests.unit.curation.test_curation import TALK, opus

pytestmark = pytest.mark.xdist_group("cluster")

BIN = Path(sys.executable).parent


def test_tasks_make_what_one_process_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    count = 2 * curate.FILES_OF_A_PART + 2  # three tasks
    (tmp_path / "films").mkdir()
    for film in range(count):
        lines = [(f"{text} Film {film % 100}!", *times) for text, *times in TALK]
        (tmp_path / "films" / f"{film}.xml").write_text(opus(lines))
    (tmp_path / "films" / "7.xml").write_text("<document>")
    done = subprocess.run(
        [BIN / "attune", "data", "curate", "--source", tmp_path / "films", "--turns", "none",
         "--out", tmp_path / "out", "--workers", "2", "--json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert_json_keys(done.args[1:], report)
    assert report["files"] == count
    assert report["rejected"]["rows"] == 1
    assert report["steps"]["duplicates"] == count - 101  # film 107 stands for the damaged 7
    assert report["speed"]["lines"] == 3 * (count - 1)

    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(ray_tasks, "run_tasks", lambda work, tasks, _: map(work, tasks))
    curate.curate([tmp_path / "films"], tmp_path / "alone", model=None)
    contents = [read_dataset_manifest(tmp_path / name)["contents"] for name in ("out", "alone")]
    assert contents[0] == contents[1]
