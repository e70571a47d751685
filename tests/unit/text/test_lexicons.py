"""Lexicons: all supported file formats, and errors that name the file."""

import json

import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.text.lexicons import Lexicon


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
