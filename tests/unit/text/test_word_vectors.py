"""Word vectors from files, and the embedding that takes vectors of any dimension."""

import gzip

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.layers import WordEmbedding
from attune.platform.core.errors import DataError
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.text.word_vectors import load_word_vectors

COUNTS = pl.DataFrame(
    {
        "token": ["b", "a", "c", "rare", "leak"],
        "train": [3, 3, 2, 1, 0],
        "everything": [9, 3, 2, 1, 4],
    }
)


@pytest.mark.parametrize("packed", [False, True])
def test_word_vectors(tmp_path, packed):
    text = b"b 1 2 3\nzzz 9 9 9\na 4 5 6\n"
    path = tmp_path / ("glove.txt.gz" if packed else "glove.txt")
    path.write_bytes(gzip.compress(text) if packed else text)
    vocabulary = Vocabulary.build(COUNTS)
    vectors = load_word_vectors(path, vocabulary)
    assert vectors.dimension == 3
    assert vectors.matrix[vocabulary.token_id("a")].tolist() == [4, 5, 6]
    assert vectors.word_vector_coverage == 0.5
    assert not vectors.matrix[0].any()
    again = load_word_vectors(path, vocabulary)
    assert np.array_equal(vectors.matrix, again.matrix)


def test_word2vec_header_is_skipped(tmp_path):
    (tmp_path / "v.txt").write_text("2 3\na 4 5 6\nb 1 2 3\n")
    assert load_word_vectors(tmp_path / "v.txt", Vocabulary.build(COUNTS)).dimension == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 1 2 3\nb 1 2\n", "row 2: expected 3 numbers, got 2"),
        ("a 1 2 3\nb 1 x 3\n", "row 2"),
        ("zzz 1 2 3\n", r"none of the \d+ tokens of the vocabulary"),
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
