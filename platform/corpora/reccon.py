"""RECCON's DailyDialog part (Poria et al. 2020): who feels what, and which turns caused it.

One JSON object a file: `{"tr_1": [[turn, turn, ...]]}`. Evidence is 1-based, and `"b"` stands for a
cause outside the dialogue. The first to speak is our speaker. A few labels are misspelt.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.corpora.conversations import LISTENER, SPEAKER, conversations
from attune.platform.corpora.edos import detokenized
from attune.platform.corpora.files import open_bytes, split_of
from attune.platform.corpora.labels import EMOTIONS, SEVEN_EMOTIONS
from attune.platform.errors import DataError, unknown

NAME = "reccon"
EMOTION_LABELS = EMOTIONS
_MISSPELT = {
    "happines": "happiness",
    "happy": "happiness",
    "sad": "sadness",
    "surprised": "surprise",
    "angry": "anger",
}
_NEEDED = ("turn", "speaker", "utterance", "emotion")


def recognises(path: Path, first_line: str) -> bool:
    """A .json file that opens an object (JSON lines have a whole object in their first line)."""
    return path.suffix == ".json" and first_line.startswith("{") and not first_line.endswith("}")


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Conversations of the file; `row` is the dialogue's place in it."""
    with open_bytes(path) as stream:
        try:
            dialogues = json.load(stream)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            row = getattr(error, "lineno", 1)
            raise DataError(f"{path}, row {row}: not readable as JSON: {error}") from error
    if not isinstance(dialogues, dict) or not dialogues:
        raise DataError(f"{path}: an object of dialogues is expected, as RECCON publishes it")
    rows = [
        row
        for number, (name, parts) in enumerate(dialogues.items(), start=1)
        for row in _rows(path, number, name, parts, tolerated)
    ]
    yield conversations(rows).with_columns(text=detokenized(pl.col("text")))


def _rows(
    path: Path, number: int, name: str, parts: Any, tolerated: Counter[str]
) -> Iterator[dict[str, object]]:
    place = {"conversation_id": name, "file": path.name, "row": number}
    turns = parts[0] if isinstance(parts, list) and parts else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        yield {**place, "problem": f"not a list: dialogue '{name}' must be a list of turns"}
        return
    for turn in turns:
        missing = [key for key in _NEEDED if key not in turn]
        if missing:
            yield {
                **place,
                "problem": f"missing key: a turn of dialogue '{name}' lacks '{missing[0]}'",
            }
            continue
        emotion = turn["emotion"]
        if emotion in _MISSPELT:
            tolerated["misspelt labels"] += 1
            emotion = _MISSPELT[emotion]
        evidence = turn.get("expanded emotion cause evidence")
        yield {
            **place,
            "split": split_of(path),
            "turn": turn["turn"] - 1,
            "role": SPEAKER if turn["speaker"] == turns[0]["speaker"] else LISTENER,
            "text": turn["utterance"],
            "label": emotion,
            "evidence": None
            if evidence is None
            else [cause - 1 for cause in evidence if isinstance(cause, int)],
            "speaker": turn["speaker"],
            "problem": None
            if emotion in SEVEN_EMOTIONS
            else unknown("label", emotion, SEVEN_EMOTIONS),
        }
