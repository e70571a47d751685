"""Population-based training: the settings of members, and members that end early."""

from types import SimpleNamespace

from attune.models.base import Range
from attune.platform.tuning.population import PopulationScheduler
from attune.platform.tuning.trial import VALIDATION


def test_copying_member_keeps_its_number_and_stays_in_range():
    def member(number, **settings):
        return SimpleNamespace(config={"task": {"number": number, "settings": settings}})

    ranges = {"rate": Range(low=0.1, high=1.0), "layers": Range(low=1, high=4, scale="int")}
    population = PopulationScheduler(ranges)
    one, other = member(0, rate=0.2, layers=1, gate="each"), member(1, rate=1.0, layers=4, gate="x")
    tasks = [population._get_new_config(one, other)[0]["task"] for _ in range(40)]
    assert {task["number"] for task in tasks} == {0}
    assert {task["settings"]["gate"] for task in tasks} == {"x"}
    assert all(0.1 <= task["settings"]["rate"] <= 1.0 for task in tasks)
    assert {task["settings"]["layers"] for task in tasks} <= {1, 2, 3, 4}
    assert len({task["settings"]["rate"] for task in tasks}) > 2
    assert other.config["task"]["settings"]["rate"] == 1.0


def test_population_does_not_wait_for_an_ended_member():
    """Tune counts it as live while it reports its end."""
    population = PopulationScheduler({"rate": Range(low=0.1, high=1.0)})
    members = [
        SimpleNamespace(is_finished=lambda: False, last_result={VALIDATION: count} if count else {})
        for count in (0, 1, 1)
    ]
    population._next_perturbation_sync = 1
    controller = SimpleNamespace(get_live_trials=lambda: members)
    population._advance_sync_point(controller, members[1])
    assert population._next_perturbation_sync == 1  # the first has no validation yet
    population._advance_sync_point(controller, members[0])
    assert population._next_perturbation_sync == 2
