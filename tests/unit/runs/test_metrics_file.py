"""metrics.jsonl after a crash."""

import json

import pytest

from attune.platform.core.errors import DataError
from attune.platform.runs.metrics_file import MetricsFile, load_metrics, read_metrics

LINES = [json.dumps({"step": step, "time": 1, "metrics": {"loss": 0.5}}) for step in (1, 2, 3)]


@pytest.mark.parametrize("end", ['{"step": 4, "ti', '{"step": 4, "ti\n', "\0\0\0\0", "4\n"])
def test_a_truncated_last_line_is_dropped_and_reported(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*LINES, end]))
    reported = []
    MetricsFile(path, 3, reported.append)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert reported == [f"{path}, line 4: dropped the last line, which is truncated"]


@pytest.mark.parametrize("line", ["{", "", "[1]", '{"step": 2}', '{"step": "2", "time": 1}'])
def test_any_other_damaged_line_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([LINES[0], line, LINES[2], ""]))
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: expected .* delete the line"):
        load_metrics(path, pytest.fail)


def test_a_whole_file_is_not_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert load_metrics(path, pytest.fail) == []
    for text in ("", "\n".join(LINES), "\n".join([*LINES, ""])):
        path.write_text(text)
        assert load_metrics(path, pytest.fail) == [json.loads(line) for line in LINES if text]
