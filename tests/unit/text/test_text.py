"""Vocabulary, word vectors, lexicons, and the embedding that takes vectors of any dimension."""

import gzip
import json

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.layers import WordEmbedding
from attune.platform.core.errors import DataError, UsageError
from attune.platform.text.lexicons import Lexicon
from attune.platform.text.vocabulary import SPECIALS, UNKNOWN, Vocabulary
from attune.platform.text.word_vectors import load_word_vectors

COUNTS = pl.DataFrame(
    {
        "token": ["b", "a", "c", "rare", "leak"],
        "train": [3, 3, 2, 1, 0],
        "everything": [9, 3, 2, 1, 4],
    }
)


def test_vocabulary_is_ordered_by_count_then_alphabet():
    vocabulary = Vocabulary.build(COUNTS)
    assert vocabulary.tokens == (*SPECIALS, "a", "b", "c", "rare")


def test_vocabulary_cuts_and_keeps():
    assert Vocabulary.build(COUNTS, min_count=2).tokens[len(SPECIALS) :] == ("a", "b", "c")
    assert Vocabulary.build(COUNTS, max_size=len(SPECIALS) + 1).tokens[-1] == "a"
    kept = Vocabulary.build(COUNTS, min_count=3, always=["sad"])
    assert kept.tokens[len(SPECIALS) :] == ("sad", "a", "b")
    assert "leak" in Vocabulary.build(COUNTS, column="everything").numbers


def test_encode_and_decode():
    vocabulary = Vocabulary.build(COUNTS)
    encoded = vocabulary.encode(pl.Series(["a nobody", None, "", "c"])).to_list()
    a, c = vocabulary.number("a"), vocabulary.number("c")
    assert encoded == [[a, vocabulary.number(UNKNOWN)], [], [], [c]]
    assert vocabulary.decode([a, vocabulary.number("<eos>"), c]) == ["a"]
    assert vocabulary.decode([vocabulary.number("<sos>"), c, 0]) == ["c"]


def test_vocabulary_survives_a_file(tmp_path):
    # \x85 and \u2028 are line breaks to str.splitlines, and occur in real text.
    vocabulary = Vocabulary([*SPECIALS, "a\x85b", "\u2028", "z"])
    vocabulary.save(tmp_path / "vocabulary.txt")
    assert Vocabulary.load(tmp_path / "vocabulary.txt").tokens == vocabulary.tokens
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(DataError, match=r"other.txt, row 1"):
        Vocabulary.load(tmp_path / "other.txt")


@pytest.mark.parametrize("packed", [False, True])
def test_word_vectors(tmp_path, packed):
    text = b"b 1 2 3\nzzz 9 9 9\na 4 5 6\n"
    path = tmp_path / ("glove.txt.gz" if packed else "glove.txt")
    path.write_bytes(gzip.compress(text) if packed else text)
    vocabulary = Vocabulary.build(COUNTS)
    vectors = load_word_vectors(path, vocabulary)
    assert vectors.dimension == 3
    assert vectors.matrix[vocabulary.number("a")].tolist() == [4, 5, 6]
    assert vectors.coverage == 0.5
    assert not vectors.matrix[0].any()
    again = load_word_vectors(path, vocabulary)
    assert np.array_equal(vectors.matrix, again.matrix)


def test_word2vec_header_is_passed_over(tmp_path):
    (tmp_path / "v.txt").write_text("2 3\na 4 5 6\nb 1 2 3\n")
    assert load_word_vectors(tmp_path / "v.txt", Vocabulary.build(COUNTS)).dimension == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 1 2 3\nb 1 2\n", "row 2: 2 numbers where row 1 has 3"),
        ("a 1 2 3\nb 1 x 3\n", "row 2"),
        ("zzz 1 2 3\n", "none of the vocabulary"),
    ],
)
def test_bad_word_vectors_are_named(tmp_path, content, message):
    (tmp_path / "v.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        load_word_vectors(tmp_path / "v.txt", Vocabulary.build(COUNTS))


def test_embedding_projects_only_where_it_must():
    vectors = torch.arange(12.0).reshape(4, 3)
    same = WordEmbedding(4, 3, vectors=vectors)
    embedded, other = same(torch.tensor([[1, 2]]), torch.tensor([3]))
    # The vectors' directions, at a spread of 1 / sqrt(dimension).
    assert torch.allclose(embedded, vectors[[1, 2]][None] / vectors.std() / 3**0.5)
    assert other.shape == (1, 3)
    wider = WordEmbedding(4, 5, vectors=vectors)
    [out] = wider(torch.tensor([[1, 2]]))
    assert out.shape == (1, 2, 5)
    out.sum().backward()
    assert wider.project.weight.grad.abs().sum() > 0
    assert wider.table.weight.grad.abs().sum() > 0
    assert not WordEmbedding(4, 5).table.weight[0].any()


def test_lexicon_reads_all_forms(tmp_path):
    (tmp_path / "empdg.json").write_text(json.dumps([["joy", "job"], {"joy": 3}]))
    (tmp_path / "nrc.txt").write_text("joy\tanger\t0\njoy\tjoy\t1\njob\tfear\t0\n")
    (tmp_path / "vad.txt").write_text("Word\tValence\tArousal\tDominance\njoy\t.9\t.7\t.5\n")
    for name in ("empdg.json", "nrc.txt"):
        lexicon = Lexicon.load(tmp_path / name, tmp_path / "vad.txt")
        assert lexicon.words == {"joy", "job"}
        assert lexicon.valence_arousal == {"joy": (0.9, 0.7)}
    lexicon.save(tmp_path / "own.json")
    assert Lexicon.load(tmp_path / "own.json") == lexicon
    assert "job" in lexicon
    assert "table" not in lexicon


def test_bad_lexicons_are_named(tmp_path):
    (tmp_path / "words.txt").write_text("joy\n")
    (tmp_path / "vad.txt").write_text("joy\t.9\t.7\t.5\nsad\tx\n")
    with pytest.raises(DataError, match=r"vad.txt, row 2"):
        Lexicon.load(tmp_path / "words.txt", tmp_path / "vad.txt")
    with pytest.raises(UsageError, match="no such lexicon"):
        Lexicon.load(tmp_path / "absent.txt")
