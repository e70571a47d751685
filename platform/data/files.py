"""Chunked reading of text, CSV and Parquet files, and chunked writing of Parquet files.

Memory does not grow with the size of a file, so a corpus may be larger than memory. Each row of a
text file or CSV has its line number, from 1. A row that cannot be read has the reason and its raw
text in place of its content.
"""

import csv
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import open_file_bytes

ROWS_AT_A_TIME = 50_000
BYTES_PER_ROW = 256
MEGABYTE = 10**6
RAW_LENGTH, LONGEST_RAW = 300, 350
"""A rejected text of more than `LONGEST_RAW` characters is cut to `RAW_LENGTH`. The difference
leaves space for the note of its length, so that a shortened text is not shortened again."""
T = TypeVar("T")
_SPLIT_NAMES = {"train": "train", "valid": "valid", "dev": "valid", "val": "valid", "test": "test"}
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, by surrogateescape


def file_extension(path: Path) -> str:
    """Return the extension in lower case, without compression: `.csv` for `Train.CSV.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def split_from_file_name(path: Path) -> str | None:
    """Return the split in a file's name, or None: test for `dailydialog_test.json`, valid for
    `dev.csv`."""
    words = path.name.lower().replace(".", "_").replace("-", "_").split("_")
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), None)


def file_head(path: Path) -> str:
    """Return the first lines, by which formats are recognised; bytes that are not UTF-8 are
    replaced."""
    with open_file_bytes(path) as stream:
        return stream.read(2048).decode("utf-8-sig", errors="replace").strip()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit on the size of an input, so that one file cannot use all memory."""

    variable: str
    """The environment variable that sets it, in megabytes."""
    default: float

    @property
    def bytes(self) -> int:
        """The limit in bytes."""
        text = os.environ.get(self.variable) or self.default
        try:
            size = float(text) * MEGABYTE
        except ValueError:
            size = 0
        if not 1 <= size < 2**62:
            raise UsageError(f"{self.variable}={text}: expected a number of megabytes above 0")
        return int(size)

    def describe(self) -> str:
        """Return `4 MB (ATTUNE_MAX_LINE_MB)`."""
        return f"{self.bytes / MEGABYTE:g} MB ({self.variable})"


LINE = Limit(variable="ATTUNE_MAX_LINE_MB", default=4)
"""A line of a text file; a longer one is rejected."""
FIELD = Limit(variable="ATTUNE_MAX_FIELD_MB", default=1)
"""A cell of a CSV; a row with a longer one is rejected."""
DOCUMENT = Limit(variable="ATTUNE_MAX_DOCUMENT_MB", default=64)
"""A file that is read as a whole: JSON, XML and SRT; decompressed."""
FILE = Limit(variable="ATTUNE_MAX_FILE_MB", default=200_000)
"""A file that is read line by line; decompressed."""


def read_whole_file(path: Path) -> bytes:
    """Return the decompressed content of a file that is read as a whole."""
    with open_file_bytes(path) as stream:
        content = stream.read(DOCUMENT.bytes + 1)
    if len(content) > DOCUMENT.bytes:
        raise DataError(
            f"{path} is larger than {DOCUMENT.describe()}: split it, or raise the limit"
        )
    return content


class LineReader:
    """Reads the lines of a file, within the limits for lines and files."""

    def __init__(self, path: Path, stream: IO[bytes]):
        self.path, self.stream = path, stream
        self.number = 0
        """The number of lines read so far."""
        self.size = 0
        """The number of bytes read so far."""
        self.limit, self.file_limit = LINE.bytes, FILE.bytes

    def read(self) -> tuple[bytes, str | None]:
        """Return the next line and its problem, if any. A line that is too long is cut; at the end
        of the file the line is empty."""
        line = self._read_line_part()
        self.number += bool(line)
        if self.number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) <= self.limit:
            return line, None
        part = line
        while part and not part.endswith(b"\n"):
            part = self._read_line_part()
        problem = f"line longer than {LINE.describe()}: split it, or raise the limit"
        return line[:RAW_LENGTH], problem

    def _read_line_part(self) -> bytes:
        """Return the rest of the line, up to one byte more than the limit."""
        part = self.stream.readline(self.limit + 1)
        self.size += len(part)
        if self.size > self.file_limit:
            raise DataError(
                f"{self.path} is larger than {FILE.describe()} when decompressed: split it, or "
                f"raise the limit"
            )
        return part


def read_file_lines(path: Path) -> Iterator[pl.DataFrame]:
    """Yield frames of (row, line, problem, raw): the lines of a text file."""
    with open_file_bytes(path) as stream:
        reader = LineReader(path, stream)
        while chunk := list(_read_line_chunk(reader)):
            texts, problems, raws = zip(*chunk, strict=True)
            last = reader.number
            yield pl.DataFrame(
                {
                    "row": range(last + 1 - len(chunk), last + 1),
                    "line": texts,
                    "problem": problems,
                    "raw": raws,
                },
                schema={"row": pl.Int64, **dict.fromkeys(("line", "problem", "raw"), pl.String)},
            )


def _read_line_chunk(reader: LineReader) -> Iterator[tuple[str | None, str | None, str | None]]:
    """Yield (line, problem, raw) of the next lines."""
    end = reader.size + ROWS_AT_A_TIME * BYTES_PER_ROW
    while reader.size < end:
        line, problem = reader.read()
        if not line:
            return
        if problem is None:
            yield _decode_file_line(line)
        else:
            yield None, problem, line.decode("utf-8", errors="backslashreplace")


def shorten_rejected_text(text: str) -> str:
    """Return a text of readable length for the file of rejected rows."""
    if len(text) <= LONGEST_RAW:
        return text
    return f"{text[:RAW_LENGTH]} ... ({len(text)} characters)"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A row of a CSV."""

    row: int
    fields: dict[str, str]
    problem: str | None = None

    @property
    def raw(self) -> str | None:
        """The text of a row with a problem, for the file of rejected rows."""
        if self.problem is None:
            return None
        return ",".join(self.fields.values()).encode(errors="backslashreplace").decode()


def read_csv_header(path: Path) -> list[str]:
    """Return the column names of a CSV."""
    with open_file_bytes(path) as stream:
        return _parse_csv_header(path, csv.reader(_DecodedLines(LineReader(path, stream))))


def read_csv_records(path: Path, required: Iterable[str]) -> Iterator[Record]:
    """Yield the rows of a CSV, whose cells may be quoted and contain line breaks.

    This uses Python's csv: polars rejects a whole file because of one bad row, without its number.
    """
    csv.field_size_limit(FIELD.bytes)
    with open_file_bytes(path) as stream:
        source = LineReader(path, stream)
        reader = csv.reader(_DecodedLines(source), strict=True)
        header = _parse_csv_header(path, reader)
        missing = sorted(set(required) - set(header))
        if missing:
            raise DataError(
                f"{path}, row 1: column {_quote_csv_names(missing)} is missing; the header has "
                f"{_quote_csv_names(header)}"
            )
        while True:
            row = source.number + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}, row {row}: a quotation mark opens here and is never closed, so "
                        f"the rest of the file cannot be read: close it, or double it if it is "
                        f"part of the text"
                    ) from None
                yield Record(row=row, fields={}, problem=_csv_problem(error))
                continue
            if fields:
                named = dict(zip(header, fields, strict=False))
                yield Record(row=row, fields=named, problem=_csv_record_problem(fields, header))


def chunk_rows(rows: Iterable[T], size: int = ROWS_AT_A_TIME) -> Iterator[list[T]]:
    """Yield lists of at most `size` rows."""
    piece: list[T] = []
    for row in rows:
        piece.append(row)
        if len(piece) >= size:
            yield piece
            piece = []
    if piece:
        yield piece


class ParquetWriter:
    """Writes a Parquet file in chunks: frames of the same schema."""

    def __init__(self, path: Path, schema: pl.Schema):
        self.writer = pq.ParquetWriter(
            path, _rows_to_arrow(schema.to_frame()).schema, compression="zstd"
        )

    def write(self, rows: pl.DataFrame) -> None:
        """Append rows."""
        self.writer.write_table(_rows_to_arrow(rows))

    def __enter__(self) -> "ParquetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()


def read_parquet_chunks(
    path: Path, size: int, columns: Iterable[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Yield frames of at most `size` rows of a Parquet file."""
    try:
        wanted = None if columns is None else list(columns)
        for batch in pq.ParquetFile(path).iter_batches(size, columns=wanted):
            piece = pl.from_arrow(batch)
            assert isinstance(piece, pl.DataFrame)
            yield piece
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is missing or damaged: create its folder again") from error


def read_parquet_rows(path: Path, start: int, count: int) -> pl.DataFrame:
    """Return `count` consecutive rows of a Parquet file, in their order."""
    rows = pl.scan_parquet(path, row_index_name="_row").slice(start, count).collect()
    return rows.sort("_row").drop("_row")


def _rows_to_arrow(rows: pl.DataFrame) -> Any:
    return rows.to_arrow(compat_level=pl.CompatLevel.oldest())


def _parse_csv_header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip().encode(errors="replace").decode() for name in next(reader, [])]
    except csv.Error as error:
        raise DataError(f"{path}, row 1: {_csv_problem(error)}") from None
    for name in names:
        if name and names.count(name) > 1:
            raise DataError(
                f"{path}, row 1: column '{name}' occurs {names.count(name)} times: rename "
                f"or remove all but one"
            )
    return names


def _csv_problem(error: csv.Error) -> str:
    if "field larger than" in str(error):
        return (
            f"field larger than {FIELD.describe()}: close its quotation mark, shorten it, or raise "
            f"the limit"
        )
    return f"not readable as CSV: {error}"


def _decode_file_line(line: bytes) -> tuple[str | None, str | None, str | None]:
    try:
        return line.rstrip(b"\r\n").decode("utf-8"), None, None
    except UnicodeDecodeError as error:
        raw = line.rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")
        return None, _not_utf8(line[error.start], error.start), raw


class _DecodedLines:
    """Decoded lines for Python's csv. Unlike a generator, it can continue after an error."""

    def __init__(self, reader: LineReader):
        self.reader = reader

    def __iter__(self) -> "_DecodedLines":
        return self

    def __next__(self) -> str:
        line, problem = self.reader.read()
        if problem is not None:
            raise csv.Error(problem)
        if not line:
            raise StopIteration
        return line.decode("utf-8", errors="surrogateescape")


def _csv_record_problem(fields: list[str], header: list[str]) -> str | None:
    for field in fields:
        if match := _ESCAPED_BYTE.search(field):
            return _not_utf8(ord(match[0]) - 0xDC00, match.start())
    if len(fields) != len(header):
        return (
            f"wrong number of fields: expected {len(header)}, as in the header, got {len(fields)}"
        )
    return None


def _not_utf8(byte: int, position: int) -> str:
    return f"not UTF-8 (byte 0x{byte:02x} at position {position}): save the file as UTF-8"


def _quote_csv_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
