"""The sweep record and its search: suggestions, results, recovery after a crash."""

import json
import math

import pytest

from attune.platform.tuning import (
    report,
    spaces,
)
from attune.platform.tuning import sweep as sweeps
from tests.commands import error_of
from tests.sweeps import SPACE, suggest_all, write_sweep


@pytest.mark.parametrize("search", ["random", "grid", "optuna"])
def test_interrupted_search_suggests_the_same_trials(search):
    def record(sweep, one):
        value = math.log(one[2]["learning_rate"]) ** 2
        sweep.record_result(one[0], "finished", "", {"valid_perplexity": value})

    whole, parts = (
        write_sweep("whole", search=search, samples=14),
        write_sweep("parts", search=search, samples=14),
    )
    expected, drawn = [], []
    for sweep, kept in ((whole, expected), (parts, drawn)):
        sweep.enqueue_grid()
        while (one := sweep.suggest_trial()) is not None:
            kept.append(one)
            record(sweep, one)
            if sweep is parts or sweep.name == "parts":
                parts = sweep = sweeps.read_sweep(sweep.folder)  # as another process would
    assert drawn == expected
    assert len(expected) == (10 if search == "grid" else 14)
    assert len({json.dumps(one[2]) for one in expected}) == len(expected)


@pytest.mark.parametrize("search", ["random", "grid"])
def test_trial_survives_driver_death_during_suggestion(search):
    whole, torn = write_sweep("whole", search=search), write_sweep("torn", search=search)
    for sweep in (whole, torn):
        sweep.enqueue_grid()
    expected = suggest_all(whole)
    first = torn.suggest_trial()
    if search == "random":
        torn.study.enqueue_trial(torn._sample_parameters(torn.study.get_trials()))
    torn.study.ask()  # and here it dies
    assert [first, *suggest_all(sweeps.read_sweep(torn.folder))] == expected


def test_best_trial_is_a_finished_one_and_failed_trials_have_no_value():
    sweep = write_sweep()
    for number, _, _ in suggest_all(sweep)[:4]:
        values = {"valid_perplexity": 10.0 - number}
        ended = ("finished", "stopped early", "diverged", "finished")[number]
        sweep.record_result(number, ended, "because", values, validations=[30.0, math.nan, 20.0])
    assert sweep.best_trial().number == 3
    summarize = sweep.summarize()
    assert (summarize["stopped_early"], summarize["failed"], summarize["trials"]) == (1, 1, 6)
    assert summarize["best"]["config"]["variant"] == "dummy"
    states = [trial.state.name for trial in sweep.get_trials()]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "RUNNING", "RUNNING"]
    assert sweep.get_trial(1).intermediate_values == {0: 30.0, 1: 20.0}


def test_two_metrics_give_a_pareto_front():
    sweep = write_sweep(metrics=("valid_perplexity", "valid_distinct_2"))
    values = [(10, 0.1), (20, 0.3), (30, 0.2)]
    for (number, _, _), (perplexity, distinct) in zip(suggest_all(sweep)[:3], values, strict=True):
        metrics = {"valid_perplexity": perplexity, "valid_distinct_2": distinct}
        sweep.record_result(number, "finished", "", metrics)
    assert [trial.number for trial in sweep.pareto_front()] == [0, 1]
    assert sweep.best_trial().number == 0
    written = report.write_report(sweep, sweep.folder / "report")
    assert (sweep.folder / "report" / "front.png").is_file()
    assert len(written["front"]) == 2


def test_variants_alternate_and_each_has_a_best_trial():
    sweep = write_sweep(space={"dummy": SPACE, "mime": SPACE}, search="optuna", samples=8)
    drawn = []
    while (one := sweep.suggest_trial()) is not None:
        drawn.append(one)
        value = one[0] + (100.0 if one[1] == "mime" else 0.0)
        sweep.record_result(one[0], "finished", "", {"valid_perplexity": value})
        sweep = sweeps.read_sweep(sweep.folder)  # as the driver of a resumed sweep does
    assert [chosen for _, chosen, _ in drawn] == ["dummy", "mime"] * 4
    assert len({settings["learning_rate"] for _, _, settings in drawn}) == 8
    best = sweep.summarize()["best_of_each"]
    assert {n: one["metrics"]["valid_perplexity"] for n, one in best.items()} == {
        "dummy": 0.0, "mime": 101.0,
    }  # fmt: skip
    assert "best_of_each" not in write_sweep("one").summarize()


def test_unreported_result_is_recovered_after_driver_death(monkeypatch):
    sweep = write_sweep()
    number, _, _ = sweep.suggest_trial()
    monkeypatch.setattr(type(sweep.study), "tell", lambda *_, **__: None)  # and here it dies
    sweep.record_result(number, "finished", "all done", {"valid_perplexity": 3.0})
    monkeypatch.undo()
    monkeypatch.setenv("ATTUNE_HOME", str(sweep.folder.parent.parent))
    again = sweeps.read_sweep(sweep.folder)
    assert again.get_trial(number).state.name == "RUNNING"
    again.recover_unreported_trials()
    assert again.get_trial(number).values == [3.0]


def test_partially_enqueued_grid_is_completed():
    sweep = write_sweep(search="grid")
    every = list(spaces.iterate_grid(sweep.search_spaces))
    for parameters in every[:3]:
        sweep.study.enqueue_trial(parameters)
    sweep.enqueue_grid()
    sweep.enqueue_grid()
    assert [one[2] for one in suggest_all(sweep)] == every


def test_sweep_without_a_process_counts_as_stopped(call):
    sweep = write_sweep(status="running")
    assert sweep.current_status == "stopped"
    assert "expected a running sweep, but it is stopped" in error_of(call("tune", "stop", "s"))
    with sweep.lock():
        assert sweep.current_status == "running"
        assert call("tune", "stop", "s").returncode == 0
    assert sweep.stop_file.exists()


def test_search_learns_from_waiting_trials():
    sweep = write_sweep(search="optuna", samples=40)
    for _ in range(24):
        number, _, settings = sweep.suggest_trial()
        sweep.set_trial_attributes(
            number, validations=[abs(math.log10(settings["learning_rate"]) + 3.5)]
        )
    rates = [math.log10(sweep.suggest_trial()[2]["learning_rate"]) for _ in range(12)]
    away = sum(abs(rate + 3.5) for rate in rates) / len(rates)
    span = math.log10(SPACE["learning_rate"].high / SPACE["learning_rate"].low)
    assert away < span / 6  # at random it would be above a quarter
