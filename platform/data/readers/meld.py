"""MELD (Poria et al. 2019): a television series with speakers, emotions and subtitle times.

The first to speak gets the role of the speaker, all others that of the listener. Dialogues with a
missing line, which leaves a gap in the numbers, are kept and counted. The three official files
share episodes; the column `episode` makes splits without shared episodes possible.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import unknown_choice_error
from attune.platform.data.conversations import (
    LISTENER,
    SPEAKER,
    SPLITS,
    conversations,
    whole_conversations,
)
from attune.platform.data.files import (
    Record,
    chunk_rows,
    file_extension,
    read_csv_records,
    split_from_file_name,
)
from attune.platform.data.labels import EMOTIONS, MELD_LABELS

NAME = "meld"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".csv",)
STREAMS = SPLITS
_COLUMNS = (
    "Utterance", "Speaker", "Emotion", "Dialogue_ID", "Utterance_ID", "Season", "Episode",
    "StartTime", "EndTime",
)  # fmt: skip


def recognises(path: Path, head: str) -> bool:
    """Return whether a file is a CSV with MELD's dialogue numbers."""
    return file_extension(path) == ".csv" and "Dialogue_ID" in head.partition("\n")[0]


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Yield conversations, one chunk of the file at a time."""
    pieces = chunk_rows(read_csv_records(path, _COLUMNS))
    frames = (
        conversations([_parse_meld_row(path, record) for record in piece]) for piece in pieces
    )
    for frame in whole_conversations(frames):
        yield _assign_meld_turns(frame, tolerated)


def _assign_meld_turns(frame: pl.DataFrame, tolerated: Counter[str]) -> pl.DataFrame:
    """Return dialogues with roles, and with consecutive turns if the numbers only have gaps."""
    dialogue, turn, place = (pl.col(c) for c in ("conversation_id", "turn", "place"))
    placed = frame.with_columns(place=pl.int_range(pl.len()).over(dialogue))
    rising = (turn.diff() > 0).fill_null(True).all().over(dialogue)
    gaps = placed.filter(rising & (turn != place))["conversation_id"].n_unique()
    if gaps:
        tolerated["dialogues with a missing line"] += gaps
    first = pl.col("speaker").first().over(dialogue)
    return placed.with_columns(
        turn=pl.when(rising).then(place).otherwise(turn),
        role=pl.when(pl.col("speaker") == first).then(pl.lit(SPEAKER)).otherwise(pl.lit(LISTENER)),
    ).drop("place")


def _parse_meld_row(path: Path, record: Record) -> dict[str, object]:
    fields = record.fields
    row: dict[str, object] = {
        "file": path.name,
        "row": record.row,
        "problem": record.problem,
        "raw": record.raw,
    }
    if "Dialogue_ID" in fields:
        row["conversation_id"] = f"{path.stem}-{fields['Dialogue_ID']}"
    if record.problem:
        return row
    emotion = fields["Emotion"].strip().lower()
    row |= {
        "split": split_from_file_name(path),
        "text": fields["Utterance"].strip(),
        "label": emotion,
        "speaker": fields["Speaker"],
    }
    try:
        row["turn"] = _parse_meld_integer("Utterance_ID", fields)
        row["start"], row["end"] = (
            _parse_meld_seconds(fields["StartTime"]),
            _parse_meld_seconds(fields["EndTime"]),
        )
        season, episode = (_parse_meld_integer(key, fields) for key in ("Season", "Episode"))
        row["episode"] = f"s{season:02d}e{episode:02d}"
    except ValueError as error:
        return {**row, "problem": str(error)}
    if emotion not in MELD_LABELS:
        row["problem"] = unknown_choice_error("label", emotion, MELD_LABELS)
    return row


def _parse_meld_integer(name: str, fields: dict[str, str]) -> int:
    value = fields[name].strip()
    if not value.isdecimal() or len(value) > 9:
        raise ValueError(f"not a whole number: {name} '{value}'")
    return int(value)


def _parse_meld_seconds(clock: str) -> float:
    """Return a time such as `0:05:52,435` in seconds."""
    try:
        hours, minutes, seconds = clock.replace(",", ".").split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        raise ValueError(f"not a time: expected H:MM:SS,mmm, got '{clock}'") from None
