"""The project's general dialogue format, for user data: JSON lines, CSV or Parquet.

JSON lines have one conversation per line:
    {"id": "a1", "emotion": "sad", "situation": "...", "split": "train",
     "utterances": [{"role": "speaker", "text": "..."}, {"role": "listener", "text": "..."}]}
CSV and Parquet have one utterance per row, with the columns conversation_id, turn, role and text.
Optional in all formats are `emotion`, `situation`, `split` and `episode` of a conversation, and of
an utterance `label` (one of the 41), `cause` (whether it contains the cause of the conversation's
emotion), `speaker` (the speaker's name), and `start` and `end` in seconds.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from attune.platform.core.errors import DataError, unknown_choice_error
from attune.platform.data.conversations import SPLITS, conversations
from attune.platform.data.files import (
    ROWS_AT_A_TIME,
    chunk_rows,
    file_extension,
    read_csv_records,
    read_file_lines,
    shorten_rejected_text,
    split_from_file_name,
)
from attune.platform.data.labels import LABELS

NAME = "dialogues"
EMOTION_LABELS = LABELS
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
STREAMS = SPLITS
_REQUIRED = ("conversation_id", "turn", "role", "text")
_OF_ALL = ("emotion", "situation", "split", "episode")
_OPTIONAL = (*_OF_ALL, "label", "cause", "speaker", "start", "end")
_TEXTS = ("role", "text", *_OF_ALL, "label", "speaker")
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class _BadValueError(ValueError):
    """A value of the wrong type; its message is reported as the row's problem."""


def recognises(path: Path, head: str) -> bool:
    """Return whether a file has this format: by its extension, for a CSV also by the column
    conversation_id, for a .json by a complete object in the first line."""
    first_line = head.partition("\n")[0].strip()
    if file_extension(path) == ".csv":
        return "conversation_id" in first_line
    if file_extension(path) == ".json":
        return '"utterances"' in first_line
    return file_extension(path) in (".parquet", ".jsonl", ".ndjson")


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:  # noqa: ARG001
    """Yield conversations, one chunk of the file at a time."""
    if file_extension(path) == ".parquet":
        return _read_dialogue_parquet(path)
    if file_extension(path) == ".csv":
        return _read_dialogue_csv(path)
    return _read_dialogue_json(path)


def _read_dialogue_json(path: Path) -> Iterator[pl.DataFrame]:
    for piece in read_file_lines(path):
        rows: list[dict[str, object]] = []
        for row, line, problem, raw in piece.iter_rows():
            place = {"file": path.name, "row": row}
            if problem:
                rows.append({**place, "problem": problem, "raw": raw})
            elif line.strip():
                rows.extend({**place, **utterance} for utterance in _parse_dialogue(path, line))
        yield conversations(rows)


def _parse_dialogue(path: Path, line: str) -> list[dict[str, object]]:
    raw = shorten_rejected_text(line)
    try:
        conversation = json.loads(line)
    except (RecursionError, ValueError) as error:
        return [{"problem": f"not readable as JSON: {error}", "raw": raw}]
    if not isinstance(conversation, dict):
        return [{"problem": "not readable as JSON: a line must be an object", "raw": raw}]
    for key in ("id", "utterances"):
        if key not in conversation:
            return [{"problem": f"missing key: '{key}'", "raw": raw}]
    utterances = conversation["utterances"]
    if not isinstance(utterances, list) or not utterances:
        problem = "not a list: 'utterances' must be a list with at least one utterance"
        return [{"problem": problem, "raw": raw}]
    shared = {key: conversation.get(key) for key in _OF_ALL}
    shared["conversation_id"] = conversation["id"]
    rows = []
    for turn, utterance in enumerate(utterances):
        if isinstance(utterance, dict) and {"role", "text"} <= set(utterance):
            rows.append(_parse_dialogue_utterance(path, {**utterance, **shared, "turn": turn}, raw))
        else:
            problem = "missing key: an utterance must have 'role' and 'text'"
            rows.append({"problem": problem, "raw": raw})
    return rows


def _read_dialogue_csv(path: Path) -> Iterator[pl.DataFrame]:
    for piece in chunk_rows(read_csv_records(path, _REQUIRED)):
        rows = []
        for record in piece:
            place: dict[str, object] = {"file": path.name, "row": record.row}
            if record.problem:
                name = record.fields.get("conversation_id", "").encode(errors="replace").decode()
                place |= {"conversation_id": name or None, "raw": record.raw}
                rows.append({**place, "problem": record.problem})
            else:  # an empty cell is a missing value
                fields = {key: value for key, value in record.fields.items() if value.strip()}
                rows.append(
                    {**place, **_parse_dialogue_utterance(path, fields, ",".join(fields.values()))}
                )
        yield conversations(rows)


def _read_dialogue_parquet(path: Path) -> Iterator[pl.DataFrame]:
    try:
        table = pq.ParquetFile(path)
        present = table.schema_arrow.names
        missing = [name for name in _REQUIRED if name not in present]
        if missing:
            raise DataError(f"{path}: column '{missing[0]}' is missing; it has {present}")
        columns = [name for name in (*_REQUIRED, *_OPTIONAL) if name in present]
        row = 0
        for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME, columns=columns):
            rows = []
            for fields in batch.to_pylist():
                row += 1
                place = {"file": path.name, "row": row}
                rows.append({**place, **_parse_dialogue_utterance(path, fields, repr(fields))})
            yield conversations(rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from error


def _parse_dialogue_utterance(path: Path, fields: Mapping[str, Any], raw: str) -> dict[str, object]:
    """Return the row of an utterance from its values by name, the same for all formats."""
    row: dict[str, object] = {"conversation_id": None}
    try:
        row["conversation_id"] = _parse_dialogue_name(fields.get("conversation_id"))
        row.update({key: _parse_dialogue_text(key, fields.get(key)) for key in _TEXTS})
        row["split"] = row["split"] or split_from_file_name(path)
        row["turn"] = _parse_dialogue_turn(fields.get("turn"))
        row["cause"] = _parse_dialogue_truth(fields.get("cause"))
        row.update({key: _parse_dialogue_seconds(key, fields.get(key)) for key in ("start", "end")})
    except _BadValueError as error:
        return {**row, "problem": str(error), "raw": raw.encode(errors="backslashreplace").decode()}
    if row["label"] is not None and row["label"] not in LABELS:
        row["problem"] = unknown_choice_error("label", row["label"], LABELS)
    return row


def _parse_dialogue_name(value: Any) -> str:
    if type(value) is int:
        return str(value)
    name = _parse_dialogue_text("id", value)
    if not name:
        raise _BadValueError("no conversation id")
    return name


def _parse_dialogue_text(key: str, value: Any) -> str | None:
    if value is None or value != value:  # NaN: pandas writes missing values so
        return None
    if not isinstance(value, str):
        raise _BadValueError(f"not text: {key} is {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _BadValueError(f"not text: {key} contains a lone surrogate") from None
    return value.strip()


def _parse_dialogue_turn(value: Any) -> int:
    # pandas converts a column of integers to floats (0.0) if one of them is missing.
    text = str(value).strip().removesuffix(".0")
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 9:
        raise _BadValueError(f"not a whole number: turn '{value}'")
    return int(text)


def _parse_dialogue_truth(value: Any) -> bool | None:
    if value is None or value != value:
        return None
    try:
        return _TRUTH[str(value).strip().lower()]
    except KeyError:
        raise _BadValueError(f"not true or false: cause '{value}'") from None


def _parse_dialogue_seconds(key: str, value: Any) -> float | None:
    if value is None or value != value:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _BadValueError(f"not a number of seconds: {key} '{value}'") from None
