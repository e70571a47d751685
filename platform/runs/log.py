"""The log of a run: `log.txt` with the messages, `log.jsonl` with the ids of run, trial and job."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from attune.platform.core.logging import JOB, TRIAL
from attune.platform.runs.record import Run

TEXT, LINES = "log.txt", "log.jsonl"

Level = Literal["info", "warning", "error"]


def log_file(run: Run) -> Path:
    """Return the path of the log with the messages only."""
    return run.folder / TEXT


def write_log(run: Run, message: str, level: Level = "info") -> None:
    """Append a message to both files."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "message": message,
        "run": run.name,
        "run_id": run.run_id,
        "trial": os.environ.get(TRIAL),
        "job": os.environ.get(JOB),
        "pid": os.getpid(),
    }
    for path, text in ((run.folder / LINES, json.dumps(line)), (log_file(run), message)):
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
