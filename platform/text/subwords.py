"""Subwords: byte-level byte-pair encoding, trained on a corpus or loaded from a file.

Subwords split the tokens that other variants use, so that all variants generate the same words and
are compared by the same metrics.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.platform.core.errors import UsageError
from attune.platform.text.vocabulary import END, SPECIALS, Vocabulary

TOKENIZER = "tokenizer.json"
"""The file beside `vocabulary.txt`, in the format of Hugging Face's tokenizers."""
BLANK = "\u0120"
"""The space before a word, as byte-level tokenizers write it."""
SIZE = 16_000
"""The default size."""


class Subwords(Vocabulary):
    """A vocabulary of special tokens and subwords, which covers every text."""

    def __init__(self, tokenizer: Any):
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
        if [number for _, number in pieces] != list(range(len(pieces))):
            raise UsageError("tokenizer: expected subword ids 0, 1, 2 ... without gaps")
        # RoBERTa's tokenizer has its own `<pad>` and `<unk>`, which no text is encoded as.
        super().__init__([*SPECIALS, *(p + "'" if p in SPECIALS else p for p, _ in pieces)])
        self.tokenizer = tokenizer

    @classmethod
    def learn_byte_pairs(cls, texts: Iterable[str], size: int = SIZE) -> "Subwords":
        """Train byte-pair encoding on space-separated tokens; `size` includes special tokens."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = sorted(bytes_of.alphabet())
        if size < len(SPECIALS) + len(alphabet):
            raise UsageError(
                f"vocabulary_size: expected at least {len(SPECIALS) + len(alphabet)}, the special "
                f"tokens and one subword per byte, got {size}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = bytes_of
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - len(SPECIALS), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def read_byte_pairs(cls, path: Path) -> "Subwords":
        """Read a byte-level tokenizer, such as the `tokenizer.json` of RoBERTa."""
        from tokenizers import Tokenizer, pre_tokenizers

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no subclass
            raise UsageError(
                f"tokenizer={path}: expected a tokenizer.json of Hugging Face ({error})"
            ) from error
        if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            raise UsageError(
                f"tokenizer={path}: expected a byte-level tokenizer, such as RoBERTa's or GPT-2's"
            )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return cls(tokenizer)

    def encode_distinct(self, texts: pl.Series) -> pl.DataFrame:
        """Return the ids of distinct texts."""
        encodings = self.tokenizer.encode_batch(texts.to_list(), add_special_tokens=False)
        numbers = [[number + len(SPECIALS) for number in encoding.ids] for encoding in encodings]
        return pl.DataFrame({"text": texts, "number": pl.Series(numbers, dtype=pl.List(pl.Int32))})

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the words that subwords form, up to `<eos>`, without special tokens."""
        pieces = []
        for number in numbers:
            if number == self.numbers[END]:
                break
            if number >= len(SPECIALS):
                pieces.append(number - len(SPECIALS))
        text: str = self.tokenizer.decode(pieces)
        return text.split()

    def decode_each(self, numbers: Iterable[int]) -> list[str]:
        """Return the text of each subword, without special tokens."""
        words = (number - len(SPECIALS) for number in numbers if number >= len(SPECIALS))
        return [self.tokenizer.decode([number]).strip() for number in words]

    def count_words(self, numbers: npt.NDArray[np.int64]) -> int:
        """Return the number of words: subwords that begin with a space, and `<eos>`."""
        begins = [token == END or token.startswith(BLANK) for token in self.tokens]
        return int(np.array(begins)[numbers].sum())

    def save(self, path: Path) -> None:
        """Write one subword per line, and the tokenizer beside it."""
        super().save(path)
        self.tokenizer.save(str(path.with_name(TOKENIZER)))


def load_words_or_subwords(path: Path) -> Vocabulary:
    """Load a vocabulary: subwords if there is a tokenizer beside it, else words."""
    tokenizer = path.with_name(TOKENIZER)
    return Subwords.read_byte_pairs(tokenizer) if tokenizer.is_file() else Vocabulary.load(path)
