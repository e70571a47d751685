"""Word vectors in GloVe's text format: one word with its vector per line, plain or gzipped."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import open_file_bytes
from attune.platform.text.vocabulary import SPECIALS, Vocabulary


@dataclass(frozen=True, kw_only=True)
class WordVectors:
    """The vectors of a vocabulary; those of tokens that the file lacks are random."""

    matrix: npt.NDArray[np.float32]  # (vocabulary, dimension)
    in_file: npt.NDArray[np.bool_]  # (vocabulary,)

    @property
    def dimension(self) -> int:
        """The dimension of the vectors."""
        return int(self.matrix.shape[1])

    @property
    def word_vector_coverage(self) -> float:
        """The share of the vocabulary, without special tokens, that the file contains."""
        words = self.in_file[len(SPECIALS) :]
        return float(words.mean()) if len(words) else 0.0


def load_word_vectors(path: Path, vocabulary: Vocabulary, *, seed: int = 0) -> WordVectors:
    """Load the vectors of a vocabulary; other lines of the file are skipped, which saves memory.

    A token that the file lacks gets a random vector with the mean and standard deviation of the
    others, so that the norms are similar.
    """
    if not path.is_file():
        raise UsageError(f"no such word vectors: '{path}'; name a GloVe text file (.txt or .gz)")
    rows: dict[int, npt.NDArray[np.float32]] = {}
    dimension = 0
    with open_file_bytes(path) as stream:
        for row, line in enumerate(stream, start=1):
            name, _, numbers = line.rstrip().partition(b" ")
            if row == 1:
                dimension = len(numbers.split())
                if dimension == 1:  # word2vec's header: number of words, dimension
                    dimension = int(numbers)
                    continue
            number = vocabulary.numbers.get(name.decode("utf-8", errors="replace"))
            if number is None:
                continue
            rows[number] = _parse_word_vector(path, row, numbers, dimension)
    if not rows:
        raise DataError(
            f"{path} has none of the {len(vocabulary)} tokens of the vocabulary: name vectors of "
            f"the same language, in lower case"
        )
    in_file = np.zeros(len(vocabulary), dtype=bool)
    in_file[list(rows)] = True
    known = np.stack([rows[number] for number in sorted(rows)])
    draw = np.random.default_rng(seed)
    matrix = draw.normal(known.mean(), known.std(), (len(vocabulary), dimension)).astype(np.float32)
    matrix[in_file] = known
    matrix[vocabulary.numbers[SPECIALS[0]]] = 0.0  # padding
    return WordVectors(matrix=matrix, in_file=in_file)


def _parse_word_vector(
    path: Path, row: int, numbers: bytes, dimension: int
) -> npt.NDArray[np.float32]:
    try:
        vector = np.array(numbers.split(), dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{path}, row {row}: {error}") from None
    if len(vector) != dimension:
        raise DataError(f"{path}, row {row}: expected {dimension} numbers, got {len(vector)}")
    return vector
