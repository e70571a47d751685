"""MELD (Poria et al. 2019): a television series with speakers, emotions and subtitle times.

The first to speak is our speaker, everybody else listens. Some dialogues lack a line (their
numbers have gaps): what is there is taken as it stands and counted. The three official files share
episodes; `episode` lets a user divide them properly.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.corpora.conversations import (
    LISTENER,
    SPEAKER,
    conversations,
    whole_conversations,
)
from attune.platform.corpora.files import in_pieces, records, split_of
from attune.platform.corpora.labels import EMOTIONS, SEVEN_EMOTIONS
from attune.platform.errors import unknown

NAME = "meld"
EMOTION_LABELS = EMOTIONS
_COLUMNS = (
    "Utterance", "Speaker", "Emotion", "Dialogue_ID", "Utterance_ID", "Season", "Episode",
    "StartTime", "EndTime",
)  # fmt: skip


def recognises(path: Path, first_line: str) -> bool:
    """A CSV with MELD's dialogue numbers."""
    return path.suffix == ".csv" and "Dialogue_ID" in first_line


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Conversations, a piece of the file at a time."""
    pieces = (conversations([_row(path, *record) for record in piece]) for piece in _pieces(path))
    for frame in whole_conversations(pieces):
        dialogue = pl.col("conversation_id")
        placed = frame.with_columns(place=pl.int_range(pl.len()).over(dialogue))
        gaps = placed.filter(pl.col("turn") != pl.col("place"))["conversation_id"].n_unique()
        if gaps:
            tolerated["dialogues that lack a line"] += gaps
        first = pl.col("speaker").first().over(dialogue)
        yield placed.with_columns(
            turn="place",
            role=pl.when(pl.col("speaker") == first)
            .then(pl.lit(SPEAKER))
            .otherwise(pl.lit(LISTENER)),
        ).drop("place")


def _pieces(path: Path) -> Iterator[list[tuple[int, dict[str, str], str | None]]]:
    return in_pieces(records(path, required=_COLUMNS))


def _row(path: Path, row: int, fields: dict[str, str], problem: str | None) -> dict[str, object]:
    place: dict[str, object] = {"file": path.name, "row": row, "problem": problem}
    if problem:
        return place
    try:
        times = {"start": _seconds(fields["StartTime"]), "end": _seconds(fields["EndTime"])}
        turn, season, episode = (
            _whole(name, fields[name]) for name in ("Utterance_ID", "Season", "Episode")
        )
    except ValueError as error:
        return {**place, "problem": str(error)}
    emotion = fields["Emotion"].strip().lower()
    return {
        **place,
        **times,
        "conversation_id": f"{path.stem}-{fields['Dialogue_ID']}",
        "split": split_of(path),
        "turn": turn,
        "text": fields["Utterance"].strip(),
        "label": emotion,
        "speaker": fields["Speaker"],
        "episode": f"s{season:02d}e{episode:02d}",
        "problem": None if emotion in SEVEN_EMOTIONS else unknown("label", emotion, SEVEN_EMOTIONS),
    }


def _whole(name: str, value: str) -> int:
    if not value.strip().isdecimal():
        raise ValueError(f"not a whole number: {name} '{value}'")
    return int(value)


def _seconds(clock: str) -> float:
    """`0:05:52,435` in seconds."""
    try:
        hours, minutes, seconds = clock.replace(",", ".").split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        raise ValueError(f"not a time: '{clock}' (hours:minutes:seconds,milliseconds)") from None
