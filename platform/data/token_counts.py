"""Token frequencies of a dataset, for vocabularies."""

from collections import Counter

import polars as pl

from attune.platform.data.conversations import LABELLED, LISTENER, SPLITS, UNPAIRED

_HELD_OUT = [name for split in SPLITS[1:] for name in (split, LABELLED[split])]


class TokenCounts:
    """The frequency of each token, in the training text and in everything.

    An utterance that occurs in a sample counts once, however many contexts contain it. The training
    text is train and the unpaired text; `everything` adds valid, test and the situations, as in the
    papers' public code, which leaks them.
    """

    def __init__(self) -> None:
        self.learnable: Counter[str] = Counter()
        self.everything: Counter[str] = Counter()

    def add(self, utterances: pl.DataFrame) -> None:
        """Count the tokens of whole, tokenised conversations."""
        answered = pl.col("turn").filter(pl.col("role") == LISTENER).max().over("conversation_id")
        used = utterances.filter(
            pl.col("split").is_in([*UNPAIRED, *LABELLED.values()])
            | (pl.col("turn") <= answered).fill_null(False)
        )
        situations = utterances.filter(pl.col("turn") == 0)["situation_tokens"]
        learnable = used.filter(~pl.col("split").is_in(_HELD_OUT))["tokens"]
        self.learnable.update(_count_tokens_of_texts(learnable))
        self.everything.update(_count_tokens_of_texts(used["tokens"]))
        self.everything.update(_count_tokens_of_texts(situations))

    def frame(self) -> pl.DataFrame:
        """Return (token, train, everything), most frequent first, ties in alphabetical order."""
        return pl.DataFrame(
            {
                "token": list(self.everything),
                "train": [self.learnable[token] for token in self.everything],
                "everything": list(self.everything.values()),
            },
            schema={"token": pl.String, "train": pl.Int64, "everything": pl.Int64},
        ).sort(["train", "everything", "token"], descending=[True, True, False])


def _count_tokens_of_texts(tokens: pl.Series) -> dict[str, int]:
    split = tokens.drop_nulls().str.split(" ").explode()
    return dict(split.alias("token").value_counts().iter_rows())
