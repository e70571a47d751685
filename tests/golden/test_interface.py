"""Commands, options and JSON keys, which scripts depend on, match the record.

JSON output is compared wherever a test reads it through `tests.commands.json_output`. Here are the
commands that no other test runs within a process; fakes take the place of a cluster.
"""

import os

import pytest

from attune.models import all_variants
from attune.models.base import DialogueVariant
from attune.platform import tracking
from attune.platform.services import jobs, stack
from attune.platform.training import driver as training_driver
from attune.platform.tuning import decoding as decoding_trials
from attune.platform.tuning import driver as tuning_driver
from tests.commands import json_output
from tests.golden import interface
from tests.runs import write_run
from tests.sweeps import write_sweep

FEW = ("--set", "max_tokens=3")


@pytest.fixture
def home(tmp_path, monkeypatch, prepared):
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    (home / "data" / "bundled").symlink_to(prepared)
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    return home


def test_commands_and_options():
    summarize, recorded = interface.describe_commands(), interface.read_record()["commands"]
    assert set(summarize) == set(recorded)
    for command, parameters in recorded.items():
        assert summarize[command] == parameters, command


def test_the_keys_of_every_command_with_json_are_recorded():
    recorded = interface.read_record()["json_keys"]
    assert interface.commands_with_json() == {key.removesuffix(" --seeds") for key in recorded}


@pytest.mark.parametrize(
    ("output", "difference"),
    [
        ({"ok": True}, ".checks is missing"),
        ({"ok": True, "checks": [], "more": 1}, ".more is not recorded"),
        ({"ok": True, "checks": [{"name": "x", "status": "ok", "found": "y"}]}, "[].fix is"),
        ({"ok": True, "checks": {"name": "x"}}, ".checks has another shape"),
        ({"ok": {"a": 1}, "checks": []}, ".ok has another shape"),
    ],
)
def test_a_different_key_is_an_error(output, difference):
    with pytest.raises(AssertionError, match="attune doctor --json") as failure:
        interface.assert_json_keys(("doctor",), output)
    assert difference in str(failure.value)


@pytest.mark.usefixtures("home")
def test_train(call, monkeypatch):
    def train_all(runs, *_):
        result = {"steps": 2, "seconds": 1.0, "metrics": {"valid_loss": 1.0}}
        return [run.update(status="finished", result=result) for run in runs]

    monkeypatch.setattr(training_driver, "train_all", train_all)
    monkeypatch.setattr(tracking, "start_group", lambda *_: "group")
    monkeypatch.setattr(tracking, "finish_group", lambda *_: None)
    command = ("train", "dummy", "--preset", "tiny", "--json")
    assert json_output(call(*command))["steps"] == 2
    assert json_output(call(*command, "--seeds", "1,2"))["mean"] == {"valid_loss": 1.0}


def run_trials(sweep, _):
    """End every trial of a sweep with a result for each of its metrics."""
    while (trial := sweep.suggest_trial()) is not None:
        sweep.record_result(trial[0], "finished", "", dict.fromkeys(sweep.metrics, trial[0] + 1.0))
    return sweep.update(status="finished")


def test_sweeps(call, home, monkeypatch):
    monkeypatch.setattr(tuning_driver, "run", run_trials)
    command = ("tune", "dummy", "--space", "optimizer", "--preset", "tiny", "--samples", "4")
    assert json_output(call(*command, "--name", "one", "--json"))["trials"] == 4
    two = ("mime", "--metric", "perplexity,distinct_2", "--name", "two", "--json")
    ended = json_output(call("tune", "run", *command[1:], *two))
    assert ended["front"]
    assert set(ended["best_of_each"]) == {"dummy", "mime"}
    for name in ("one", "two"):
        assert len(json_output(call("tune", "show", name, "--json"))["table"]) == 4
    folder = json_output(call("tune", "report", "one", "--json"))["report"]
    assert folder == str(home / "sweeps" / "one" / "report")
    with write_sweep("busy", status="running").lock():
        assert json_output(call("tune", "stop", "busy", "--json"))["asked"]
    assert len(json_output(call("tune", "list", "--json"))["sweeps"]) == 3


def test_a_report_over_several_seeds(call, home, monkeypatch):
    """The report trains the best trial again and counts the steps saved by early stopping."""

    def train_all(runs, *_):
        for run in runs:
            (run.folder / "result.json").write_text('{"steps": 9, "metrics": {"valid_loss": 1.0}}')
        return [run.update(status="finished") for run in runs]

    def run_two_trials(sweep, _):
        for ended, steps in (("finished", 9), ("stopped early", 1)):
            number, _, _ = sweep.suggest_trial()
            result = {"steps": steps, "samples": {"train": 3}}
            run = write_run(home, f"trial-{number}", "dummy", result=result)
            sweep.set_trial_attributes(number, runs=[run.name])
            sweep.record_result(number, ended, "", {"valid_loss": 1.0}, [1.0])
        return sweep.update(status="finished")

    monkeypatch.setattr(tuning_driver, "run", run_two_trials)
    monkeypatch.setattr(training_driver, "train_all", train_all)
    command = ("tune", "dummy", "--space", "optimizer", "--preset", "tiny", "--samples", "2")
    json_output(call(*command, "--metric", "loss", "--name", "s", "--json"))
    json_output(call("tune", "show", "s", "--json"))
    summary = json_output(call("tune", "report", "s", "--seeds", "1,2", "--json"))
    assert summary["repeated"]
    assert summary["saved"]


def test_sweeps_of_decoding(call, home_with, build, monkeypatch):
    home_with({"mine": build("dummy")})
    monkeypatch.setattr(decoding_trials, "run", run_trials)
    command = ("tune-decoding", "mine", "--metric", "bleu,distinct_2", "--samples", "3")
    assert json_output(call(*command, "--name", "ways", "--json"))["trials"] == 3
    assert json_output(call("tune", "show", "ways", "--json"))["table"]


@pytest.mark.usefixtures("home")
def test_the_local_stack(call, monkeypatch):
    parts = {
        name: stack.Part(
            name=name, pid=os.getpid(), started=0.0, mark="", port=1,
            ports={"head": 2, "metrics": 3},
        )
        for name in stack.PARTS
    }  # fmt: skip
    monkeypatch.setattr(stack.Part, "alive", lambda _: True)
    monkeypatch.setattr(stack.Part, "memory", lambda _: 1.0)
    for name in stack.CHECKS:
        monkeypatch.setitem(stack.CHECKS, name, lambda _: None)
    monkeypatch.setattr(stack, "running_parts", lambda: parts)
    monkeypatch.setattr(stack, "up", lambda *_, **__: parts)
    monkeypatch.setattr(stack, "down", lambda _: list(parts.values()))
    assert len(json_output(call("up", "--json"))["parts"]) == 3
    assert json_output(call("status", "--json"))["ok"]
    assert json_output(call("down", "--json"))["stopped"] == list(stack.PARTS)


class Jobs:
    """A cluster whose only job has succeeded."""

    address = "http://cluster:8265"

    def __init__(self, _):
        self.job = jobs.Job(
            id="job", state="SUCCEEDED", command="attune runs", options="", run="", began=0.0,
            ended=1.0,
        )  # fmt: skip

    def submit(self, *_, **__):
        return self.job.id

    def dashboard(self, job):
        return f"{self.address}/#/jobs/{job}"

    def follow(self, *_):
        return self.job

    def all(self):
        return [self.job]

    def find(self, _):
        return self.job

    def wait(self, *_):
        return self.job


@pytest.mark.usefixtures("home")
def test_jobs(call, monkeypatch):
    monkeypatch.setattr(jobs, "Jobs", Jobs)
    assert "state" not in json_output(call("submit", "--json", "--", "runs"))
    assert json_output(call("submit", "--follow", "--json", "--", "runs"))["state"] == "SUCCEEDED"
    assert json_output(call("jobs", "list", "--json"))["jobs"]
    for command in ("stop", "wait"):
        assert json_output(call("jobs", command, "job", "--json"))["id"] == "job"


def test_data(call):
    assert json_output(call("data", "prepare", "--source", "bundled", "--out", "d", "--json"))[
        "hash"
    ]
    assert json_output(call("data", "inspect", "d", "--json"))["samples"]


def test_settings_of_a_variant(call):
    assert json_output(call("variants", "mime-no-mimicry", "--json"))["variants"]


def test_explanations(call, home_with, build):
    """The explanations of all dialogue variants have the recorded keys."""
    variants = [name for name, (kind, _) in all_variants().items()
                if issubclass(kind, DialogueVariant)]  # fmt: skip
    home_with({name: build(name) for name in variants})
    answers = json_output(call("respond", *variants, "--context", "I am sad.", *FEW, "--json"))
    assert len(answers["answers"]) == len(variants)
    context = ("--context", "I am sad today.")
    assert json_output(call("show", "attention", "empdg", *context, "--json"))["explanation"][
        "attention"
    ]
    judged = json_output(call("show", "critics", "empdg", "--count", "2", "--json"))
    assert judged["answers"][0]["scores"]
