"""Search spaces: groups of settings, sweep files and grids."""

import dataclasses

import optuna
import pytest

from attune.models import all_variants
from attune.models.base import Choice, Range
from attune.platform.core.errors import UsageError
from attune.platform.training.settings import configure
from attune.platform.tuning import (
    spaces,
)
from attune.platform.tuning.spaces import SweepDefinition
from tests.sweeps import SPACE


@pytest.mark.parametrize("name", sorted(all_variants()))
def test_search_groups_produce_valid_settings(name):
    for group in spaces.get_search_groups(name):
        tried = spaces.build_variant_spaces([name], [group], SweepDefinition(), {})
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        for _ in range(10):
            chosen, settings = spaces.suggest(study.ask(), tried)
            config, training = configure(chosen, "tiny", settings)
            together = {**dataclasses.asdict(config), **dataclasses.asdict(training)}
            assert {key: together[key] for key in settings} == settings


def test_settings_that_define_an_ablation_are_not_tuned():
    fixed = {n: s for n, (_, s) in all_variants().items() if s}
    for name, settings in fixed.items():
        keys = {key for group in spaces.get_search_groups(name).values() for key in group}
        assert not keys & set(settings)
    assert "gate" in spaces.get_search_groups("emotion-cause-soft")["gating"]


def test_unknown_group_error_lists_the_known_groups():
    with pytest.raises(UsageError, match=r"'mime' has no search space 'gats': it has .*gating"):
        spaces.build_variant_spaces(["mime"], ["gats"], SweepDefinition(), {})
    with pytest.raises(UsageError, match="is left to tune"):
        spaces.build_variant_spaces(["mime"], ["gating"], SweepDefinition(), {"gate": "each"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "space: {elbo_wieght: [1.0]}",
            "unknown setting 'elbo_wieght': did you mean 'elbo_weight'",
        ),
        (
            "space: {elbo_weight: {low: 2.0, high: 1.0}}",
            "space.elbo_weight: low: expected less than high=1.0, got 2.0",
        ),
        (
            "space: {elbo_weight: {low: 0, high: 1, scale: loguniform}}",
            "expected a number above 0 with scale",
        ),
        ("space: {elbo_weight: {low: 0, high: 1, scale: log}}", "unknown scale 'log'"),
        (
            "space: {elbo_weight: 3}",
            r"space.elbo_weight: expected a list of values, or \{low.*, got 3",
        ),
        ("space: {gate: [each, wide]}", "space.gate: unknown value of gate 'wide'"),
        (
            "space: {positive_threshold: {low: 0.5, high: 1.5}}",
            "positive_threshold: expected a number above 0 and below 1",
        ),
        (
            "space: {batch_size: [0, 16]}",
            "batch_size: expected a number from 1 to 1,000,000",
        ),
        ("spaces: {}", "unknown key 'spaces': did you mean 'space'"),
        ("space: [", "line 1: expected YAML"),
        ("search: bayes", "unknown search 'bayes'"),
        ("variants: 5", "variants: expected names.*got 5"),
        ("metric: 3", "metric: expected a text, got 3"),
    ],
)
def test_invalid_sweep_file_error_names_key_and_range(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        spaces.build_variant_spaces(["mime"], [], spaces.find_definition(str(path)), {})
    assert "mine.yaml" in str(error.value)


def test_sweep_file_overrides_and_extends_the_space_and_set_removes_keys(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("space: {elbo_weight: [1e-1, 2.0], width: {low: 8, high: 16, scale: int}}")
    ready = spaces.find_definition(str(path))
    tried = spaces.build_variant_spaces(
        ["mime"], ["loss-weights"], ready, {"response_weight": "1"}
    )["mime"]
    assert set(tried) == {"classification_weight", "elbo_weight", "width"}
    assert tried["elbo_weight"] == Choice(values=(0.1, 2.0))  # which YAML reads as a text


@pytest.mark.parametrize("name", sorted(spaces.read_bundled_sweeps()))
def test_bundled_sweeps_are_valid(name):
    ready = spaces.find_definition(name)
    assert ready.about
    if ready.variants:
        tried = spaces.build_variant_spaces(ready.variants, [], ready, {})
        assert len(list(spaces.iterate_grid(tried))) > 1
    else:
        spaces.build_decoding_spaces(
            [ready.decode] if ready.decode else list(spaces.DECODING_SPACES), ready, {}
        )


def test_grid_contains_every_combination_of_every_variant():
    points = list(
        spaces.iterate_grid({"dummy": SPACE, "mime": {"gate": Choice(values=("each", "open"))}})
    )
    assert len(points) == 5 * 2 + 2
    assert points[-1] == {"variant": "mime", "mime/gate": "open"}
    rates = sorted({one["dummy/learning_rate"] for one in points if one["variant"] == "dummy"})
    assert rates == pytest.approx([1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2])


def test_oversized_grid_is_rejected_without_enumeration():
    tried = {"dummy": {str(n): Range(low=0.0, high=1.0) for n in range(40)}}
    with pytest.raises(UsageError, match="choose fewer settings"):
        spaces.count_grid_points(tried)
    assert spaces.count_grid_points({"a": SPACE, "b": SPACE}) == 20
