"""A trial's process: settings, checkpoints, and the validations that it reports."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import MetricsFile
from attune.platform.runs.record import run_checkpoint_folders
from attune.platform.training import checkpoints, sharing
from attune.platform.tuning.trial import (
    VALIDATION,
    MetricReporter,
    RungError,
    Task,
    apply_settings,
    follow_metrics,
    has_diverged,
)
from tests.runs import write_run


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
    [checkpoint] = run_checkpoint_folders(one)
    assert not checkpoints.is_same_checkpoint(checkpoint, run_checkpoint_folders(other)[-1])
    checkpoints.adopt_checkpoint(checkpoint, other)
    problems = []
    taken = checkpoints.find_valid_checkpoint(other, problems.append)
    assert not problems
    assert [path.name for path in other.iterdir()] == ["00000040"]
    assert (taken / checkpoints.WEIGHTS).read_bytes() == b"weights of 40"
    now = checkpoints.read_checkpoint_state(taken)
    assert (now.total, now.best, now.best_metrics, now.stage_over) == (40, None, {}, False)


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


def test_only_validations_with_the_metric_are_reported(home, monkeypatch):
    """Perplexity may only be missing before the decoder is trained."""
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


def test_trial_pauses_at_its_rung(home, monkeypatch):
    monkeypatch.setattr("ray.tune.report", lambda _: None)
    run = write_run(home, "s-000", "dummy")
    task = Task(number=0, variant="dummy", folder="", settings={}, metrics=("valid_loss",), rung=3)
    reporter, file = MetricReporter(task, run), MetricsFile(run.metrics_file, 0)
    for step in (1, 2, 3):
        file.add(step, {"valid_loss": 1.0})
        if step < 3:
            reporter(step, {"valid_loss": 1.0}, over=False)
    reporter(3, {"valid_loss": 1.0}, over=True)  # a finished trial does not pause
    with pytest.raises(RungError):
        reporter(3, {"valid_loss": 1.0}, over=False)


def test_metrics_of_several_workers_are_followed_up_to_the_checkpoint(home):
    run = write_run(home, "s-000", "dummy")
    file = MetricsFile(run.metrics_file, 0)
    for step in (5, 10):
        file.add(step, {"loss": 1.0})
        file.add(step, {"valid_loss": 1.0})
    gone = SimpleNamespace(join=lambda _: None, is_alive=lambda: False)
    assert [step for step, _ in follow_metrics(run, gone)] == [
        5,
        10,
    ]  # everything after the last checkpoint
    rounds = iter([True, False])

    def write(_):
        checkpoints.write_checkpoint(
            run.checkpoints, checkpoints.TrainState(total=5), first=True, barrier=lambda: None,
            save_engines=lambda path: path.mkdir(),
            save_weights=lambda path: path.write_bytes(b""),
        )  # fmt: skip

    working = SimpleNamespace(join=write, is_alive=lambda: next(rounds))
    lines = [(step, *metrics) for step, metrics in follow_metrics(run, working)]
    assert lines == [(5, "loss"), (5, "valid_loss"), (10, "loss")]


def test_validations_of_the_shared_stage_do_not_count(home, monkeypatch):
    reports = []
    monkeypatch.setattr("ray.tune.report", reports.append)
    run = write_run(home, "s-000", "empdg")
    assert sharing.shared_stage(run, ["critic_steps", "gumbel_temperature"]) == "critics"
    assert sharing.shared_stage(run, ["critic_steps", "penalty_weight"]) == "generator"
    assert sharing.shared_stage(run, ["critic_steps", "width"]) is None
    for variant, config in (
        ("empdg", {"discriminators": False}),
        ("meed2", {"joint": True}),
        ("meed2", {"labels": False}),
    ):
        other = write_run(home, "s-001", variant, config=config)
        assert sharing.shared_stage(other, ["label_smoothing"]) is None
        assert sharing.shared_stage(other, ["penalty_weight"]) is None
    task = Task(
        number=0, variant="empdg", folder="", settings={}, metrics=("valid_perplexity",), rung=1,
        shared="critics",
    )  # fmt: skip
    reporter, file = MetricReporter(task, run), MetricsFile(run.metrics_file, 0)
    for step in (10, 20):
        file.add(step, {"valid_perplexity": 9.0})
    reporter(10, {"valid_perplexity": 9.0}, over=False)  # the critics' stage has not ended yet
    ended = run.stage_model("critics")
    ended.mkdir()
    state = dataclasses.asdict(checkpoints.TrainState(stage=2, total=10))
    (ended / checkpoints.TRAIN_STATE).write_text(json.dumps(state))
    reporter(10, {"valid_perplexity": 9.0}, over=False)
    with pytest.raises(RungError):
        reporter(20, {"valid_perplexity": 8.0}, over=False)
    assert [(one["step"], one[VALIDATION]) for one in reports] == [(20, 1)]
