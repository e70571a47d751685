"""RECCON's DailyDialog part (Poria et al. 2020): emotions of utterances, and their causes.

A file is one JSON object: `{"tr_1": [[turn, turn, ...]]}`. Evidence is a list of turn numbers from
1; `"b"` denotes a cause outside the dialogue. The first to speak gets the role of the speaker.
Misspelt labels are corrected and counted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.core.errors import DataError, unknown_choice_error
from attune.platform.data.conversations import LISTENER, SPEAKER, SPLITS, conversations
from attune.platform.data.files import (
    file_extension,
    read_whole_file,
    shorten_rejected_text,
    split_from_file_name,
)
from attune.platform.data.labels import EMOTIONS, RECCON_LABELS
from attune.platform.data.readers.edos import detokenize_edos_column

NAME = "reccon"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".json",)
STREAMS = SPLITS
_MISSPELT = {
    "happines": "happiness",
    "happy": "happiness",
    "sad": "sadness",
    "surprised": "surprise",
    "angry": "anger",
}
_NEEDED = {"turn": int, "speaker": str, "utterance": str, "emotion": str}
_EVIDENCE = "expanded emotion cause evidence"
_OUTSIDE = "b"


def recognises(path: Path, head: str) -> bool:
    """Return whether a file is a .json object whose first value is a list of lists."""
    return (
        file_extension(path) == ".json"
        and re.match(r'\{\s*"[^"]*"\s*:\s*\[\s*\[', head) is not None
    )


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Yield the conversations of a file; `row` is the number of the dialogue in it."""
    content = read_whole_file(path)
    try:
        dialogues = json.loads(content, object_pairs_hook=_without_repeated_reccon_keys)
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, row {row}: not UTF-8: save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {error.lineno}: not readable as JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}, row 1: not readable as JSON: {error}") from error
    if not isinstance(dialogues, dict) or not dialogues:
        raise DataError(f"{path}: expected RECCON's format, a JSON object of dialogues")
    rows = []
    for number, (name, parts) in enumerate(dialogues.items(), start=1):
        place = {"conversation_id": name, "file": path.name, "row": number}
        problem = _reccon_problem(parts)
        if problem:
            rows.append(
                {**place, "problem": problem, "raw": shorten_rejected_text(json.dumps(parts))}
            )
        else:
            rows.extend(
                {**place, **turn}
                for turn in _reccon_turns(parts[0], split_from_file_name(path), tolerated)
            )
    yield conversations(rows).with_columns(text=detokenize_edos_column(pl.col("text")))


def _without_repeated_reccon_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"the key '{repeated[0]}' occurs twice")
    return dict(pairs)


def _reccon_problem(parts: Any) -> str | None:
    """Return why a dialogue cannot be used, or None."""
    if not (isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], list)):
        return "not a list: a dialogue must be a list that contains one list of turns"
    if not parts[0]:
        return "not a list: the dialogue has no turn"
    for number, turn in enumerate(parts[0], start=1):
        if not isinstance(turn, dict):
            return f"not an object: turn {number}"
        for key, kind in _NEEDED.items():
            if type(turn.get(key)) is not kind:
                return f"missing key: turn {number} has no '{key}' of type {kind.__name__}"
        evidence = turn.get(_EVIDENCE, [])
        turns = range(1, len(parts[0]) + 1)
        if not isinstance(evidence, list) or not all(
            cause == _OUTSIDE or (type(cause) is int and cause in turns) for cause in evidence
        ):
            return f"wrong evidence: expected turn numbers, turn {number} has {evidence}"
        emotion = _MISSPELT.get(turn["emotion"], turn["emotion"])
        if emotion not in RECCON_LABELS:
            return unknown_choice_error("label", emotion, RECCON_LABELS)
    return None


def _reccon_turns(
    turns: list[dict[str, Any]], split: str | None, tolerated: Counter[str]
) -> Iterator[dict[str, object]]:
    for turn in turns:
        if turn["emotion"] in _MISSPELT:
            tolerated["misspelt labels"] += 1
        evidence = turn.get(_EVIDENCE)
        yield {
            "split": split,
            "turn": turn["turn"] - 1,
            "role": SPEAKER if turn["speaker"] == turns[0]["speaker"] else LISTENER,
            "text": turn["utterance"],
            "label": _MISSPELT.get(turn["emotion"], turn["emotion"]),
            "evidence": None if evidence is None else [c - 1 for c in evidence if c != _OUTSIDE],
            "speaker": turn["speaker"],
        }
