"""EDOS (Welivita, Xie and Pu 2021): dialogues from OpenSubtitles, one per row, each with a label.

There are four files with different columns. The turns of a dialogue are the lines of a quoted cell;
in three files each begins with `- `. The texts are tokenised with spaces (`I 'm`). These are
removed, so that all datasets have the same spelling. The speakers are unknown, so roles alternate.
The label is that of the last turn, and the conversation's emotion if it is one of the 32. The split
is determined by a hash of the text, because some dialogues occur several times.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError, unknown_choice_error
from attune.platform.data.conversations import (
    LISTENER,
    SPEAKER,
    SPLITS,
    conversation_split_by_hash,
    conversations,
)
from attune.platform.data.files import (
    Record,
    chunk_rows,
    file_extension,
    read_csv_header,
    read_csv_records,
)
from attune.platform.data.labels import EMOTIONS, LABELS

NAME = "edos"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".csv",)
STREAMS = SPLITS
_DIALOG = ("os_dialog", "Dialog")
_LABEL = ("emotion", "Agreed emotion (2/3 vote)")


def recognises(path: Path, head: str) -> bool:
    """Return whether a file is a CSV with a column of dialogues."""
    first_line = head.partition("\n")[0]
    return file_extension(path) == ".csv" and (
        "os_dialog" in first_line or "Agreed emotion" in first_line
    )


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Yield conversations, one chunk of the file at a time."""
    columns = [_find_edos_column(path, names) for names in (_DIALOG, _LABEL)]
    dialogs = (
        _parse_edos_dialog(path, record, columns, tolerated)
        for record in read_csv_records(path, columns)
    )
    for piece in chunk_rows(dialogs):
        yield conversations([turn for dialog in piece for turn in dialog]).with_columns(
            text=detokenize_edos_column(pl.col("text"))
        )


def detokenize_edos_column(text: pl.Expr) -> pl.Expr:
    """Return detokenised text: `I 'm here , isn 't it ?` as `I'm here, isn't it?`."""
    return (
        text.str.replace_all(r"(?i)(\w) (n't|'(?:s|m|re|ve|ll|d|t)\b)", "${1}${2}")
        .str.replace_all(r" ([.,!?;:])", "${1}")
        .str.strip_chars()
    )


def _parse_edos_dialog(
    path: Path, record: Record, columns: list[str], tolerated: Counter[str]
) -> list[dict[str, object]]:
    place = {
        "conversation_id": f"{path.stem}-{record.row}",
        "file": path.name,
        "row": record.row,
        "problem": record.problem,
        "raw": record.raw,
    }
    if record.problem:
        return [place]
    dialog, label = (record.fields[column] for column in columns)
    label = label.lower().removesuffix("(other)").strip()
    if label == "-":
        tolerated["dialogs without a majority label"] += 1
    elif label not in LABELS:
        place["problem"] = unknown_choice_error("label", label, LABELS)
    turns = [turn.lstrip("- ").strip() for turn in dialog.split("\n")]
    spoken = [turn for turn in turns if turn]
    if len(spoken) < len(turns):
        tolerated["empty lines in dialogs"] += len(turns) - len(spoken)
    return [
        {
            **place,
            "split": conversation_split_by_hash("\n".join(spoken)),
            "turn": number,
            "role": LISTENER if number % 2 else SPEAKER,
            "text": text,
            "emotion": label if label in EMOTIONS else None,
            "label": label if label in LABELS and number == len(spoken) - 1 else None,
        }
        for number, text in enumerate(spoken or [""])
    ]


def _find_edos_column(path: Path, names: tuple[str, ...]) -> str:
    header = read_csv_header(path)
    for name in names:
        if name in header:
            return name
    raise DataError(
        f"{path}, row 1: expected one of the columns {', '.join(names)}; the header is {header}"
    )
