"""The training loop on real DeepSpeed engines, in one process."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.comm import comm
from typer.testing import CliRunner

from attune.jobs.cli import app
from attune.models import all_variants
from attune.models.decoding import Decoding
from attune.platform.core.errors import DataError
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.prepare import prepare
from attune.platform.evaluation.evaluate import evaluate
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.model import MODEL_WEIGHTS, load_model
from attune.platform.runs.record import find_run, read_run
from attune.platform.services import cluster
from attune.platform.training import checkpoints, data, engine, loop, setup, sharing
from attune.platform.training.loop import Training
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.validation import compute_validation_metrics
from attune.platform.training.worker import train
from attune.platform.tuning.spaces import boundary_values, get_search_groups
from tests.golden.interface import assert_json_keys

pytestmark = pytest.mark.xdist_group("training")

SPEED = "samples_per_second"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    engine.init_deepspeed()


@pytest.fixture
def begin(prepared):
    def make(variant, name, *, max_steps, zero=0, seed=0, **overrides):
        overrides = {"log_every": 1, "evaluate_every": 5, "batch_size": 8, **overrides}
        return setup.new_run(
            variant, data=str(prepared), preset="tiny", overrides=overrides, max_steps=max_steps,
            name=name, zero=zero, seed=seed,
        )  # fmt: skip

    return make


@pytest.fixture(autouse=True)
def few_valid_samples(monkeypatch):
    """Validate on 40 samples; all of them would take most of the time."""
    real = data.load_training_streams

    def fewer(run, model):
        streams, _ = real(run, model)
        samples = read_dataset_samples(Path(run.data["folder"]), "valid").head(40)
        return streams, model.columns(samples)

    monkeypatch.setattr(data, "load_training_streams", fewer)


def train_run(run):
    model = setup.set_up_run_model(run)
    streams, valid = data.load_training_streams(run, model)
    return Training(run, model, streams, valid).run()


def logged(run):
    return [
        (line["step"], {k: v for k, v in line["metrics"].items() if k != SPEED})
        for line in read_metrics(run.metrics_file)
    ]


def weights(run):
    return load_model(run.model).variant.state_dict()


def assert_same(one, other):
    assert logged(one) == logged(other)
    expected = weights(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, expected[name]), name


class Killed(BaseException):
    """An exception that the code under test does not catch."""


def kill_at(monkeypatch, total):
    real = Training.train_round

    def mortal(self, stage, state, *rest):
        if state.total == total:
            raise Killed
        return real(self, stage, state, *rest)

    monkeypatch.setattr(Training, "train_round", mortal)


# Covers every source of randomness: dropout, word dropout, Gumbel noise.
NOISY = {"dropout": 0.1, "word_dropout": 0.2, "checkpoint_every": 3}
SCHEDULES = {
    # Two stages of 8 and 24 steps.
    "emoprepend-1": (32, NOISY, (2, 7, 8, 20, 31)),
    # Stages of 22, 3 and 7 rounds; a round of the last has 3 updates of two players.
    "empdg": (32, {**NOISY, "generator_steps": 2}, (23, 24, 26, 29)),
    # Stages of 3 and 9 steps; both train the reasoner, and gates are sampled.
    "emotion-cause-hard": (12, {**NOISY, "checkpoint_every": 2}, (3, 7)),
    # Three parallel streams; unpaired texts are used from the fourth step, and states are sampled.
    "dual-emp": (8, {**NOISY, "checkpoint_every": 2, "paired_share": 0.375}, (3, 7)),
}


@pytest.fixture(scope="module")
def uninterrupted():
    """Uninterrupted runs by variant, added by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("variant", "killed_at"),
    [(name, at) for name, (_, _, all_of) in SCHEDULES.items() for at in all_of],
)
def test_a_killed_run_resumes_to_the_result_of_an_uninterrupted_run(
    begin, monkeypatch, variant, killed_at, uninterrupted, tmp_path_factory
):
    steps, settings, _ = SCHEDULES[variant]
    if variant not in uninterrupted:
        whole = begin(variant, "whole", max_steps=steps, **settings)
        assert train_run(whole)
        kept = tmp_path_factory.mktemp("whole")
        shutil.copytree(whole.folder, kept, dirs_exist_ok=True)
        uninterrupted[variant] = read_run(kept)
    run = begin(variant, "broken", max_steps=steps, **settings)
    with monkeypatch.context() as patched:
        kill_at(patched, killed_at)
        with pytest.raises(Killed):
            train_run(run)
    assert train_run(run)
    assert_same(run, uninterrupted[variant])


SHARING = [
    name
    for name, (own, fixed) in sorted(all_variants().items())
    if not fixed and own.stage_independent_settings(own.Config())
]


@pytest.mark.parametrize("name", SHARING)
def test_stage_independent_settings_do_not_change_a_stage(begin, name):
    """The weights are equal to the last digit, with every source of randomness enabled."""
    # Enough steps for the first stages.
    steps, settings = 16, {**NOISY, "evaluate_every": 4}
    base = begin(name, "base", max_steps=steps, **settings)
    assert train_run(base)
    spaces = {
        key: tried for group in get_search_groups(name).values() for key, tried in group.items()
    }
    own = all_variants()[name][0]
    for stage, keys in own.stage_independent_settings(own.Config(**base.config)).items():
        expected = (base.stage_model(stage) / MODEL_WEIGHTS).read_bytes()
        for key in keys:
            value = next(v for v in boundary_values(spaces[key]) if v != base.config[key])
            run = begin(name, f"other-{key}", max_steps=steps, **settings, **{key: value})
            assert train_run(run)
            assert (run.stage_model(stage) / MODEL_WEIGHTS).read_bytes() == expected, key
            shared_steps = [sharing.steps_until_shared_stage(r, stage) for r in (run, base)]
            assert shared_steps[0] == shared_steps[1]


def test_a_run_that_starts_after_a_shared_stage_gives_the_same_result(begin):
    steps, settings, _ = SCHEDULES["empdg"]
    first = begin("empdg", "first", max_steps=steps, **settings)
    assert train_run(first)
    other = {**settings, "generator_steps": 3}
    alone = begin("empdg", "alone", max_steps=steps, **other)
    assert train_run(alone)
    run = begin("empdg", "sharing", max_steps=steps, **other)
    run = sharing.start_after_shared_stage(run, [run, first, alone.update(seed=7)])
    assert run.shared_steps == sharing.steps_until_shared_stage(first, "critics") == 25
    assert load_model(run.stage_model("generator")).variant.config.generator_steps == 3
    trained = []
    model = setup.set_up_run_model(run)
    streams, valid = data.load_training_streams(run, model)
    assert Training(run, model, streams, valid, watch=lambda step, *_: trained.append(step)).run()
    assert min(trained) == 26
    assert_same(run, alone)
    critical = begin("empdg", "critical", max_steps=steps, **{**settings, "penalty_weight": 0.2})
    assert sharing.start_after_shared_stage(critical, [first]).shared_steps == 22
    apart = begin("empdg", "apart", max_steps=steps, **{**settings, "emotion_weight": 0.2})
    assert sharing.start_after_shared_stage(apart, [first]) == apart


def test_a_stopped_run_resumes_where_it_stopped(begin):
    whole = begin("dummy", "whole", max_steps=12)
    assert train_run(whole)
    run = begin("dummy", "stopped", max_steps=12)
    run.stop_file.touch()
    # One step is trained even so: a run that is stopped repeatedly still finishes.
    assert not train_run(run)
    assert not (run.folder / loop.RESULT).exists()
    run.stop_file.unlink()
    assert train_run(run)
    assert_same(run, whole)


@pytest.mark.parametrize("damage", ["cut", "missing", "state"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_loaded(begin, monkeypatch, damage):
    whole = begin("dummy", "whole", max_steps=15, checkpoint_every=3)
    assert train_run(whole)
    run = begin("dummy", "damaged", max_steps=15, checkpoint_every=3)
    with monkeypatch.context() as patched:
        kill_at(patched, 10)
        with pytest.raises(Killed):
            train_run(run)
    last = sorted(run.checkpoints.glob("0*"))[-1]
    victim = next((last / checkpoints.ENGINES).rglob("*.pt"))
    if damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "missing":
        victim.unlink()
    else:
        state = json.loads((last / checkpoints.TRAIN_STATE).read_text())
        state["step"] += 1
        (last / checkpoints.TRAIN_STATE).write_text(json.dumps(state))
    assert train_run(run)
    assert f"{last} is damaged" in (run.folder / "log.txt").read_text()
    assert_same(run, whole)


def test_deepspeed_compiles_no_extension(begin):
    assert train_run(begin("dummy", "alone", max_steps=1))
    assert comm.cdb.shm_comm_op is None


def test_accumulation_does_not_change_metrics(begin):
    whole = begin("multi-trs", "whole", max_steps=6)
    parts = begin("multi-trs", "parts", max_steps=6, accumulation=4)
    assert train_run(whole)
    assert train_run(parts)
    for (step, one), (_, other) in zip(logged(whole), logged(parts), strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4), (step, name)


def test_zero_3_matches_zero_0_and_resumes(begin, monkeypatch):
    whole = begin("dummy", "whole", max_steps=8)
    spread = begin("dummy", "spread", max_steps=8, zero=3, checkpoint_every=3)
    assert train_run(whole)
    with monkeypatch.context() as patched:
        kill_at(patched, 5)
        with pytest.raises(Killed):
            train_run(spread)
    assert train_run(spread)
    for (step, one), (_, other) in zip(logged(whole), logged(spread), strict=True):
        assert other == pytest.approx(one, rel=1e-4), step
    spread_weights = weights(spread)
    for name, tensor in weights(whole).items():
        assert torch.allclose(tensor, spread_weights[name], atol=1e-5), name


def test_bf16_losses_are_close_to_fp32(begin):
    wide = begin("multi-trs", "wide", max_steps=5)
    narrow = begin("multi-trs", "narrow", max_steps=5, precision="bf16")
    assert train_run(wide)
    assert train_run(narrow)
    assert logged(wide) != logged(narrow)
    for (step, one), (_, other) in zip(logged(wide), logged(narrow), strict=True):
        key = "loss" if "loss" in one else "valid_loss"
        assert other[key] == pytest.approx(one[key], rel=1e-2), step
    assert all(tensor.dtype == torch.float32 for tensor in weights(narrow).values())


def test_stages_share_the_step_limit_and_each_has_at_least_one_update(begin):
    run = begin("emoprepend-1", "short", max_steps=1)
    assert train_run(run)
    assert [line["step"] for line in read_metrics(run.metrics_file) if "loss" in line["metrics"]] \
        == [1, 2]  # fmt: skip
    model = setup.set_up_run_model(run)
    longer = Training(run.update(max_steps=100), model, *data.load_training_streams(run, model))
    assert [longer.stage_steps(0), longer.stage_steps(1)] == [25, 75]


def test_the_result_is_the_best_of_the_last_stage_and_patience_ends_training(begin):
    # At this learning rate the validation loss rises, so the first validations are the best.
    run = begin("dummy", "impatient", max_steps=60, learning_rate=3.0, patience=2, evaluate_every=2)
    assert train_run(run)
    validations = [(s, m["valid_loss"]) for s, m in logged(run) if "valid_loss" in m]
    best_step, best = min(validations, key=lambda validation: validation[1])
    result = json.loads((run.folder / loop.RESULT).read_text())
    assert result["best_step"] == best_step
    assert result["steps"] == validations[-1][0] < 60
    assert len([step for step, _ in validations if step > best_step]) == 2
    model = load_model(run.model)
    _, valid = data.load_training_streams(run, model)
    [stage] = model.variant.stages()
    metrics = compute_validation_metrics(model.variant, stage, valid, ProcessGroup())
    assert metrics["valid_loss"] == pytest.approx(best, rel=1e-6)


def test_patience_waits_until_dropout_decays(begin):
    settings = {"learning_rate": 3.0, "patience": 2, "evaluate_every": 2}
    run = begin("dummy", "waits", max_steps=60, dropout_decay_share=0.5, **settings)
    assert train_run(run)
    best, *_, last = [s for s, m in logged(run) if "valid_loss" in m]
    assert json.loads((run.folder / loop.RESULT).read_text())["best_step"] == best == 2
    assert last == 34  # the second validation after decay starts in step 31


def test_a_time_limit_becomes_a_number_of_steps_for_the_learning_rate_schedule(begin, monkeypatch):
    """The number of steps is estimated once, from the speed of the first steps."""
    clock, speed, real = [0.0], [1.0], Training._apply_update

    def takes_time(*arguments):
        clock[0] += speed[0]
        return real(*arguments)

    monkeypatch.setattr(Training, "_apply_update", takes_time)
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    run = begin("dummy", "timed", max_steps=None, schedule="linear", checkpoint_every=20)
    run = run.update(max_minutes=2.0)
    with monkeypatch.context() as patched:
        kill_at(patched, 75)
        with pytest.raises(Killed):
            train_run(run)
    speed[0] = 0.1  # does not change the estimate
    assert train_run(run)
    result = json.loads((run.folder / loop.RESULT).read_text())
    assert result["steps"] == result["stage_steps"]["train"] == 108  # 0.9 of 120 seconds
    rates = [m["learning_rate"] for _, m in logged(run) if "learning_rate" in m]
    assert rates[-1] == pytest.approx(rates[0] / 108, rel=0.01)


def test_init_copies_weights_and_vocabulary(begin, prepared):
    first = begin("transformer", "first", max_steps=2, vocabulary_size=500)
    assert train_run(first)
    second = setup.new_run(
        "multi-trs", data=str(prepared), preset="tiny", max_steps=1, name="second", init="first"
    )
    initial, loaded = weights(first), setup.set_up_run_model(second).variant.state_dict()
    shared = set(initial) & set(loaded)
    assert {"embedding.table.weight", "output.bias"} <= shared
    assert all(torch.equal(initial[name], loaded[name]) for name in shared)


def test_a_stage_starts_from_the_best_model_of_the_previous_stage(begin, monkeypatch):
    real, validations = loop.compute_validation_metrics, []

    def worse_each_time(*arguments, **named):
        validations.append(real(*arguments, **named))
        return {**validations[-1], "valid_emotion_accuracy": 1 / len(validations)}

    monkeypatch.setattr(loop, "compute_validation_metrics", worse_each_time)
    run = begin("emoprepend-1", "stages", max_steps=16, evaluate_every=2)
    assert train_run(run)
    assert len(validations) > 3
    last = load_model(run.model).variant.emotion_classifier.state_dict()
    best = load_model(run.folder / "best-classifier").variant.emotion_classifier.state_dict()
    for name, tensor in last.items():
        assert torch.equal(tensor, best[name]), name


def test_metrics_of_both_players_are_logged_and_the_result_is_of_the_last_stage(begin):
    run = begin("empdg", "game", max_steps=20, evaluate_every=2)
    assert train_run(run)
    lines = [metrics for _, metrics in logged(run)]
    names = {name for line in lines if line.get("stage") == 2 for name in line}
    assert names >= {
        "wasserstein_semantic", "wasserstein_emotional", "wasserstein", "penalty_semantic",
        "penalty_emotional", "adversarial", "nll", "emotion", "gradient_norm_generator",
        "gradient_norm_critics",
    }  # fmt: skip
    assert all(line["gradient_norm_critics"] > 0 for line in lines if line.get("stage") == 2)
    validations = [line["valid_wasserstein"] for line in lines if "valid_adversarial" in line]
    result = json.loads((run.folder / loop.RESULT).read_text())
    assert result["metrics"]["valid_wasserstein"] == min(validations)


def test_perplexity_is_computed_on_all_samples_in_every_stage(begin):
    """Critics train on answered samples only; their stage reports perplexity on all of valid."""
    run = begin("empdg", "whole", max_steps=6)
    model = setup.set_up_run_model(run)
    _, valid = data.load_training_streams(run, model)
    metrics = [
        compute_validation_metrics(model.variant, stage, valid, ProcessGroup())
        for stage in model.variant.stages()
    ]
    perplexities = [each["valid_perplexity"] for each in metrics]
    assert perplexities == pytest.approx([perplexities[0]] * 3, rel=1e-5)
    assert metrics[0]["valid_nll"] != metrics[2]["valid_nll"]


def test_a_stage_has_its_own_learning_rate_and_perplexity_is_per_word(begin, prepared):
    run = begin("meed2", "pieces", max_steps=6, predictor_rate=0.25, learning_rate=1e-3)
    assert train_run(run)
    rates = [m["learning_rate"] for _, m in logged(run) if "learning_rate" in m]
    assert rates == pytest.approx([2.5e-4] * 2 + [1e-3] * 4)
    logged_perplexity = min(
        m["valid_perplexity"] for _, m in logged(run) if "valid_perplexity" in m
    )
    model, samples = load_model(run.model), read_dataset_samples(prepared, "valid").head(40)
    evaluation = evaluate(
        model.variant, samples, model.columns(samples), model.vocabulary, Decoding(max_tokens=1)
    )
    assert logged_perplexity == pytest.approx(evaluation.metrics["perplexity"], rel=1e-4)


def test_data_without_next_turns_cannot_train_critics(tmp_path):
    source = tmp_path / "short.jsonl"
    turns = [{"role": "speaker", "text": "I won."}, {"role": "listener", "text": "Great."}]
    lines = [
        json.dumps({"id": f"{split}{n}", "emotion": "proud", "split": split, "utterances": turns})
        for split in ("train", "valid", "test")
        for n in range(4)
    ]
    source.write_text("\n".join(lines))
    prepare(str(source), tmp_path / "short")
    run = setup.new_run("empdg", data=str(tmp_path / "short"), preset="tiny", name="lonely")
    assert "bundled corpus" in run.notice
    with pytest.raises(DataError, match="none in valid, is answered by the speaker"):
        data.load_training_streams(run, setup.set_up_run_model(run))


@pytest.mark.parametrize("multitask", [True, False])
def test_the_joint_stage_freezes_the_reasoner_unless_multitask(begin, multitask):
    run = begin("emotion-cause-soft", "rests", max_steps=6, multitask=multitask)
    assert train_run(run)
    names = {name for _, metrics in logged(run) for name in metrics if metrics.get("stage") == 1}
    assert names >= {"nll", "emotion", "cause", "cause_accuracy"}
    last = load_model(run.model).variant.reasoner.state_dict()
    best = load_model(run.folder / "best-reasoner").variant.reasoner.state_dict()
    assert all(torch.equal(last[name], best[name]) for name in last) == (not multitask)


def test_a_callback_is_called_after_each_checkpointed_validation_and_may_end_training(begin):
    def train_watched(run, leave_at=0):
        model = setup.set_up_run_model(run)
        streams, valid = data.load_training_streams(run, model)
        validations = []

        def watch(step, metrics, over):
            if "valid_loss" not in metrics:
                return
            assert run.newest_checkpoint().name == f"{step:08d}"
            validations.append((step, over))
            if step == leave_at:
                raise SystemExit

        with contextlib.suppress(SystemExit):
            Training(run, model, streams, valid, ProcessGroup(), watch).run()
        return validations

    whole, left = begin("dummy", "whole", max_steps=12), begin("dummy", "left", max_steps=12)
    assert train_watched(whole) == [(5, False), (10, False), (12, True)]
    assert train_watched(left, leave_at=5) == [(5, False)]
    assert not (left.folder / loop.RESULT).exists()
    assert train_watched(left) == [(10, False), (12, True)]
    assert logged(left) == logged(whole)


def test_the_demo_compares_variants(prepared, tmp_path, monkeypatch):
    """Runs are trained in this process; test_ray.py tests several runs on Ray."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bundled").symlink_to(prepared)
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(cluster, "plan_capacity", lambda *_: (1, 1))
    monkeypatch.setattr(cluster, "fit", lambda _, run, __: train(run, ProcessGroup()))
    monkeypatch.setattr(cluster, "describe_missing_resources", lambda *_: "")
    monkeypatch.setattr(
        "attune.platform.data.dataset_folder.read_dataset_samples",
        lambda *arguments: read_dataset_samples(*arguments).head(40),
    )
    variants = ("transformer", "mime")
    command = ("demo", *variants, "--preset", "tiny", "--max-steps", "4", "--json")
    names = [f"demo-{variant}-tiny" for variant in variants]

    def run_demo():
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        output = json.loads(done.stdout.splitlines()[-1])
        assert_json_keys(command, output)
        return output

    first = run_demo()
    assert [run["name"] for run in first["runs"]] == names
    for run in first["runs"]:
        assert run["metrics"]["perplexity"] > 1
        assert Path(run["answers"]).is_file()
    trained = [find_run(name).metrics_file.read_bytes() for name in names]
    assert run_demo() == first  # finished runs are not trained again
    assert trained == [find_run(name).metrics_file.read_bytes() for name in names]
