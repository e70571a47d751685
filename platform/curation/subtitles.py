"""Read subtitles: the lines of OPUS XML and SRT files, plain or gzipped, with their times.

A line of OPUS is a sentence: plain text, or tokens in `<w>`, which are joined again. Its times are
those of the `<time>` marks inside it, so a sentence that is shown together with the one before has
no start. A line of SRT is a subtitle block, or each part of it that begins with a dash; the times
between the parts are unknown.
"""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from attune.platform.core.errors import DataError
from attune.platform.data.files import file_extension, read_whole_file
from attune.platform.data.readers.edos import detokenize_edos_column

OPUS, SRT = ".xml", ".srt"
EXTENSIONS = (OPUS, SRT)
_CLOCK = re.compile(r"(\d+):(\d+):(\d+)[,.](\d+)")
_SHOWN = re.compile(rf"^\s*({_CLOCK.pattern})\s*-->\s*({_CLOCK.pattern})")
_DASH = re.compile(r"^\s*[-\u2013\u2014](?![-\u2013\u2014])")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a film with its start and end in seconds, None if unknown."""

    text: str
    start: float | None = None
    end: float | None = None


def find_subtitles(source: Path) -> list[Path]:
    """Return the subtitle files in a folder at any depth, sorted by name, or the one file."""
    if source.is_file():
        return [source] if file_extension(source) in EXTENSIONS else []
    return sorted(
        path for path in source.rglob("*") if path.is_file() and file_extension(path) in EXTENSIONS
    )


def read_subtitles(path: Path) -> list[Line]:
    """Return the lines of a file; raise a DataError if it is damaged or has none."""
    lines = _read_opus(path) if file_extension(path) == OPUS else list(_read_srt(path))
    if not lines:
        raise DataError(f"{path} contains no subtitles")
    return lines


def _read_opus(path: Path) -> list[Line]:
    lines, tokenized = [], False
    content = io.BytesIO(read_whole_file(path))
    try:
        for _, element in ET.iterparse(content, events=("end",)):
            if element.tag == "s":
                tokenized = tokenized or element.find(".//w") is not None
                if line := _parse_opus_sentence(element):
                    lines.append(line)
                element.clear()
    except (ET.ParseError, ValueError, LookupError) as error:  # LookupError: an odd encoding
        raise DataError(f"{path}: not readable as XML: {error}") from error
    return _detokenize_subtitles(lines) if tokenized else lines


def _parse_opus_sentence(element: ET.Element) -> Line | None:
    """Return an `<s>` element as a line, or None if it has no text."""
    words: list[str] = []
    start = end = None
    for part in element.iter():
        if part.tag == "time":
            clock = _parse_subtitle_time(part.get("value", ""))
            if part.get("id", "").endswith("S"):
                start = clock if start is None else start
            else:
                end = clock
        words.append(part.text or "")
        if part is not element:
            words.append(part.tail or "")
    text = " ".join(" ".join(words).split())
    return Line(text=text, start=start, end=end) if text else None


def _detokenize_subtitles(lines: list[Line]) -> list[Line]:
    texts = pl.DataFrame({"text": [line.text for line in lines]}, schema={"text": pl.String})
    joined = texts.select(detokenize_edos_column(pl.col("text"))).to_series()
    return [
        Line(text=text, start=line.start, end=line.end)
        for text, line in zip(joined, lines, strict=True)
    ]


def _read_srt(path: Path) -> Iterator[Line]:
    content = read_whole_file(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:  # most other files come from Windows
        text = content.decode("cp1252", errors="replace")
    shown: list[str] = []
    times: tuple[float | None, float | None] | None = None
    for row in [*text.splitlines(), "0:0:0,0 --> 0:0:0,0"]:
        if match := _SHOWN.match(row):
            if times is not None:
                if shown and shown[-1].isdecimal():  # the number of the next block
                    shown.pop()
                yield from _split_subtitle_at_dashes(shown, *times)
            times, shown = (_parse_subtitle_time(match[1]), _parse_subtitle_time(match[6])), []
        elif row.strip():
            shown.append(row.strip())
        elif shown and times is not None:  # the next row is a block's number
            yield from _split_subtitle_at_dashes(shown, *times)
            times, shown = None, []


def _split_subtitle_at_dashes(
    shown: list[str], start: float | None, end: float | None
) -> Iterator[Line]:
    """Yield the parts of a subtitle block, split before each row with a dash."""
    parts: list[list[str]] = []
    for row in shown:
        if not parts or _DASH.match(row):
            parts.append([])
        parts[-1].append(row)
    for number, part in enumerate(parts):
        yield Line(
            text=" ".join(part),
            start=start if number == 0 else None,
            end=end if number == len(parts) - 1 else None,
        )


def _parse_subtitle_time(clock: str) -> float | None:
    """Return a time such as `00:01:02,500` in seconds, or None if it is not a time."""
    match = _CLOCK.match(clock.strip())
    if match is None:
        return None
    hours, minutes, seconds, fraction = match.groups()
    return int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{fraction}")
