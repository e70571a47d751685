"""Learning rate, dropout and the divisors of loss terms, as functions of a run's settings."""

import itertools

import numpy as np
import pytest
import torch

from attune.models import load_variant
from attune.models.base import PAIRED, Progress, Stage
from attune.platform.training import data, setup
from attune.platform.training.loop import Training
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.schedules import has_dropout_decayed, rate, scheduled_dropout_factor
from attune.platform.training.settings import TrainingConfig

STAGE = Stage(name="train", players={}, updates=())


def rates(training, steps, stage=STAGE):
    return [rate(training, stage, step, steps) for step in range(steps)]


def test_warmup_is_a_share_of_its_stage():
    training = TrainingConfig(learning_rate=1.0, schedule="linear", warmup_share=0.1)
    for steps in (50, 1000):
        values = rates(training, steps)
        assert np.argmax(values) == steps // 10 - 1
        assert values[steps // 10 - 1] == 1.0
        assert values[0] == pytest.approx(10 / steps)
        assert values[-1] < 2 / steps
    counted = TrainingConfig(learning_rate=1.0, warmup_steps=20)
    assert [rates(counted, steps).index(1.0) for steps in (50, 1000)] == [19, 19]


def test_a_stage_may_have_its_own_rate_and_schedule():
    training = TrainingConfig(learning_rate=1.0, schedule="linear")
    own = Stage(name="critics", players={}, updates=(), rate=0.1, schedule="constant")
    assert set(rates(training, 10, own)) == {0.1}
    noam = TrainingConfig(learning_rate=1.0, schedule="noam", warmup_steps=8000)
    assert set(rates(noam, 10, own)) == {0.1}  # the run's warm-up is longer than the stage


def test_dropout_decays_to_zero_at_the_end_of_a_stage():
    training = TrainingConfig(dropout_decay_share=0.25)
    factors = [scheduled_dropout_factor(training, step, 100) for step in range(100)]
    assert factors[:75] == [1.0] * 75
    assert factors[75:] == pytest.approx(np.arange(24, -1, -1) / 25)
    assert [has_dropout_decayed(training, step, 100) for step in (75, 76, 99)] == [
        False,
        True,
        True,
    ]
    assert {scheduled_dropout_factor(TrainingConfig(), step, 100) for step in range(100)} == {1.0}
    assert has_dropout_decayed(TrainingConfig(), 0, 100)


@pytest.fixture
def begin_training(prepared, tmp_path, monkeypatch):
    """A function that sets up a training, as one of its workers, without starting it."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))

    def begin(rank=0, world_size=1, **overrides):
        run = setup.new_run(
            "dummy", data=str(prepared), preset="tiny", overrides=overrides,
            name=f"{len(list(tmp_path.glob('runs/*')))}",
        )  # fmt: skip
        model = setup.set_up_run_model(run)
        group = ProcessGroup(rank=rank, world_size=world_size)
        return Training(run, model, *data.load_training_streams(run, model), group)

    return begin


def token_weights(training, monkeypatch):
    """For each part of an epoch's batches: the length of its longest response, its number of
    tokens, and the gradient of the response's term with respect to each token's likelihood."""
    weights = []
    for loaded in itertools.islice(
        training.streams[PAIRED].batches(), len(training.streams[PAIRED].plan(0))
    ):
        for parts in training._split_for_accumulation({PAIRED: loaded.batch}):
            response = parts[PAIRED]["response"]
            likelihood = torch.zeros(response.shape, requires_grad=True)
            monkeypatch.setattr(
                load_variant("dummy"), "log_likelihood", lambda *_, value=likelihood: value
            )
            training.variant.losses(parts, Progress())["nll"].backward()
            gradient = likelihood.grad[response != 0]
            weights.append((response.shape[1], len(gradient), gradient.unique()))
    return weights


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("by", "size"), [("samples", 16), ("tokens", 1500)])
def test_a_token_weighs_the_same_in_every_batch(
    begin_training, monkeypatch, by, size, accumulation
):
    """Batches are of one length each: divided by its own tokens a short one would weigh more."""
    settings = {"batch_by": by, "batch_size": size, "accumulation": accumulation}
    ranks = [begin_training(rank, 2, **settings) for rank in (0, 1)]
    parts = [
        token_weights(training, monkeypatch) for training in [begin_training(**settings), *ranks]
    ]
    for weights in parts:
        lengths = [length for length, _, _ in weights]
        assert max(lengths) > 2 * min(lengths)
        assert len(torch.cat([values for _, _, values in weights]).unique()) == 1
    # The weights of all tokens of an epoch add up to the number of updates, whoever computes them.
    for weights, share in zip(parts, (1, 1 / 2, 1 / 2), strict=True):
        total = -sum(count * values.item() for _, count, values in weights)
        updates = len(weights) / accumulation
        rank_share = sum(count for _, count, _ in weights) / sum(c for _, c, _ in parts[0])
        assert total == pytest.approx(updates * accumulation * rank_share / share, rel=1e-5)


def test_sample_terms_are_divided_by_the_mean_batch(begin_training):
    training = begin_training(batch_by="tokens", batch_size=1500)
    stream = training.streams[PAIRED]
    batches = [
        part[PAIRED]
        for loaded in itertools.islice(stream.batches(), len(stream.plan(0)))
        for part in training._split_for_accumulation({PAIRED: loaded.batch})
    ]
    assert len({len(batch) for batch in batches}) > 1
    assert {batch.samples for batch in batches} == {len(stream.tokens) / len(batches)}
    length = stream.tokens.mean()
    assert {batch.tokens for batch in batches} == {batches[0].samples * length}


def test_the_public_scale_sums_over_the_tokens_of_a_batch(begin_training):
    training = begin_training(loss_scale="public", batch_size=16)
    loaded = next(training.streams[PAIRED].batches())
    [parts] = training._split_for_accumulation({PAIRED: loaded.batch})
    assert (parts[PAIRED].tokens, parts[PAIRED].samples) == (1.0, len(parts[PAIRED]))
