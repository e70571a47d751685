"""Which words of an utterance carry feeling: a lexicon's, and adjectives that it lacks (EmpDG)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from attune.platform.text.lexicons import Lexicon
from attune.platform.text.vocabulary import SPECIALS, Vocabulary

ADJECTIVE = "JJ"
"""As the Penn Treebank's tags of adjectives begin: JJ, JJR, JJS."""


class EmotionWords:
    """Finds the words of a lexicon and adjectives, in the order of the text."""

    def __init__(self, lexicon: Lexicon):
        self.lexicon = lexicon

    def find(self, tokens: pl.Series) -> pl.Series:
        """The emotion words of blank-separated token strings, likewise; null stays null.

        Each distinct text is tagged once, however many contexts it stands in.
        """
        distinct = tokens.drop_nulls().unique(maintain_order=True)
        emotion_words = {text: " ".join(self._find_distinct(text.split())) for text in distinct}
        return tokens.replace_strict(emotion_words, default=None, return_dtype=pl.String)

    def mark_vocabulary(self, vocabulary: Vocabulary) -> list[bool]:
        """Return for each token of a vocabulary whether it is an emotion word.

        Tokens are tagged one by one, since generated words come without a sentence to tag.
        """
        words = vocabulary.tokens[len(SPECIALS) :]
        return [False] * len(SPECIALS) + [bool(self._find_distinct([word])) for word in words]

    def _find_distinct(self, words: Sequence[str]) -> list[str]:
        tagged = _tagger()(words)
        return [
            word
            for word, tag in tagged
            if word in self.lexicon or (tag.startswith(ADJECTIVE) and word.isalpha())
        ]


@functools.cache
def _tagger() -> Callable[[Sequence[str]], list[tuple[str, str]]]:
    """Brill's tagger, as the package carries it: nltk's and spaCy's would have to be downloaded."""
    from textblob.en import parser  # type: ignore[import-untyped]

    def tag(words: Sequence[str]) -> list[tuple[str, str]]:
        tagged: list[Any] = parser.find_tags(list(words))
        return [(word, kind) for word, kind in tagged]

    return tag
