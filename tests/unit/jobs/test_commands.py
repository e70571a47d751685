"""`attune variants`, `runs` and `respond`: output, JSON and errors."""

import dataclasses
import re
import subprocess
import sys

import pytest

from attune.jobs import options
from attune.jobs.variants import PRESETS
from attune.models import all_variants
from attune.models.base import Choice, Range
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError
from attune.platform.core.field_help import field_help
from attune.platform.data import prepare as preparing
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.data.prepare import find_prepared_data
from attune.platform.runs.record import RUN_RECORD, find_run
from tests.commands import error_of, json_output
from tests.unit.jobs.test_cli import attune

FEW = ("--set", "max_tokens=3")


def test_variants(call):
    variants = json_output(call("variants", "--json"))["variants"]
    assert [one["name"] for one in variants] == list(all_variants())
    for one in variants:
        assert set(one) == {"name", "system", "paper", "ablation_of", "kind", "search_spaces"}
        assert one["kind"] in ("dialogue", "classifier")
        for key in (key for group in one["search_spaces"].values() for key in group.values()):
            assert set(key) in ({"type", "values"}, {"type", "low", "high"})
    multi = next(one for one in variants if one["name"] == "multi-trs")
    assert (multi["system"], multi["ablation_of"]) == ("Multi-TRS", None)
    spaces = multi["search_spaces"]
    assert spaces["architecture"]["num_layers"] == {"type": "choice", "values": [1, 2, 4]}
    weight = {"type": "loguniform", "low": 0.01, "high": 1.0}
    assert spaces["loss-weights"]["emotion_weight"] == weight
    assert "learning_rate" in spaces["optimizer"]


def test_an_ablation_names_its_variant(call, monkeypatch):
    from attune.models.dummy import Dummy

    monkeypatch.setattr(Dummy, "ablations", {"dummy-narrow": {"width": 2}})
    space = {"size": {"width": Range(low=1, high=8, scale="int"), "a": Choice(values=(1, "b"))}}
    monkeypatch.setattr(Dummy, "search_spaces", space)
    [one] = json_output(call("variants", "dummy-narrow", "--json"))["variants"]
    assert one["ablation_of"] == "dummy"
    assert one["search_spaces"]["size"] == {
        "width": {"type": "int", "low": 1, "high": 8},
        "a": {"type": "choice", "values": [1, "b"]},
    }
    [width] = [setting for setting in one["settings"] if setting["name"] == "width"]
    assert width["default"] == 32
    assert set(width["presets"].values()) == {2}


def test_settings_of_a_variant_have_their_help(call):
    done = call("variants", "multi-trs", "--json")
    settings = {one["name"]: one for one in json_output(done)["variants"][0]["settings"]}
    assert settings["emotion_weight"]["help"].startswith("Weight of the emotion's cross-entropy")
    assert settings["width"]["help"].startswith("Width of embeddings")  # inherited
    assert settings["width"]["help"].endswith("(from 1 to 65,536)")
    assert settings["width"]["presets"] == {
        "tiny": 32, "small": 128, "compact": 256, "paper": 300,
    }  # fmt: skip
    assert settings["learning_rate"]["of"] == "training"
    assert "Weight of the emotion's" in done.stderr
    assert "did you mean 'multi-trs'" in error_of(call("variants", "multi-tsr"))


@pytest.mark.parametrize("name", all_variants())
def test_a_variant_is_described_within_100_columns(call, name):
    shown = call("variants", name).stdout
    assert max(map(len, shown.splitlines())) <= 100
    presets = all_variants()[name][0].presets
    for preset in presets:
        assert re.search(rf"^{preset} +{PRESETS[preset]}", shown, re.M)
    # Names and values are never cut or wrapped; only the help texts are.
    headers = [line.split() for line in shown.splitlines() if line.startswith("--set")]
    assert headers == [["--set", "default", *presets]] * 2
    assert "…" not in shown


def test_every_setting_has_a_help_text():
    for variant, _ in all_variants().values():
        assert set(field_help(variant.Config)) == {
            field.name for field in dataclasses.fields(variant.Config)
        }


@pytest.mark.usefixtures("home")
def test_runs(call):
    runs = json_output(call("runs", "--json"))["runs"]
    assert [run["name"] for run in runs] == ["first", "second", "third"]
    assert runs[1] == {
        "name": "second",
        "run_id": None,
        "variant": "multi-trs",
        "status": "stopped",
        "data": "few",
        "alias": None,
        "job": None,
        "dashboard": None,
        "seed": 6,
        "metrics": {"valid_loss": 2.0, "valid_perplexity": 7.4, "valid_emotion_accuracy": 0.5},
    }
    assert runs[0]["metrics"] == {}
    only = json_output(call("runs", "--variant", "dummy", "--json"))["runs"]
    assert [run["name"] for run in only] == ["first", "third"]
    none = json_output(call("runs", "--variant", "transformer", "--json"))
    assert none == {"runs": []}
    shown = call("runs").stdout
    assert "50.00%" in shown
    assert "…" not in shown  # no terminal, no edge: a job's log has whole names
    assert "emotion accuracy" in shown
    wrong = call("runs", "--variant", "dumy")
    assert "did you mean 'dummy'" in error_of(wrong)


@pytest.mark.usefixtures("home")
def test_respond(call, tmp_path):
    turns = ("I lost [my] job.", "Oh no!", "It's sad.")
    context = [part for turn in turns for part in ("--context", turn)]
    command = ("respond", "first", "multi-trs@latest", *context, *FEW, "--json")
    done = attune(*command, cwd=tmp_path)
    answer = json_output(done)
    assert answer["context"] == list(turns)
    assert [(one["run"], one["variant"]) for one in answer["answers"]] == [
        ("first", "dummy"),
        ("second", "multi-trs"),
    ]
    for one in answer["answers"]:
        assert set(one) == {"run", "variant", "answer", "seconds", "explanation"}
        assert one["seconds"] > 0
        assert sum(one["explanation"]["emotion"].values()) == pytest.approx(1.0)
    shown = call("respond", "second", *context, *FEW).stdout
    assert "speaker: I lost [my] job." in shown
    assert answer["answers"][1]["answer"] in shown
    assert "emotion: " in shown


@pytest.mark.usefixtures("home")
def test_respond_uses_the_decoding_options(call):
    def answer(*arguments):
        command = ("respond", "second", "--context", "Hello.", "--json", *arguments)
        return json_output(call(*command))["answers"][0]["answer"]

    sampled = ("--decode", "nucleus", "--set", "max_tokens=8", "--set", "top_p=1.0")
    first = answer(*sampled)
    assert answer(*sampled, "--set", "seed=0") == first
    assert answer(*sampled, "--set", "seed=1") != first
    assert len(answer("--set", "max_tokens=1").split()) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("secnd", "--context", "x"), "did you mean 'second'"),
        (("multi-tsr@latest", "--context", "x"), "did you mean 'multi-trs'"),
        (("third", "--context", "x"), "run 'third' has no model yet: it is running"),
        (("second", "--context", "x", "--context", "y"), "has 2 turns"),
        (("second",), "--context"),
        (("second", "--context", "x", "--decode", "gredy"), "did you mean 'greedy'"),
        (("second", "--context", "x", "--set", "beam=3"), "did you mean 'beams'"),
        (("second", "--context", "x", "--set", "beams"), "--set beams: expected KEY=VALUE"),
        (
            ("second", "--context", "x", "--set", "beams=many"),
            "beams: expected an integer, got 'many'",
        ),
        (
            ("second", "--context", "x", "--set", "beams=0"),
            "beams: expected a number from 1 to 1,000",
        ),
        (
            ("second", "--context", "x", "--set", "top_p=1.5"),
            "top_p: expected a number above 0 and at most 1, got 1.5",
        ),
        (
            ("second", "--context", "x", "--set", "temperature=0"),
            "temperature: expected a number above 0 and at most 100, got 0",
        ),
    ],
)
@pytest.mark.usefixtures("home")
def test_respond_refuses(call, arguments, message):
    assert message in error_of(call("respond", *arguments, "--json"))


@pytest.mark.usefixtures("home")
def test_runs_skips_a_damaged_run_with_a_message(call):
    path = find_run("first").folder / RUN_RECORD
    path.write_text("{")
    done = call("runs", "--json")
    assert "first" not in {run["name"] for run in json_output(done)["runs"]}
    assert f"{path} is damaged" in done.stderr


def test_find_data(tmp_path, monkeypatch, prepared):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    folder = find_prepared_data("bundled")
    assert folder == tmp_path / "data" / "bundled"
    assert read_dataset_manifest(folder) == read_dataset_manifest(prepared)
    monkeypatch.setattr(preparing, "prepare", None)  # it is not made a second time
    assert find_prepared_data("bundled") == folder
    monkeypatch.chdir(prepared.parent)
    assert find_prepared_data("./bundled") == prepared
    with pytest.raises(UsageError, match="not a prepared folder"):
        find_prepared_data("bundeld")


def test_parse_overrides():
    assert options.parse_override_options(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    assert options.parse_override_options(None) == {}
    for text in ("a", "=1", ""):
        with pytest.raises(UsageError, match="KEY=VALUE"):
            options.parse_override_options([text])


def test_help_names_every_setting_of_decoding(tmp_path):
    """The help text lists them by hand, because reading the class would import torch."""
    keys = {field.name for field in dataclasses.fields(Decoding)} - {"method"}
    for command in ("respond", "evaluate"):
        done = attune(command, "--help", cwd=tmp_path, COLUMNS="200")
        assert keys <= set(re.findall(r"\w+", done.stdout))
        assert "Examples" in done.stdout


def test_help_imports_no_heavy_library():
    code = (
        "import attune.jobs.cli, sys; print({'torch', 'mlflow', 'nltk', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("command", [("train", "dummy"), ("tune", "dummy", "--space", "optimizer")])
@pytest.mark.parametrize("minutes", ["0", "-1", "0.0", "nan"])
@pytest.mark.usefixtures("home")
def test_zero_minutes_are_an_error(call, command, minutes):
    message = error_of(call(*command, "--max-minutes", minutes))
    assert "expected a number above 0" in message
    assert "leave it out for no limit" in message


@pytest.mark.parametrize(
    "command", [("train", "dummy"), ("tune", "dummy", "--space", "optimizer"), ("demo", "dummy")]
)
@pytest.mark.parametrize("steps", ["0", "-1"])
@pytest.mark.usefixtures("home")
def test_zero_steps_are_an_error(call, command, steps):
    assert "--max-steps" in error_of(call(*command, "--max-steps", steps))
