"""The report of a sweep: table, figures, importances and savings."""

import dataclasses
import math

import polars as pl
import pytest

from attune.models.base import Choice
from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import MetricsFile
from attune.platform.runs.record import runs_folder
from attune.platform.tuning import (
    report,
)
from tests.runs import write_run
from tests.sweeps import suggest_all, write_sweep


def test_report_has_table_figures_and_self_contained_page():
    sweep = write_sweep(samples=12)
    for number, _, settings in suggest_all(sweep):
        value = 30 + math.log10(settings["learning_rate"]) ** 2
        ended = "stopped early" if number in (3, 4) else "finished"
        sweep.record_result(number, ended, "", {"valid_perplexity": value}, validations=[value])
    surface = ("learning_rate", "batch_size")
    summary = report.write_report(sweep, sweep.folder / "report", surface)
    files = {path.name for path in (sweep.folder / "report").iterdir()}
    assert files == {
        "trials.csv", "summary.json", "report.html", "slices.png", "parallel.png", "history.png",
        "surface.png", "importances.png",
    }  # fmt: skip
    assert summary["importances"]["learning_rate"] > 0.9
    frame = pl.read_csv(sweep.folder / "report" / "trials.csv")
    assert frame.height == 12
    finished = frame.filter(pl.col("ended") == "finished")["valid_perplexity"]
    assert finished.is_sorted()
    assert frame["ended"].to_list()[-2:] == ["stopped early"] * 2
    page = (sweep.folder / "report" / "report.html").read_text()
    assert "<script src=" not in page
    assert "Plotly.newPlot" in page
    with pytest.raises(UsageError, match="did you mean 'learning_rate'"):
        report.write_report(sweep, sweep.folder / "report", ("learning_rat", "batch_size"))
    with pytest.raises(UsageError, match="expected a new folder or an earlier report"):
        report.write_report(sweep, sweep.folder)  # which holds the sweep itself
    report.write_report(sweep, sweep.folder / "report")


def test_single_setting_is_plotted_against_sample_counts_and_metrics(home):
    """As in Table 4 of Dual-Emp: texts and metrics against the threshold."""
    thresholds = Choice(values=(0.5, 0.6, 0.7))
    sweep = write_sweep(
        space={"dual-emp": {"harvest_threshold": thresholds}}, search="grid", samples=3,
        metrics=("valid_perplexity", "valid_bleu"),
    )  # fmt: skip
    sweep.enqueue_grid()
    for number, _, settings in suggest_all(sweep):
        kept = round(100 * settings["harvest_threshold"])
        samples = {"paired": 40, "contexts": kept, "responses": 2 * kept}
        run = write_run(home, f"run-{number}", "dual-emp", result={"samples": samples})
        log = MetricsFile(run.metrics_file, 0)
        for step in (10, 20):
            log.add(step, {"valid_perplexity": 300.0 / step})
        sweep.set_trial_attributes(number, runs=[run.name])
        measured = {"valid_perplexity": 30.0 + number, "valid_bleu": 2.0, "valid_nll": 3.0}
        sweep.record_result(number, "finished", "", measured, validations=[30.0])
    report.write_report(sweep, sweep.folder / "report")
    frame = report.build_table(sweep)
    assert frame["samples_contexts"].to_list() == [50, 60, 70]
    assert report.find_only_setting(sweep, frame) == "harvest_threshold"
    assert report.build_panels(sweep, frame) == {  # not the pairs, which are the same in all
        "samples": {"contexts": "samples_contexts", "responses": "samples_responses"},
        "perplexity": {"perplexity": "valid_perplexity"},
        "bleu": {"bleu": "valid_bleu"},
    }
    files = {path.name for path in (sweep.folder / "report").iterdir()}
    assert {"against.png", "validations.png", "slices.png"} <= files
    assert "data:image/png;base64" in (sweep.folder / "report" / "report.html").read_text()


def test_mean_over_seeds_has_a_confidence_interval(trained):
    results = [{"metrics": {"valid_loss": value}} for value in (1.0, 2.0, 3.0)]
    runs = [dataclasses.replace(trained, result=result) for result in results]
    statistics = report.summarize_seeds(4, {"a": 1}, runs, "valid_loss")
    assert (statistics.mean, statistics.std) == (2.0, 1.0)
    assert (statistics.low, statistics.high) == pytest.approx(
        (2 - 2.484, 2 + 2.484), abs=1e-3
    )  # t = 4.303


def test_savings_are_relative_to_full_runs(trained):
    sweep = write_sweep()
    for number, _, _ in suggest_all(sweep)[:3]:
        ended = "finished" if number == 0 else "stopped early"
        name = f"run-{number}"
        folder = runs_folder() / name
        result = {"steps": 90 if number == 0 else 10}
        dataclasses.replace(trained, name=name, folder=folder, result=result).write()
        sweep.set_trial_attributes(number, runs=[name])
        sweep.record_result(number, ended, "", {"valid_perplexity": 1.0}, validations=[1.0])
    assert report.compute_savings(sweep) == {
        "steps": 110, "steps_of_full_runs": 270.0, "times_fewer": pytest.approx(270 / 110),
    }  # fmt: skip


def test_importance_uses_the_validation_most_trials_reached():
    sweep = write_sweep(samples=16, scheduler="asha")
    for _ in range(16):
        number, _, settings = sweep.suggest_trial()
        cost = math.log10(settings["learning_rate"]) ** 2
        validations = [cost] if number else [cost, 1.0, 1.0]
        ended = "stopped early" if number else "finished"
        sweep.record_result(number, ended, "", {"valid_perplexity": validations[-1]}, validations)
    whom = report.select_comparable(sweep)
    assert (len(whom.trials), whom.validation) == (16, 1)
    assert [trial.value for trial in whom.trials][1:] == [
        trial.user_attrs["validations"][0] for trial in sweep.get_trials()[1:]
    ]
    assert (
        report.compute_importances(sweep)["learning_rate"] > 0.8
    )  # one finished trial shows nothing
    assert "16 trials that reached validation 1" in str(whom)


def test_importance_uses_finished_trials_when_most_finished():
    sweep = write_sweep(samples=4)
    for _ in range(4):
        number, _, _ = sweep.suggest_trial()
        ended = "finished" if number < 2 else "stopped early"
        sweep.record_result(number, ended, "", {"valid_perplexity": 1.0 + number}, [9.0])
    whom = report.select_comparable(sweep)
    assert ([trial.value for trial in whom.trials], whom.validation) == ([1.0, 2.0], None)


def test_table_leaves_missing_values_empty(call):
    sweep = write_sweep(samples=3)
    numbers = [sweep.suggest_trial()[0] for _ in range(3)]
    sweep.record_result(numbers[0], "failed", "it died", {})
    sweep.set_trial_attributes(numbers[1], metrics={"valid_perplexity": 7.0}, validations=[7.0])
    assert report.build_table(sweep).select("trial", "valid_perplexity", "ended").rows() == [
        (1, 7.0, "waits"), (0, None, "failed"), (2, None, "interrupted"),
    ]  # fmt: skip
    output = call("tune", "show", "s").stdout
    assert "waits" in output
    assert "nan" not in output
