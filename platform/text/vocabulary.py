"""Vocabularies: the tokens that a model knows, and their ids."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.platform.core.errors import DataError

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<sos>", "<eos>"
CONTEXT, SEPARATOR, LABEL = "<cls>", "<sep>", "<lab>"
SPEAKER_TOKEN, LISTENER_TOKEN = "<speaker>", "<listener>"
SPECIALS = (
    PAD, UNKNOWN, START, END, CONTEXT, SEPARATOR, LABEL, SPEAKER_TOKEN, LISTENER_TOKEN,
)  # fmt: skip
"""The first tokens of every vocabulary, so that their ids are fixed. Texts cannot contain them,
because the tokenizer splits off `<` and `>`."""

FEW_TEXTS = 64
"""Number of texts up to which Python encodes them faster than polars."""


class Vocabulary:
    """The tokens of a model; the special ones come first, `<pad>` is 0."""

    def __init__(self, tokens: Sequence[str]):
        self.tokens = tuple(tokens)
        self.numbers = {token: number for number, token in enumerate(self.tokens)}
        assert self.tokens[: len(SPECIALS)] == SPECIALS, "a vocabulary begins with the specials"
        assert len(self.numbers) == len(self.tokens), "no token occurs twice"

    @classmethod
    def build(
        cls,
        counts: pl.DataFrame,
        *,
        column: str = "train",
        min_count: int = 1,
        max_size: int | None = None,
        always: Iterable[str] = (),
    ) -> "Vocabulary":
        """Build a vocabulary from the most frequent tokens in `tokens.parquet`.

        `column="everything"` gives the vocabulary of the public code, which includes the test set.
        `always` lists tokens that are included even if they are rare, such as the names of the
        emotions. `max_size` includes the special tokens.
        """
        kept = counts.filter(pl.col(column) >= max(min_count, 1)).sort(
            [column, "token"], descending=[True, False]
        )["token"]
        wanted = dict.fromkeys((*SPECIALS, *always))
        wanted.update(dict.fromkeys(kept))
        return cls(list(wanted)[:max_size])

    def __len__(self) -> int:
        return len(self.tokens)

    def token_id(self, token: str) -> int:
        """Return the id of a token, or that of `<unk>`."""
        return self.numbers.get(token, self.numbers[UNKNOWN])

    def encode(self, tokens: pl.Series) -> pl.Series:
        """Return lists of ids for space-separated tokens; null and empty text give empty lists."""
        distinct = tokens.drop_nulls().unique(maintain_order=True)
        numbers = self.encode_distinct(distinct.alias("text"))
        return (
            pl.DataFrame({"text": tokens})
            .join(numbers, on="text", how="left", maintain_order="left")["number"]
            .fill_null(pl.Series([[]], dtype=pl.List(pl.Int32)))
            .alias(tokens.name)
        )

    @functools.cached_property
    def _vocabulary_table(self) -> tuple[pl.Series, pl.Series]:
        """All tokens and their numbers; converting the dictionary for each text takes longer than
        the model's first token."""
        return pl.Series(self.tokens), pl.Series(range(len(self)), dtype=pl.Int32)

    def encode_distinct(self, texts: pl.Series) -> pl.DataFrame:
        """Return the ids of distinct texts: (text, number), where `number` is a list."""
        if len(texts) <= FEW_TEXTS:
            ids = [[self.token_id(token) for token in text.split(" ") if token] for text in texts]
            return pl.DataFrame({"text": texts, "number": pl.Series(ids, dtype=pl.List(pl.Int32))})
        return (
            texts.to_frame()
            .with_columns(token=pl.col("text").str.split(" "))
            .explode("token")
            .filter(pl.col("token") != "")
            .with_columns(
                number=pl.col("token").replace_strict(
                    *self._vocabulary_table, default=self.numbers[UNKNOWN], return_dtype=pl.Int32
                )
            )
            .group_by("text", maintain_order=True)
            .agg("number")
        )

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the tokens of ids up to `<eos>`, without special tokens except `<unk>`."""
        tokens = []
        for number in numbers:
            token = self.tokens[number]
            if token == END:
                break
            if token not in SPECIALS or token == UNKNOWN:
                tokens.append(token)
        return tokens

    def decode_each(self, numbers: Iterable[int]) -> list[str]:
        """Return the text of each id, without special tokens."""
        return self.decode(numbers)

    def count_words(self, numbers: npt.NDArray[np.int64]) -> int:
        """Return the number of words, where `<eos>` counts as one."""
        return len(numbers)

    def save(self, path: Path) -> None:
        """Write one token per line."""
        path.write_text("\n".join(self.tokens) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read what `save` wrote."""
        # split, not splitlines: some tokens are Unicode line separators.
        text = path.read_text(encoding="utf-8", errors="replace")
        tokens = text.removesuffix("\n").split("\n")
        if tuple(tokens[: len(SPECIALS)]) != SPECIALS:
            raise DataError(f"{path}, row 1: a vocabulary begins with {' '.join(SPECIALS)}")
        if not text.endswith("\n") or len(set(tokens)) < len(tokens):
            raise DataError(
                f"{path}, row {len(tokens)}: expected distinct tokens, one a line; the file is "
                f"damaged or truncated: restore it from a copy"
            )
        return cls(tokens)
