"""Each check of the contract notices the fault it is there for."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from attune.models.multitask import MultiTransformer
from attune.models.transformer import Transformer
from attune.platform.data.labels import EMOTIONS
from attune.platform.runs.model import build_model
from attune.platform.training import settings
from tests import contract


class NumberForALoss(MultiTransformer):
    def losses(self, batches, progress):
        losses = super().losses(batches, progress)
        return {**losses, "emotion": losses["emotion"].item()}


class DetachedLoss(MultiTransformer):
    def losses(self, batches, progress):
        losses = super().losses(batches, progress)
        return {**losses, "emotion": losses["emotion"].detach()}


class BuildsAsItGoes(MultiTransformer):
    def encode_context(self, words):
        return nn.Linear(self.config.width, self.config.width)(super().encode_context(words))


class UnusedPart(MultiTransformer):
    def __init__(self, config, data_info):
        super().__init__(config, data_info)
        self.idle = nn.Linear(2, 2)


class ForgottenPart(UnusedPart):
    def stages(self):
        [stage] = super().stages()
        parts = tuple(part for part in stage.players["model"] if part != "idle")
        return [type(stage)(**{**vars(stage), "players": {"model": parts}})]


class LocalMean(MultiTransformer):
    def compute_nll(self, batch, hidden, words):
        return super().compute_nll(batch, hidden, words) * batch.tokens / words.response_mask.sum()


class KeepsSomethingApart(MultiTransformer):
    scales = itertools.count(1)

    def __init__(self, config, data_info):
        super().__init__(config, data_info)
        # Neither weight nor setting: lost when saved.
        self.hidden_scale = next(KeepsSomethingApart.scales)

    def encode_context(self, words):
        return super().encode_context(words) * self.hidden_scale


class ReadsTheTrueEmotion(MultiTransformer):
    def embed(self, batch):
        words = super().embed(batch)
        context = words.context + batch["emotion"][:, None, None] * 0.01
        return dataclasses.replace(words, context=context)


class SeesPadding(MultiTransformer):
    def encode_context(self, words):
        return self.encoder(words.context, torch.ones_like(words.attention_mask))


class WrongPositions(Transformer):
    def next_logits(self, tokens, state):
        return super().next_logits(tokens, {**state, "length": 0})


class CarelessSelect(Transformer):
    def select(self, state, rows):
        return {**super().select(state, rows), "past": state["past"]}


class SmoothsItsLikelihood(Transformer):
    def compute_nll(self, batch, hidden, words):
        return 0.9 * super().compute_nll(batch, hidden, words) + 0.1


class CannotLearn(MultiTransformer):
    def losses(self, batches, progress):
        return {name: term * 0 + 1 for name, term in super().losses(batches, progress).items()}


@pytest.fixture
def faulty(vocabulary, monkeypatch):
    def make(variant):
        monkeypatch.setattr("attune.models.VARIANTS", {"faulty": f"{__name__}:{variant.__name__}"})
        monkeypatch.setattr("attune.platform.core.settings.VARIANTS", {"faulty": "here"})
        config = settings.configure("faulty", "tiny")[0]
        return build_model("faulty", config, vocabulary, EMOTIONS)

    return make


@pytest.mark.parametrize(
    ("variant", "check"),
    [
        (NumberForALoss, contract.check_terms_are_tensors_that_learn),
        (DetachedLoss, contract.check_terms_are_tensors_that_learn),
        (BuildsAsItGoes, contract.check_no_module_is_built_in_a_forward),
        (UnusedPart, contract.check_each_player_moves_itself_and_nobody_else),
        (ForgottenPart, contract.check_each_player_moves_itself_and_nobody_else),
        (LocalMean, contract.check_parts_add_up),
        (ReadsTheTrueEmotion, contract.check_truth_is_not_used),
        (SeesPadding, contract.check_a_batch_gives_what_its_samples_give),
        (WrongPositions, contract.check_steps_equal_all_at_once),
        (CarelessSelect, contract.check_steps_equal_all_at_once),
        (SmoothsItsLikelihood, contract.check_likelihood_term),
    ],
)
def test_faults_are_noticed(faulty, batch, variant, check):
    with pytest.raises(AssertionError):
        check(faulty(variant).variant, batch)


def test_what_is_not_saved_is_noticed(faulty, batch, tmp_path):
    with pytest.raises(AssertionError):
        contract.check_saved_is_loaded(faulty(KeepsSomethingApart), batch, tmp_path)


def test_what_cannot_learn_is_noticed(faulty, batch):
    with pytest.raises(AssertionError, match="is still"):
        contract.check_learns_by_heart(faulty(CannotLearn).variant, batch, steps=3)
