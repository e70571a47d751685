"""Asynchronous successive halving: promotions, and resuming a sweep."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

from attune.platform.runs.metrics_file import MetricsFile
from attune.platform.training import checkpoints
from attune.platform.training.loop import RESULT
from attune.platform.tuning import (
    halving,
    recorder,
    trial_manager,
    trial_runs,
)
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.halving import TrialProgress
from attune.platform.tuning.trial import (
    read_validations,
)
from tests.runs import write_run
from tests.sweeps import SPACE, update_run, write_sweep


def collect_progress(*costs, rung=1, variant="a", start=0):
    return [
        TrialProgress(
            number=n, variant=variant, costs=[cost], rung=rung, ended=False, finished=False
        )
        for n, cost in enumerate(costs, start=start)
    ]


def test_best_third_is_promoted():
    assert halving.select_promotion(collect_progress(2.0, 1.0)) is None
    three = collect_progress(2.0, 1.0, 3.0)
    assert halving.select_promotion(three).number == 1
    assert halving.select_promotion(three, min_group=4) is None
    three[1] = dataclasses.replace(three[1], rung=3)  # in training
    assert halving.select_promotion(three) is None
    three[1] = dataclasses.replace(three[1], costs=[1.0, 1.0, 1.0])
    assert halving.select_promotion(three) is None  # alone at its rung
    assert halving.select_finalist(three).number == 1
    three[1] = dataclasses.replace(three[1], ended=True, finished=True)
    assert halving.select_finalist(three) is None


def test_trial_better_than_the_finished_one_is_promoted_in_a_small_group():
    old = TrialProgress(
        number=0, variant="a", costs=[3.0, 3.0, 3.0], rung=3, ended=True, finished=True
    )  # fmt: skip
    new = dataclasses.replace(old, number=1, ended=False, finished=False)
    assert halving.select_finalist([old, dataclasses.replace(new, costs=[9.0] * 3)]) is None
    better = dataclasses.replace(new, costs=[9.0, 9.0, 2.0])
    assert halving.select_finalist([old, better]) == better
    assert halving.next_rung(better) == 9
    assert halving.next_rung(dataclasses.replace(better, costs=[2.0] * 10)) == 27  # beyond the 9th


def test_highest_rung_comes_first_when_time_is_short():
    low = collect_progress(1.0, 2.0, 3.0)
    high = [
        dataclasses.replace(each, number=each.number + 3, costs=[4.0, 4.0, 4.0], rung=3)
        for each in collect_progress(1.0, 2.0, 3.0)
    ]
    assert halving.select_promotion([*low, *high]).number == 0
    assert halving.select_promotion([*low, *high], highest_first=True).number == 3


def test_trials_compete_within_their_variant():
    fast = collect_progress(1.0, 2.0, 3.0)
    fast[0] = dataclasses.replace(fast[0], ended=True, finished=True)
    slow = collect_progress(91.0, 90.0, 92.0, variant="slow", start=3)
    assert halving.select_promotion([*fast, *slow]).number == 4
    assert halving.select_finalist([*fast, *slow[:2]]).number == 4


VALIDATIONS = 9


FINAL = [(7 * n) % 16 for n in range(16)]


"""The final quality of each of sixteen trials; lower is better."""


class Trainer:
    """Stands in for Tune: a validation is a line in the run's metrics file, and a checkpoint."""

    def __init__(self, home, monkeypatch, metric="valid_perplexity", **fields):
        self.home, self.metric, self.validations, self.tasks = home, metric, 0, 0
        sweep = write_sweep(
            samples=16, scheduler="asha", run_id="group", metrics=(metric,), **fields
        )
        self.folder = sweep.folder
        monkeypatch.setattr(trial_runs.setup, "new_run", self.new_run)
        monkeypatch.setattr(recorder.tracking, "finish_group", lambda *_: None)
        monkeypatch.setattr(recorder, "sample_answers", lambda _: None)

    def new_run(self, variant, *, name, seed, **_):
        return write_run(self.home, name, variant, seed=seed)

    def manager(self):
        self.tags = {}
        tracker = SimpleNamespace(
            update_run=update_run, start_run=lambda _: None,
            finish_run=lambda run, why, **_: self.tags.update({run.name: why}),
            start_group=lambda *_: None, finish_group=lambda *_: None,
            register_model=lambda *_: None, close=lambda _: None,
        )  # fmt: skip
        return trial_manager.TrialManager(sweeps.read_sweep(self.folder), tracker, lambda *_: None)

    def train(self, task):
        self.tasks += 1
        run = task.run()
        done = len(read_validations(run))
        file = MetricsFile(run.metrics_file, done)
        quality = FINAL[task.number] + run.seed / 10
        value = 50.0 - quality if "accuracy" in self.metric else 50.0 + quality
        for validation in range(done + 1, min(task.rung, VALIDATIONS) + 1):
            file.add(validation, {self.metric: value})
            self.validations += 1
            state = checkpoints.TrainState(total=validation, best_metrics={self.metric: value})
            checkpoints.write_checkpoint(
                run.checkpoints, state, first=True, barrier=lambda: None,
                save_engines=lambda path: path.mkdir(),
                save_weights=lambda path: path.write_bytes(b""),
            )  # fmt: skip
        if task.rung >= VALIDATIONS:
            result = {"steps": VALIDATIONS, "metrics": {self.metric: value}}
            (run.folder / RESULT).write_text(json.dumps(result))

    def run(self, manager, tasks=math.inf):
        """Train two at a time, until the sweep ends or the driver dies after so many tasks."""
        live, count = [], 0
        while True:
            while len(live) < 2 and (task := manager.next_task()) is not None:
                live.append(task)
            if not live:
                assert not manager.waits
                return manager.finish()
            task = live.pop(0)
            self.train(task)
            count += 1
            if count > tasks:  # the driver dies before it records the end
                return None
            config = {trial_manager.TASK: dataclasses.asdict(task)}
            manager.on_trial_complete(0, [], SimpleNamespace(config=config))


@pytest.mark.parametrize("metric", ["valid_perplexity", "valid_emotion_accuracy"])
def test_sixteen_halved_trials_cost_as_much_as_four_full_ones(home, monkeypatch, metric):
    trainer = Trainer(home, monkeypatch, metric)
    ended = trainer.run(trainer.manager())
    assert trainer.validations == 16 + 5 * 2 + 1 * 6
    assert ended.status == "finished"
    assert (ended.count("finished"), ended.count("stopped early")) == (1, 15)
    assert ended.best_trial().number == FINAL.index(0)
    assert trainer.tags[f"s-{FINAL.index(1):03d}"] == "stopped early: by asha after validation 3"
    assert trainer.tags[f"s-{FINAL.index(15):03d}"] == "stopped early: by asha after validation 1"
    second = ended.get_trial(FINAL.index(1))
    assert second.state.name == "PRUNED"
    assert len(second.intermediate_values) == 3


@pytest.mark.parametrize("after", [0, 5, 16, 19, 21])
def test_driver_death_loses_no_validation(home, monkeypatch, after):
    trainer = Trainer(home, monkeypatch)
    assert trainer.run(trainer.manager(), after) is None
    ended = trainer.run(trainer.manager())
    assert trainer.validations == 32
    assert trainer.tasks == 16 + 5 + 1 + 1  # only the unrecorded task is repeated
    assert (ended.count("finished"), ended.count("stopped early")) == (1, 15)
    assert ended.best_trial().number == FINAL.index(0)


def test_trials_waiting_when_the_budget_is_spent_resume_later(home, monkeypatch):
    trainer = Trainer(home, monkeypatch)
    manager = trainer.manager()
    for _ in range(4):
        task = manager.next_task()
        trainer.train(task)
        config = {trial_manager.TASK: dataclasses.asdict(task)}
        manager.on_trial_complete(0, [], SimpleNamespace(config=config))
    manager.stop_all("the budget is spent")
    assert manager.next_task() is None
    stopped = manager.finish()
    assert (stopped.status, stopped.count("stopped early")) == ("stopped", 0)
    assert stopped.summarize()["best"]["metrics"] == {"valid_perplexity": 50.0}
    assert trainer.run(trainer.manager()).count("stopped early") == 15
    assert trainer.validations == 32


def test_seeds_of_a_trial_are_promoted_together(home, monkeypatch):
    trainer = Trainer(home, monkeypatch, repeat=2)
    ended = trainer.run(trainer.manager())
    assert trainer.validations == 2 * 32
    assert ended.best_trial().user_attrs["metrics"]["valid_perplexity"] == pytest.approx(50.05)


def test_waiting_trials_precede_new_ones_after_half_the_budget(home, monkeypatch):
    trainer = Trainer(home, monkeypatch, budget=100.0)
    manager = trainer.manager()
    for seconds, expected in ((10.0, [0, 1, 2, 3]), (60.0, [FINAL.index(0)])):
        monkeypatch.setattr(manager.recorder, "elapsed_seconds", lambda seconds=seconds: seconds)
        for number in expected:
            task = manager.next_task()
            assert task.number == number
            trainer.train(task)
            config = {trial_manager.TASK: dataclasses.asdict(task)}
            manager.on_trial_complete(0, [], SimpleNamespace(config=config))


def test_finalists_of_different_variants_train_concurrently(home, monkeypatch):
    trainer = Trainer(home, monkeypatch, space={"dummy": SPACE, "transformer": SPACE})
    manager = trainer.manager()
    while (task := manager.next_task()).rung < VALIDATIONS:
        trainer.train(task)
        config = {trial_manager.TASK: dataclasses.asdict(task)}
        manager.on_trial_complete(0, [], SimpleNamespace(config=config))
    assert {task.variant, manager.next_task().variant} == {"dummy", "transformer"}
