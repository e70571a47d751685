"""EmpatheticDialogues (Rashkin et al. 2019), the official CSV.

Cells are not quoted: a comma inside a text is written `_comma_`, and a quotation mark is an
ordinary character. Some rows are ragged (the official test and valid files have candidates after
the eighth field): additional fields are dropped and counted, and rows without the last two fields,
which are not used, are kept and counted. Roles alternate by `utterance_idx`; the first to speak is
the speaker.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError
from attune.platform.data.conversations import LISTENER, SPEAKER, SPLITS, conversations
from attune.platform.data.files import file_extension, read_file_lines, split_from_file_name
from attune.platform.data.labels import EMOTIONS

NAME = "ed"
EMOTION_LABELS = EMOTIONS
SUFFIXES = (".csv",)
STREAMS = SPLITS
HEADER = [
    "conv_id", "utterance_idx", "context", "prompt", "speaker_idx", "utterance", "selfeval", "tags",
]  # fmt: skip
NEEDED = 6  # the utterance is the sixth field


def recognises(path: Path, head: str) -> bool:
    """Return whether a file is a CSV with the official header."""
    return file_extension(path) == ".csv" and head.startswith("conv_id,utterance_idx")


def read(path: Path, tolerated: Counter[str]) -> Iterator[pl.DataFrame]:
    """Yield conversations, one chunk of the file at a time."""
    for number, piece in enumerate(read_file_lines(path)):
        if number == 0:
            _check_empathetic_dialogues_header(path, piece["line"][0], piece["problem"][0])
            piece = piece.slice(1)
        piece = piece.filter(pl.col("line").ne_missing(""))
        fields = piece.with_columns(field=pl.col("line").str.split(",")).with_columns(
            count=pl.col("field").list.len()
        )
        readable = pl.col("count") >= NEEDED
        ragged = fields.filter(readable & (pl.col("count") != len(HEADER))).height
        if ragged:
            tolerated["ragged rows"] += ragged
        index = (
            _empathetic_dialogues_field("utterance_idx")
            .str.strip_chars()
            .cast(pl.Int64, strict=False)
        )
        # In a file saved with quoted cells, commas would split the texts.
        quoted = (pl.col("count") > len(HEADER)) & (
            _opens_quotation("utterance") | _opens_quotation("prompt")
        )
        yield conversations(
            fields.select(
                conversation_id=pl.when(pl.col("count") > 1).then(
                    _empathetic_dialogues_field("conv_id")
                ),
                split=pl.lit(split_from_file_name(path)),
                turn=index - 1,
                role=pl.when(index % 2 == 1).then(pl.lit(SPEAKER)).otherwise(pl.lit(LISTENER)),
                text=_empathetic_dialogues_text("utterance"),
                emotion=_empathetic_dialogues_field("context").str.strip_chars(),
                situation=_empathetic_dialogues_text("prompt"),
                file=pl.lit(path.name),
                row="row",
                raw=pl.when(~readable | quoted).then("line").otherwise("raw"),
                problem=pl.when(pl.col("problem").is_not_null())
                .then("problem")
                .when(~readable)
                .then(
                    pl.format(
                        f"wrong number of fields: expected {len(HEADER)}, got {{}}",
                        "count",
                    )
                )
                .when(quoted)
                .then(pl.lit("quoted cell: expected unquoted texts, with '_comma_' for a comma"))
                .when(index.is_null())
                .then(
                    pl.format(
                        "not a whole number: utterance_idx '{}'",
                        _empathetic_dialogues_field("utterance_idx"),
                    )
                ),
            )
        )


def _empathetic_dialogues_field(name: str) -> pl.Expr:
    return pl.col("field").list.get(HEADER.index(name), null_on_oob=True)


def _empathetic_dialogues_text(name: str) -> pl.Expr:
    return (
        _empathetic_dialogues_field(name)
        .str.replace_all("_comma_", ",", literal=True)
        .str.strip_chars()
    )


def _opens_quotation(name: str) -> pl.Expr:
    return _empathetic_dialogues_field(name).str.starts_with('"') & ~_empathetic_dialogues_field(
        name
    ).str.ends_with('"')


def _check_empathetic_dialogues_header(path: Path, header: str | None, problem: str | None) -> None:
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
