"""Tokenise a column of texts as the papers' public code does.

Lower case, 23 contractions expanded as substrings, then nltk's `word_tokenize`: Punkt splits the
text into sentences, the Treebank rules split the sentences into words. Tests compare the result
with nltk; it is the same, but faster:

- Punkt's decision about a full stop depends only on the words around it, so it is cached.
- The Treebank rules are about thirty regular expressions. They are taken from nltk, translated to
  the syntax of polars' engine (Rust) and applied to the whole column at once. nltk itself
  tokenises sentences for which the engines could disagree: those with non-ASCII characters, or
  with a quotation mark before a word, which requires a look-around.

Tokens never contain white space, so those of an utterance are stored as one space-separated string.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import numpy as np
import polars as pl
from nltk.tabdata import PunktDecoder
from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

CONTRACTIONS = {
    "it's": "it is",
    "don't": "do not",
    "doesn't": "does not",
    "didn't": "did not",
    "you'd": "you would",
    "you're": "you are",
    "you'll": "you will",
    "i'm": "i am",
    "they're": "they are",
    "that's": "that is",
    "what's": "what is",
    "couldn't": "could not",
    "i've": "i have",
    "we've": "we have",
    "can't": "cannot",
    "i'd": "i would",
    "aren't": "are not",
    "isn't": "is not",
    "wasn't": "was not",
    "weren't": "were not",
    "won't": "will not",
    "there's": "there is",
    "there're": "there are",
}
"""The contractions that the public code expands, in its order, even inside a word."""

# An end mark that Punkt considers: followed by another word, or directly by punctuation.
_SENTENCE_END_INSIDE = r"[.?!](?:\s+\S|[)\";}\]*:@'({\[?!])"
# The most frequent case, a plain word, its end mark, spaces and a letter: Punkt always splits here,
# unless the word is an abbreviation or begins a collocation ("no. 5"); see `_tokenize_sentences`.
_PLAIN_SENTENCE_END = re.compile(r"(?<!\S)([a-z]{2,})([.?!]) +(?=[a-z])")
_QUOTE_BEFORE_WORD = r"(?:^|\W)'\w"
_PUNKT = "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english"


def tokenize(texts: pl.Series, *, expand_contractions: bool = True) -> pl.Series:
    """Return the tokens of each text, joined by spaces; null stays null.

    Each distinct text is tokenised once. `expand_contractions=False` is for the emotion-cause
    paper, which keeps contractions.
    """
    distinct = pl.DataFrame({"text": texts.drop_nulls().unique(maintain_order=True)})
    lowered = pl.col("text").str.to_lowercase()
    if expand_contractions:
        for short, long in CONTRACTIONS.items():
            lowered = lowered.str.replace_all(short, long, literal=True)
    frame = distinct.with_columns(lowered=lowered).with_row_index()
    several = pl.col("lowered").str.contains(_SENTENCE_END_INSIDE) | ~_is_ascii("lowered")
    single = frame.filter(~several).select("index", sentence="lowered")
    cut = frame.filter(several)
    pieces = [_tokenize_sentences(text) for text in cut["lowered"]]
    sentences = pl.DataFrame(
        {
            "index": np.repeat(cut["index"].to_numpy(), [len(piece) for piece in pieces]),
            "sentence": pl.Series(list(itertools.chain.from_iterable(pieces)), dtype=pl.String),
        }
    )
    tokens = (
        _tokenize_words(pl.concat([single, sentences]).sort("index", maintain_order=True))
        .filter(pl.col("tokens") != "")
        .group_by("index", maintain_order=True)
        .agg(pl.col("tokens").str.join(" "))
    )
    done = frame.join(tokens, on="index", how="left").select("text", pl.col("tokens").fill_null(""))
    return (
        pl.DataFrame({"text": texts})
        .join(done, on="text", how="left", maintain_order="left")["tokens"]
        .alias(texts.name)
    )


def tokenize_few(texts: Iterable[str]) -> list[str]:
    """Return what `tokenize` returns, for a few texts: without polars, whose calls take much longer
    than their tokens."""
    joined = []
    for text in texts:
        lowered = text.lower()
        for short, long in CONTRACTIONS.items():
            lowered = lowered.replace(short, long)
        joined.append(" ".join(nltk_tokenize(lowered)))
    return joined


def tokenize_one(text: str, *, expand_contractions: bool = True) -> list[str]:
    """Return the tokens of a single text, with the code that prepares a corpus."""
    joined = tokenize(pl.Series([text]), expand_contractions=expand_contractions)[0]
    return joined.split(" ") if joined else []


def nltk_tokenize(text: str) -> list[str]:
    """Tokenise one text with nltk's own `word_tokenize`, the reference for `tokenize`."""
    words = NLTKWordTokenizer()
    return [
        token for sentence in _plain_punkt().tokenize(text) for token in words.tokenize(sentence)
    ]


def punkt_sentences(text: str) -> list[str]:
    """Return Punkt's sentences of a text, in its original case."""
    return list(_plain_punkt().tokenize(text))


class _CachingPunkt(PunktSentenceTokenizer):  # type: ignore[misc]
    """Punkt with a cache of its decision for each distinct pair of adjacent words."""

    def __init__(self, parameters: PunktParameters):
        super().__init__(parameters)
        self.careful = parameters.abbrev_types | {word for word, _ in parameters.collocations}
        # Bounded, because the pairs of a large corpus would not fit in memory.
        self.text_contains_sentbreak = functools.lru_cache(1 << 20)(super().text_contains_sentbreak)


@functools.cache
def _caching_punkt() -> _CachingPunkt:
    return _CachingPunkt(_punkt_parameters())


@functools.cache
def _plain_punkt() -> PunktSentenceTokenizer:
    return PunktSentenceTokenizer(_punkt_parameters())


def _punkt_parameters() -> PunktParameters:
    """Load nltk's English Punkt model from a package that contains it, without a download."""
    folder = Path(str(metadata.distribution("llama-index-core").locate_file(_PUNKT)))
    decoder, parameters = PunktDecoder(), PunktParameters()

    def lines(name: str) -> list[str]:
        return (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)

    parameters.collocations = set(decoder.tab2tups(lines("collocations.tab")))
    parameters.sent_starters = decoder.txt2set(lines("sent_starters.txt"))
    parameters.abbrev_types = decoder.txt2set(lines("abbrev_types.txt"))
    parameters.ortho_context = decoder.tab2intdict(lines("ortho_context.tab"))
    return parameters


def _tokenize_sentences(text: str) -> list[str]:
    """Return Punkt's sentences; clear cases are split without calling it.

    Punkt ends a sentence at `word.` + `next` unless `word` is an abbreviation or begins a known
    collocation, and always at `word?` and `word!` (its other rules concern numbers, initials and
    ellipses). A text can therefore be split there, and the pieces handled independently.
    """
    careful = _caching_punkt().careful

    def mark(match: re.Match[str]) -> str:
        word, end = match.groups()
        return match[0] if end == "." and word in careful else f"{word}{end}\n"

    if "\n" in text:
        return list(_caching_punkt().tokenize(text))
    pieces = _PLAIN_SENTENCE_END.sub(mark, text).split("\n")
    return [
        sentence
        for piece in pieces
        for sentence in (
            _caching_punkt().tokenize(piece) if _may_contain_sentence_end(piece) else (piece,)
        )
    ]


_may_contain_sentence_end = re.compile(_SENTENCE_END_INSIDE + r"|[^\x00-\x7f]").search


def _is_ascii(column: str) -> pl.Expr:
    return pl.col(column).str.len_bytes() == pl.col(column).str.len_chars()


def _tokenize_words(sentences: pl.DataFrame) -> pl.DataFrame:
    """Return (index, tokens): the Treebank tokens of each sentence, joined by spaces, in order."""
    plain = _is_ascii("sentence") & ~pl.col("sentence").str.contains(_QUOTE_BEFORE_WORD)
    numbered = sentences.with_row_index("place")
    fast = numbered.filter(plain).select(
        "place", "index", tokens=_apply_treebank_rules(pl.col("sentence"))
    )
    odd = numbered.filter(~plain)
    tokenizer = NLTKWordTokenizer()
    slow = odd.select(
        "place",
        "index",
        tokens=pl.Series(
            [" ".join(tokenizer.tokenize(sentence)) for sentence in odd["sentence"]],
            dtype=pl.String,
        ),
    )
    return pl.concat([fast, slow]).sort("place").select("index", "tokens")


def _apply_treebank_rules(text: pl.Expr) -> pl.Expr:
    """Apply nltk's rules in nltk's order (`NLTKWordTokenizer.tokenize`) as a polars expression."""
    rules = NLTKWordTokenizer
    starting_quotes = rules.STARTING_QUOTES[:-1]
    before = [*starting_quotes, *rules.PUNCTUATION, rules.PARENS_BRACKETS, rules.DOUBLE_DASHES]
    contractions = [(rule, r" \1 \2 ") for rule in (*rules.CONTRACTIONS2, *rules.CONTRACTIONS3)]
    for rule, replacement in before:
        text = text.str.replace_all(*_translate_treebank_rule(rule.pattern, replacement))
    text = pl.concat_str(pl.lit(" "), text, pl.lit(" "))
    for rule, replacement in [*rules.ENDING_QUOTES, *contractions]:
        text = text.str.replace_all(*_translate_treebank_rule(rule.pattern, replacement))
    return text.str.replace_all(r"\s+", " ").str.strip_chars()


def _translate_treebank_rule(pattern: str, replacement: str) -> tuple[str, str]:
    """Translate a rule to Rust: no comments, possessive `*+` or `\\<`; `${1}` is a group."""
    for python, rust in (("(?#X)", ""), ("*+", "*"), (r"\<", "<"), (r"\>", ">")):
        pattern = pattern.replace(python, rust)
    replacement = re.sub(r"\\g<0>", "${0}", re.sub(r"\\(\d)", r"${\1}", replacement))
    if pattern.endswith(r"(?=\s)"):  # `wanna `: Rust has no look-ahead, so keep the space
        pattern, replacement = pattern.removesuffix(r"(?=\s)") + r"(\s)", replacement + "${3}"
    return pattern, replacement
