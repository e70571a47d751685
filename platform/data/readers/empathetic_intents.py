"""EmpatheticIntents (Welivita and Pu 2020): sentences, each with one of the 41 labels.

`train.txt`, `valid.txt` and `test.txt` have a number and a text per line, such as
`17 <SEP> i feel thankful`. The numbers are the indices of `LABELS` (the published list is wrong
about `neutral`, which is 40). Sentences with emotions are by speakers, those with intents by
listeners. They have neither context nor response, so they belong to streams of their own.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError
from attune.platform.data.conversations import LABELLED, LISTENER, SPEAKER, conversations
from attune.platform.data.files import file_extension, read_file_lines, split_from_file_name
from attune.platform.data.labels import EMOTIONS, LABELS

NAME = "intents"
EMOTION_LABELS = LABELS
SUFFIXES = (".txt",)
STREAMS = tuple(LABELLED.values())
_SEPARATOR = "<SEP>"


def recognises(path: Path, head: str) -> bool:
    """Return whether a text file has a number and the separator in its first line."""
    number, separator, _ = head.partition("\n")[0].partition(_SEPARATOR)
    return file_extension(path) == ".txt" and bool(separator) and number.strip().isdecimal()


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:  # noqa: ARG001
    """Yield conversations of one utterance each, one chunk of the file at a time."""
    split = split_from_file_name(path)
    if split is None:
        raise DataError(f"{path}: the name must contain the split: train, valid or test")
    for piece in read_file_lines(path):
        yield conversations(
            [
                {
                    "conversation_id": f"{path.stem}-{row}",
                    "split": LABELLED[split],
                    "turn": 0,
                    "file": path.name,
                    "row": row,
                    **(
                        _parse_intent_utterance(line)
                        if problem is None
                        else {"problem": problem, "raw": raw}
                    ),
                }
                for row, line, problem, raw in piece.iter_rows()
                if problem or line.strip()
            ]
        )


def _parse_intent_utterance(line: str) -> dict[str, object]:
    number, separator, text = (part.strip() for part in line.partition(_SEPARATOR))
    if not separator:
        return {"problem": f"no separator: a line is 'NUMBER {_SEPARATOR} TEXT'", "raw": line}
    if not number.isdecimal() or int(number) >= len(LABELS):
        problem = f"unknown label '{number}': expected a number from 0 to {len(LABELS) - 1}"
        return {"problem": problem, "raw": line}
    label = LABELS[int(number)]
    role = SPEAKER if label in EMOTIONS else LISTENER
    return {"role": role, "text": text, "label": label, "emotion": label}
