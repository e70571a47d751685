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
    sweep,
    trial_manager,
)
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
from tests.sweeps import SPACE, asked, make, update_run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(all_variants()))
def test_every_group_of_every_variant_gives_settings_that_it_takes(name):
    for group in spaces.get_search_groups(name):
        tried = spaces.build_variant_spaces([name], [group], SweepDefinition(), {})
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        for _ in range(10):
            chosen, settings = spaces.suggest(study.ask(), tried)
            config, training = configure(chosen, "tiny", settings)
            together = {**dataclasses.asdict(config), **dataclasses.asdict(training)}
            assert {key: together[key] for key in settings} == settings


def test_what_makes_an_ablation_is_not_tuned():
    fixed = {n: s for n, (_, s) in all_variants().items() if s}
    for name, settings in fixed.items():
        keys = {key for group in spaces.get_search_groups(name).values() for key in group}
        assert not keys & set(settings)
    assert "gate" in spaces.get_search_groups("emotion-cause-soft")["gating"]


def test_an_unknown_group_lists_those_there_are():
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
def test_a_bad_file_is_told_by_key_and_range(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        spaces.build_variant_spaces(["mime"], [], spaces.find_definition(str(path)), {})
    assert "mine.yaml" in str(error.value)


def test_a_file_overrides_and_adds_and_set_takes_away(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("space: {elbo_weight: [1e-1, 2.0], width: {low: 8, high: 16, scale: int}}")
    ready = spaces.find_definition(str(path))
    tried = spaces.build_variant_spaces(
        ["mime"], ["loss-weights"], ready, {"response_weight": "1"}
    )["mime"]
    assert set(tried) == {"classification_weight", "elbo_weight", "width"}
    assert tried["elbo_weight"] == Choice(values=(0.1, 2.0))  # which YAML takes for a text


@pytest.mark.parametrize("name", sorted(spaces.read_bundled_sweeps()))
def test_ready_made_sweeps_are_valid(name):
    ready = spaces.find_definition(name)
    assert ready.about
    if ready.variants:
        tried = spaces.build_variant_spaces(ready.variants, [], ready, {})
        assert len(list(spaces.iterate_grid(tried))) > 1
    else:
        spaces.build_decoding_spaces(
            [ready.decode] if ready.decode else list(spaces.DECODING_SPACES), ready, {}
        )


def test_a_grid_has_every_combination_of_every_variant():
    found = list(
        spaces.iterate_grid({"dummy": SPACE, "mime": {"gate": Choice(values=("each", "open"))}})
    )
    assert len(found) == 5 * 2 + 2
    assert found[-1] == {"variant": "mime", "mime/gate": "open"}
    rates = sorted({one["dummy/learning_rate"] for one in found if one["variant"] == "dummy"})
    assert rates == pytest.approx([1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2])


@pytest.mark.parametrize("search", ["random", "grid", "optuna"])
def test_a_search_that_is_interrupted_asks_for_what_it_would_have_asked(search):
    def told(found, one):
        value = math.log(one[2]["learning_rate"]) ** 2
        found.record_result(one[0], "finished", "", {"valid_perplexity": value})

    whole, parts = (
        make("whole", search=search, samples=14),
        make("parts", search=search, samples=14),
    )
    expected, drawn = [], []
    for found, kept in ((whole, expected), (parts, drawn)):
        found.enqueue_grid()
        while (one := found.suggest_trial()) is not None:
            kept.append(one)
            told(found, one)
            if found is parts or found.name == "parts":
                parts = found = sweep.read_sweep(found.folder)  # as another process would
    assert drawn == expected
    assert len(expected) == (10 if search == "grid" else 14)
    assert len({json.dumps(one[2]) for one in expected}) == len(expected)


@pytest.mark.parametrize("search", ["random", "grid"])
def test_a_trial_is_not_lost_where_a_driver_dies_while_it_asks(search):
    whole, torn = make("whole", search=search), make("torn", search=search)
    for found in (whole, torn):
        found.enqueue_grid()
    expected = asked(whole)
    first = torn.suggest_trial()
    if search == "random":
        torn.study.enqueue_trial(torn._sample_parameters(torn.study.get_trials()))
    torn.study.ask()  # and here it dies
    assert [first, *asked(sweep.read_sweep(torn.folder))] == expected


def test_what_ended_early_is_no_best_and_what_failed_has_no_value():
    found = make()
    for number, _, _ in asked(found)[:4]:
        values = {"valid_perplexity": 10.0 - number}
        ended = ("finished", "stopped early", "diverged", "finished")[number]
        found.record_result(number, ended, "because", values, validations=[30.0, math.nan, 20.0])
    assert found.best_trial().number == 3
    summarize = found.summarize()
    assert (summarize["stopped_early"], summarize["failed"], summarize["trials"]) == (1, 1, 6)
    assert summarize["best"]["config"]["variant"] == "dummy"
    states = [trial.state.name for trial in found.get_trials()]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "RUNNING", "RUNNING"]
    assert found.get_trial(1).intermediate_values == {0: 30.0, 1: 20.0}


def test_of_two_metrics_there_is_a_front():
    found = make(metrics=("valid_perplexity", "valid_distinct_2"))
    values = [(10, 0.1), (20, 0.3), (30, 0.2)]
    for (number, _, _), (perplexity, distinct) in zip(asked(found)[:3], values, strict=True):
        metrics = {"valid_perplexity": perplexity, "valid_distinct_2": distinct}
        found.record_result(number, "finished", "", metrics)
    assert [trial.number for trial in found.pareto_front()] == [0, 1]
    assert found.best_trial().number == 0
    written = report.write_report(found, found.folder / "report")
    assert (found.folder / "report" / "front.png").is_file()
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
def test_what_does_not_go_together_is_told_at_once(fields, message):
    usual = {"scheduler": "asha", "search": "random", "metrics": ("valid_loss",),
             "spaces": {"a": SPACE}, "workers": 1}  # fmt: skip
    schedulers.check_compatibility(**usual)
    with pytest.raises(UsageError, match=message):
        schedulers.check_compatibility(**{**usual, **fields})


def test_who_takes_over_keeps_its_place_and_stays_in_range():
    def member(number, **settings):
        return SimpleNamespace(config={"task": {"number": number, "settings": settings}})

    tried = {"rate": Range(low=0.1, high=1.0), "layers": Range(low=1, high=4, scale="int")}
    population = schedulers.PopulationScheduler(tried)
    one, other = member(0, rate=0.2, layers=1, gate="each"), member(1, rate=1.0, layers=4, gate="x")
    found = [population._get_new_config(one, other)[0]["task"] for _ in range(40)]
    assert {task["number"] for task in found} == {0}
    assert {task["settings"]["gate"] for task in found} == {"x"}
    assert all(0.1 <= task["settings"]["rate"] <= 1.0 for task in found)
    assert {task["settings"]["layers"] for task in found} <= {1, 2, 3, 4}
    assert len({task["settings"]["rate"] for task in found}) > 2
    assert other.config["task"]["settings"]["rate"] == 1.0


def test_seeds_together_are_their_mean_and_the_worst_end():
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


def write_checkpoint(folder, standing):
    checkpoints.write_checkpoint(
        folder, standing, first=True, barrier=lambda: None,
        save_engines=lambda path: path.mkdir(parents=True),
        save_weights=lambda path: path.write_bytes(b"weights of %d" % standing.total),
    )  # fmt: skip


def test_a_member_takes_over_anothers_checkpoint(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    standing = checkpoints.TrainState(
        step=40, total=40, best=1.0, best_step=20, best_metrics={"valid_loss": 1.0},
        stage_over=True,
    )  # fmt: skip
    write_checkpoint(one, standing)
    write_checkpoint(other, checkpoints.TrainState(step=60, total=60))
    [given] = checkpoint_folders(one)
    assert not checkpoints.is_same(given, checkpoint_folders(other)[-1])
    checkpoints.adopt_checkpoint(given, other)
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


def test_settings_of_a_run_are_changed_by_name(trained):
    changed = apply_settings(trained, {"learning_rate": 0.5, "width": 16})
    assert changed.training["learning_rate"] == 0.5
    assert changed.config["width"] == 16
    assert changed.training["batch_size"] == trained.training["batch_size"]
    task = Task(
        number=0, variant="dummy", folder=str(trained.folder), settings={"width": 8}, metrics=("a",)
    )
    assert task.run().config["width"] == 8


def test_a_run_has_diverged_where_its_last_loss_is_no_number(trained):
    lines = [{"step": 1, "time": 0, "metrics": {"loss": 1.0}}]
    trained.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert not has_diverged(trained)
    lines.append({"step": 2, "time": 0, "metrics": {"loss": math.nan}})
    trained.metrics_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert has_diverged(trained)


@pytest.mark.usefixtures("trained")
def test_decoding_is_tuned_without_training_and_goes_on(prepared, monkeypatch):
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
    found = make(
        kind="decoding", metrics=("bleu",), search="grid", scheduler="none", asked=asked_for,
        space=spaces.build_decoding_spaces(["beam"], ready, {"max_tokens": "5"}),
    )  # fmt: skip
    shown = []
    stopped = decoding.run(found, lambda text, done: shown.append((text, done)))
    assert stopped.status == "stopped"
    monkeypatch.setenv(JOB, "tune-decoding-1")
    ended = decoding.run(
        sweep.read_sweep(found.folder), lambda text, done: shown.append((text, done))
    )
    assert (ended.status, ended.job) == ("finished", "tune-decoding-1")
    assert sorted(task.settings["beams"] for task in measured) == [1, 2, 3, 5, 8, 10]
    assert len(ended.get_trials()) == 6
    assert ended.count("finished") == 6
    assert shown[-1][1] == 6
    assert ended.summarize()["best"]["config"]["decode"] == "beam"


def test_a_report_has_table_pictures_and_a_page_that_needs_no_network():
    found = make(samples=12)
    for number, _, settings in asked(found):
        value = 30 + math.log10(settings["learning_rate"]) ** 2
        ended = "stopped early" if number in (3, 4) else "finished"
        found.record_result(number, ended, "", {"valid_perplexity": value}, validations=[value])
    surface = ("learning_rate", "batch_size")
    summary = report.write_report(found, found.folder / "report", surface)
    files = {path.name for path in (found.folder / "report").iterdir()}
    assert files == {
        "trials.csv", "summary.json", "report.html", "slices.png", "parallel.png", "history.png",
        "surface.png", "importances.png",
    }  # fmt: skip
    assert summary["importances"]["learning_rate"] > 0.9
    frame = pl.read_csv(found.folder / "report" / "trials.csv")
    assert frame.height == 12
    finished = frame.filter(pl.col("ended") == "finished")["valid_perplexity"]
    assert finished.is_sorted()
    assert frame["ended"].to_list()[-2:] == ["stopped early"] * 2
    page = (found.folder / "report" / "report.html").read_text()
    assert "<script src=" not in page
    assert "Plotly.newPlot" in page
    with pytest.raises(UsageError, match="did you mean 'learning_rate'"):
        report.write_report(found, found.folder / "report", ("learning_rat", "batch_size"))
    with pytest.raises(UsageError, match="is there already, and no report"):
        report.write_report(found, found.folder)  # which holds the sweep itself
    report.write_report(found, found.folder / "report")


def test_one_setting_is_shown_with_all_that_was_counted_and_measured(home):
    """Table 4 of Dual-Emp: texts and metrics against the threshold."""
    thresholds = Choice(values=(0.5, 0.6, 0.7))
    found = make(
        space={"dual-emp": {"harvest_threshold": thresholds}}, search="grid", samples=3,
        metrics=("valid_perplexity", "valid_bleu"),
    )  # fmt: skip
    found.enqueue_grid()
    for number, _, settings in asked(found):
        kept = round(100 * settings["harvest_threshold"])
        samples = {"paired": 40, "contexts": kept, "responses": 2 * kept}
        run = write_run(home, f"run-{number}", "dual-emp", result={"samples": samples})
        log = MetricsFile(run.metrics_file, 0)
        for step in (10, 20):
            log.add(step, {"valid_perplexity": 300.0 / step})
        found.set_trial_attributes(number, runs=[run.name])
        measured = {"valid_perplexity": 30.0 + number, "valid_bleu": 2.0, "valid_nll": 3.0}
        found.record_result(number, "finished", "", measured, validations=[30.0])
    report.write_report(found, found.folder / "report")
    frame = report.build_table(found)
    assert frame["samples_contexts"].to_list() == [50, 60, 70]
    assert report.find_only_setting(found, frame) == "harvest_threshold"
    assert report.build_panels(found, frame) == {  # not the pairs, which are the same in all
        "samples": {"contexts": "samples_contexts", "responses": "samples_responses"},
        "perplexity": {"perplexity": "valid_perplexity"},
        "bleu": {"bleu": "valid_bleu"},
    }
    files = {path.name for path in (found.folder / "report").iterdir()}
    assert {"against.png", "validations.png", "slices.png"} <= files
    assert "data:image/png;base64" in (found.folder / "report" / "report.html").read_text()


def test_the_mean_over_seeds_has_an_interval(trained):
    results = [{"metrics": {"valid_loss": value}} for value in (1.0, 2.0, 3.0)]
    found = [dataclasses.replace(trained, result=result) for result in results]
    one = report.summarize_seeds(4, {"a": 1}, found, "valid_loss")
    assert (one.mean, one.std) == (2.0, 1.0)
    assert (one.low, one.high) == pytest.approx((2 - 2.484, 2 + 2.484), abs=1e-3)  # t = 4.303


def test_steps_saved_are_counted_against_full_runs(trained):
    found = make()
    for number, _, _ in asked(found)[:3]:
        ended = "finished" if number == 0 else "stopped early"
        name = f"run-{number}"
        folder = runs_folder() / name
        result = {"steps": 90 if number == 0 else 10}
        dataclasses.replace(trained, name=name, folder=folder, result=result).write()
        found.set_trial_attributes(number, runs=[name])
        found.record_result(number, ended, "", {"valid_perplexity": 1.0}, validations=[1.0])
    assert report.compute_savings(found) == {
        "steps": 110, "steps_of_full_runs": 270.0, "times_fewer": pytest.approx(270 / 110),
    }  # fmt: skip


def test_a_budget_is_a_time():
    assert [command._seconds(text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]
    with pytest.raises(UsageError, match="write it as 90s"):
        command._seconds("2 hours")


def test_a_trial_whose_process_was_gone_before_it_began_begins_again(monkeypatch):
    """Tune does not count that as a failure: its error is none."""
    manager = object.__new__(trial_manager.TrialManager)
    manager.restarts, manager.queue = collections.Counter(), collections.deque()
    manager.live = {"s-000": (0, "run")}
    told = []
    monkeypatch.setattr(manager, "_record_run_end", lambda _, error: told.append(error))
    task = {"folder": "runs/s-000", "population": False}
    gone = SimpleNamespace(get_error=lambda: None, config={TASK: task})
    for _ in range(trial_manager.RETRIES):
        manager.on_trial_error(0, [], gone)
        assert manager.queue == collections.deque([(0, "run")])
        manager.live["s-000"] = manager.queue.popleft()
    manager.on_trial_error(0, [], gone)
    assert told == ["it died"]
    assert not manager.queue


def test_a_sweep_and_its_trials_know_their_job(prepared, monkeypatch):
    monkeypatch.setattr(trial_manager.tracking, "start_group", lambda *_: "group")
    found = make(samples=2, asked={"data": str(prepared), "preset": "tiny"})
    for job in ("tune-1", "tune-2"):  # submitted again, after a stop
        monkeypatch.setenv(JOB, job)
        monkeypatch.setenv(DASHBOARD, f"http://head/{job}")
        manager = trial_manager.TrialManager(
            found, SimpleNamespace(update_run=update_run), lambda *_: None
        )
        manager._enqueue(0 if job == "tune-2" else found.suggest_trial()[0])
        trial = find_run("s-000")
        assert (trial.job, trial.dashboard) == (job, f"http://head/{job}")
        found = manager.sweep
    assert tracking.job_tags(trial.job, "") == {"ray_job": "tune-2"}


def test_a_trial_is_judged_by_looks_that_have_its_metric(home, monkeypatch):
    """Before it learns to speak a look has no perplexity; of what never has one it is an error."""
    told = []
    monkeypatch.setattr("ray.tune.report", told.append)
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
    assert [(one["step"], one[VALIDATION], one["valid_perplexity"]) for one in told] == [
        (2, 1, 9.0)
    ]


def test_tune_prints_nothing_of_a_trial_without_a_look(capsys):
    """What it says otherwise stands between people and --json."""

    class Trial:
        last_result: ClassVar = {}

    driver.SilentProgressCallback().on_trial_complete(1, [], Trial())
    assert capsys.readouterr().out == ""
