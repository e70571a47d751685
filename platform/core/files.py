"""Files: read them plain or gzipped, write them atomically, compute their checksums."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attune.platform.core.errors import DataError

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@contextmanager
def open_file_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read, decompressed if its name ends in .gz; a DataError if that fails."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (row 1 is missing): take the file out or fill it")
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as stream:
            if stream.read(2) in _UTF16:
                raise DataError(
                    f"{path}, row 1: the file is UTF-16; convert it with 'iconv -f utf-16 -t utf-8'"
                )
            stream.seek(0)
            yield stream  # type: ignore[misc]
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be read to its end: {error}") from error


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` once it is completely written."""
    new = path.with_suffix(".new")
    yield new
    new.replace(path)


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
