"""Anybody's own dialogues: JSON lines, CSV or Parquet.

JSON lines, one conversation each:
    {"id": "a1", "emotion": "sad", "situation": "...", "split": "train",
     "utterances": [{"role": "speaker", "text": "..."}, {"role": "listener", "text": "..."}]}
CSV and Parquet, one utterance a row: conversation_id, turn, role, text. `emotion`, `situation` and
`split` may be left out everywhere, and an utterance may carry `label` (one of the 41) and `cause`
(does it hold the cause of the conversation's emotion?).
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from attune.platform.corpora.conversations import conversations
from attune.platform.corpora.files import ROWS_AT_A_TIME, in_pieces, lines, records, split_of
from attune.platform.corpora.labels import LABELS
from attune.platform.errors import DataError, unknown

NAME = "dialogues"
EMOTION_LABELS = LABELS
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_REQUIRED = ("conversation_id", "turn", "role", "text")
_OPTIONAL = ("emotion", "situation", "split", "label", "cause")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def recognises(path: Path, first_line: str) -> bool:
    """By the ending; a CSV by its column conversation_id."""
    if path.suffix == ".csv":
        return "conversation_id" in first_line
    return (
        path.suffix == ".parquet"
        or path.name.endswith(_JSON_LINES)
        or _is_json_lines(path, first_line)
    )


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:  # noqa: ARG001
    """Conversations, a piece of the file at a time."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.name.endswith((".csv", ".csv.gz")):
        return _read_csv(path)
    return _read_json_lines(path)


def _is_json_lines(path: Path, first_line: str) -> bool:
    return path.suffix == ".json" and first_line.startswith("{") and first_line.endswith("}")


def _read_json_lines(path: Path) -> Iterator[pl.DataFrame]:
    for piece in lines(path):
        rows: list[dict[str, object]] = []
        for row, line, problem in piece.iter_rows():
            place = {"file": path.name, "row": row}
            if problem:
                rows.append({**place, "problem": problem})
            elif line.strip():
                rows.extend({**place, **utterance} for utterance in _conversation(path, line))
        yield conversations(rows)


def _conversation(path: Path, line: str) -> list[dict[str, object]]:
    try:
        conversation = json.loads(line)
    except json.JSONDecodeError as error:
        return [{"problem": f"not readable as JSON: {error}"}]
    if not isinstance(conversation, dict):
        return [{"problem": "not readable as JSON: a line must be an object"}]
    for key in ("id", "utterances"):
        if key not in conversation:
            return [{"problem": f"missing key: '{key}'"}]
    shared: dict[str, object] = {
        "conversation_id": str(conversation["id"]),
        "emotion": _text(conversation.get("emotion")),
        "situation": _text(conversation.get("situation")),
        "split": _text(conversation.get("split")) or split_of(path),
    }
    utterances = conversation["utterances"]
    if not isinstance(utterances, list) or not utterances:
        return [
            {
                **shared,
                "problem": "not a list: 'utterances' must be a list with at least one utterance",
            }
        ]
    return [{**shared, "turn": turn, **_utterance(u)} for turn, u in enumerate(utterances)]


def _utterance(utterance: Any) -> dict[str, object]:
    if not isinstance(utterance, dict) or not {"role", "text"} <= set(utterance):
        return {"problem": "missing key: an utterance needs 'role' and 'text'"}
    label, cause = _text(utterance.get("label")), utterance.get("cause")
    fields: dict[str, object] = {
        "role": _text(utterance["role"]),
        "text": _text(utterance["text"]),
        "label": label,
    }
    if label is not None and label not in LABELS:
        return {**fields, "problem": unknown("label", label, LABELS)}
    if cause is not None and not isinstance(cause, bool):
        return {**fields, "problem": f"not true or false: cause {cause!r}"}
    return {**fields, "cause": cause}


def _read_csv(path: Path) -> Iterator[pl.DataFrame]:
    for piece in in_pieces(records(path, required=_REQUIRED)):
        yield conversations([_row(path, *record) for record in piece])


def _row(path: Path, row: int, fields: dict[str, Any], problem: str | None) -> dict[str, object]:
    place: dict[str, object] = {"file": path.name, "row": row, "problem": problem}
    if problem:
        return place
    given = {name: _text(fields.get(name)) or None for name in (*_REQUIRED, *_OPTIONAL)}
    turn, cause = str(given["turn"]), given.pop("cause")
    place |= given
    place["split"] = given["split"] or split_of(path)
    place["turn"] = int(turn) if turn.isdecimal() else None
    if not turn.isdecimal():
        return {**place, "problem": f"not a whole number: turn '{turn}'"}
    if cause is not None and cause.lower() not in _TRUTH:
        return {**place, "problem": f"not true or false: cause '{cause}'"}
    if given["label"] is not None and given["label"] not in LABELS:
        return {**place, "problem": unknown("label", given["label"], LABELS)}
    return {**place, "cause": None if cause is None else _TRUTH[cause.lower()]}


def _read_parquet(path: Path) -> Iterator[pl.DataFrame]:
    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from error
    missing = [name for name in _REQUIRED if name not in table.schema_arrow.names]
    if missing:
        raise DataError(
            f"{path}: column '{missing[0]}' is missing; it has {table.schema_arrow.names}"
        )
    if table.metadata.num_rows == 0:
        raise DataError(f"{path} is empty (row 1 is missing): take the file out or fill it")
    columns = [n for n in (*_REQUIRED, *_OPTIONAL) if n in table.schema_arrow.names]
    row = 0
    for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME, columns=columns):
        rows = batch.to_pylist()
        yield conversations([_row(path, row + n, f, None) for n, f in enumerate(rows, start=1)])
        row += len(rows)


def _text(value: Any) -> str | None:
    return None if value is None else str(value).strip()
