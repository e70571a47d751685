"""Cause labels of EmpatheticDialogues (Gao et al. 2021): the causes of the emotion.

JSON lines, one conversation per line: tokenised `utters`, the emotion as `context`, and in
`emotion_cause` the indices of the utterances that are its causes. The labels were made from whole
conversations. The speaker's last turn carries the emotion, so a cause sample has the conversation
up to that turn as its context.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.data.conversations import LISTENER, SPEAKER, SPLITS, conversations
from attune.platform.data.files import file_extension, read_file_lines, split_from_file_name
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.readers.edos import detokenize_edos_column

NAME = "ed-causes"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".jsonl",)
STREAMS = SPLITS
_NEEDED = {"conv_id": str, "utters": list, "context": str, "emotion_cause": list}


def recognises(path: Path, head: str) -> bool:
    """Return whether a file is a .jsonl whose first line has the expected keys."""
    return file_extension(path) == ".jsonl" and all(
        f'"{key}"' in head for key in ("conv_id", "utters")
    )


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:  # noqa: ARG001
    """Yield conversations, one chunk of the file at a time."""
    for piece in read_file_lines(path):
        rows: list[dict[str, object]] = []
        for number, line, problem, raw in piece.iter_rows():
            place = {"file": path.name, "row": number}
            if problem:
                rows.append({**place, "problem": problem, "raw": raw})
            elif line.strip():
                rows.extend(
                    {**place, **turn}
                    for turn in _parse_ed_cause_turns(line, split_from_file_name(path))
                )
        yield conversations(rows).with_columns(text=detokenize_edos_column(pl.col("text")))


def _parse_ed_cause_turns(line: str, split: str | None) -> Iterator[dict[str, object]]:
    try:
        conversation = json.loads(line)
    except (RecursionError, ValueError) as error:
        yield {"problem": f"not readable as JSON: {error}", "raw": line}
        return
    problem = _find_ed_cause_problem(conversation)
    if problem:
        yield {"problem": problem, "raw": line}
        return
    last = (len(conversation["utters"]) - 1) // 2 * 2  # the speaker's
    for turn, words in enumerate(conversation["utters"]):
        ends = turn == last
        causes = [cause for cause in conversation["emotion_cause"] if cause <= last]
        yield {
            "conversation_id": conversation["conv_id"],
            "split": split,
            "turn": turn,
            "role": LISTENER if turn % 2 else SPEAKER,
            "text": " ".join(words),
            "emotion": conversation["context"],
            "cause": turn in conversation["emotion_cause"],
            "label": conversation["context"] if ends else None,
            "evidence": causes if ends else None,
        }


def _find_ed_cause_problem(conversation: Any) -> str | None:
    """Return why a conversation cannot be used, or None."""
    if not isinstance(conversation, dict):
        return "not an object: a line must be a JSON object"
    for key, kind in _NEEDED.items():
        if type(conversation.get(key)) is not kind:
            return f"missing key: no '{key}' of type {kind.__name__}"
    for words in conversation["utters"]:
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            return "not a list: an utterance must be a list of words"
    turns = range(len(conversation["utters"]))
    if not all(type(cause) is int and cause in turns for cause in conversation["emotion_cause"]):
        return (
            f"wrong cause: {conversation['emotion_cause']}, the conversation has {len(turns)} "
            f"utterances numbered from 0"
        )
    return None
