"""Rows out of files, a piece at a time: a corpus larger than memory is read in constant memory.

The same with Parquet, whose pieces are frames, out of files and into them.

Every row comes with its number (1 for the first line, as an editor shows it) and, where it cannot
be read, with the reason and its raw text instead of its content.
"""

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from attune.platform.core.errors import DataError
from attune.platform.core.files import open_bytes

ROWS_AT_A_TIME = 50_000
T = TypeVar("T")
_SPLIT_NAMES = {"train": "train", "valid": "valid", "dev": "valid", "val": "valid", "test": "test"}
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # how surrogateescape keeps what is not UTF-8


def extension(path: Path) -> str:
    """`.csv` for `Train.CSV.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def split_from_name(path: Path) -> str | None:
    """The split that a file's name tells: `dailydialog_test.json` is test, `dev.csv` is valid."""
    words = path.name.lower().replace(".", "_").replace("-", "_").split("_")
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), None)


def head(path: Path) -> str:
    """The first few lines, for telling formats apart; what is not UTF-8 in them is replaced."""
    with open_bytes(path) as stream:
        return stream.read(2048).decode("utf-8-sig", errors="replace").strip()


def lines(path: Path) -> Iterator[pl.DataFrame]:
    """Frames of (row, line, problem, raw): the lines of a text file."""
    with open_bytes(path) as stream:
        row = 0
        while chunk := stream.readlines(ROWS_AT_A_TIME * 256):
            if row == 0:
                chunk[0] = chunk[0].removeprefix(b"\xef\xbb\xbf")
            texts, problems, raws = zip(*map(_decode_line, chunk), strict=True)
            yield pl.DataFrame(
                {
                    "row": range(row + 1, row + 1 + len(chunk)),
                    "line": texts,
                    "problem": problems,
                    "raw": raws,
                },
                schema={"row": pl.Int64, **dict.fromkeys(("line", "problem", "raw"), pl.String)},
            )
            row += len(chunk)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A row of a CSV."""

    row: int
    fields: dict[str, str]
    problem: str | None = None

    @property
    def raw(self) -> str | None:
        """What a bad row held, for the rejects."""
        if self.problem is None:
            return None
        return ",".join(self.fields.values()).encode(errors="backslashreplace").decode()


def read_header(path: Path) -> list[str]:
    """The column names of a CSV."""
    with open_bytes(path) as stream:
        return _parse_header(path, csv.reader(_decode_lines(stream)))


def records(path: Path, required: Iterable[str]) -> Iterator[Record]:
    """A CSV whose cells may be quoted and hold line breaks.

    Python's csv and not polars: polars refuses a whole file for one bad row and can't say which.
    """
    csv.field_size_limit(2**31 - 1)
    with open_bytes(path) as stream:
        reader = csv.reader(_decode_lines(stream), strict=True)
        header = _parse_header(path, reader)
        missing = sorted(set(required) - set(header))
        if missing:
            raise DataError(
                f"{path}, row 1: column {_quote_names(missing)} is missing; the header has "
                f"{_quote_names(header)}"
            )
        while True:
            row = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}, row {row}: a quotation mark opens here and never closes, so the "
                        f"rest of the file is lost: close it, or double it if it is meant"
                    ) from None
                yield Record(row=row, fields={}, problem=f"not readable as CSV: {error}")
                continue
            if fields:
                named = dict(zip(header, fields, strict=False))
                yield Record(row=row, fields=named, problem=_record_problem(fields, header))


def chunked(rows: Iterable[T], size: int = ROWS_AT_A_TIME) -> Iterator[list[T]]:
    """Lists of at most `size` rows."""
    piece: list[T] = []
    for row in rows:
        piece.append(row)
        if len(piece) >= size:
            yield piece
            piece = []
    if piece:
        yield piece


class ParquetWriter:
    """A Parquet file that is written a frame at a time, all of one schema."""

    def __init__(self, path: Path, schema: pl.Schema):
        self.writer = pq.ParquetWriter(
            path, _to_arrow(schema.to_frame()).schema, compression="zstd"
        )

    def write(self, rows: pl.DataFrame) -> None:
        """Add a piece."""
        self.writer.write_table(_to_arrow(rows))

    def __enter__(self) -> "ParquetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def read_parquet_chunks(
    path: Path, size: int, columns: Iterable[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Frames of at most `size` rows of a Parquet file."""
    try:
        wanted = None if columns is None else list(columns)
        for batch in pq.ParquetFile(path).iter_batches(size, columns=wanted):
            piece = pl.from_arrow(batch)
            assert isinstance(piece, pl.DataFrame)
            yield piece
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is missing or damaged: make its folder anew") from error


def read_parquet_rows(path: Path, start: int, count: int) -> pl.DataFrame:
    """Return some consecutive rows of a Parquet file, in their order."""
    rows = pl.scan_parquet(path, row_index_name="_row").slice(start, count).collect()
    return rows.sort("_row").drop("_row")


def _to_arrow(rows: pl.DataFrame) -> Any:
    return rows.to_arrow(compat_level=pl.CompatLevel.oldest())


def _parse_header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    try:
        return [name.strip().encode(errors="replace").decode() for name in next(reader, [])]
    except csv.Error as error:
        raise DataError(f"{path}, row 1: not readable as CSV: {error}") from None


def _decode_line(line: bytes) -> tuple[str | None, str | None, str | None]:
    try:
        return line.rstrip(b"\r\n").decode("utf-8"), None, None
    except UnicodeDecodeError as error:
        raw = line.rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")
        return None, _not_utf8(line[error.start], error.start), raw


def _decode_lines(stream: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream):
        text = line.decode("utf-8", errors="surrogateescape")
        yield text.removeprefix("\ufeff") if number == 0 else text


def _record_problem(fields: list[str], header: list[str]) -> str | None:
    for field in fields:
        if match := _ESCAPED_BYTE.search(field):
            return _not_utf8(ord(match[0]) - 0xDC00, match.start())
    if len(fields) != len(header):
        return f"wrong number of fields: {len(fields)} where the header has {len(header)}"
    return None


def _not_utf8(byte: int, position: int) -> str:
    return f"not UTF-8 (byte 0x{byte:02x} at position {position}): save the file as UTF-8"


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
