"""Limits on what is read: long lines, long cells, large files; rejects of readable length."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.curation import subtitles
from attune.platform.data import files
from attune.platform.data.files import (
    RAW_LENGTH,
    read_csv_records,
    read_file_lines,
    read_whole_file,
)
from attune.platform.data.prepare import prepare

UTTERANCES = [{"role": "speaker", "text": "I won."}, {"role": "listener", "text": "Great!"}]
GOOD = json.dumps({"id": "a", "emotion": "proud", "split": "train", "utterances": UTTERANCES})

MEASURE = """
import re, sys
from pathlib import Path
from attune.platform.data.prepare import prepare
manifest = prepare(sys.argv[1], Path(sys.argv[2]))
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
print(manifest["rejected"]["rows"], int(peak[1]) // 1024)
"""
# Not `ru_maxrss`, which a process inherits from the one that starts it.


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setenv("ATTUNE_MAX_LINE_MB", "0.01")
    monkeypatch.setenv("ATTUNE_MAX_FIELD_MB", "0.001")


def test_a_line_of_300_mb_in_a_small_archive_takes_less_than_1_gb(tmp_path):
    with gzip.open(tmp_path / "own.jsonl.gz", "wb") as file:
        file.write(GOOD.encode() + b'\n{"id": "')
        for _ in range(300):
            file.write(b"x" * 2**20)
        file.write(b'"}\n')
    assert (tmp_path / "own.jsonl.gz").stat().st_size < 400_000
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTUNE_MAX")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "own.jsonl.gz", tmp_path / "out"],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    rejected, megabytes = map(int, done.stdout.split())
    assert rejected == 1
    assert megabytes < 1000
    assert (tmp_path / "out" / "rejects.jsonl").stat().st_size < 2_000


def test_lines_after_a_long_line_are_read_and_keep_their_numbers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"y" * 50_000 + b"\nthree\n" + b"z" * 50_000)
    frame = next(iter(read_file_lines(path)))
    assert frame["row"].to_list() == [1, 2, 3, 4]
    assert frame["line"].to_list() == ["one", None, "three", None]
    assert frame["raw"][1] == "y" * RAW_LENGTH
    assert frame["problem"][1].startswith("line longer than 0.01 MB (ATTUNE_MAX_LINE_MB)")


def test_rows_after_a_long_cell_or_line_of_a_csv_are_read_and_keep_their_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\n1,2\n{'y' * 2_000},4\n5,6\n{'z' * 50_000},8\n9,10\n")
    rows = list(read_csv_records(path, ("a",)))
    assert [(row.row, row.fields.get("a")) for row in rows if row.problem is None] == [
        (2, "1"), (4, "5"), (6, "9"),
    ]  # fmt: skip
    assert [(row.row, row.problem.split(" (")[0]) for row in rows if row.problem] == [
        (3, "field larger than 0.001 MB"),
        (5, "not readable as CSV: line longer than 0.01 MB"),
    ]


def test_files_beyond_the_limit_are_named_with_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_MAX_FILE_MB", "0.001")
    monkeypatch.setenv("ATTUNE_MAX_DOCUMENT_MB", "0.001")
    path = tmp_path / "a.srt.gz"
    path.write_bytes(gzip.compress(b"a line\n" * 1_000))
    with pytest.raises(DataError, match=r"larger than 0.001 MB \(ATTUNE_MAX_FILE_MB\) when"):
        list(read_file_lines(path))
    for read in (read_whole_file, subtitles.read_subtitles):
        with pytest.raises(DataError, match=r"larger than 0.001 MB \(ATTUNE_MAX_DOCUMENT_MB\)"):
            read(path)


@pytest.mark.parametrize("text", ["0", "-1", "many", "nan", "inf"])
def test_a_limit_must_be_a_number_of_megabytes(monkeypatch, text):
    monkeypatch.setenv("ATTUNE_MAX_LINE_MB", text)
    with pytest.raises(UsageError, match=f"ATTUNE_MAX_LINE_MB={text}: expected a number of mega"):
        _ = files.LINE.bytes


def test_rejected_rows_are_shortened(tmp_path):
    bad = json.dumps({"id": "b", "emotion": "proud", "utterances": [{"text": "x" * 5_000}]})
    wrong = json.dumps({"id": "c" * 5_000, "emotion": "e" * 2_000, "utterances": UTTERANCES})
    (tmp_path / "own.jsonl").write_text(f"{GOOD}\n{bad}\n{wrong}\n")
    prepare(str(tmp_path / "own.jsonl"), tmp_path / "out")
    rejects = Path(tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert len(rejects) == 2
    assert all(len(line) < 2_500 for line in rejects)
    assert f"... ({len(bad)} characters)" in rejects[0]


def test_columns_that_occur_twice_are_named(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("conversation_id,turn,role,text,text\na,0,speaker,hi,ho\n")
    with pytest.raises(DataError, match=r"own.csv, row 1: column 'text' occurs 2 times: rename"):
        prepare(str(path), tmp_path / "out")
