"""`attune show transfer`, `predictor` and `control`: results of MEED2's paper."""

import pytest

from attune.models.labels import LABELS
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.evaluation import control
from attune.platform.runs.model import copy_model_labeller, load_model, save_model
from attune.platform.runs.record import find_run
from tests.commands import error_of, json_output
from tests.runs import write_run


@pytest.fixture
def home(tmp_path, monkeypatch, build, prepared):
    """Runs of MEED2, one of them with a labeller for its answers, and of other variants."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    inputs = {"name": "b", "folder": str(prepared), "hash": read_dataset_manifest(prepared)["hash"]}
    save_model(build("intent-classifier"), tmp_path / "labeller")
    named = {"labelled": "meed2", "alone": "meed2", "raw": "meed2-no-emotion", "plain": "dummy"}
    for name, variant in named.items():
        run = write_run(tmp_path / "home", name, variant, data=inputs)
        save_model(build(variant), run.model)
    copy_model_labeller(tmp_path / "labeller", find_run("labelled").model)


@pytest.mark.usefixtures("home")
def test_runs_are_evaluated_on_other_corpora(call, data, prepared):
    few = ("--set", "max_tokens=3")
    actual = json_output(
        call("show", "transfer", "plain", "alone", "--data", prepared, *few, "--json")
    )
    rows = actual["rows"]
    assert [(row["run"], row["data"]) for row in rows] == [
        ("plain", str(prepared)), ("alone", str(prepared)),
    ]  # fmt: skip
    evaluated = json_output(call("evaluate", "plain", "--data", prepared, *few, "--json"))
    for name in ("perplexity", "distinct_1", "distinct_2"):
        assert rows[0][name] == evaluated["metrics"][name]
    unlabelled = call("show", "transfer", "plain", "alone", "--data", data, *few)
    assert "no utterance of a context has one of the 41 labels" in unlabelled.stderr


@pytest.mark.usefixtures("home")
def test_the_label_predictor_is_compared_with_random_labels(call, prepared):
    model = load_model(find_run("alone").model)
    samples = read_dataset_samples(prepared, "test")
    labelled = samples.filter(samples["response_label"].is_in(LABELS))
    run, guess = json_output(call("show", "predictor", "alone", "--json"))["rows"]
    assert run["run"] == "alone"
    assert set(run) == {"run", "accuracy", "weighted_precision", "weighted_recall", "weighted_f1"}
    assert run["weighted_recall"] == pytest.approx(run["accuracy"])
    assert guess["run"] == "random"
    assert guess["accuracy"] == pytest.approx(1 / len(LABELS), abs=3 * labelled.height**-0.5 / 6)
    assert "predicts no label" in error_of(call("show", "predictor", "plain"))
    assert model.variant.data_info.emotions


@pytest.mark.usefixtures("home")
def test_answers_with_the_requested_label_are_counted(monkeypatch, prepared):
    """The labeller gives half of the answers the requested label, and the others "sad"."""
    asked = []
    monkeypatch.setattr(
        control, "answer", lambda *inputs: asked.append(inputs[-1]) or [[] for _ in range(4)]
    )
    monkeypatch.setattr(
        control, "most_likely_labels",
        lambda _, turns: [(asked[-1] or {}).get("label", "sad"), "sad"] * (turns.height // 2),
    )  # fmt: skip
    model = load_model(find_run("labelled").model)
    actual = control.controllability(
        model,
        read_dataset_samples(prepared, "test").head(4),
        ["consoling", "sad"],
        control.Decoding(),
    )
    assert asked == [None, {"label": "consoling"}, {"label": "sad"}]
    assert [(each.label, each.asked, each.unasked) for each in actual] == [
        ("consoling", 0.5, 0.0), ("sad", 1.0, 1.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("home")
def test_show_control(call):
    command = ("show", "control", "labelled", "--labels", "consoling,joyful", "--count", "2")
    actual = json_output(call(*command, "--json"))
    assert [each["label"] for each in actual["labels"]] == ["consoling", "joyful"]
    assert actual["contexts"] == 2
    assert "--set labeller=RUN" in error_of(call("show", "control", "alone", "--count", "2"))
    for name in ("plain", "raw"):
        assert "cannot be asked" in error_of(call("show", "control", name, "--count", "2"))
    asked = call("respond", "raw", "--context", "Oh no.", "--control", "label=consoling")
    assert "meed2-no-emotion has no controls" in error_of(asked)
    wrong = call("show", "control", "labelled", "--labels", "consolin")
    assert "did you mean 'consoling'" in error_of(wrong)
