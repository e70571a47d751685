"""Every variant computes what was recorded; the docstring of the package says how to re-record."""

import copy
import json

import pytest

from tests.golden import behaviour


@pytest.mark.parametrize("name", behaviour.names())
def test_behaviour_matches_the_record(golden_corpus, name, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    expected = json.loads(behaviour.path_of(name).read_text(encoding="utf-8"))
    lines = behaviour.differences(expected, behaviour.measure(name, golden_corpus))
    assert not lines, "\n".join([f"{len(lines)} values differ:", *lines[:20]])


def test_the_record_has_a_file_for_each_variant():
    assert {path.stem for path in behaviour.FOLDER.iterdir()} == set(behaviour.names())


def test_values_are_compared_by_position():
    expected = json.loads(behaviour.path_of("empdg").read_text(encoding="utf-8"))
    measures = copy.deepcopy(expected)
    measures["stages"][0]["name"] = measures["stages"][0]["steps"][0][0]["player"] = "other"
    update = measures["stages"][2]["steps"][1][0]
    update["terms"] = {f"new_{name}": value for name, value in update["terms"].items()}
    assert behaviour.differences(expected, measures) == []
    value = expected["stages"][1]["steps"][2][0]["gradient_norm"]
    overrides = {
        "scaled": lambda m: m["stages"][1]["steps"][2][0].update(gradient_norm=value * 1.001),
        "without a term": lambda m: m["stages"][0]["steps"][0][0]["terms"].popitem(),
        "without a step": lambda m: m["stages"][2]["steps"].pop(),
        "without a stage": lambda m: m["stages"].pop(),
        "another answer": lambda m: m["answers"].__setitem__(3, "yes"),
        "not a number": lambda m: m["scores"]["emotion"].__setitem__(0, float("nan")),
    }
    for change, alter in overrides.items():
        measures = copy.deepcopy(expected)
        alter(measures)
        assert behaviour.differences(expected, measures), change
