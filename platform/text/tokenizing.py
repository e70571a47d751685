"""Words as the papers' public code makes them, a column at a time.

Lower case, 23 contractions expanded as substrings, then nltk's `word_tokenize`: Punkt cuts the
text into sentences, the Treebank rules cut the sentences into words. Both are exact, and tests
hold them against nltk itself; what differs is the cost:

- Punkt's decision about a full stop depends only on the words around it, so it is remembered.
- The Treebank rules are some thirty regular expressions. We take them from nltk, translate them
  to the syntax of polars' (Rust) engine and run them over the whole column at once. Where the two
  engines could disagree (non-ASCII text, a quotation mark before a word, which needs a
  look-around), nltk itself does the sentence.

Tokens never contain white space, so an utterance's tokens are kept as one blank-separated string.
"""

import functools
import re
from importlib import metadata

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
"""What the public code expands, in its order; as substrings, so `that's` is done inside `Thats's`."""

# An end mark that Punkt would look at: followed by another word, or directly by punctuation.
_SENTENCE_END_INSIDE = r"[.?!](?:\s+\S|[)\";}\]*:@'({\[?!])"
_LOOK_AROUND_QUOTE = r"(?:^|\W)'\w"
_PUNKT = "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english"


def tokenize(texts: pl.Series, *, expand_contractions: bool = True) -> pl.Series:
    """The tokens of each text, joined by blanks; null stays null. Each distinct text is done once.

    `expand_contractions=False` is for the emotion-cause paper, whose texts keep them.
    """
    name = texts.name
    distinct = texts.drop_nulls().unique(maintain_order=True)
    lowered = pl.col("text").str.to_lowercase()
    if expand_contractions:
        for short, long in CONTRACTIONS.items():
            lowered = lowered.str.replace_all(short, long, literal=True)
    frame = pl.DataFrame({"text": distinct}).select(
        raw="text", text=lowered, several=lowered.str.contains(_SENTENCE_END_INSIDE)
    )
    # Anything beyond ASCII may hold other blanks and quotes: let Punkt have a look.
    several = frame["several"] | (frame["text"].str.len_bytes() != frame["text"].str.len_chars())
    sentences = frame.with_columns(
        sentence=pl.Series(
            [
                _sentences(text) if cut else [text.strip()]
                for text, cut in zip(frame["text"], several, strict=True)
            ],
            dtype=pl.List(pl.String),
        ),
    )
    exploded = sentences.select("raw", "sentence").explode("sentence")
    tokens = (
        exploded.with_columns(tokens=_words(exploded["sentence"]))
        .group_by("raw", maintain_order=True)
        .agg(pl.col("tokens").filter(pl.col("tokens") != "").str.join(" "))
    )
    return (
        pl.DataFrame({"raw": texts})
        .join(tokens, on="raw", how="left", maintain_order="left")["tokens"]
        .alias(name)
    )


def tokenize_one(text: str, *, expand_contractions: bool = True) -> list[str]:
    """The tokens of a single text, by the same code that prepares a corpus."""
    joined = tokenize(pl.Series([text]), expand_contractions=expand_contractions)[0]
    return joined.split(" ") if joined else []


class _RememberingPunkt(PunktSentenceTokenizer):
    """Punkt that decides about each distinct pair of neighbouring words once."""

    def __init__(self, parameters: PunktParameters):
        super().__init__(parameters)
        # A bounded cache: on a corpus larger than memory the pairs would outgrow it.
        self.text_contains_sentbreak = functools.lru_cache(1 << 20)(super().text_contains_sentbreak)


@functools.cache
def _punkt() -> _RememberingPunkt:
    """nltk's English Punkt model. nltk downloads it; this package carries it, so we need not."""
    folder = metadata.distribution("llama-index-core").locate_file(_PUNKT)
    decoder, parameters = PunktDecoder(), PunktParameters()

    def lines(name: str) -> list[str]:
        return folder.joinpath(name).read_text(encoding="utf-8").splitlines(keepends=True)

    parameters.collocations = set(decoder.tab2tups(lines("collocations.tab")))
    parameters.sent_starters = decoder.txt2set(lines("sent_starters.txt"))
    parameters.abbrev_types = decoder.txt2set(lines("abbrev_types.txt"))
    parameters.ortho_context = decoder.tab2intdict(lines("ortho_context.tab"))
    return _RememberingPunkt(parameters)


def _sentences(text: str) -> list[str]:
    return _punkt().tokenize(text) or [""]


def _words(sentences: pl.Series) -> pl.Series:
    """Treebank tokens of each sentence, joined by blanks."""
    frame = pl.DataFrame({"sentence": sentences}).with_row_index()
    # len_bytes == len_chars is the cheap test for pure ASCII.
    plain = (pl.col("sentence").str.len_bytes() == pl.col("sentence").str.len_chars()) & ~pl.col(
        "sentence"
    ).str.contains(_LOOK_AROUND_QUOTE)
    nltk_words = NLTKWordTokenizer()
    fast = frame.filter(plain).select("index", tokens=_treebank(pl.col("sentence")))
    odd = frame.filter(~plain)
    slow = odd.select(
        "index",
        tokens=pl.Series(
            [" ".join(nltk_words.tokenize(sentence)) for sentence in odd["sentence"]],
            dtype=pl.String,
        ),
    )
    return pl.concat([fast, slow]).sort("index")["tokens"]


def _treebank(text: pl.Expr) -> pl.Expr:
    """nltk's rules in nltk's order (see `NLTKWordTokenizer.tokenize`), as one polars expression."""
    rules = NLTKWordTokenizer
    without_look_around = rules.STARTING_QUOTES[:-1]
    before = [*without_look_around, *rules.PUNCTUATION, rules.PARENS_BRACKETS, rules.DOUBLE_DASHES]
    contractions = [
        (rule, r" \1 \2 ") for rule in (*rules.CONTRACTIONS2, *rules.CONTRACTIONS3)
    ]
    for rule, replacement in before:
        text = text.str.replace_all(*_in_rust(rule.pattern, replacement))
    text = pl.concat_str(pl.lit(" "), text, pl.lit(" "))
    for rule, replacement in [*rules.ENDING_QUOTES, *contractions]:
        text = text.str.replace_all(*_in_rust(rule.pattern, replacement))
    return text.str.replace_all(r"\s+", " ").str.strip_chars()


def _in_rust(pattern: str, replacement: str) -> tuple[str, str]:
    """A Python rule in Rust's syntax: no comments, possessive `*+` or `\\<`; `${1}` for a group."""
    for python, rust in (("(?#X)", ""), ("*+", "*"), (r"\<", "<"), (r"\>", ">")):
        pattern = pattern.replace(python, rust)
    replacement = re.sub(r"\\g<0>", "${0}", re.sub(r"\\(\d)", r"${\1}", replacement))
    if pattern.endswith(r"(?=\s)"):  # `wanna `: Rust has no look-ahead, so keep the blank
        pattern, replacement = pattern.removesuffix(r"(?=\s)") + r"(\s)", replacement + "${3}"
    return pattern, replacement
