"""Settings: bounds, help and errors; looking up variants by what they can do."""

import dataclasses
import math
import typing

import pytest

from attune.models import VARIANTS, load_variant
from attune.models.base import Bounds
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import labels_utterances, setting_help, variants_where
from attune.platform.training.settings import TrainingConfig, configure


def test_variants_where_returns_names_in_the_order_of_the_registry():
    assert variants_where(lambda _: True) == list(VARIANTS)
    assert variants_where(lambda _: False) == []


def test_the_variant_that_labels_utterances():
    assert variants_where(labels_utterances) == ["intent-classifier"]


CONFIGS = [TrainingConfig, Decoding, *dict.fromkeys(load_variant(n).Config for n in VARIANTS)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_number_has_bounds_that_contain_its_default(config):
    hints = typing.get_type_hints(config, include_extras=True)
    plain = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if plain[field.name] in (int, float, int | None):
            [bounds] = hints[field.name].__metadata__
            assert field.default is None or field.default in bounds, field.name
            assert str(bounds) in setting_help(config)[field.name]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_setting_has_help(config):
    assert all(len(text) > 15 for text in setting_help(config).values())


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Bounds(at_least=0), (0, 1e30), (-1e-9, math.inf, math.nan), "at least 0"),
        (Bounds(above=0), (1e-30,), (0, math.inf), "above 0"),
        (Bounds(at_least=1, at_most=4096), (1, 4096), (0, 4097), "from 1 to 4,096"),
        (Bounds(at_least=0, below=1), (0, 0.99), (1, -0.1), "from 0 to below 1"),
        (Bounds(above=0, at_most=1), (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        (Bounds(above=0, below=1), (0.5,), (0, 1), "above 0 and below 1"),
    ],
)
def test_bounds(bounds, inside, outside, text):
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)
    assert str(bounds) == text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout=1.5", "dropout: expected a number from 0 to below 1, got 1.5"),
        ("width=-5", "width: expected a number from 1 to 65,536, got -5"),
        (f"batch_size={10**20}", f"from 1 to 1,000,000, got {10**20}"),
        ("learning_rate=0", "learning_rate: expected a number above 0 and at most 100, got 0"),
        ("learning_rate=1e999", "got 1e999"),
        ("learning_rate=x", "learning_rate: expected a float, got 'x'"),
        ("max_context=0", "max_context: expected a number from 1 to"),
        ("num_heads=3", "key_depth: expected a multiple of num_heads=3, got 32"),
        ("elbo=2", "unknown setting 'elbo': did you mean 'elbo_weight'?"),
        ("batch=2", "did you mean 'batch_by' or 'batch_size'?"),
        ("xyz=2", "unknown setting 'xyz': 'attune variants mime' lists the settings"),
    ],
)
def test_impossible_settings_are_rejected_by_name(setting, message):
    key, _, value = setting.partition("=")
    with pytest.raises(UsageError) as error:
        configure("mime", "tiny", {key: value})
    assert message in str(error.value)
    assert len(str(error.value)) < 100


def test_a_value_of_none_is_not_compared_with_bounds():
    assert configure("mime", "tiny", {"max_context": "none"})[1].max_context is None
