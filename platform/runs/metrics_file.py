"""metrics.jsonl: the metrics of a run on disk, independent of a tracking server."""

import json
import time
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends lines; a resumed run first removes those of steps after its checkpoint."""

    def __init__(self, path: Path, done: int):
        self.path = path
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= done]
        new = path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        new.replace(path)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line."""
        line = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": metrics}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[str]:
    """Return the complete lines of a file that may be growing."""
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")  # the last may be half-written
    return whole


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all logged lines, parsed."""
    return [json.loads(line) for line in read_lines(path)]
