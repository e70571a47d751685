"""The real data sets, where ATTUNE_DATA names a folder with them."""

import hashlib
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from attune.platform.batching.encoding import encode
from attune.platform.batching.streams import Stream
from attune.platform.data.dataset_folder import read_cause_samples, read_dataset_samples
from attune.platform.data.labels import EMOTIONS, LABELS
from attune.platform.data.prepare import prepare
from attune.platform.evaluation.profiles import select_samples
from attune.platform.text.emotion_words import EmotionWords
from attune.platform.text.lexicons import Lexicon
from attune.platform.text.tokenizing import CONTRACTIONS, nltk_tokenize
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.text.word_vectors import load_word_vectors

DATA = Path(os.environ.get("ATTUNE_DATA", "/nonexistent"))
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="ATTUNE_DATA does not name a folder with the real data sets"
)

# Recorded on the data as it is published; a commit that changes it says why.
EMPATHETIC_DIALOGUES = "e6964e1a14dd97ceace0da64f9231f88cc293681613de452c13ab482bb9e9ae9"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")

    def make(name, again=""):
        out = folder / (name + again)
        manifest = prepare(str(DATA / name), out)
        return out, manifest

    return make


@pytest.fixture(scope="module")
def dialogues(prepared):
    return prepared("empatheticdialogues")


def test_empathetic_dialogues_counts(dialogues):
    _, manifest = dialogues
    assert manifest["splits"] == {
        "train": {"conversations": 19532, "samples": 40252},
        "valid": {"conversations": 2769, "samples": 5736},
        "test": {"conversations": 2546, "samples": 5257},
    }
    assert manifest["rejected"]["rows"] == 0
    assert manifest["hash"] == EMPATHETIC_DIALOGUES


def test_the_same_input_gives_the_same_bytes(dialogues, prepared):
    first, _ = dialogues
    second, _ = prepared("empatheticdialogues", " again")
    for path in first.iterdir():
        digests = [hashlib.sha256(f.read_bytes()).digest() for f in (path, second / path.name)]
        assert digests[0] == digests[1], path.name


def test_listener_turns_with_a_reply(dialogues):
    folder, _ = dialogues
    answered = {
        split: read_dataset_samples(folder, split)["next_turn"].count()
        for split in ("train", "valid", "test")
    }
    assert answered == {"train": 24381, "valid": 3569, "test": 3166}


def test_the_published_samples_of_empdg(dialogues):
    folder, _ = dialogues
    counts = [
        select_samples("empdg", read_dataset_samples(folder, s)).height
        for s in ("train", "valid", "test")
    ]
    assert counts == [20724, 2972, 2713]


def test_emotion_words_of_the_lexicon_and_adjectives(dialogues):
    folder, _ = dialogues
    find = EmotionWords(Lexicon.load(DATA / "nrc" / "emotion_lexicon.json")).find_emotion_words
    # The example of the paper's Figure 1 has "new" and "job"; "new" is in no lexicon of NRC.
    text = "my sister called me this morning and told me she scored a new job with microsoft !"
    assert {"sister", "new", "job"} <= set(find(pl.Series([text]))[0].split())
    contexts = read_dataset_samples(folder, "valid").explode("context_tokens")["context_tokens"]
    emotion_words = find(contexts)
    assert (
        0.1
        < emotion_words.str.count_matches(" ").sum() / contexts.str.count_matches(" ").sum()
        < 0.4
    )


def test_vocabulary_is_built_on_train_alone(dialogues):
    folder, _ = dialogues
    counts = pl.read_parquet(folder / "tokens.parquet")
    vocabulary = Vocabulary.build(counts)
    assert abs((counts["train"] > 0).sum() - 19651) <= 5
    assert abs(counts.height - 23675) <= 5
    test = read_dataset_samples(folder, "test")["response_tokens"].str.split(" ").explode()
    unknown = (~test.is_in(list(vocabulary.tokens))).mean()
    assert unknown == pytest.approx(0.0070, abs=0.0001)


def test_tokens_equal_nltk(dialogues):
    folder, _ = dialogues
    samples = pl.concat(
        [read_dataset_samples(folder, split) for split in ("train", "valid", "test")]
    )
    for text, ours in (
        samples.select("response", "response_tokens").sample(3000, seed=0).iter_rows()
    ):
        lowered = text.lower()
        for short, long in CONTRACTIONS.items():
            lowered = lowered.replace(short, long)
        assert ours == " ".join(nltk_tokenize(lowered)), text


def test_an_epoch_of_real_batches(dialogues):
    folder, _ = dialogues
    vocabulary = Vocabulary.build(pl.read_parquet(folder / "tokens.parquet"))
    columns = encode(read_dataset_samples(folder, "train"), vocabulary, emotions=EMOTIONS)
    real, padded, samples = np.zeros(2), np.zeros(2), 0
    for batch in Stream(columns, size=16).epoch():
        both = (batch["context"], batch["response"])
        real += [int((tokens != 0).sum()) for tokens in both]
        padded += [tokens.numel() for tokens in both]
        samples += len(batch)
    assert samples == 40252
    assert (real / padded > 0.86).all(), real / padded


def test_edos(prepared):
    folder, manifest = prepared("edos")
    assert manifest["tolerated"]["dialogs without a majority label"] == 1332
    assert manifest["rejected"]["reasons"] == {"unknown label": 1}
    assert sum(s["conversations"] for s in manifest["splits"].values()) == 19659 - 1
    train = read_dataset_samples(folder, "train")
    assert set(train["response_label"].drop_nulls()) <= set(LABELS)
    assert not train["response"].str.contains(r"\w '(?:s|m|re|ve|ll|t)\b").any()


def test_reccon(prepared):
    folder, manifest = prepared("reccon")
    counts = {split: count["conversations"] for split, count in manifest["splits"].items()}
    dialogues = {"train": 834, "valid": 47, "test": 225}
    assert counts == {**dialogues, **{f"cause_{split}": n for split, n in dialogues.items()}}
    assert manifest["rejected"]["rows"] == 0
    assert read_dataset_samples(folder, "train")["context_evidence"].list.explode().count() > 0
    # Pairs of an utterance and a cause.
    causes = {split: read_cause_samples(folder, split)["context_causes"] for split in dialogues}
    assert {s: marks.explode().sum() for s, marks in causes.items()} == {
        "train": 7027,
        "valid": 328,
        "test": 1767,
    }


def test_published_cause_marks(prepared):
    folder, manifest = prepared("emotion_cause")
    assert manifest["rejected"]["rows"] == 0
    for split, count, agreement in (("valid", 2769, 0.7069), ("test", 2546, 0.7271)):
        samples = read_cause_samples(folder, split)
        assert samples.height == count
        marks = samples["context_causes"].explode()
        speaks = samples["context_roles"].explode() == "speaker"
        assert (marks == speaks).mean() == pytest.approx(agreement, abs=1e-4)


def test_meld(prepared):
    _, manifest = prepared("meld")
    counts = {split: count["conversations"] for split, count in manifest["splits"].items()}
    assert counts == {"train": 1038, "valid": 114, "test": 280}
    assert manifest["rejected"]["rows"] == 0


def test_word_vectors_and_lexicons(dialogues):
    folder, _ = dialogues
    vocabulary = Vocabulary.build(pl.read_parquet(folder / "tokens.parquet"))
    vectors = load_word_vectors(DATA / "glove" / "glove.6B.100d.subset.txt.gz", vocabulary)
    assert vectors.dimension == 100
    assert vectors.word_vector_coverage > 0.8
    lexicon = Lexicon.load(DATA / "nrc" / "emotion_lexicon.json", DATA / "nrc" / "vad.txt")
    assert len(lexicon.words) == 14182
    assert {"job", "time"} <= lexicon.words
    assert lexicon.valence_arousal["aaaah"] == (0.520, 0.636)
