"""Schedulers: conflicting options, and population-based training."""

from types import SimpleNamespace

import pytest

from attune.models.base import Choice, Range
from attune.platform.core.errors import UsageError
from attune.platform.tuning import (
    schedulers,
)
from tests.sweeps import SPACE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": ("valid_perplexity", "valid_bleu")}, "two metrics use --scheduler none"),
        ({"metrics": ("valid_distinct_2",)}, "with distinct_2 use --scheduler none"),
        ({"scheduler": "median", "spaces": {"a": SPACE, "b": SPACE}}, "give one VARIANT"),
        ({"scheduler": "pbt", "search": "optuna"}, "leave --search out"),
        ({"scheduler": "pbt", "workers": 2}, "leave --workers-per-trial out"),
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


def test_exploiting_member_keeps_its_number_and_stays_in_range():
    def member(number, **settings):
        return SimpleNamespace(config={"task": {"number": number, "settings": settings}})

    tried = {"rate": Range(low=0.1, high=1.0), "layers": Range(low=1, high=4, scale="int")}
    population = schedulers.PopulationScheduler(tried)
    one, other = member(0, rate=0.2, layers=1, gate="each"), member(1, rate=1.0, layers=4, gate="x")
    tasks = [population._get_new_config(one, other)[0]["task"] for _ in range(40)]
    assert {task["number"] for task in tasks} == {0}
    assert {task["settings"]["gate"] for task in tasks} == {"x"}
    assert all(0.1 <= task["settings"]["rate"] <= 1.0 for task in tasks)
    assert {task["settings"]["layers"] for task in tasks} <= {1, 2, 3, 4}
    assert len({task["settings"]["rate"] for task in tasks}) > 2
    assert other.config["task"]["settings"]["rate"] == 1.0


class Member:
    """A trial of Tune's that runs, as it says."""

    def is_finished(self):
        return False


def test_population_does_not_wait_for_an_ended_member():
    """Tune counts it among the living while it tells of its end."""
    population = schedulers.PopulationScheduler({"rate": Range(low=0.1, high=1.0)})
    members = [Member(), Member(), Member()]
    population._trial_state = {
        each: SimpleNamespace(last_train_time=validations)
        for each, validations in zip(members, (0, 1, 1), strict=True)
    }
    population._next_perturbation_sync = 1
    controller = SimpleNamespace(get_live_trials=lambda: members)
    population._advance_sync_point(controller, members[1])
    assert population._next_perturbation_sync == 1  # the first has not looked yet
    population._advance_sync_point(controller, members[0])
    assert population._next_perturbation_sync == 2
