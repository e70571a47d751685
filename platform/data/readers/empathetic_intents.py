"""EmpatheticIntents (Welivita and Pu 2020): sentences, each with one of the 41 labels.

`train.txt`, `valid.txt` and `test.txt` have a number and a text a line, `17 <SEP> i feel thankful`;
the numbers are those of `LABELS` (what the published list says of `neutral` is a slip: it is 40).
Emotions are told by the speaker of a situation, intents are what a listener does; no sentence has a
context or an answer, so they go to streams of their own.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError
from attune.platform.data.conversations import LABELLED, LISTENER, SPEAKER, conversations
from attune.platform.data.files import extension, lines, split_from_name
from attune.platform.data.labels import EMOTIONS, LABELS

NAME = "intents"
EMOTION_LABELS = LABELS
SUFFIXES = (".txt",)
STREAMS = tuple(LABELLED.values())
_SEPARATOR = "<SEP>"


def recognises(path: Path, head: str) -> bool:
    """A text file with a number and the separator in its first line."""
    number, separator, _ = head.partition("\n")[0].partition(_SEPARATOR)
    return extension(path) == ".txt" and bool(separator) and number.strip().isdecimal()


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:  # noqa: ARG001
    """Conversations of one utterance each, a piece of the file at a time."""
    split = split_from_name(path)
    if split is None:
        raise DataError(f"{path}: its name must tell its split: train, valid or test")
    for piece in lines(path):
        yield conversations(
            [
                {
                    "conversation_id": f"{path.stem}-{row}",
                    "split": LABELLED[split],
                    "turn": 0,
                    "file": path.name,
                    "row": row,
                    **(_utterance(line) if problem is None else {"problem": problem, "raw": raw}),
                }
                for row, line, problem, raw in piece.iter_rows()
                if problem or line.strip()
            ]
        )


def _utterance(line: str) -> dict[str, object]:
    number, separator, text = (part.strip() for part in line.partition(_SEPARATOR))
    if not separator:
        return {"problem": f"no separator: a line is 'NUMBER {_SEPARATOR} TEXT'", "raw": line}
    if not number.isdecimal() or int(number) >= len(LABELS):
        problem = f"unknown label '{number}': a number from 0 to {len(LABELS) - 1} is expected"
        return {"problem": problem, "raw": line}
    label = LABELS[int(number)]
    role = SPEAKER if label in EMOTIONS else LISTENER
    return {"role": role, "text": text, "label": label, "emotion": label}
