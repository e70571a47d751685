"""Cleaning steps for subtitles, each with a name, a switch and a count.

Line steps change a text or empty it, before lines are merged into turns. Turn and dialogue steps
decide what is kept. A dropped turn ends its dialogue, and the turns after it begin another one,
because the next turn would answer something that is missing.

Deviations: Xie and Pu 2021 list their steps in an appendix that is not available; these are ours.
"""

import hashlib
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attune.platform.core.errors import UsageError, unknown_choice_error

MAX_TOKENS = 100
"""The maximum input length of the paper's model."""
MIN_ENGLISH_WORDS, MIN_ENGLISH_SHARE = 8, 0.1

_TAG = re.compile(r"<[^<>]*>|\{[^{}]*\}|\\[Nnh]")
_SOUND = re.compile(r"\[[^\]]*(?:\]|$)|\([^)]*(?:\)|$)|\*[^*]+\*")
_NOTES = re.compile(r"[\u2669-\u266f]|^\s*#\s|\s#\s*$")
_CREDIT = re.compile(
    r"(?i)\b(?:subtitles?|subtitling|subbed|sync(?:ed|hroni[sz]ed)?|captions?|captioned|captioning|"
    r"translated|translation|transcribed|transcript|corrected|corrections?|ripped|encoded|edited)"
    r"(?: and \w+)?(?: by|:)\s|opensubtitles|addic7ed|https?:|www\.|\w\.(?:com|org|net)\b"
)
_SPEAKER = re.compile(r"^\s*(?:[A-Z][A-Z0-9.'&# -]{0,28}[A-Z0-9.]|[A-Z]{2,}):(?=\s|$)\s*")
_DASH = re.compile(r"^(?:\s*[-\u2013\u2014](?![-\u2013\u2014]))+\s*")
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u00b4": "'", "`": "'", "\u201c": '"',
                         "\u201d": '"', "\u2026": "..."})  # fmt: skip
_MISREAD = re.compile(r"\bl(?='(?:m|ll|ve|d)\b)|(?<![\w'])l(?![\w'.])|\bl(?=[tfns]\b)")
_TOKEN = re.compile(r"\w+(?:'\w+)*|[^\w\s]")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_ENGLISH = frozenset(
    re.findall(
        r"\S+",
        """the and you is are of to it that what this have not my your with be they she his her him
        from about know but get can here just right there want think good like would i i'm it's
        don't we how who when where why all been had has were did does going out up yes oh see now
        if or our their them some any because could should us at as by on""",
    )
)
"""Common English words that similar languages do not have; they make up half of English speech."""


def markup(text: str) -> str:
    """Remove tags and resolve character references."""
    return _TAG.sub(" ", html.unescape(text)) if _contains_any(text, "<{\\&") else text


def lyrics(text: str) -> str:
    """Drop lyrics."""
    return "" if _NOTES.search(text) else text


def credits(text: str) -> str:
    """Drop credits of the subtitles and advertisements."""
    return "" if _CREDIT.search(text) else text


def sounds(text: str) -> str:
    """Remove sound descriptions: [door slams], (sighs), *cough*."""
    return _SOUND.sub(" ", text) if _contains_any(text, "[(*") else text


def speakers(text: str) -> str:
    """Remove a speaker's name and dashes at the beginning: `- MARY: No.`."""
    return _SPEAKER.sub("", _DASH.sub("", text))


def spelling(text: str) -> str:
    """Correct an l that should be an I, and replace curly quotation marks and ellipses."""
    return _MISREAD.sub("I", text.translate(_QUOTES))


def short(text: str) -> bool:
    """Keep turns with at least one word."""
    return _WORD.search(text) is not None


def long(text: str) -> bool:
    """Keep turns with at most 100 tokens."""
    return count_tokens_for_cleaning(text) <= MAX_TOKENS


def letters(text: str) -> bool:
    """Keep turns with at least half letters."""
    written = [character for character in text if not character.isspace()]
    return 2 * sum(map(str.isalpha, written)) >= len(written)


def english(texts: Sequence[str]) -> bool:
    """Keep English dialogues, by the share of common English words; short ones are kept."""
    words = [word.lower() for text in texts for word in _WORD.findall(text)]
    if len(words) < MIN_ENGLISH_WORDS:
        return True
    return sum(word in _ENGLISH for word in words) >= MIN_ENGLISH_SHARE * len(words)


def alone(texts: Sequence[str]) -> bool:
    """Keep dialogues with at least two turns."""
    return len(texts) > 1


DUPLICATES = "duplicates"
"""Drops dialogues with the same words as an earlier one, once all files are done (`curate.py`)."""

LINE_STEPS: dict[str, Callable[[str], str]] = {
    step.__name__: step for step in (markup, lyrics, credits, sounds, speakers, spelling)
}
TURN_STEPS: dict[str, Callable[[str], bool]] = {
    step.__name__: step for step in (short, long, letters)
}
DIALOG_STEPS: dict[str, Callable[[Sequence[str]], bool]] = {
    step.__name__: step for step in (english, alone)
}
STEPS = (*LINE_STEPS, *TURN_STEPS, *DIALOG_STEPS, DUPLICATES)


def select_cleaning_steps(without: Iterable[str]) -> tuple[str, ...]:
    """Return all steps except some, in their order."""
    left_out = set(without)
    for name in sorted(left_out - set(STEPS)):
        raise UsageError(f"--without: {unknown_choice_error('step', name, STEPS)}")
    return tuple(step for step in STEPS if step not in left_out)


@dataclass(frozen=True)
class Cleaning:
    """Some steps, and the number of lines, turns or dialogues that each changed or dropped."""

    steps: tuple[str, ...]
    counts: Counter[str]

    def line(self, text: str) -> str:
        """Return the text of a line after the line steps."""
        for name in self.steps:
            if (step := LINE_STEPS.get(name)) and text:
                changed = " ".join(step(text).split())
                self.counts[name] += changed != text
                text = changed
        return text

    def pieces(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Return the ranges of turns (start, end) that remain of a dialogue."""
        kept = [self._passes_cleaning_steps(TURN_STEPS, text) for text in texts]
        ends = [place for place, keep in enumerate(kept) if not keep]
        starts = [0, *(place + 1 for place in ends)]
        spans = zip(starts, [*ends, len(texts)], strict=True)
        return [
            (start, end)
            for start, end in spans
            if start < end and self._passes_cleaning_steps(DIALOG_STEPS, texts[start:end])
        ]

    def _passes_cleaning_steps(
        self, steps: dict[str, Callable[..., bool]], what: str | Sequence[str]
    ) -> bool:
        """Return whether the steps keep a turn or dialogue, and count the one that drops it."""
        for name in self.steps:
            if name in steps and not steps[name](what):
                self.counts[name] += 1
                return False
        return True


def names_speaker(text: str) -> bool:
    """Return whether a line begins with a dash or a speaker's name."""
    plain = markup(text)
    return bool(_DASH.match(plain) or _SPEAKER.match(plain))


def count_tokens_for_cleaning(text: str) -> int:
    """Return the number of words and punctuation marks."""
    return len(_TOKEN.findall(text))


def dialog_key(texts: Sequence[str]) -> int:
    """Return a hash of a dialogue's words; punctuation and case do not matter."""
    words = " / ".join(" ".join(re.findall(r"\w+", text.lower())) for text in texts)
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), signed=True)


def _contains_any(text: str, characters: str) -> bool:
    return any(character in text for character in characters)
