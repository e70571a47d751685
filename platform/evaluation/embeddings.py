"""Embedding Average, Greedy and Extrema (Liu et al. 2016): similarity of answers and references.

Average: the cosine of the mean word vectors of both texts. Extrema: the cosine of two vectors that
have, in each dimension, the words' value with the largest magnitude (of two such values, the
positive one). Greedy: each word is matched with the nearest word of the other text by cosine,
averaged over the words of a text and then over both directions.

Words without a vector are ignored, as in the paper's code; a pair in which one text has no word
with a vector scores 0. A score is the mean over all pairs. It depends on the word vectors: only
scores with the same file are comparable (the papers use 300 dimensions).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from attune.platform.batching.encoding import Ragged
from attune.platform.core.errors import UsageError
from attune.platform.core.files import file_checksum
from attune.platform.text.vocabulary import SPECIALS, Vocabulary
from attune.platform.text.word_vectors import load_word_vectors

NAMES = ("embedding_average", "embedding_greedy", "embedding_extrema")
PAIRS_AT_A_TIME = 256

Progress = Callable[[int], None]
"""Called with the number of pairs processed since the last call."""


def check(path: Path) -> None:
    """Raise an error for a missing file of vectors, before a split is answered."""
    if not path.is_file():
        raise UsageError(
            f"--embedding-metrics {path}: there is no such file; name one in GloVe's text form"
        )


def score(
    path: Path, answers: pl.Series, references: pl.Series, progress: Progress = lambda _: None
) -> tuple[dict[str, float | None], str]:
    """Return the means over all pairs of tokenized texts and their signature."""
    words = pl.concat([answers, references]).str.split(" ").explode().drop_nulls()
    words = words.filter(words != "").unique().sort()
    known = Vocabulary(list(dict.fromkeys((*SPECIALS, *words))))  # an answer may hold `<unk>`
    vectors = load_word_vectors(path, known)
    has_vector = vectors.in_file.copy()
    has_vector[: len(SPECIALS)] = False  # a file may have a vector for `<unk>`
    hypotheses, refs = (Ragged.from_lists(known.encode(texts)) for texts in (answers, references))
    known_mask = torch.from_numpy(has_vector)
    table = torch.from_numpy(np.where(has_vector[:, None], vectors.matrix, np.float32(0.0)))
    order = np.lexsort((refs.lengths, hypotheses.lengths))
    scores = torch.zeros(len(order), len(NAMES), dtype=torch.float64)
    for start in range(0, len(order), PAIRS_AT_A_TIME):
        rows = order[start : start + PAIRS_AT_A_TIME]
        scores[rows] = compare_texts(table, known_mask, hypotheses.pad(rows), refs.pad(rows))
        progress(len(rows))
    share = has_vector[np.concatenate([hypotheses.values, refs.values])].mean()
    signature = (
        f"embedding.vectors:{path.name}@{file_checksum(path)[:8]} "
        f"embedding.dimension:{vectors.dimension} embedding.text:tokens "
        f"embedding.known:{share:.2%} embedding.unknown:skipped"
    )
    return dict(zip(NAMES, scores.mean(dim=0).tolist(), strict=True)), signature


def compare_texts(table: Tensor, has_vector: Tensor, hypotheses: Tensor, refs: Tensor) -> Tensor:
    """Return the three scores, (B, 3), from word ids, (B, T) and (B, S)."""
    one, other = table[hypotheses], table[refs]  # (B, T, D), (B, S, D), 0 where there is none
    own, its = has_vector[hypotheses], has_vector[refs]  # (B, T), (B, S)
    cosines = normalize(one, dim=2) @ normalize(other, dim=2).transpose(1, 2)  # (B, T, S)
    cosines = cosines.masked_fill(~(own[:, :, None] & its[:, None, :]), -1.0)
    greedy = (_mean_best_cosine(cosines, 2, own) + _mean_best_cosine(cosines, 1, its)) / 2
    # The sum points where the mean does.
    average = cosine_similarity(one.sum(dim=1), other.sum(dim=1))
    extrema = cosine_similarity(_largest_magnitudes(one), _largest_magnitudes(other))
    comparable = own.any(dim=1) & its.any(dim=1)
    scores = torch.stack([average, greedy, extrema], dim=1).double()
    return scores.masked_fill(~comparable[:, None], 0.0)


def _mean_best_cosine(cosines: Tensor, dimension: int, counts: Tensor) -> Tensor:
    """Return the mean cosine of the counted words with their nearest word of the other text."""
    if not cosines.shape[dimension]:  # no text of the batch has a word
        return cosines.new_zeros(len(cosines))
    nearest = cosines.amax(dim=dimension) * counts
    return nearest.sum(dim=1) / counts.sum(dim=1).clamp(min=1)


def _largest_magnitudes(vectors: Tensor) -> Tensor:
    """Return the value with the largest magnitude in each dimension, (B, T, D) -> (B, D)."""
    if not vectors.shape[1]:
        return vectors.sum(dim=1)
    highest, lowest = vectors.amax(dim=1), vectors.amin(dim=1)
    return torch.where(highest >= -lowest, highest, lowest)
