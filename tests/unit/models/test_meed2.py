"""MEED2: subwords, the label in the decoder's input, and a label that a user requests."""

import shutil

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.base import PAIRED, Progress
from attune.models.decoding import Decoding
from attune.models.labels import LABELS
from attune.platform.core.errors import DataError, UsageError
from attune.platform.data.dataset_folder import LEXICON, read_dataset_samples
from attune.platform.evaluation.evaluate import evaluate, predictions
from attune.platform.runs.model import save_model
from attune.platform.serving.responder import Responder
from attune.platform.text import subwords
from attune.platform.text.subwords import Subwords
from attune.platform.text.vocabulary import END, SPECIALS
from attune.platform.training import setup
from tests.runs import write_run

TEXTS = ["i lost my keys .", "i lost my dog , too !", "that is 'n awful émotion ."]


@pytest.fixture(scope="module")
def tokenizer():
    return Subwords.learn_byte_pairs(TEXTS * 3, 300)


def test_subwords_decode_to_the_words_of_any_text(tokenizer):
    words, foreign = "i lost my wallet .", "日本 keys !"
    numbers = tokenizer.encode(pl.Series([words, None, "", foreign])).to_list()
    assert [" ".join(tokenizer.decode(each)) for each in numbers] == [words, "", "", foreign]
    assert min(numbers[0]) >= len(SPECIALS)
    with_end = [*numbers[0], tokenizer.numbers[END], *numbers[3]]
    assert " ".join(tokenizer.decode(with_end)) == words
    assert tokenizer.decode_each(tokenizer.encode(pl.Series(["i lost"])).to_list()[0]) == [
        "i",
        "lost",
    ]
    assert len(numbers[0]) > 5
    assert tokenizer.count_words(np.array([*numbers[0], tokenizer.numbers[END]])) == 6
    assert tokenizer.count_words(np.array(numbers[3])) == 3


def test_saved_subwords_are_restored(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "vocabulary.txt")
    loaded = subwords.load_words_or_subwords(tmp_path / "vocabulary.txt")
    texts = pl.Series(TEXTS)
    assert loaded.tokens == tokenizer.tokens
    assert loaded.encode(texts).to_list() == tokenizer.encode(texts).to_list()
    assert Subwords.learn_byte_pairs(TEXTS * 3, 300).tokens == tokenizer.tokens


def test_unusable_tokenizers_are_rejected(tmp_path, tiny_encoder):
    with pytest.raises(UsageError, match="vocabulary_size: expected at least 265"):
        Subwords.learn_byte_pairs(TEXTS, 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"expected a tokenizer\.json"):
        Subwords.read_byte_pairs(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match="expected a byte-level tokenizer"):
        Subwords.read_byte_pairs(tiny_encoder / "tokenizer.json")


def test_a_run_learns_subwords_of_its_corpus(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    run = setup.new_run("meed2", data=str(prepared), preset="tiny", name="pieces")
    model = setup.set_up_run_model(run)
    assert isinstance(model.vocabulary, Subwords)
    assert len(model.vocabulary) == 600
    columns = model.columns(read_dataset_samples(prepared, "valid").head(3))
    labels = read_dataset_samples(prepared, "valid").head(3)["response_label"]
    assert [LABELS[number] for number in columns["response_label"]] == labels.to_list()
    assert (columns["context_labels"].lengths == columns["context"].lengths).all()


def test_data_without_labels_are_rejected(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    unlabelled = tmp_path / "data"
    unlabelled.mkdir()
    for path in prepared.iterdir():
        (unlabelled / path.name).write_bytes(path.read_bytes())
    for split in ("train", "valid"):
        samples = pl.read_parquet(prepared / f"{split}.parquet")
        none = samples.with_columns(response_label=pl.lit(None, dtype=pl.String))
        none.write_parquet(unlabelled / f"{split}.parquet")
    with pytest.raises(DataError, match="attune annotate emotions"):
        setup.new_run("meed2", data=str(unlabelled), preset="tiny")
    setup.new_run("meed2-no-emotion", data=str(unlabelled), preset="tiny")


def test_the_decoder_gets_the_true_label_in_training_only(build, batch):
    variant = build("meed2", dropout=0.0).variant
    other = {**batch.tensors, "response_label": (batch["response_label"] + 1) % len(LABELS)}
    changed = type(batch)(tensors=other, samples=batch.samples, tokens=batch.tokens)

    def nll(batch):
        return variant.losses({PAIRED: batch}, Progress())["nll"]

    variant.train()
    assert nll(batch) != nll(changed)
    variant.eval()
    assert nll(batch) == nll(changed)


@torch.no_grad()
def test_oracle_likelihood_uses_the_true_label(build, batch):
    variant = build("meed2").variant.eval()
    assert not torch.equal(variant.oracle_log_likelihood(batch), variant.log_likelihood(batch))
    predicted = variant.predict(batch)["response_label"].argmax(dim=-1)
    tensors = {**batch.tensors, "response_label": predicted}
    relabelled = type(batch)(tensors=tensors, samples=batch.samples, tokens=batch.tokens)
    assert torch.equal(variant.oracle_log_likelihood(relabelled), variant.log_likelihood(batch))
    plain = build("meed2-no-emotion").variant.eval()
    assert torch.equal(plain.oracle_log_likelihood(batch), plain.log_likelihood(batch))


@torch.no_grad()
def test_a_requested_label_affects_every_token(build, batch):
    variant = build("meed2").variant.eval()
    start_token = torch.full((len(batch),), variant.data_info.specials["<sos>"])

    def second_logits(label):
        state = variant.encode(batch, {"label": label})
        _, state = variant.next_logits(start_token, state)
        return variant.next_logits(start_token, state)[0]

    predicted = variant.predict(batch)["response_label"].argmax(dim=-1)
    requested = second_logits(LABELS[predicted[0]])
    assert torch.allclose(requested[0], second_logits("predicted")[0], atol=1e-6)
    assert not torch.allclose(requested, second_logits("wishing"), atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["meed2", "meed2-joint"])
def test_explanations(build, batch, name):
    variant = build(name).variant.eval()
    words = (batch["context"] >= len(SPECIALS)).sum(dim=1).tolist()
    for row, explanation in enumerate(variant.explain(batch)):
        assert sum(explanation.response_label.values()) == pytest.approx(1.0, abs=1e-5)
        assert len(explanation.by_word["tells the label"]) == words[row]
        assert len(explanation.word_labels) == words[row]
        assert set(explanation.word_labels) <= {"", *LABELS}


def test_the_predictor_is_evaluated(build, test_samples, test_columns, vocabulary):
    variant = build("meed2").variant
    few = {name: column[np.arange(40)] for name, column in test_columns.items()}
    metrics = evaluate(
        variant, test_samples.head(40), few, vocabulary, Decoding(max_tokens=2)
    ).metrics
    predicted = predictions(variant, few)["response_label"].argmax(axis=1)
    accuracy = (predicted == few["response_label"]).mean()
    assert metrics["response_label_accuracy"] == pytest.approx(accuracy)
    assert metrics["response_label_weighted_recall"] == pytest.approx(accuracy)  # as it always is
    oracle = evaluate(
        variant, test_samples.head(40), few, vocabulary, Decoding(max_tokens=2), oracle=True
    ).metrics
    assert {name for name in metrics if metrics[name] != oracle[name]} == {
        "perplexity", "perplexity_sample_mean",
    }  # fmt: skip


def test_stages_of_separate_and_joint_training(build):
    separate, joint = build("meed2").variant.stages(), build("meed2-joint").variant.stages()
    assert [stage.name for stage in separate] == ["predictor", "dialogue"]
    assert separate[0].players == {"predictor": ("predictor",)}
    assert "predictor" not in separate[1].players["model"]
    assert [stage.updates[0].weights for stage in joint] == [{"nll": 1.0, "label": 1.0}]
    assert len(build("meed2-no-emotion").variant.stages()) == 1
    slower = build("meed2", predictor_rate=0.5).variant.stages()
    assert [stage.rate for stage in slower] == [0.5, 1.0]


def test_contexts_are_labelled_by_the_labeller_saved_with_the_model(
    build, prepared, tmp_path, monkeypatch
):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    intents = build("intent-classifier")
    for name, model in {"labeller": intents, "other": build("mime")}.items():
        run = write_run(tmp_path, name, model.name)
        save_model(model, run.model)
    with pytest.raises(UsageError, match="name a run of intent-classifier"):
        setup.new_run("meed2", data=str(prepared), preset="tiny", overrides={"labeller": "other"})
    named = {"labeller": "intent-classifier@latest"}
    run = setup.new_run("meed2", data=str(prepared), preset="tiny", overrides=named)
    without = setup.new_run("meed2", data=str(prepared), preset="tiny", name="without")
    assert "labeller=RUN" in without.notice
    assert not run.notice
    folder = tmp_path / "moved"
    save_model(setup.set_up_run_model(run), folder)
    [answer] = Responder(folder).respond([["I lost my keys .", "Oh no !", "Yes ."]])
    labels = answer.explanation.word_labels
    assert set(labels) <= set(LABELS)
    assert len(set(labels[:3])) == 1  # one for each utterance


def test_notices_of_lexicon_and_labeller_are_both_kept(prepared, tmp_path, monkeypatch):
    """No variant needs both, so one that reads labels is patched to read emotion words as well."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(setup, "model_requires_lexicon", lambda _: True)
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "data" / LEXICON).unlink(missing_ok=True)
    run = setup.new_run("meed2", data=str(tmp_path / "data"), preset="tiny")
    assert "lexicon=FILE" in run.notice
    assert "labeller=RUN" in run.notice
