"""Each check of the contract detects a variant with the fault that it checks for."""

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


class LossIsANumber(MultiTransformer):
    def losses(self, batches, progress):
        losses = super().losses(batches, progress)
        return {**losses, "emotion": losses["emotion"].item()}


class LossIsDetached(MultiTransformer):
    def losses(self, batches, progress):
        losses = super().losses(batches, progress)
        return {**losses, "emotion": losses["emotion"].detach()}


class BuildsModulesInForward(MultiTransformer):
    def encode_context(self, embedded):
        return nn.Linear(self.config.width, self.config.width)(super().encode_context(embedded))


class HasUnusedModule(MultiTransformer):
    def __init__(self, config, data_info):
        super().__init__(config, data_info)
        self.unused = nn.Linear(2, 2)


class HasUntrainedModule(HasUnusedModule):
    def stages(self):
        [stage] = super().stages()
        parts = tuple(part for part in stage.players["model"] if part != "unused")
        return [type(stage)(**{**vars(stage), "players": {"model": parts}})]


class DividesByOwnTokens(MultiTransformer):
    def compute_nll(self, batch, decoded, embedded):
        nll = super().compute_nll(batch, decoded, embedded)
        return nll * batch.tokens / embedded.response_mask.sum()


class HasUnsavedAttribute(MultiTransformer):
    scales = itertools.count(1)

    def __init__(self, config, data_info):
        super().__init__(config, data_info)
        # Neither a weight nor a setting, so it is not saved.
        self.hidden_scale = next(HasUnsavedAttribute.scales)

    def encode_context(self, embedded):
        return super().encode_context(embedded) * self.hidden_scale


class ReadsTrueEmotion(MultiTransformer):
    def embed(self, batch):
        embedded = super().embed(batch)
        context = embedded.context + batch["emotion"][:, None, None] * 0.01
        return dataclasses.replace(embedded, context=context)


class AttendsToPadding(MultiTransformer):
    def encode_context(self, embedded):
        return self.encoder(embedded.context, torch.ones_like(embedded.attention_mask))


class RepeatsFirstPosition(Transformer):
    def next_logits(self, tokens, state):
        return super().next_logits(tokens, {**state, "length": 0})


class DoesNotSelectPast(Transformer):
    def select(self, state, rows):
        return {**super().select(state, rows), "past": state["past"]}


class SmoothsLikelihoodTerm(Transformer):
    def compute_nll(self, batch, decoded, embedded):
        return 0.9 * super().compute_nll(batch, decoded, embedded) + 0.1


class HasConstantLosses(MultiTransformer):
    def losses(self, batches, progress):
        return {name: term * 0 + 1 for name, term in super().losses(batches, progress).items()}


@pytest.fixture
def build_faulty(vocabulary, monkeypatch):
    def build(variant):
        monkeypatch.setattr("attune.models.VARIANTS", {"faulty": f"{__name__}:{variant.__name__}"})
        monkeypatch.setattr("attune.platform.core.settings.VARIANTS", {"faulty": "here"})
        config = settings.configure("faulty", "tiny")[0]
        return build_model("faulty", config, vocabulary, EMOTIONS)

    return build


@pytest.mark.parametrize(
    ("variant", "check"),
    [
        (LossIsANumber, contract.check_loss_terms_have_gradients),
        (LossIsDetached, contract.check_loss_terms_have_gradients),
        (BuildsModulesInForward, contract.check_losses_build_no_modules),
        (HasUnusedModule, contract.check_updates_change_only_their_player),
        (HasUntrainedModule, contract.check_updates_change_only_their_player),
        (DividesByOwnTokens, contract.check_losses_of_ranks_average_to_the_whole),
        (ReadsTrueEmotion, contract.check_true_labels_are_not_used),
        (AttendsToPadding, contract.check_outputs_do_not_depend_on_the_batch),
        (RepeatsFirstPosition, contract.check_stepwise_decoding_gives_the_likelihood),
        (DoesNotSelectPast, contract.check_stepwise_decoding_gives_the_likelihood),
        (SmoothsLikelihoodTerm, contract.check_likelihood_term),
    ],
)
def test_faults_are_detected(build_faulty, batch, variant, check):
    with pytest.raises(AssertionError):
        check(build_faulty(variant).variant, batch)


def test_unsaved_attributes_are_detected(build_faulty, batch, tmp_path):
    with pytest.raises(AssertionError):
        contract.check_saved_model_is_restored(build_faulty(HasUnsavedAttribute), batch, tmp_path)


def test_losses_that_do_not_decrease_are_detected(build_faulty, batch):
    with pytest.raises(AssertionError, match="is still"):
        contract.check_samples_are_memorised(
            build_faulty(HasConstantLosses).variant, batch, steps=3
        )
