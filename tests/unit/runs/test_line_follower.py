"""The follower of a growing file."""

import json

import pytest

from attune.platform.runs.metrics_file import (
    LineFollower,
    MetricsFile,
    MetricsFollower,
    read_metrics,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(lines):
    return [line["step"] for line in lines]


def append(path, first, last, value=1.0):
    with path.open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "time": 0, "metrics": {"loss": value}}) + "\n")


def test_each_line_is_returned_once(path):
    follower = MetricsFollower(path)
    assert follower.read_new_metrics() == []
    append(path, 1, 2)
    assert steps(follower.read_new_metrics()) == [1, 2]
    append(path, 3, 3)
    assert steps(follower.read_new_metrics()) == [3]
    assert follower.read_new_metrics() == []


def test_partial_line_waits_for_its_end_and_damaged_line_is_skipped(path):
    follower = MetricsFollower(path)
    append(path, 1, 1)
    with path.open("a") as file:
        file.write('{"step": 2, "metr{"step": 3}\n{"step": 4,')
    assert steps(follower.read_new_metrics()) == [1]
    with path.open("a") as file:
        file.write(' "time": 0, "metrics": {}}\n')
    assert steps(follower.read_new_metrics()) == [4]


@pytest.mark.parametrize("new_value", [0.5, 1.0, 1.23456789])  # shorter, equal and longer lines
@pytest.mark.parametrize("last", [4, 12])
def test_rewritten_file_returns_only_the_repeated_lines(path, new_value, last):
    append(path, 1, 8)
    follower = MetricsFollower(path)
    follower.read_new_metrics()
    MetricsFile(path, done=3)
    append(path, 4, last, value=new_value)
    first = 9 if new_value == 1.0 else 4  # equal lines are not returned again
    assert steps(follower.read_new_metrics()) == list(range(first, last + 1))
    append(path, last + 1, last + 1)
    assert steps(follower.read_new_metrics()) == [last + 1]


def test_equal_lines_of_a_log_are_all_returned(path):
    follower = LineFollower(path)
    path.write_text("stage 1\nstage 1\n")
    assert follower.read_new_lines() == ["stage 1", "stage 1"]


def test_resumed_run_removes_lines_after_its_checkpoint(path):
    append(path, 1, 8)
    before = path.read_bytes().splitlines(keepends=True)
    MetricsFile(path, done=3).add(4, {"loss": 2.0})
    assert path.read_bytes().startswith(b"".join(before[:3]))
    assert steps(read_metrics(path)) == [1, 2, 3, 4]
