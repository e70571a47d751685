"""Schedulers: options that do not work together."""

import pytest

from attune.models.base import Choice
from attune.platform.core.errors import UsageError
from attune.platform.tuning import schedulers
from tests.sweeps import SPACE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": ("valid_perplexity", "valid_bleu")}, "two metrics use --scheduler none"),
        ({"metrics": ("valid_distinct_2",)}, "with distinct_2 use --scheduler none"),
        ({"scheduler": "median", "spaces": {"a": SPACE, "b": SPACE}}, "give one VARIANT"),
        ({"scheduler": "pbt", "search": "optuna"}, "leave out --search optuna"),
        ({"scheduler": "pbt", "workers": 2}, "leave out --workers-per-trial"),
        ({"scheduler": "pbt", "spaces": {"a": SPACE, "b": SPACE}}, "give one VARIANT"),
        ({"scheduler": "pbt", "spaces": {"a": {"x": Choice(values=(1, 2))}}}, "only choices"),
    ],
)
def test_conflicting_options_are_rejected(fields, message):
    usual = {"scheduler": "asha", "search": "random", "metrics": ("valid_loss",),
             "spaces": {"a": SPACE}, "workers": 1}  # fmt: skip
    schedulers.check_compatibility(**usual)
    with pytest.raises(UsageError, match=message):
        schedulers.check_compatibility(**{**usual, **fields})
