"""metrics.jsonl: the metrics of a run on disk, independent of a tracking server."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attune.platform.core.errors import DataError


class LineFollower:
    """Reads the complete lines of a growing file, each once.

    A resumed run rewrites its metrics file without the lines after its checkpoint; the lines that
    it keeps are not returned again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._end, self._last_line = 0, b""
        self._hashes: list[int] = []
        """One for each line read, to find the kept lines of a rewritten file."""

    def read_new_lines(self) -> list[str]:
        """Return the lines since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end - len(self._last_line))
                is_rewritten = file.read(len(self._last_line)) != self._last_line
                if is_rewritten:
                    file.seek(0)
                lines = [line for line in file if line.endswith(b"\n")]  # the last may be partial
        except FileNotFoundError:
            return []
        if is_rewritten:
            known, self._end, self._last_line, self._hashes = self._hashes, 0, b"", []
            kept = _common_metrics_prefix(known, [hash(line) for line in lines])
            self._advance(lines[:kept])
            lines = lines[kept:]
        self._advance(lines)
        return [line.decode().removesuffix("\n") for line in lines]

    def _advance(self, lines: list[bytes]) -> None:
        for line in lines:
            self._end += len(line)
            self._last_line = line
            self._hashes.append(hash(line))


class MetricsFollower(LineFollower):
    """Reads the parsed lines of a growing metrics file, each once."""

    def read_new_metrics(self) -> list[dict[str, Any]]:
        """Return the lines since the last call; a damaged one, of a killed process, is skipped."""
        parsed = []
        for line in self.read_new_lines():
            try:
                parsed.append(_parse_metrics_line(line))
            except ValueError:
                continue
        return parsed


class MetricsFile:
    """Appends lines; a resumed run first removes those of steps after its checkpoint."""

    def __init__(self, path: Path, done: int, report: Callable[[str], None] = lambda _: None):
        self.path = path
        lines = load_metrics(path, report)
        write_metrics(path, [line for line in lines if line["step"] <= done])

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line."""
        line = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": metrics}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all logged lines, parsed."""
    return MetricsFollower(path).read_new_metrics()


def load_metrics(path: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the lines of a file that no process writes to, parsed.

    A truncated last line, of a process that was killed, is left out and reported. Any other damaged
    line is a DataError.
    """
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else [b""]
    if lines == [b""]:
        return []
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(_parse_metrics_line(line))
        except ValueError:
            if number < len(lines):
                text = line[:60].decode(errors="replace")
                raise DataError(
                    f"{path}, line {number}: expected a JSON object with step, time and metrics, "
                    f"got '{text}'; delete the line and resume: its metrics are restored from "
                    f"MLflow if they were sent"
                ) from None
            report(f"{path}, line {number}: dropped the last line, which is truncated")
    return parsed


def _parse_metrics_line(text: str | bytes) -> dict[str, Any]:
    """Return a line of the metrics file; raise ValueError if it is none."""
    line = json.loads(text)
    match line:
        case {"step": int(), "time": int(), "metrics": dict()}:
            return dict(line)
    raise ValueError


def write_metrics(path: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the file by one with these lines."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    new.replace(path)


def _common_metrics_prefix(known: list[int], current: list[int]) -> int:
    pairs = zip(known, current, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other),
                min(len(known), len(current)))  # fmt: skip
