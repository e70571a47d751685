"""Rows out of files, a piece at a time: a corpus larger than memory is read in constant memory.

Every row comes with its number (1 for the first line, as an editor shows it) and, where it cannot
be read, with the reason instead of its content.
"""

import csv
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import polars as pl

from attune.platform.errors import DataError

ROWS_AT_A_TIME = 50_000
_SPLIT_NAMES = {"train": "train", "valid": "valid", "dev": "valid", "val": "valid", "test": "test"}
T = TypeVar("T")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def split_of(path: Path) -> str | None:
    """The split that a file's name tells: `dailydialog_test.json` is test, `dev.csv` is valid."""
    words = path.name.lower().replace(".", "_").replace("-", "_").split("_")
    return next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), None)


def open_bytes(path: Path) -> IO[bytes]:
    """A file to read, unpacked where its name ends in .gz; an empty or UTF-16 one is an error."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (row 1 is missing): take the file out or fill it")
    opened = gzip.open if path.suffix == ".gz" else open
    stream: IO[bytes] = opened(path, "rb")  # type: ignore[assignment]
    if stream.read(2) in _UTF16:
        stream.close()
        raise DataError(
            f"{path}, row 1: the file is UTF-16; convert it with 'iconv -f utf-16 -t utf-8'"
        )
    stream.seek(0)
    return stream


def first_line(path: Path) -> str:
    """The first line, for telling formats apart; what is not UTF-8 in it is replaced."""
    with open_bytes(path) as stream:
        return stream.readline(1 << 16).decode("utf-8-sig", errors="replace").strip()


def lines(path: Path) -> Iterator[pl.DataFrame]:
    """Frames of (row, line, problem): the lines of a text file."""
    with open_bytes(path) as stream:
        row = 0
        while chunk := stream.readlines(ROWS_AT_A_TIME * 256):
            if row == 0:
                chunk[0] = chunk[0].removeprefix(b"\xef\xbb\xbf")
            texts, problems = zip(*map(_decode, chunk), strict=True)
            yield pl.DataFrame(
                {
                    "row": range(row + 1, row + 1 + len(chunk)),
                    "line": texts,
                    "problem": problems,
                },
                schema={"row": pl.Int64, "line": pl.String, "problem": pl.String},
            )
            row += len(chunk)


def records(
    path: Path, required: Iterable[str]
) -> Iterator[tuple[int, dict[str, str], str | None]]:
    """(row, fields by column name, problem): a CSV whose cells may be quoted and hold line breaks.

    Python's csv and not polars: polars refuses a whole file for one bad row and can't say which.
    """
    with open_bytes(path) as stream:
        decoded = (line.decode("utf-8", errors="surrogateescape") for line in stream)
        reader = csv.reader(_without_mark(decoded))
        header = [name.strip() for name in next(reader, [])]
        missing = sorted(set(required) - set(header))
        if missing:
            raise DataError(
                f"{path}, row 1: column {_listed(missing)} is missing; the header has "
                f"{_listed(header)}"
            )
        while True:
            row = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield row, {}, f"not readable as CSV: {error}"
                continue
            if fields:
                yield row, dict(zip(header, fields, strict=False)), _record_problem(fields, header)


def in_pieces(rows: Iterable[T], size: int = ROWS_AT_A_TIME) -> Iterator[list[T]]:
    """Lists of at most `size` rows."""
    piece: list[T] = []
    for row in rows:
        piece.append(row)
        if len(piece) >= size:
            yield piece
            piece = []
    if piece:
        yield piece


def _decode(line: bytes) -> tuple[str | None, str | None]:
    try:
        return line.rstrip(b"\r\n").decode("utf-8"), None
    except UnicodeDecodeError as error:
        return None, _not_utf8(line[error.start], error.start)


def _record_problem(fields: list[str], header: list[str]) -> str | None:
    for field in fields:
        for position, character in enumerate(field):
            if "\udc80" <= character <= "\udcff":
                return _not_utf8(ord(character) - 0xDC00, position)
    if len(fields) != len(header):
        return f"wrong number of fields: {len(fields)} where the header has {len(header)}"
    return None


def _not_utf8(byte: int, position: int) -> str:
    return f"not UTF-8 (byte 0x{byte:02x} at position {position}): save the file as UTF-8"


def _without_mark(decoded: Iterator[str]) -> Iterator[str]:
    first = next(decoded, "")
    yield first.removeprefix("\ufeff")
    yield from decoded


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
