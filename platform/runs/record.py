"""Runs as folders under `ATTUNE_HOME/runs`: made, found by what a user types, listed.

run.json          what was asked for and what came of it (`Run`)
vocabulary.txt    the tokens it reads and writes
lexicon.json      the emotion words it reads, where it does
metrics.jsonl     one line per logged step, written by the first worker
log.txt           what it had to say; log.jsonl the same with all ids (`logs.py`)
checkpoints/      to go on from (`training/checkpoints.py`)
model/            the result: weights and all that is needed to answer (`runs.py`)
answers/          answers to whole splits (Parquet), by `attune evaluate`
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attune.platform.core.errors import DataError, UsageError, unknown_choice
from attune.platform.core.home import home
from attune.platform.core.records import (
    FORMAT_KEY,
    FormatVersionError,
    check_format,
    report_skipped,
)

RUN_RECORD, METRICS_FILE, STOP_FILE = "run.json", "metrics.jsonl", "stop"
ALIASES = "aliases.json"
"""In `ATTUNE_HOME`: who is champion and who candidate, as the registry said when last asked."""
LATEST = "latest"
RUN_FORMAT = 1
"""The format version of run.json; a change that older code cannot read increases it."""

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run's folder says of it."""

    name: str
    folder: Path
    variant: str
    preset: str
    config: dict[str, Any]
    """The variant's configuration, complete."""
    training: dict[str, Any]
    """How it is trained (`training/settings.py`), complete."""
    data: dict[str, Any]
    """`name` for people, `folder` and content `hash`; `harvest` with `folder` and `hash` where the
    unpaired text is another folder's."""
    seed: int = 0
    workers: int = 1
    zero: int = 0
    max_steps: int | None = None
    max_minutes: float | None = None
    init: str | None = None
    """The folder of the model it starts from."""
    run_id: str | None = None
    """MLflow's."""
    parent: str | None = None
    """MLflow's id of what it is one of several seeds of."""
    tracking: str = ""
    """MLflow's store."""
    command: str = ""
    commit: str = ""
    created: str = ""
    job: str = ""
    """The Ray job that trains it, or did last."""
    dashboard: str = ""
    """Where Ray shows that job, or the cluster it is trained in."""
    notice: str = ""
    """What whoever begins it should know of it."""
    shared_steps: int = 0
    """Steps that another run has done for it, which has its first stages in common."""
    status: Status = "running"
    error: str = ""
    """What it has failed of."""
    result: dict[str, Any] = field(default_factory=dict)
    """`steps`, `seconds`, `best_step` and `metrics` once there are some."""

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def stage_model(self, stage: str) -> Path:
        """The folder of the best model of a stage before the last."""
        return self.folder / f"best-{stage}"

    def kept_stages(self) -> list[str]:
        """The stages before the last whose best models are kept."""
        return [path.name.removeprefix("best-") for path in sorted(self.folder.glob("best-*"))]

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are kept."""
        return self.folder / "checkpoints"

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint written last, whether or not it is damaged."""
        return next(reversed(checkpoint_folders(self.checkpoints)), None)

    @property
    def metrics_file(self) -> Path:
        """What was logged."""
        return self.folder / METRICS_FILE

    @property
    def stop_file(self) -> Path:
        """Whoever makes this file asks the run to checkpoint and end."""
        return self.folder / STOP_FILE

    def update(self, **changes: Any) -> "Run":
        """The run with some fields changed, written to its folder."""
        run = dataclasses.replace(self, **changes)
        run.write()
        return run

    def write(self) -> None:
        """Write run.json, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "folder"}
        content = {FORMAT_KEY: RUN_FORMAT, **fields}
        new = self.folder / f"{RUN_RECORD}.{os.getpid()}"
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        new.replace(self.folder / RUN_RECORD)


def checkpoint_folders(folder: Path) -> list[Path]:
    """All checkpoints in a run's folder of checkpoints, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def runs_folder() -> Path:
    """Where runs are kept."""
    return home() / "runs"


def read_run(folder: Path) -> Run:
    """Read the run in a folder."""
    path = folder / RUN_RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            check_format(path, content, RUN_FORMAT, "train the run again")
            content.pop(FORMAT_KEY)
        return Run(folder=folder.absolute(), **content)
    except FileNotFoundError:
        raise UsageError(f"'{folder}' is not a run ({RUN_RECORD} is missing)") from None
    except FormatVersionError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def all_runs(report: Callable[[str], None] = lambda _: None) -> Iterator[Run]:
    """Iterate over the runs, oldest first.

    Damaged records are passed to `report`; records of another format version are skipped with one
    line on stderr.
    """
    runs = []
    for path in runs_folder().glob(f"*/{RUN_RECORD}"):
        try:
            runs.append(read_run(path.parent))
        except FormatVersionError as error:
            report_skipped(error)
        except DataError as error:
            report(str(error))
    yield from sorted(runs, key=lambda run: (run.created, run.name))


def find_run(text: str) -> Run:
    """A run by its name, its MLflow id, `variant@latest`, or the path of its folder."""
    if (runs_folder() / text / RUN_RECORD).is_file() and "/" not in text:
        return read_run(runs_folder() / text)
    if (Path(text) / RUN_RECORD).is_file():
        return read_run(Path(text))
    runs = list(all_runs())
    variant, _, which = text.partition("@")
    if which == LATEST:
        matches = [run for run in runs if run.variant == variant]
        if not matches:
            raise UsageError(
                unknown_choice("variant among the runs", variant, {r.variant for r in runs})
            )
        return matches[-1]
    for run in runs:
        if run.run_id == text:
            return run
    if not runs:
        raise UsageError(f"unknown run '{text}': there are none in {runs_folder()} yet")
    raise UsageError(
        f"{unknown_choice('run', text, [run.name for run in runs])} ('attune runs' lists all)"
    )


def read_aliases() -> dict[str, str]:
    """By MLflow's id of a run its alias, as last noted."""
    path = home() / ALIASES
    if not path.is_file():
        return {}
    noted: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return {run_id: alias for alias, run_id in noted.items()}


def write_aliases(runs: dict[str, str]) -> None:
    """Note by alias the id of the run that has it."""
    new = home() / f"{ALIASES}.{os.getpid()}"
    new.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    new.replace(home() / ALIASES)


def new_run_name(variant: str, data: str) -> str:
    """`<variant>-<data>-<n>`, with the first n that is free."""
    start = f"{variant}-{data}-"
    taken = {p.name for p in runs_folder().glob(f"{start}*")}
    number = 1
    while f"{start}{number}" in taken:
        number += 1
    return f"{start}{number}"


def check_run_name(name: str) -> None:
    """A name becomes a folder's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"'{name}' cannot be a run's name: use letters, digits, '-', '_' and '.'")
