"""Records of another format version: an error by name, skipped in lists."""

import json

import pytest

from attune.platform.core.errors import UsageError
from attune.platform.runs.record import RUN_FORMAT, RUN_RECORD, find_run
from attune.platform.tuning import sweep
from attune.ui.run_catalog import RunCatalog
from tests.commands import error_of, json_output
from tests.runs import write_run
from tests.sweeps import write_sweep

VERSIONS = [None, 0, RUN_FORMAT + 1, "x"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Two readable runs of one variant, and the newest of another format version."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    for number, name in enumerate(("first", "second", "newest")):
        run = write_run(tmp_path, name, "dummy", data={"name": "x"}, created=f"2026-01-0{number}")
        run.model.mkdir()
    set_version(tmp_path / "runs" / "newest" / RUN_RECORD, RUN_FORMAT + 1)
    return tmp_path


def set_version(path, version):
    content = json.loads(path.read_text())
    content.pop("format", None)
    path.write_text(json.dumps(content if version is None else {"format": version, **content}))


def test_records_carry_their_format_version(home):
    assert json.loads((home / "runs" / "first" / RUN_RECORD).read_text())["format"] == RUN_FORMAT
    assert (
        json.loads((write_sweep().folder / sweep.RECORD).read_text())["format"]
        == sweep.SWEEP_FORMAT
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_another_version_requested_by_name_is_an_error(call, home, version):
    path = home / "runs" / "newest" / RUN_RECORD
    set_version(path, version)
    message = error_of(call("respond", "newest", "--context", "Hello."))
    stated = "no format version" if version is None else f"format version {version}"
    assert f"{path} has {stated}" in message
    assert f"reads version {RUN_FORMAT}: train the run again" in message
    with pytest.raises(UsageError, match=stated):
        find_run(str(path.parent))


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_runs_skips_another_version_with_one_line_on_stderr(call, home, arguments):
    done = call("runs", *arguments)
    assert done.returncode == 0
    path = home / "runs" / "newest" / RUN_RECORD
    assert sum(f"skipped: {path}" in line for line in done.stderr.splitlines()) == 1
    assert str(path) not in done.stdout
    if arguments:
        assert [run["name"] for run in json_output(done)["runs"]] == ["first", "second"]
    else:
        assert "second" in done.stdout


def test_latest_is_the_newest_run_that_can_be_read(home, capsys):
    assert find_run("dummy@latest").name == "second"
    [line] = capsys.readouterr().err.splitlines()
    assert f"skipped: {home / 'runs' / 'newest' / RUN_RECORD}" in line


def test_the_page_offers_only_runs_that_can_be_read(home, capsys):
    assert list(RunCatalog().runs()) == ["second", "first"]
    assert list(RunCatalog().runs()) == ["second", "first"]
    [line] = capsys.readouterr().err.splitlines()
    assert f"skipped: {home / 'runs' / 'newest' / RUN_RECORD}" in line


@pytest.mark.usefixtures("home")
def test_a_sweep_of_another_version(call):
    write_sweep("old")
    path = write_sweep("new").folder / sweep.RECORD
    set_version(path, 99)
    message = error_of(call("tune", "show", "new"))
    assert f"{path} has format version 99" in message
    assert f"reads version {sweep.SWEEP_FORMAT}: start the sweep again" in message
    done = call("tune", "list", "--json")
    assert [one["name"] for one in json_output(done)["sweeps"]] == ["old"]
    assert sum(f"skipped: {path}" in line for line in done.stderr.splitlines()) == 1
    set_version(path, None)
    assert "has no format version" in error_of(call("tune", "stop", "new"))
    assert [one.name for one in sweep.read_all_sweeps()] == ["old"]


def test_a_damaged_record_stays_a_damaged_record(call, home):
    for text in ("{", "[]", json.dumps({"format": RUN_FORMAT, "name": "first"})):
        path = home / "runs" / "first" / RUN_RECORD
        path.write_text(text)
        assert "is damaged" in error_of(call("respond", "first", "--context", "x"), code=1)
        assert f"{path} is damaged" in call("runs", "--json").stderr
