"""Subwords: byte-level byte-pair encoding, trained on a corpus or taken from a file.

Subwords are those of the words that everything else counts, blanks between them, so that what a
model says is made of the same words, and is judged by the same metrics, as any other model's.
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
"""Beside `vocabulary.txt`, in the form of Hugging Face's tokenizers."""
BLANK = "\u0120"
"""What byte-level tokenizers write for the blank in front of a word."""
SIZE = 16_000
"""Subwords to learn where no size is asked for."""


class Subwords(Vocabulary):
    """The special tokens, then the pieces of words that a tokenizer knows: every text is known."""

    def __init__(self, tokenizer: Any):
        pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
        if [number for _, number in pieces] != list(range(len(pieces))):
            raise UsageError("a tokenizer must number its subwords from 0 on, without a gap")
        # RoBERTa's has a `<pad>` and `<unk>` of its own, which no text is ever turned into.
        super().__init__([*SPECIALS, *(p + "'" if p in SPECIALS else p for p, _ in pieces)])
        self.tokenizer = tokenizer

    @classmethod
    def learn(cls, texts: Iterable[str], size: int = SIZE) -> "Subwords":
        """Subwords of blank-separated token strings, the commonest pairs joined first; `size`
        counts the special tokens, too."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=True)
        alphabet = sorted(bytes_of.alphabet())
        if size < len(SPECIALS) + len(alphabet):
            raise UsageError(
                f"vocabulary_size={size}: at least {len(SPECIALS) + len(alphabet)} is expected, "
                f"the special tokens and one subword for each byte"
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
    def read(cls, path: Path) -> "Subwords":
        """A byte-level tokenizer of others: the `tokenizer.json` of RoBERTa, say."""
        from tokenizers import Tokenizer, pre_tokenizers

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise UsageError(
                f"tokenizer={path}: this is no tokenizer.json of Hugging Face ({error})"
            ) from error
        if not isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            raise UsageError(
                f"tokenizer={path}: a byte-level one is expected, as RoBERTa's or GPT-2's"
            )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return cls(tokenizer)

    def encode_distinct(self, texts: pl.Series) -> pl.DataFrame:
        """The numbers of distinct texts."""
        encodings = self.tokenizer.encode_batch(texts.to_list(), add_special_tokens=False)
        numbers = [[number + len(SPECIALS) for number in encoding.ids] for encoding in encodings]
        return pl.DataFrame({"text": texts, "number": pl.Series(numbers, dtype=pl.List(pl.Int32))})

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words that the subwords make, up to `<eos>`, without the special tokens."""
        pieces = []
        for number in numbers:
            if number == self.numbers[END]:
                break
            if number >= len(SPECIALS):
                pieces.append(number - len(SPECIALS))
        text: str = self.tokenizer.decode(pieces)
        return text.split()

    def decode_each(self, numbers: Iterable[int]) -> list[str]:
        """Each subword by itself, without the special tokens."""
        words = (number - len(SPECIALS) for number in numbers if number >= len(SPECIALS))
        return [self.tokenizer.decode([number]).strip() for number in words]

    def count_words(self, numbers: npt.NDArray[np.int64]) -> int:
        """How many words some subwords make, `<eos>` being one: those that begin with a blank."""
        begins = [token == END or token.startswith(BLANK) for token in self.tokens]
        return int(np.array(begins)[numbers].sum())

    def save(self, path: Path) -> None:
        """One subword a line, and the tokenizer beside them."""
        super().save(path)
        self.tokenizer.save(str(path.with_name(TOKENIZER)))


def load(path: Path) -> Vocabulary:
    """What `save` wrote: subwords where a tokenizer lies beside the vocabulary, else words."""
    tokenizer = path.with_name(TOKENIZER)
    return Subwords.read(tokenizer) if tokenizer.is_file() else Vocabulary.load(path)
