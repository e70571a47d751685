"""Embedding Average, Greedy and Extrema (Liu et al. 2016): answers beside references, as vectors.

Average: the cosine of the two texts' mean word vectors. Extrema: the cosine of two vectors that
have in each dimension the words' number farthest from 0 (of two as far, the positive one).
Greedy: each word is matched with the nearest of the other text by the cosine of their vectors; the
mean over the words of one text, and then over both directions.

Words without a vector are passed over, as in the paper's own code; a pair in which one text has no
word with a vector scores 0. A score is the mean over all pairs. It depends on the vectors: figures
of others (300 numbers a word in the papers) cannot stand beside those of another file.
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
from attune.platform.core.files import checksum
from attune.platform.text.vocabulary import SPECIALS, Vocabulary
from attune.platform.text.word_vectors import load_word_vectors

NAMES = ("embedding_average", "embedding_greedy", "embedding_extrema")
PAIRS_AT_A_TIME = 256

Progress = Callable[[int], None]
"""Called with the number of pairs that were just done."""


def check(path: Path) -> None:
    """Better to hear before the answers are made that there are no vectors."""
    if not path.is_file():
        raise UsageError(
            f"--embedding-metrics {path}: there is no such file; name one in GloVe's text form"
        )


def score(
    path: Path, answers: pl.Series, references: pl.Series, progress: Progress = lambda _: None
) -> tuple[dict[str, float | None], str]:
    """The means over all pairs of tokens joined by blanks, and what they are."""
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
        f"embedding.vectors:{path.name}@{checksum(path)[:8]} "
        f"embedding.dimension:{vectors.dimension} embedding.text:tokens "
        f"embedding.known:{share:.2%} embedding.unknown:skipped"
    )
    return dict(zip(NAMES, scores.mean(dim=0).tolist(), strict=True)), signature


def compare_texts(table: Tensor, has_vector: Tensor, hypotheses: Tensor, refs: Tensor) -> Tensor:
    """(B, 3) from word ids, (B, T) and (B, S); `has_vector` marks words with a vector."""
    one, other = table[hypotheses], table[refs]  # (B, T, D), (B, S, D), 0 where there is none
    own, its = has_vector[hypotheses], has_vector[refs]  # (B, T), (B, S)
    cosines = normalize(one, dim=2) @ normalize(other, dim=2).transpose(1, 2)  # (B, T, S)
    cosines = cosines.masked_fill(~(own[:, :, None] & its[:, None, :]), -1.0)
    greedy = (_mean(cosines, 2, own) + _mean(cosines, 1, its)) / 2
    # The sum points where the mean does.
    average = cosine_similarity(one.sum(dim=1), other.sum(dim=1))
    extrema = cosine_similarity(_extrema(one), _extrema(other))
    comparable = own.any(dim=1) & its.any(dim=1)
    scores = torch.stack([average, greedy, extrema], dim=1).double()
    return scores.masked_fill(~comparable[:, None], 0.0)


def _mean(cosines: Tensor, dimension: int, counts: Tensor) -> Tensor:
    """Over the words that count, of the cosine with the nearest word of the other text."""
    if not cosines.shape[dimension]:  # no text of the batch has a word
        return cosines.new_zeros(len(cosines))
    nearest = cosines.amax(dim=dimension) * counts
    return nearest.sum(dim=1) / counts.sum(dim=1).clamp(min=1)


def _extrema(vectors: Tensor) -> Tensor:
    """(B, T, D) -> (B, D). Words that are not there are 0, which is never farthest from 0."""
    if not vectors.shape[1]:
        return vectors.sum(dim=1)
    highest, lowest = vectors.amax(dim=1), vectors.amin(dim=1)
    return torch.where(highest >= -lowest, highest, lowest)
