"""Vocabulary: order, limits, encoding and decoding, files."""

import polars as pl
import pytest

from attune.platform.core.errors import DataError
from attune.platform.text.vocabulary import FEW_TEXTS, SPECIALS, UNKNOWN, Vocabulary

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


def test_vocabulary_is_limited_and_keeps_required_words():
    assert Vocabulary.build(COUNTS, min_count=2).tokens[len(SPECIALS) :] == ("a", "b", "c")
    assert Vocabulary.build(COUNTS, max_size=len(SPECIALS) + 1).tokens[-1] == "a"
    kept = Vocabulary.build(COUNTS, min_count=3, always=["sad"])
    assert kept.tokens[len(SPECIALS) :] == ("sad", "a", "b")
    assert "leak" in Vocabulary.build(COUNTS, column="everything").numbers


def test_encode_and_decode():
    vocabulary = Vocabulary.build(COUNTS)
    texts = pl.Series(["a nobody", None, "", "c"])
    encoded = vocabulary.encode(texts).to_list()
    a, c = vocabulary.token_id("a"), vocabulary.token_id("c")
    assert encoded == [[a, vocabulary.token_id(UNKNOWN)], [], [], [c]]
    assert vocabulary.decode([a, vocabulary.token_id("<eos>"), c]) == ["a"]
    assert vocabulary.decode([vocabulary.token_id("<sos>"), c, 0]) == ["c"]
    many = pl.concat([texts, pl.Series([f"b {number}" for number in range(FEW_TEXTS)])])
    assert vocabulary.encode(many).to_list()[: len(texts)] == encoded


def test_vocabulary_survives_a_file(tmp_path):
    # \x85 and \u2028 are line breaks to str.splitlines, and occur in real text.
    vocabulary = Vocabulary([*SPECIALS, "a\x85b", "\u2028", "z"])
    vocabulary.save(tmp_path / "vocabulary.txt")
    assert Vocabulary.load(tmp_path / "vocabulary.txt").tokens == vocabulary.tokens
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(DataError, match=r"other.txt, row 1"):
        Vocabulary.load(tmp_path / "other.txt")
