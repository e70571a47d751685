"""EmpatheticDialogues (Rashkin et al. 2019), the official CSV.

Nothing in it is quoted: a comma inside a text is written `_comma_` and a quotation mark is a plain
character. A few rows are ragged (official test and valid files carry candidates behind the eighth
field): what lies behind is dropped and counted, and what lacks only the last two fields, which
nobody uses, is kept and counted. The role is the parity of `utterance_idx`: the first to speak
is the one who feels.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError
from attune.platform.data.conversations import LISTENER, SPEAKER, SPLITS, conversations
from attune.platform.data.files import extension, lines, split_from_name
from attune.platform.data.labels import EMOTIONS

NAME = "ed"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".csv",)
STREAMS = SPLITS
HEADER = [
    "conv_id", "utterance_idx", "context", "prompt", "speaker_idx", "utterance", "selfeval", "tags",
]  # fmt: skip
NEEDED = 6  # the utterance is the sixth


def recognises(path: Path, head: str) -> bool:
    """A CSV whose header has the official names."""
    return extension(path) == ".csv" and head.startswith("conv_id,utterance_idx")


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Conversations, a piece of the file at a time."""
    for number, piece in enumerate(lines(path)):
        if number == 0:
            _check_header(path, piece["line"][0], piece["problem"][0])
            piece = piece.slice(1)
        piece = piece.filter(pl.col("line").ne_missing(""))
        fields = piece.with_columns(field=pl.col("line").str.split(",")).with_columns(
            count=pl.col("field").list.len()
        )
        readable = pl.col("count") >= NEEDED
        ragged = fields.filter(readable & (pl.col("count") != len(HEADER))).height
        if ragged:
            tolerated["ragged rows"] += ragged
        index = _field("utterance_idx").str.strip_chars().cast(pl.Int64, strict=False)
        # A file that somebody saved with quoted cells: its commas would be taken for ours.
        quoted = (pl.col("count") > len(HEADER)) & (_opens("utterance") | _opens("prompt"))
        yield conversations(
            fields.select(
                conversation_id=pl.when(pl.col("count") > 1).then(_field("conv_id")),
                split=pl.lit(split_from_name(path)),
                turn=index - 1,
                role=pl.when(index % 2 == 1).then(pl.lit(SPEAKER)).otherwise(pl.lit(LISTENER)),
                text=_text("utterance"),
                emotion=_field("context").str.strip_chars(),
                situation=_text("prompt"),
                file=pl.lit(path.name),
                row="row",
                raw=pl.when(~readable | quoted).then("line").otherwise("raw"),
                problem=pl.when(pl.col("problem").is_not_null())
                .then("problem")
                .when(~readable)
                .then(
                    pl.format(
                        f"wrong number of fields: {{}} where {len(HEADER)} are expected",
                        "count",
                    )
                )
                .when(quoted)
                .then(pl.lit("quoted cell: texts are not quoted here, and a comma is '_comma_'"))
                .when(index.is_null())
                .then(pl.format("not a whole number: utterance_idx '{}'", _field("utterance_idx"))),
            )
        )


def _field(name: str) -> pl.Expr:
    return pl.col("field").list.get(HEADER.index(name), null_on_oob=True)


def _text(name: str) -> pl.Expr:
    return _field(name).str.replace_all("_comma_", ",", literal=True).str.strip_chars()


def _opens(name: str) -> pl.Expr:
    return _field(name).str.starts_with('"') & ~_field(name).str.ends_with('"')


def _check_header(path: Path, header: str | None, problem: str | None) -> None:
    if header is None:
        raise DataError(f"{path}, row 1: {problem}")
    names = header.split(",")
    missing = [name for name in HEADER[:NEEDED] if name not in names]
    if missing:
        raise DataError(
            f"{path}, row 1: column '{missing[0]}' is missing; the header is '{header}'"
        )
    if names[:NEEDED] != HEADER[:NEEDED]:
        raise DataError(f"{path}, row 1: the columns must be in the order {','.join(HEADER)}")
