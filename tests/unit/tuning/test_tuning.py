"""Search spaces, sweeps on the disk, and what is written of them; no cluster."""

import collections
import dataclasses
import json
import math
from types import SimpleNamespace
from typing import ClassVar

import optuna
import polars as pl
import pytest

from attune.jobs import tune as command
from attune.models import all_variants
from attune.models.base import Choice, Range
from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import DASHBOARD, JOB
from attune.platform.runs.metrics_file import MetricsFile
from attune.platform.runs.model import save_model
from attune.platform.runs.record import Run, checkpoint_folders, find_run, runs_folder
from attune.platform.services import cluster
from attune.platform.services import tasks as ray_tasks
from attune.platform.training import checkpoints
from attune.platform.training.settings import configure
from attune.platform.tuning import (
    decoding,
    driver,
    report,
    schedulers,
    spaces,
    trial_manager,
)
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.spaces import SweepDefinition
from attune.platform.tuning.trial import (
    TASK,
    VALIDATION,
    MetricReporter,
    Task,
    apply_settings,
    has_diverged,
)
from tests.runs import write_run
from tests.sweeps import SPACE, suggest_all, update_run, write_sweep


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


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
    with pytest.raises(UsageError, match="nothing is left"):
        spaces.build_variant_spaces(["mime"], ["gating"], SweepDefinition(), {"gate": "each"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "space: {elbo_wieght: [1.0]}",
            "unknown setting 'elbo_wieght': did you mean 'elbo_weight'",
        ),
        ("space: {elbo_weight: {low: 2.0, high: 1.0}}", "space.elbo_weight: low=2.0 must be less"),
        ("space: {elbo_weight: {low: 0, high: 1, scale: loguniform}}", "more than 0 is expected"),
        ("space: {elbo_weight: {low: 0, high: 1, scale: log}}", "unknown scale 'log'"),
        ("space: {elbo_weight: 3}", r"space.elbo_weight: write a list of values, or \{low"),
        ("space: {gate: [each, wide]}", "space.gate: unknown value of gate 'wide'"),
        ("space: {positive_threshold: {low: 0.5, high: 1.5}}", "positive_threshold=1.5"),
        ("space: {batch_size: [0, 16]}", "batch_size=0: at least 1 is expected"),
        ("spaces: {}", "unknown key 'spaces': did you mean 'space'"),
        ("space: [", "line 1: not readable as YAML"),
        ("search: bayes", "unknown search 'bayes'"),
        ("variants: 5", "'variants' must be names"),
        ("metric: 3", "'metric' must be a text, not 3"),
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
    assert tried["elbo_weight"] == Choice(values=(0.1, 2.0))  # which YAML takes for a text


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


def test_combined_seeds_have_mean_metrics_and_the_worst_outcome():
    def one(ended, value):
        metrics = {"valid_loss": value}
        return trial_manager.Outcome(ended=ended, reason=ended, metrics=metrics, validations=[])

    both = trial_manager._combine_seeds([one("finished", 1.0), one("finished", 3.0)])
    assert both.metrics == {"valid_loss": 2.0, "valid_loss_std": pytest.approx(math.sqrt(2))}
    assert (
        trial_manager._combine_seeds([one("finished", 1.0), one("stopped early", 3.0)]).ended
        == "stopped early"
    )
    assert (
        trial_manager._combine_seeds([one("finished", 1.0), one("diverged", math.nan)]).metrics
        == {}
    )
    early, late = one("finished", 1.0), one("waits", 3.0)
    early.validations, late.validations = [5.0], [7.0, 3.0]
    both = trial_manager._combine_seeds([early, late])
    assert (both.ended, both.validations) == ("waits", [6.0, 4.0])


def write_checkpoint(folder, state):
    checkpoints.write_checkpoint(
        folder, state, first=True, barrier=lambda: None,
        save_engines=lambda path: path.mkdir(parents=True),
        save_weights=lambda path: path.write_bytes(b"weights of %d" % state.total),
    )  # fmt: skip


def test_member_adopts_another_members_checkpoint(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    state = checkpoints.TrainState(
        step=40, total=40, best=1.0, best_step=20, best_metrics={"valid_loss": 1.0},
        stage_over=True,
    )  # fmt: skip
    write_checkpoint(one, state)
    write_checkpoint(other, checkpoints.TrainState(step=60, total=60))
    [checkpoint] = checkpoint_folders(one)
    assert not checkpoints.is_same(checkpoint, checkpoint_folders(other)[-1])
    checkpoints.adopt_checkpoint(checkpoint, other)
    problems = []
    taken = checkpoints.find_valid(other, problems.append)
    assert not problems
    assert [path.name for path in other.iterdir()] == ["00000040"]
    assert (taken / checkpoints.WEIGHTS).read_bytes() == b"weights of 40"
    now = checkpoints.read_state(taken)
    assert (now.total, now.best, now.best_metrics, now.stage_over) == (40, None, {}, False)


@pytest.fixture
def trained(build, prepared):
    """A run of a model that has learned nothing."""
    model = build("dummy")
    run = Run(
        name="mine", folder=runs_folder() / "mine", variant="dummy", preset="tiny",
        config=dataclasses.asdict(model.variant.config),
        training=dataclasses.asdict(configure("dummy", "tiny")[1]),
        data={"name": "bundled", "folder": str(prepared), "hash": "x"}, status="finished",
    )  # fmt: skip
    run.write()
    save_model(model, run.model)
    return run


def test_apply_settings_overrides_settings_by_name(trained):
    changed = apply_settings(trained, {"learning_rate": 0.5, "width": 16})
    assert changed.training["learning_rate"] == 0.5
    assert changed.config["width"] == 16
    assert changed.training["batch_size"] == trained.training["batch_size"]
    task = Task(
        number=0, variant="dummy", folder=str(trained.folder), settings={"width": 8}, metrics=("a",)
    )
    assert task.run().config["width"] == 8


def test_run_with_nan_as_last_loss_has_diverged(trained):
    lines = [{"step": 1, "time": 0, "metrics": {"loss": 1.0}}]
    trained.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not has_diverged(trained)
    lines.append({"step": 2, "time": 0, "metrics": {"loss": math.nan}})
    trained.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert has_diverged(trained)


@pytest.mark.usefixtures("trained")
def test_decoding_sweep_needs_no_training_and_resumes(prepared, monkeypatch):
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2})
    measured = []

    def inline(work, tasks):
        for task in tasks:
            measured.append(task)
            yield work(task)
            if len(measured) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(ray_tasks, "run_tasks", inline)
    ready = spaces.find_definition("mime-beams")
    asked_for = {"run": "mine", "data": str(prepared), "split": "valid", "contexts": 4,
                 "overrides": {"max_tokens": "5"}}  # fmt: skip
    sweep = write_sweep(
        kind="decoding", metrics=("bleu",), search="grid", scheduler="none", asked=asked_for,
        space=spaces.build_decoding_spaces(["beam"], ready, {"max_tokens": "5"}),
    )  # fmt: skip
    shown = []
    stopped = decoding.run(sweep, lambda text, done: shown.append((text, done)))
    assert stopped.status == "stopped"
    monkeypatch.setenv(JOB, "tune-decoding-1")
    ended = decoding.run(
        sweeps.read_sweep(sweep.folder), lambda text, done: shown.append((text, done))
    )
    assert (ended.status, ended.job) == ("finished", "tune-decoding-1")
    assert sorted(task.settings["beams"] for task in measured) == [1, 2, 3, 5, 8, 10]
    assert len(ended.get_trials()) == 6
    assert ended.count("finished") == 6
    assert shown[-1][1] == 6
    assert ended.summarize()["best"]["config"]["decode"] == "beam"


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
    with pytest.raises(UsageError, match="is there already, and no report"):
        report.write_report(sweep, sweep.folder)  # which holds the sweep itself
    report.write_report(sweep, sweep.folder / "report")


def test_single_setting_is_plotted_against_sample_counts_and_metrics(home):
    """Table 4 of Dual-Emp: texts and metrics against the threshold."""
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


def test_budget_is_parsed_as_a_duration():
    assert [command._seconds(text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]
    with pytest.raises(UsageError, match="write it as 90s"):
        command._seconds("2 hours")


def test_trial_whose_process_died_before_start_is_requeued(monkeypatch):
    """Tune does not count that as a failure: its error is none."""
    manager = object.__new__(trial_manager.TrialManager)
    manager.restarts, manager.queue = collections.Counter(), collections.deque()
    manager.live = {"s-000": (0, "run")}
    errors = []
    monkeypatch.setattr(manager, "_record_run_end", lambda _, error: errors.append(error))
    task = {"folder": "runs/s-000", "population": False}
    gone = SimpleNamespace(get_error=lambda: None, config={TASK: task})
    for _ in range(trial_manager.RETRIES):
        manager.on_trial_error(0, [], gone)
        assert manager.queue == collections.deque([(0, "run")])
        manager.live["s-000"] = manager.queue.popleft()
    manager.on_trial_error(0, [], gone)
    assert errors == ["it died"]
    assert not manager.queue


def test_sweep_and_trials_record_their_job(prepared, monkeypatch):
    monkeypatch.setattr(trial_manager.tracking, "start_group", lambda *_: "group")
    sweep = write_sweep(samples=2, asked={"data": str(prepared), "preset": "tiny"})
    for job in ("tune-1", "tune-2"):  # submitted again, after a stop
        monkeypatch.setenv(JOB, job)
        monkeypatch.setenv(DASHBOARD, f"http://head/{job}")
        manager = trial_manager.TrialManager(
            sweep, SimpleNamespace(update_run=update_run), lambda *_: None
        )
        manager._enqueue(0 if job == "tune-2" else sweep.suggest_trial()[0])
        trial = find_run("s-000")
        assert (trial.job, trial.dashboard) == (job, f"http://head/{job}")
        sweep = manager.sweep
    assert tracking.job_tags(trial.job, "") == {"ray_job": "tune-2"}


def test_only_validations_with_the_metric_are_reported(home, monkeypatch):
    """Before it learns to speak a look has no perplexity; of what never has one it is an error."""
    reports = []
    monkeypatch.setattr("ray.tune.report", reports.append)
    task = Task(number=0, variant="dummy", folder="", settings={}, metrics=("valid_perplexity",))
    validations = [{"valid_loss": 3.0}, {"valid_loss": 2.0, "valid_perplexity": 9.0}]
    for variant in ("emotion-cause-soft", "emotion-classifier"):
        run = write_run(home, variant, variant)
        reporter, file = MetricReporter(task, run), MetricsFile(run.metrics_file, 0)
        for step, metrics in enumerate(validations, start=1):
            file.add(step, metrics)
            if variant == "emotion-classifier":
                with pytest.raises(UsageError, match="--metric perplexity"):
                    reporter(step, validations[0], over=False)
            else:
                reporter(step, metrics, over=False)
    assert [(one["step"], one[VALIDATION], one["valid_perplexity"]) for one in reports] == [
        (2, 1, 9.0)
    ]


def test_tune_prints_nothing_for_a_trial_without_validation(capsys):
    """What it says otherwise stands between people and --json."""

    class Trial:
        last_result: ClassVar = {}

    driver.SilentProgressCallback().on_trial_complete(1, [], Trial())
    assert capsys.readouterr().out == ""
