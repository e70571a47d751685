"""The command line as a process: help, JSON, exit codes, errors."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from attune.jobs import cli
from tests.commands import json_output


def attune(*arguments, cwd, **environment):
    return subprocess.run(
        [str(Path(sys.executable).parent / "attune"), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_prepare_and_inspect_print_json(tmp_path):
    done = attune("data", "prepare", "--source", "bundled", "--out", "d", "--json", cwd=tmp_path)
    answer = json_output(done)
    assert set(answer) == {"out", "hash", "format", "splits", "rejected"}
    assert answer["out"] == "d"
    assert answer["rejected"] == {"rows": 0, "file": None, "reasons": {}}
    assert set(answer["splits"]["train"]) == {"conversations", "samples"}
    assert "train" in done.stderr
    report = json_output(attune("data", "inspect", "d", "--json", cwd=tmp_path))
    assert report["hash"] == answer["hash"]
    shown = attune("data", "inspect", "d", cwd=tmp_path).stdout
    assert "samples by emotion" in shown
    assert "response:" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data", "prepare", "--source", "nowhere", "--out", "d"), "no such source: 'nowhere'"),
        (("data", "prepare", "--source", "bundled", "--out", "d", "--format", "edd"), "'edd'"),
        (("data", "inspect", "nowhere"), "not a prepared folder"),
        (("data", "prepare", "--out", "d"), "--source"),
        (("date",), "data"),
        (("data", "inspect", "d", "--samples", "x"), "'--samples'"),
    ],
)
def test_wrong_arguments_exit_with_code_2_without_a_traceback(tmp_path, arguments, message):
    done = attune(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


def test_a_bad_file_exits_with_code_1(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"id": 1}\n')
    command = ("data", "prepare", "--source", "mine.jsonl", "--out", "d", "--strict")
    done = attune(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "mine.jsonl, row 1: missing key: 'utterances'" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine.jsonl"]


def test_unexpected_errors_write_their_traceback_to_a_file(tmp_path):
    attune("data", "prepare", "--source", "bundled", "--out", "d", cwd=tmp_path)
    (tmp_path / "d" / "tokens.parquet").write_text("not a Parquet file")
    done = attune("data", "inspect", "d", cwd=tmp_path, ATTUNE_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [log] = (tmp_path / "home" / "logs").iterdir()
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text()


def test_names_with_brackets_are_printed_unchanged(tmp_path):
    """Rich interprets [brackets] as markup, which must not happen to user input."""
    command = ("data", "prepare", "--source", "bundled", "--out", "a[/b]", "--json")
    done = attune(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a[/b]" in done.stderr


def test_a_home_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "home").write_text("")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text("[]")
    done = attune("data", "inspect", "d", cwd=tmp_path, ATTUNE_HOME=str(tmp_path / "home"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    sick = attune("doctor", cwd=tmp_path, ATTUNE_HOME=str(tmp_path / "home"))
    assert sick.returncode == 1
    assert "set ATTUNE_HOME" in sick.stdout


def test_a_stopped_command_removes_its_partial_output(tmp_path):
    """Clusters end jobs with SIGTERM, people with Ctrl-C."""
    conversation = {"utterances": [{"role": r, "text": "x"} for r in ("speaker", "listener")]}
    lines = [json.dumps({"id": n, **conversation}) for n in range(300_000)]
    (tmp_path / "large.jsonl").write_text("\n".join(lines))
    for sign, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        command = ["data", "prepare", "--source", "large.jsonl", "--out", "d"]
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "attune"), *command],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        while not list(tmp_path.glob(".d-*")):  # until it has started to write
            assert process.poll() is None
        process.send_signal(sign)
        _, error = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in error
        assert [p.name for p in tmp_path.iterdir()] == ["large.jsonl"]


def test_help_lists_commands_in_groups_on_one_line_each(tmp_path):
    shown = attune("--help", cwd=tmp_path, COLUMNS="80").stdout
    assert "Start with attune doctor" in shown
    panels = re.findall(r"^╭─ ([\w ]+) ─", shown, re.M)
    assert panels == ["Options", *cli.COMMANDS]
    expected = ("Data", "Train and tune", "Evaluate", "Serve", "Cluster")
    assert panels[2:] == list(expected)
    for commands in cli.COMMANDS.values():
        for name, (_, line) in commands.items():
            assert re.search(rf"│ {name} +{re.escape(line.replace('`', ''))} +│", shown), name


def test_every_command_is_listed_in_a_group():
    listed = [name for commands in cli.COMMANDS.values() for name in commands]
    group = typer.main.get_command(cli.app)
    assert sorted(listed) == sorted(group.commands)
    assert len(group.list_commands(None)) == len(listed)


def test_help_of_a_command_shows_examples(tmp_path):
    shown = attune("data", "prepare", "--help", cwd=tmp_path).stdout
    assert "Examples" in shown
    assert "rejects.jsonl" in shown
    assert attune("--version", cwd=tmp_path).stdout.startswith("attune ")


def test_doctor(tmp_path):
    done = attune("doctor", "--json", cwd=tmp_path, ATTUNE_HOME=str(tmp_path), CXX="")
    answer = json_output(done)
    assert answer["ok"]
    checks = {check["name"]: check for check in answer["checks"]}
    wanted = {"python", "torch", "ray", "deepspeed", "mlflow", "gradio", "polars"}
    assert wanted | {"gpu", "compiler", "cluster", "tracking", "data", "disk"} <= set(checks)
    assert str(tmp_path) in checks["disk"]["found"]


def test_doctor_prints_fixes(tmp_path):
    (tmp_path / "mlflow.db").write_text("not a database at all, but long enough to be looked at")
    # There is no compiler on this PATH; the cluster is checked with the interpreter itself.
    environment = {"ATTUNE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    done = attune("doctor", "--json", cwd=tmp_path, **environment)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    failed = {check["name"]: check["fix"] for check in answer["checks"] if check["fix"]}
    assert "install a C++ compiler" in failed["compiler"]
    assert "damaged" in failed["tracking"]
    away = attune(
        "doctor", cwd=tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9", ATTUNE_HOME=str(tmp_path)
    )
    assert away.returncode == 1
    assert "start the tracking server" in away.stdout
