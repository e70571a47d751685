"""Emotion cause: the reasoner, its losses, the ablations and the data they require."""

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
import torch

from attune.models import all_variants
from attune.models.base import PAIRED, Batch, Progress
from attune.platform.batching.encoding import Layout, Ragged, encode
from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import bundled
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.prepare import prepare
from attune.platform.runs.model import load_model, save_model
from attune.platform.serving.responder import Responder
from attune.platform.text.lexicons import Lexicon
from attune.platform.training import settings, setup
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.updates import train_only_updated, update_loss
from attune.platform.training.validation import compute_validation_metrics
from tests.contract import compute_outputs

SOFT, HARD = "emotion-cause-soft", "emotion-cause-hard"
NAMES = sorted(name for name in all_variants() if name.startswith("emotion-cause"))


def stages_by_name(variant):
    return {stage.name: stage for stage in variant.stages()}


def joint_losses(variant, batch, **progress):
    return variant.losses({PAIRED: batch}, Progress(**progress))


def replace_tensors(batch, **tensors):
    return dataclasses.replace(batch, tensors={**batch.tensors, **tensors})


def test_variants_and_ablations_are_those_of_the_paper():
    ablations = ("-lexicon", "-no-emotion", "-no-multitask")
    expected = {SOFT, HARD, "emotion-cause-no-cause"}
    expected |= {name + ablation for name in (SOFT, HARD) for ablation in ablations}
    assert set(NAMES) == expected


def test_words_and_their_separators_have_cause_labels(test_samples, vocabulary):
    layout = Layout(separators=True)
    columns = encode(test_samples, vocabulary, layout=layout, causes=True)
    separator = vocabulary.numbers["<sep>"]
    for row in range(0, test_samples.height, 97):
        labels = columns["context_causes"].pad([row])[0].tolist()
        context = columns["context"].pad([row])[0].tolist()
        turns = columns["context_turns"].pad([row])[0].tolist()
        causes = test_samples["context_causes"][row].to_list()
        assert labels[0] == 1
        assert labels[1:] == [int(causes[turn - 1]) for turn in turns[1:]]
        assert context.count(separator) == len(causes)
        assert context[-1] == separator
    assert {0, 1} == set(np.unique(columns["context_causes"].values))


def test_utterances_without_annotation_are_unknown(test_samples, vocabulary):
    is_labelled = pl.int_range(pl.len()) > 0
    some = test_samples.head(3).with_columns(pl.when(is_labelled).then("context_causes"))
    columns = encode(some, vocabulary, layout=Layout(max_context=4), causes=True)
    labels = columns["context_causes"]
    assert labels.lengths.tolist() == columns["context"].lengths.tolist()
    assert set(labels.pad([0])[0, 1:].tolist()) == {-1}
    assert -1 not in labels.pad([1, 2])[:, 1:]
    assert "context_causes" not in encode(some, vocabulary)


@torch.no_grad()
def test_the_reasoner_has_no_positions(build, batch):
    """It has one layer and one head, and is invariant to the order of words (appendix A)."""
    variant = build(SOFT, preset="paper", width=32, key_depth=64).variant.eval()
    assert len(variant.reasoner.encoder.layers) == 1
    assert variant.reasoner.encoder.layers[0].attention.num_heads == 1
    context, roles = batch["context"][:1], batch["context_roles"][:1]
    length = int((context != 0).sum())
    order = torch.cat([torch.tensor([0]), torch.arange(1, length).flip(0)])
    one = variant.reasoner(context[:, :length], roles[:, :length])
    other = variant.reasoner(context[:, order], roles[:, order])
    assert torch.allclose(one.emotion_logits, other.emotion_logits, atol=1e-5)
    assert torch.allclose(one.cause_logits[:, order], other.cause_logits, atol=1e-5)
    assert variant.reasoner.embedding.table.weight is not variant.embedding.table.weight


def test_the_loss_of_the_reasoner(build, batch):
    """Eq. 3-4 word by word, without `<cls>`, padding and words without a label."""
    variant = build(SOFT).variant.eval()
    labels = batch["context_causes"].clone()
    labels[0, 1:4] = -1
    labels[1, 1:] = -1
    relabelled = replace_tensors(batch, context_causes=labels)
    terms = variant.cause_reasoner_losses({PAIRED: relabelled}, Progress())
    output = variant.reasoner(batch["context"], batch["context_roles"])
    causes, emotions = output.cause_logits.log_softmax(-1), output.emotion_logits.log_softmax(-1)
    cause = emotion = correct = 0.0
    for row in range(len(batch)):
        emotion -= emotions[row, batch["emotion"][row]].item() / len(batch)
        known = [
            (causes[row, position, label].item(), causes[row, position].argmax().item() == label)
            for position, label in enumerate(labels[row].tolist())
            if position > 0 and label >= 0 and batch["context"][row, position] != 0
        ]
        if known:
            cause -= sum(value for value, _ in known) / len(known) / len(batch)
            correct += sum(is_correct for _, is_correct in known) / len(known) / len(batch)
    assert terms["cause"].item() == pytest.approx(cause, rel=1e-4)
    assert terms["emotion"].item() == pytest.approx(emotion, rel=1e-4)
    assert terms["cause_accuracy"].item() == pytest.approx(correct, rel=1e-4)


def test_joint_loss_is_the_sum_of_all_terms(build, batch):
    variant = build(SOFT, emotion_weight=2.0, cause_weight=3.0, response_weight=0.5).variant.eval()
    [update] = stages_by_name(variant)["joint"].updates
    terms = joint_losses(variant, batch)
    expected = 0.5 * terms["nll"] + 2 * terms["emotion"] + 3 * terms["cause"]  # eq. 7
    assert torch.allclose(update_loss(update, terms), expected)
    [update] = stages_by_name(variant)["reasoner"].updates
    assert update.weights == {"emotion": 2.0, "cause": 3.0}
    assert all(weight == 1.0 for weight in build(SOFT).variant.loss_weights().values())


@torch.no_grad()
def test_the_generator_gets_the_predicted_emotion(build, batch):
    """It is added at each position of encoder and decoder, also in training."""
    variant = build(SOFT, dropout=0.0).variant.train()
    predicted = variant.predict(batch)["emotion"].argmax(dim=-1)
    before = variant.embed(batch)
    assert before.emotion[:, 0].equal(variant.emotion_embedding(predicted))
    other = replace_tensors(batch, emotion=(batch["emotion"] + 1) % 32)
    assert variant.embed(other).context.equal(before.context)
    variant.emotion_embedding.weight[predicted.unique()] += 1.0
    after = variant.embed(batch)
    for one, two in (
        (before.context, after.context),
        (before.decoder_inputs, after.decoder_inputs),
    ):
        assert torch.allclose(two - one, torch.ones_like(one), atol=1e-5)
    values = variant.log_likelihood(batch)
    not_predicted = [number for number in range(32) if number not in predicted.tolist()]
    variant.emotion_embedding.weight[not_predicted] += 1.0
    assert variant.log_likelihood(batch).equal(values)


@pytest.mark.parametrize("name", NAMES)
def test_cause_labels_are_not_used_in_evaluation(build, batch, name):
    variant = build(name).variant.eval()
    other = replace_tensors(batch, context_causes=1 - batch["context_causes"])
    for one, two in zip(
        compute_outputs(variant, batch), compute_outputs(variant, other), strict=True
    ):
        assert one.equal(two)


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_without_multitask_the_reasoner_is_frozen(build, batch, name):
    variant = build(f"{name}-no-multitask", dropout=0.5, word_dropout=0.5).variant.train()
    stages = stages_by_name(variant)
    assert stages["reasoner"].players == {"reasoner": ("reasoner",)}
    [update] = stages["joint"].updates
    parts = stages["joint"].players[update.player]
    assert "reasoner" not in parts
    assert update.weights == {"nll": 1.0}
    embedded = variant.embed(batch)
    assert embedded.gates.equal(variant.embed(batch).gates), "nothing is dropped out or sampled"
    assert variant.reasoner.training
    update_loss(update, joint_losses(variant, batch)).backward()
    assert all(p.grad is None for p in variant.reasoner.parameters())
    assert "reasoner" in stages_by_name(build(name).variant)["joint"].players["model"]


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_without_emotion_the_generator_has_no_emotion_embedding(build, batch, name):
    variant = build(f"{name}-no-emotion").variant.eval()
    whole = {n for n, _ in build(name).variant.named_parameters()}
    assert whole - {n for n, _ in variant.named_parameters()} == {"emotion_embedding.weight"}
    assert not variant.embed(batch).emotion.any()
    assert "emotion" in variant.loss_weights(), "the reasoner still predicts it"


def test_without_cause_there_are_no_gates_and_no_cause_labels(build, batch):
    variant = build("emotion-cause-no-cause").variant.eval()
    names = [name for name, _ in variant.named_parameters()]
    assert not any("gated" in name or "cause" in name for name in names)
    assert variant.embed(batch).gates is None
    assert set(variant.loss_weights()) == {"nll", "emotion"}
    tensors = {name: t for name, t in batch.tensors.items() if name != "context_causes"}
    unlabelled = Batch(tensors=tensors, samples=batch.samples, tokens=batch.tokens)
    assert set(joint_losses(variant, unlabelled)) == {"nll", "emotion"}
    assert variant.explain(unlabelled)[0].by_word is None


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_with_a_lexicon_intense_words_are_labelled(build, batch, vocabulary, name):
    model = build(f"{name}-lexicon", lexicon_threshold=0.9)
    variant = model.variant
    tensors = {n: t for n, t in batch.tensors.items() if n != "context_causes"}
    unlabelled = Batch(tensors=tensors, samples=batch.samples, tokens=batch.tokens)
    labels = variant._cause_labels(unlabelled)
    values = bundled.lexicon().valence_arousal
    for tokens, row in zip(batch["context"].tolist(), labels.tolist(), strict=True):
        for token, label in zip(tokens, row, strict=True):
            word = vocabulary.tokens[token]
            valence, arousal = values.get(word, (0.5, 0.0))
            expected = int(abs(valence - 0.5) + arousal > 0.9) if token else -1
            assert label == expected, word
    assert (labels == 1).any()
    assert torch.isfinite(joint_losses(variant, unlabelled)["cause"])
    assert variant.explain(unlabelled)[0].by_word.keys() == {"lexicon", "gate"}


def test_requirements_follow_the_settings(build, test_samples):
    few = test_samples.head(4)
    for name, reads, intensity in (
        (SOFT, True, False),
        (f"{HARD}-no-emotion", True, False),
        (f"{SOFT}-lexicon", False, True),
        ("emotion-cause-no-cause", False, False),
    ):
        model = build(name)
        columns = model.columns(few)
        assert ("context_causes" in columns) == reads
        assert (model.variant.data_info.intensity is not None) == intensity
        assert "emotion_words" not in columns, "they are not read, so no tagger is needed"
        separator = model.vocabulary.numbers["<sep>"]
        assert (columns["context"].pad(np.arange(4)) == separator).any()


def test_the_sizes_of_the_paper(build):
    config, training = settings.configure(HARD, "paper")
    assert (config.width, config.num_layers, config.num_heads) == (300, 6, 8)
    assert config.key_depth == 8 * 64
    assert (training.batch_by, training.batch_size) == ("tokens", 8192)
    assert training.learning_rate == 5e-4
    assert (config.gate, settings.configure(SOFT, "paper")[0].gate) == ("hard", "soft")
    layer = build(SOFT, preset="paper").variant.decoder.layers[5].gated_attention
    assert layer.queries.weight.shape == (512, 300)
    assert layer.out.weight.shape == (300, 512)


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_explanations_have_values_for_words_only(build, tmp_path, name):
    """`<cls>` and `<sep>` are not words; `<unk>` is."""
    save_model(build(name), tmp_path)
    responder = Responder(tmp_path)
    turns = ["My dog ran away.", "Oh no!", "He is zzyzx old."]
    [answer] = responder.respond([turns])
    explanation = answer.explanation
    assert " ".join(explanation.words) == "my dog ran away . oh no ! he is <unk> old ."
    assert set(explanation.by_word) == {"cause", "gate"}
    assert all(len(values) == len(explanation.words) for values in explanation.by_word.values())
    assert all(0 <= value <= 1 for values in explanation.by_word.values() for value in values)
    assert sum(explanation.emotion.values()) == pytest.approx(1.0, abs=1e-4)
    if name == SOFT:
        assert explanation.by_word["gate"] == pytest.approx(explanation.by_word["cause"], abs=1e-5)
    else:
        opened = [float(cause >= 0.5) for cause in explanation.by_word["cause"]]
        assert explanation.by_word["gate"] == opened
    batch = responder._batch([turns, ["I am so proud !"]])
    with torch.no_grad():
        [alone] = responder.variant.explain(select_context(batch, 1))
        together = responder.variant.explain(batch)[1]
    for key, values in alone.by_word.items():
        assert values == pytest.approx(together.by_word[key], abs=1e-5)


def select_context(batch, row):
    """Return one row of a batch without responses."""
    length = int((batch["context"][row] != 0).sum())
    parts = {
        name: tensor[[row]][:, :length] if tensor.dim() > 1 else tensor[[row]]
        for name, tensor in batch.tensors.items()
    }
    return Batch(tensors=parts, samples=1.0, tokens=1.0)


def write_unlabelled_dialogues(folder):
    roles = ("speaker", "listener")
    lines = [
        {
            "id": f"{split} {number}",
            "emotion": "sad",
            "split": split,
            "utterances": [{"role": roles[t % 2], "text": f"Text {t} here ."} for t in range(4)],
        }
        for split in ("train", "valid", "test")
        for number in range(3)
    ]
    path = folder / "dialogues.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def unlabelled(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    prepare(str(write_unlabelled_dialogues(tmp_path)), tmp_path / "data", form="dialogues")
    return tmp_path / "data"


def test_data_without_cause_labels_are_rejected_before_the_run(unlabelled, tmp_path):
    for name in (SOFT, HARD, f"{SOFT}-no-multitask", f"{HARD}-no-emotion"):
        with pytest.raises(DataError, match=f"attune annotate cause RUN --data {unlabelled}"):
            setup.new_run(name, data=str(unlabelled), preset="tiny")
    assert not (tmp_path / "home" / "runs").exists()
    run = setup.new_run("emotion-cause-no-cause", data=str(unlabelled), preset="tiny")
    assert run.folder.is_dir()


def test_a_run_stores_valence_and_arousal(unlabelled, tmp_path):
    name = f"{SOFT}-lexicon"
    run = setup.new_run(name, data=str(unlabelled), preset="tiny")
    assert "valence_arousal=FILE" in run.notice
    (tmp_path / "vad.txt").write_text("text\t0.9\t0.8\t0.1\nhere\t0.5\t0.1\t0.1\n")
    overrides = {"valence_arousal": str(tmp_path / "vad.txt")}
    run = setup.new_run(name, data=str(unlabelled), preset="tiny", overrides=overrides)
    assert not run.notice
    model = setup.set_up_run_model(run)
    numbers = model.vocabulary.numbers
    intensity = model.variant.data_info.intensity
    assert intensity[numbers["text"]].item() == pytest.approx(1.2)
    assert intensity[numbers["here"]].item() == pytest.approx(0.1)
    assert intensity[numbers["<unk>"]].item() == 0.0
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").variant.data_info.intensity.equal(intensity)
    (tmp_path / "words.txt").write_text("text\n")
    overrides = {"lexicon": str(tmp_path / "words.txt")}
    with pytest.raises(UsageError, match="no valence and arousal"):
        setup.new_run(name, data=str(unlabelled), preset="tiny", overrides=overrides)


def test_intensity_of_low_and_high_valence():
    lexicon = Lexicon(
        words=frozenset(), valence_arousal={"joy": (0.9, 0.6), "grief": (0.1, 0.6), "mud": (0.5, 0)}
    )
    values = [lexicon.emotional_intensity(word) for word in ("joy", "grief", "mud", "table")]
    assert values == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_the_reasoner_generalises_to_new_causes(build, prepared):
    """After a few steps its accuracy on valid exceeds that of the more frequent label."""
    model = build(SOFT)
    variant = model.variant
    train, valid = (
        model.columns(read_dataset_samples(prepared, s).head(600)) for s in ("train", "valid")
    )
    stage = stages_by_name(variant)["reasoner"]
    optimizer = torch.optim.Adam(variant.reasoner.parameters(), lr=3e-3)
    torch.manual_seed(0)
    variant.train()
    for step in range(60):
        rows = np.random.default_rng(step).choice(600, 32, replace=False)
        tensors = {
            name: c.pad(rows) if isinstance(c, Ragged) else torch.from_numpy(c[rows])
            for name, c in train.items()
        }
        batch = Batch(tensors=tensors, samples=32, tokens=1.0)
        with train_only_updated(variant, ("reasoner",)):
            terms = variant.cause_reasoner_losses({PAIRED: batch}, Progress())
            optimizer.zero_grad()
            update_loss(stage.updates[0], terms).backward()
            optimizer.step()
    metrics = compute_validation_metrics(variant, stage, valid, ProcessGroup())
    labels = valid["context_causes"].values
    most_frequent = max((labels == 0).mean(), (labels == 1).mean())
    assert metrics["valid_cause_accuracy"] > most_frequent + 0.05


def test_perplexity_is_reported_from_the_first_stage_that_trains_the_decoder(build, prepared):
    model = build(SOFT)
    valid = model.columns(read_dataset_samples(prepared, "valid").head(20))
    reasoner, generator = stages_by_name(model.variant).values()
    assert "valid_perplexity" not in compute_validation_metrics(
        model.variant, reasoner, valid, ProcessGroup()
    )
    assert (
        compute_validation_metrics(model.variant, generator, valid, ProcessGroup())[
            "valid_perplexity"
        ]
        > 1
    )
