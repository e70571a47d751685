"""Our tokens are nltk's, to the letter."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.platform.text.tokenizing import (
    CONTRACTIONS,
    nltk_tokenize,
    tokenize,
    tokenize_few,
    tokenize_one,
)


def nltk_tokens(text: str, expand: bool = True) -> list[str]:
    """What the public code does: lower case, substrings, `word_tokenize`."""
    text = text.lower()
    if expand:
        for short, long in CONTRACTIONS.items():
            text = text.replace(short, long)
    return nltk_tokenize(text)


TRICKY = [
    "I can't believe it's over... don't you?",
    "He said 'hello' and \"goodbye\". 'Tis true, 'twas fun.",
    "Dr. Smith paid $3.50 at 5 p.m. on Jan. 3. Then he left.",
    "No way!!! Really?? Yes. no. 1 fan.",
    "(I went home.) She stayed; we'd called: 10:30, 1,000 times.",
    "gonna wanna gimme lemme gotta cannot more'n d'ye wanna",
    "Mr. and Mrs. Jones vs. the u.s. team. etc. and so on.",
    "the dogs' bowls, the dog's bowl, y'all'd've",
    "end of text -- or not-- maybe a*b @home #tag 50% & more",
    "curly \u2019quotes\u2019 \u201chere\u201d and \u2014 dashes\u2026 na\xefve caf\xe9. ok?",
    "a.b.c. x. y. z. ok. sure. yes.",
    "   spaces   everywhere .  And more ?  ok ",
    "Wow!i know.right?yes",
    "line one.\nline two. still",
    "it's.that's.i'm",
    "",
    "...",
    "'",
]


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("expand", [True, False])
def test_equals_nltk(text, expand):
    assert tokenize_one(text, expand_contractions=expand) == nltk_tokens(text, expand)


WORDS = (
    "i it's don't can't mr. dr. no. u.s. ok sure yes. no? wow! ... .. , ; : ' '' `` ( ) [ ] -- - ",
    "1 2.5 1,000 10:30 $5 50% @you #tag a. b.c. e.g. 'tis 'twas gonna wanna cannot the dogs' n't ",
    "\u2019 \u201cx\u201d \xe9 he'll we're they've x'd <b> * & end. end.) end.\" \" ?! !? !!!",
)
PIECES = st.sampled_from([*"".join(WORDS).split(" "), "\n", "\t"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(PIECES, st.sampled_from(["", " ", "  "])), max_size=14))
def test_equals_nltk_on_random_text(parts):
    text = "".join(piece + blank for piece, blank in parts)
    assert tokenize_one(text) == nltk_tokens(text)
    assert tokenize_few([text]) == [" ".join(tokenize_one(text))]


def test_tokens_as_in_the_papers():
    assert " ".join(tokenize_one("I CAN'T, it's John's.")) == "i can not , it is john 's ."


def test_column_keeps_order_nulls_and_repeats():
    tokens = tokenize(pl.Series("text", ["B b.", None, "a", "B b.", ""]))
    assert tokens.to_list() == ["b b .", None, "a", "b b .", ""]
    assert tokens.name == "text"
