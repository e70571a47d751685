"""The contract of every variant and ablation; a new system is included when it is listed."""

import dataclasses
import typing

import pytest

from attune.jobs import demo
from attune.models import VARIANTS, all_variants, load_variant
from attune.models.base import PAIRED, DialogueVariant, Progress
from attune.models.layers import WordEmbedding
from attune.models.transformer import Transformer
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import PRESETS, find_variant
from attune.platform.training import settings
from tests import contract

NAMES = sorted(all_variants())
DIALOGUE = [name for name in NAMES if issubclass(all_variants()[name][0], DialogueVariant)]
TRANSFORMERS = [name for name in sorted(VARIANTS) if issubclass(load_variant(name), Transformer)]


@pytest.fixture(params=NAMES)
def model(request, build):
    return build(request.param)


@pytest.fixture(params=DIALOGUE)
def dialogue(request, build):
    return build(request.param)


@pytest.mark.parametrize(
    "check",
    [
        contract.check_loss_terms_have_gradients,
        contract.check_losses_build_no_modules,
        contract.check_updates_change_only_their_player,
        contract.check_losses_of_ranks_average_to_the_whole,
        contract.check_true_labels_are_not_used,
        contract.check_outputs_do_not_depend_on_the_batch,
        contract.check_samples_are_memorised,
    ],
)
def test_every_variant_fulfils_the_contract(model, batch, check):
    check(model.variant, batch)


@pytest.mark.parametrize(
    "check",
    [
        contract.check_stepwise_decoding_gives_the_likelihood,
        contract.check_likelihood_term,
    ],
)
def test_dialogue_variants_fulfil_the_contract(dialogue, batch, check):
    check(dialogue.variant, batch)


def test_answers_have_no_special_tokens(dialogue, batch):
    contract.check_answers_have_no_special_tokens(dialogue, batch)


def test_saved_models_are_restored(model, batch, tmp_path):
    contract.check_saved_model_is_restored(model, batch, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_can_be_switched_off(name, build, batch):
    fields = {field.name for field in dataclasses.fields(all_variants()[name][0].Config)}
    rates = {"dropout", "word_dropout"} & fields
    noisy = build(name, **dict.fromkeys(rates, 0.5)).variant
    plain = build(name, **dict.fromkeys(rates, 0.0)).variant
    contract.check_dropout_can_be_switched_off(noisy, plain, batch)


def test_the_same_seed_builds_the_same_model(build):
    for name in NAMES:
        one, other = build(name).variant.state_dict(), build(name).variant.state_dict()
        assert all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_declarations_of_a_variant_are_consistent(name):
    variant = load_variant(name)
    fields = {field.name for field in dataclasses.fields(variant.Config)}
    assert set(variant.presets) == set(PRESETS)
    for preset in variant.presets:
        settings.configure(name, preset)
    for ablation, fixed in variant.ablations.items():
        assert ablation not in VARIANTS
        assert set(fixed) <= fields
    for space in variant.search_spaces.values():
        assert set(space) <= fields
    assert variant.__doc__
    if name != "dummy":
        module = typing.cast(str, __import__(variant.__module__, fromlist=["x"]).__doc__)
        assert "Deviations:" in module


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_declared_validation_metrics_are_those_of_losses_and_predictions(name, build, batch):
    measured = set()
    for each in (name, *load_variant(name).ablations):
        variant = build(each).variant.eval()
        measured |= {f"{predicted}_accuracy" for predicted in variant.predict(batch)}
        for stage in variant.stages():
            batches = dict.fromkeys((PAIRED, stage.streams[0]), batch)  # as in validation
            for update in stage.updates:
                measured |= set(getattr(variant, update.losses)(batches, Progress(fraction=1.0)))
    assert measured == set(load_variant(name).validation_metrics)


def test_the_demo_has_one_variant_of_each_dialogue_system():
    systems = [find_variant(name)[0].system for name in demo.PLAN]
    answering = {name for name in VARIANTS if name in DIALOGUE} - {"dummy"}
    assert sorted(systems) == sorted({load_variant(name).system for name in answering})


def test_settings_are_parsed_by_type():
    config = settings.configure("multi-trs", "tiny", {"width": "64", "tied": "false"})[0]
    assert (config.width, config.tied) == (64, False)
    assert settings.configure("multi-trs", "tiny", {"dropout": "0"})[0].dropout == 0.0
    for overrides, message in (
        ({"widht": "64"}, "unknown setting 'widht': did you mean 'width'"),
        ({"width": "wide"}, "width: expected an integer, got 'wide'"),
        ({"width": "1.5"}, "width: expected an integer"),
        ({"tied": "1"}, "tied: expected true or false, got '1'"),
    ):
        with pytest.raises(UsageError, match=message):
            settings.configure("multi-trs", "tiny", overrides)
    with pytest.raises(UsageError, match="top_k: expected a number from 0 to 1,000, got -1"):
        settings.configure("moel", "tiny", {"top_k": "-1"})
    with pytest.raises(UsageError, match="did you mean 'multi-trs'"):
        settings.configure("multitrs")
    with pytest.raises(UsageError, match="unknown preset 'huge'"):
        settings.configure("multi-trs", "huge")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_embedding_width_reaches_every_word_embedding(build, batch, name):
    for tied in (False, True):
        variant = build(name, embedding_width=12, tied=tied).variant
        tables = [each for each in variant.modules() if isinstance(each, WordEmbedding)]
        assert {each.table.weight.shape[1] for each in tables} == {12}
        contract.check_loss_terms_have_gradients(variant, batch)
