"""Embedding Average, Greedy and Extrema against manual calculation."""

import gzip
import json
import math

import numpy as np
import polars as pl
import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.evaluation import embeddings
from tests.commands import error_of, json_output

VECTORS = {
    "east": (2.0, 0.0),
    "north": (0.0, 1.0),
    "northeast": (1.0, 1.0),
    "west": (-3.0, 0.0),
    "<unk>": (5.0, 5.0),  # some files have one
}
HALF = 0.5**0.5


@pytest.fixture
def path(tmp_path):
    lines = [f"{word} {' '.join(map(str, vector))}" for word, vector in VECTORS.items()]
    path = tmp_path / "vectors.txt.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def scores(path, answer, reference):
    actual, _ = embeddings.score(path, pl.Series([answer]), pl.Series([reference]))
    assert tuple(actual) == ("embedding_average", "embedding_greedy", "embedding_extrema")
    return list(actual.values())


@pytest.mark.parametrize(
    ("answer", "reference", "average", "greedy", "extrema"),
    [
        ("east north", "east north", 1.0, 1.0, 1.0),
        ("east", "north", 0.0, 0.0, 0.0),
        # mean (1, 1/2) against (0, 1); each direction of greedy by itself: (0 + 1) / 2 and 1.
        ("east north", "north", 0.5 / math.hypot(1, 0.5), 0.75, 1 / math.hypot(2, 1)),
        # means (-1/2, 0) and (2, 0); the extreme of 2 and -3 is -3.
        ("east west", "east", -1.0, (0.0 + 1.0) / 2, -1.0),
        ("northeast", "east", HALF, HALF, HALF),
        # greedy: 1, HALF and HALF of the answer's; 1 and HALF of the reference's.
        (
            "east northeast northeast", "east north",
            (2 * 4 + 1 * 2) / (math.hypot(4, 2) * math.hypot(2, 1)),
            ((1 + 2 * HALF) / 3 + (1 + HALF) / 2) / 2,
            (2 * 2 + 1 * 1) / (math.hypot(2, 1) * math.hypot(2, 1)),
        ),
        ("east nowhere", "nobody east", 1.0, 1.0, 1.0),  # words without a vector are passed over
        ("<unk> east", "east", 1.0, 1.0, 1.0),
        ("nowhere", "east", 0.0, 0.0, 0.0),
        ("", "east", 0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_scores_equal_manual_calculation(path, answer, reference, average, greedy, extrema):
    expected = pytest.approx([average, greedy, extrema], abs=1e-6)
    assert scores(path, answer, reference) == expected


def test_extrema_prefers_the_positive_of_two_equal_magnitudes(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("up 1 1\ndown -1 1\n")
    assert scores(path, "up down", "up")[2] == pytest.approx(1.0)


def test_scores_do_not_depend_on_batches_and_padding(path, monkeypatch):
    draw = np.random.default_rng(0)
    words = [*VECTORS, "nowhere"]

    def texts():
        return [" ".join(draw.choice(words, size=n)) for n in draw.integers(1, 9, size=40)]

    answers, references = texts(), texts()
    alone = [scores(path, *pair) for pair in zip(answers, references, strict=True)]
    done = []
    monkeypatch.setattr(embeddings, "PAIRS_AT_A_TIME", 7)
    both = pl.Series(answers), pl.Series(references)
    actual, signature = embeddings.score(path, *both, done.append)
    assert list(actual.values()) == pytest.approx(np.mean(alone, axis=0), abs=1e-6)
    assert sum(done) == 40
    assert signature.startswith("embedding.vectors:vectors.txt.gz@")
    assert "embedding.dimension:2 embedding.text:tokens embedding.known:" in signature


def test_unusable_files_are_errors(path, tmp_path):
    with pytest.raises(UsageError, match="there is no such file"):
        embeddings.check(tmp_path / "none")
    path.write_bytes(gzip.compress(b"east 1 0"))
    with pytest.raises(DataError, match="none of the 11 tokens of the vocabulary"):
        scores(path, "nobody", "nowhere")


def test_evaluate_with_embedding_metrics(call, path, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    rows = [("east", "east"), ("", "north"), ("", "")]
    text = "\n".join(json.dumps({"answer": a, "response": r}) for a, r in rows)
    (tmp_path / "said.jsonl").write_text(text)
    command = ("evaluate", "--answers", tmp_path / "said.jsonl", "--embedding-metrics")
    actual = json_output(call(*command, path, "--json"))
    assert actual["metrics"]["embedding_greedy"] == pytest.approx(1 / 3)
    assert "embedding.known:100.00%" in actual["signature"]
    assert "there is no such file" in error_of(call(*command, tmp_path / "none"))
