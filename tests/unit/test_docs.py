"""The documents agree with the code: the example system trains, and names and paths exist."""

import ast
import re
from pathlib import Path

import pytest

from attune.models import VARIANTS
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import find_run
from tests import contract
from tests.commands import json_output
from tests.golden.commands import runs_in_this_process

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
ADDING_A_SYSTEM = ROOT / "docs" / "adding-a-system.md"
EXAMPLE_FILE = "models/seq2seq.py"  # what a reader of the example writes


@pytest.fixture
def seq2seq(tmp_path, monkeypatch):
    """Register the system of docs/adding-a-system.md; return its name and its ablation's."""
    code = re.search(r"```python\n(.*?)```", ADDING_A_SYSTEM.read_text(encoding="utf-8"), re.S)
    (tmp_path / "documented_seq2seq.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(VARIANTS, "seq2seq", "documented_seq2seq:Seq2Seq")
    return "seq2seq", "seq2seq-no-emotion"


def test_the_documented_system_keeps_the_contract(seq2seq, build, batch, tmp_path):
    for name in seq2seq:
        model = build(name)
        contract.check_terms_are_tensors_that_learn(model.variant, batch)
        contract.check_no_module_is_built_in_a_forward(model.variant, batch)
        contract.check_each_player_moves_itself_and_nobody_else(model.variant, batch)
        contract.check_parts_add_up(model.variant, batch)
        contract.check_saved_is_loaded(model, batch, tmp_path / name)
        contract.check_truth_is_not_used(model.variant, batch)
        contract.check_a_batch_gives_what_its_samples_give(model.variant, batch)
        contract.check_steps_equal_all_at_once(model.variant, batch)
        contract.check_likelihood_term(model.variant, batch)
        contract.check_answers_are_text(model, batch)
        contract.check_learns_by_heart(build(name).variant, batch)


@pytest.mark.usefixtures("seq2seq")
def test_the_documented_system_is_trained_by_the_command(call, prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    settings = ("--set", "log_every=1", "--set", "batch_size=32")
    command = ("train", "seq2seq", "--data", prepared, "--preset", "tiny", "--max-steps", "40")
    with runs_in_this_process():
        result = json_output(call(*command, *settings, "--name", "mine", "--json"))
    assert result["steps"] == 40
    losses = [
        line["metrics"]["loss"]
        for line in read_metrics(find_run("mine").metrics_file)
        if "loss" in line["metrics"]
    ]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    answer = json_output(call("respond", "mine", "--context", "I am sad.", "--json"))["answers"][0]
    assert sum(answer["explanation"]["emotion"].values()) == pytest.approx(1.0)


def defined_names(path):
    """Every class, function and method of a Python file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def test_functions_of_the_architecture_are_in_the_files_named_beside_them():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"`([\w.]+)` \| `([\w/]+\.py)` \|", text)
    assert len(rows) > 25
    for name, path in rows:
        assert name in defined_names(ROOT / path), f"{path} has no {name}"
    arrows = re.findall(r"-->\|([\w.]+)\|", text)
    assert set(arrows) <= {name for name, _ in rows}


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/adding-a-system.md"]
)
def test_paths_in_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    folders = "platform|models|jobs|ui|infra|tests|docs"
    paths = set(re.findall(rf"`((?:{folders})/[\w/.-]*)`", text))
    links = set(re.findall(r"\]\(([\w/.-]+)\)", text))
    paths = {path for path in paths if path != EXAMPLE_FILE}
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_every_package_of_the_platform_is_described(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for folder in (ROOT / "platform").iterdir():
        if (folder / "__init__.py").is_file():
            assert re.search(rf"`(platform/)?{folder.name}/`", text), folder.name
