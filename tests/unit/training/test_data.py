"""The data of a run: filters that variants declare, and splits that are read once."""

import ast
import dataclasses
from pathlib import Path

import pytest

from attune.models import all_variants
from attune.platform.training import data, setup
from attune.platform.training.data import load_training_streams, read_training_split_once
from attune.platform.training.settings import TrainingConfig

ROOT = Path(__file__).parents[3]
SETTINGS = {
    field.name
    for variant, _ in all_variants().values()
    for field in dataclasses.fields(variant.Config)
}


def is_config(node):
    """Whether an expression is named `config`, or is an attribute of that name."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name == "config"


def reads_setting(node):
    """Whether a node reads a setting of a variant by its name."""
    if isinstance(node, ast.Attribute):
        return is_config(node.value) and node.attr in SETTINGS
    if isinstance(node, ast.Subscript):
        key = node.slice
        return is_config(node.value) and isinstance(key, ast.Constant) and key.value in SETTINGS
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        return is_config(node.args[0]) and isinstance(node.args[1], ast.Constant)
    return False


def settings_read(source):
    """The lines of a source file that read a setting of a variant by its name."""
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if reads_setting(node)})


def test_platform_reads_no_setting_of_a_variant():
    files = sorted((ROOT / "platform").rglob("*.py"))
    assert len(files) > 50
    lines = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in settings_read(path.read_text(encoding="utf-8"))
    }
    assert not lines, "declare the setting in the contract, as `DataFilters` does"


@pytest.mark.parametrize(
    "source",
    [
        "def check(config):\n    return config.cause_threshold",
        "def check(model):\n    return model.variant.config.harvest",
        "def check(config):\n    return getattr(config, 'emotionality_threshold', 0.0)",
        "def check(run):\n    return run.config['harvest_threshold']",
    ],
)
def test_each_way_to_read_a_setting_is_detected(source):
    assert settings_read(source) == [2]


def test_declared_filters_are_settings():
    declared = set()
    for variant, _ in all_variants().values():
        filters = dataclasses.asdict(variant.requirements.filters).values()
        names = {name for name in filters if name is not None}
        assert names <= {field.name for field in dataclasses.fields(variant.Config)}
        declared |= names
    assert declared == {
        "cause_threshold", "emotionality_threshold", "harvest", "harvest_threshold",
    }  # fmt: skip
    assert not declared & {field.name for field in dataclasses.fields(TrainingConfig)}


@pytest.mark.parametrize("variant", ["meed2", "emotion-cause-soft"])
def test_train_and_valid_are_read_once(prepared, tmp_path, monkeypatch, variant):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    read_training_split_once.cache_clear()
    splits = []
    real = data.read_model_split
    monkeypatch.setattr(
        data, "read_model_split", lambda *asked: splits.append(asked[-1]) or real(*asked)
    )
    run = setup.new_run(variant, data=str(prepared), preset="tiny")
    load_training_streams(run, setup.set_up_run_model(run))
    assert sorted(splits) == ["train", "valid"]
