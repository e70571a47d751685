"""Join tokens to readable text."""

import re
from collections.abc import Sequence

_BEFORE = re.compile(r" (n't|'(?:s|m|re|ve|ll|d)\b|[.,!?;:)%]|'')")
_AFTER = re.compile(r"([($#]|``) ")
_SENTENCE_START = re.compile(r"(?:^|[.!?] )[a-z]")
_LONE_I = re.compile(r"\bi\b")


def detokenize(tokens: Sequence[str]) -> str:
    """Join tokens to text: `i am sorry , do n't worry .` as `I am sorry, don't worry.`."""
    text = _AFTER.sub(r"\1", _BEFORE.sub(r"\1", " ".join(tokens)))
    text = text.replace("``", '"').replace("''", '"').replace("can not", "cannot")
    text = _LONE_I.sub("I", text)
    return _SENTENCE_START.sub(lambda match: match[0].upper(), text)
