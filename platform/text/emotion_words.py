"""Emotion words of an utterance: words of a lexicon, and adjectives (EmpDG)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl

from attune.platform.text.lexicons import Lexicon
from attune.platform.text.vocabulary import SPECIALS, Vocabulary

ADJECTIVE = "JJ"
"""The prefix of the Penn Treebank's tags of adjectives: JJ, JJR, JJS."""


class EmotionWords:
    """Finds the words of a lexicon, and adjectives, in the order of the text."""

    def __init__(self, lexicon: Lexicon):
        self.lexicon = lexicon

    def find_emotion_words(self, tokens: pl.Series) -> pl.Series:
        """Return the emotion words of space-separated tokens, in the same form; null stays null.

        Each distinct text is tagged once.
        """
        distinct = tokens.drop_nulls().unique(maintain_order=True)
        emotion_words = {
            text: " ".join(self._select_emotion_words(text.split())) for text in distinct
        }
        return tokens.replace_strict(emotion_words, default=None, return_dtype=pl.String)

    def mark_emotion_words(self, vocabulary: Vocabulary) -> list[bool]:
        """Return for each token of a vocabulary whether it is an emotion word.

        Tokens are tagged one by one, since generated words come without a sentence to tag.
        """
        words = vocabulary.tokens[len(SPECIALS) :]
        return [False] * len(SPECIALS) + [
            bool(self._select_emotion_words([word])) for word in words
        ]

    def _select_emotion_words(self, words: Sequence[str]) -> list[str]:
        tagged = _load_adjective_tagger()(words)
        return [
            word
            for word, tag in tagged
            if word in self.lexicon or (tag.startswith(ADJECTIVE) and word.isalpha())
        ]


@functools.cache
def _load_adjective_tagger() -> Callable[[Sequence[str]], list[tuple[str, str]]]:
    """Load textblob's Brill tagger; those of nltk and spaCy would need a download."""
    from textblob.en import parser  # type: ignore[import-untyped]

    def tag(words: Sequence[str]) -> list[tuple[str, str]]:
        tagged: list[Any] = parser.find_tags(list(words))
        return [(word, kind) for word, kind in tagged]

    return tag
