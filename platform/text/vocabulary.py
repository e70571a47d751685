"""Tokens and their numbers."""

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
"""In front of every vocabulary, so their numbers never change. The tokenizer cuts off `<` and `>`,
so no text can contain one."""


class Vocabulary:
    """Which tokens a model knows; the special ones come first, `<pad>` is 0."""

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
        """The commonest tokens of `tokens.parquet`.

        `column="everything"` is the public code's vocabulary, which has seen the test set; `always`
        names tokens that are kept however rare (the emotions' own words, say). `max_size` counts
        everything, specials too.
        """
        kept = counts.filter(pl.col(column) >= max(min_count, 1)).sort(
            [column, "token"], descending=[True, False]
        )["token"]
        wanted = dict.fromkeys((*SPECIALS, *always))
        wanted.update(dict.fromkeys(kept))
        return cls(list(wanted)[:max_size])

    def __len__(self) -> int:
        return len(self.tokens)

    def number(self, token: str) -> int:
        """The number of a token, `<unk>`'s where it is not known."""
        return self.numbers.get(token, self.numbers[UNKNOWN])

    def encode(self, tokens: pl.Series) -> pl.Series:
        """Lists of numbers for blank-separated token strings; null and empty give an empty list."""
        distinct = tokens.drop_nulls().unique(maintain_order=True)
        numbers = self.encode_distinct(distinct.alias("text"))
        return (
            pl.DataFrame({"text": tokens})
            .join(numbers, on="text", how="left", maintain_order="left")["number"]
            .fill_null(pl.Series([[]], dtype=pl.List(pl.Int32)))
            .alias(tokens.name)
        )

    def encode_distinct(self, texts: pl.Series) -> pl.DataFrame:
        """The numbers of distinct texts: text, number (a list)."""
        return (
            texts.to_frame()
            .with_columns(token=pl.col("text").str.split(" "))
            .explode("token")
            .filter(pl.col("token") != "")
            .with_columns(
                number=pl.col("token").replace_strict(
                    self.numbers, default=self.numbers[UNKNOWN], return_dtype=pl.Int32
                )
            )
            .group_by("text", maintain_order=True)
            .agg("number")
        )

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The tokens of numbers, up to `<eos>`, without the special ones."""
        tokens = []
        for number in numbers:
            token = self.tokens[number]
            if token == END:
                break
            if token not in SPECIALS or token == UNKNOWN:
                tokens.append(token)
        return tokens

    def decode_each(self, numbers: Iterable[int]) -> list[str]:
        """Each token by itself, without the special ones."""
        return self.decode(numbers)

    def count_words(self, numbers: npt.NDArray[np.int64]) -> int:
        """How many words some tokens make, `<eos>` being one."""
        return len(numbers)

    def save(self, path: Path) -> None:
        """One token a line."""
        path.write_text("\n".join(self.tokens) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """What `save` wrote."""
        # split, not splitlines: some tokens are other line-breaking characters of Unicode.
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
