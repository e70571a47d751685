"""GloVe's text format: a word and its numbers a line, plain or gzipped, of any dimension."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import open_bytes
from attune.platform.text.vocabulary import SPECIALS, Vocabulary


@dataclass(frozen=True, kw_only=True)
class WordVectors:
    """A row for each token of a vocabulary; where `found` is False the row is drawn at random."""

    matrix: npt.NDArray[np.float32]  # (vocabulary, dimension)
    found: npt.NDArray[np.bool_]  # (vocabulary,)

    @property
    def dimension(self) -> int:
        """How many numbers a word has."""
        return int(self.matrix.shape[1])

    @property
    def share_found(self) -> float:
        """How much of the vocabulary, specials aside, the file knows."""
        words = self.found[len(SPECIALS) :]
        return float(words.mean()) if len(words) else 0.0


def load_word_vectors(path: Path, vocabulary: Vocabulary, *, seed: int = 0) -> WordVectors:
    """The vectors of a vocabulary. Only its words are parsed, so a 6 GB file takes little memory.

    A token that the file lacks gets numbers of the same spread as those that were found, so that
    nothing stands out only because it is new.
    """
    if not path.is_file():
        raise UsageError(f"no such word vectors: '{path}'; give a GloVe text file (.txt or .gz)")
    rows: dict[int, npt.NDArray[np.float32]] = {}
    dimension = 0
    with open_bytes(path) as stream:
        for row, line in enumerate(stream, start=1):
            name, _, numbers = line.rstrip().partition(b" ")
            if row == 1:
                dimension = len(numbers.split())
                if dimension == 1:  # word2vec's header: how many words, how many numbers
                    dimension = int(numbers)
                    continue
            number = vocabulary.numbers.get(name.decode("utf-8", errors="replace"))
            if number is None:
                continue
            rows[number] = _parsed(path, row, numbers, dimension)
    if not rows:
        raise DataError(f"{path}: none of the vocabulary's {len(vocabulary)} tokens is in it")
    found = np.zeros(len(vocabulary), dtype=bool)
    found[list(rows)] = True
    known = np.stack([rows[number] for number in sorted(rows)])
    draw = np.random.default_rng(seed)
    matrix = draw.normal(known.mean(), known.std(), (len(vocabulary), dimension)).astype(np.float32)
    matrix[found] = known
    matrix[vocabulary.numbers[SPECIALS[0]]] = 0.0  # padding adds nothing
    return WordVectors(matrix=matrix, found=found)


def _parsed(path: Path, row: int, numbers: bytes, dimension: int) -> npt.NDArray[np.float32]:
    try:
        vector = np.array(numbers.split(), dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{path}, row {row}: {error}") from None
    if len(vector) != dimension:
        raise DataError(f"{path}, row {row}: {len(vector)} numbers where row 1 has {dimension}")
    return vector
