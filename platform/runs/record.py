"""The run record: runs as folders under `ATTUNE_HOME/runs`, written, looked up and listed.

run.json          the settings and the result (`Run`)
vocabulary.txt    the tokens of the model
lexicon.json      the emotion words, if the variant uses them
metrics.jsonl     one line per logged step, written by the first worker
log.txt           messages for people; log.jsonl the same with all ids (`log.py`)
checkpoints/      checkpoints to resume from (`training/checkpoints.py`)
model/            the trained model: weights and everything to load it (`model.py`)
answers/          answers to whole splits (Parquet), written by `attune evaluate`
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attune.platform.core.errors import DataError, UsageError, unknown_choice_error
from attune.platform.core.home import home
from attune.platform.core.records import (
    FormatVersionError,
    read_record,
    report_skipped_record,
    write_record,
)

RUN_RECORD, METRICS_FILE, STOP_FILE = "run.json", "metrics.jsonl", "stop"
ALIASES = "aliases.json"
"""In `ATTUNE_HOME`: the champion and the candidate, as of the last query of the registry."""
LATEST = "latest"
RUN_FORMAT = 1
"""The format version of run.json; a change that older code cannot read increases it."""

Status = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The record of a run, stored as run.json in its folder."""

    name: str
    folder: Path
    variant: str
    preset: str
    config: dict[str, Any]
    """The variant's configuration, complete."""
    training: dict[str, Any]
    """The training settings (`training/settings.py`), complete."""
    data: dict[str, Any]
    """`name` for display, `folder` and content `hash`; `harvest` with `folder` and `hash` if the
    unpaired text is in another folder."""
    seed: int = 0
    workers: int = 1
    zero: int = 0
    max_steps: int | None = None
    max_minutes: float | None = None
    init: str | None = None
    """The folder of the model whose weights initialize it."""
    run_id: str | None = None
    """The id of the run in MLflow."""
    parent: str | None = None
    """The MLflow id of the group (of seeds or trials) that it belongs to."""
    tracking: str = ""
    """The address of the tracking store, without password."""
    command: str = ""
    commit: str = ""
    created: str = ""
    job: str = ""
    """The Ray job that trains it or trained it last."""
    dashboard: str = ""
    """The address of that job, or of the cluster, on Ray's dashboard."""
    notice: str = ""
    """A message to show when the run starts."""
    shared_steps: int = 0
    """Steps taken over from another run that shares the first stages."""
    status: Status = "running"
    error: str = ""
    """The reason of a failure."""
    result: dict[str, Any] = field(default_factory=dict)
    """`steps`, `seconds`, `best_step` and `metrics`, once available."""

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def stage_model(self, stage: str) -> Path:
        """Return the folder of the best model of a stage before the last."""
        return self.folder / f"best-{stage}"

    def kept_stages(self) -> list[str]:
        """Return the stages before the last whose best models are kept."""
        return [path.name.removeprefix("best-") for path in sorted(self.folder.glob("best-*"))]

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint written last, whether or not it is damaged."""
        return next(reversed(run_checkpoint_folders(self.checkpoints)), None)

    @property
    def metrics_file(self) -> Path:
        """The file of the logged metrics."""
        return self.folder / METRICS_FILE

    @property
    def stop_file(self) -> Path:
        """The file whose existence asks the run to write a checkpoint and stop."""
        return self.folder / STOP_FILE

    def update(self, **changes: Any) -> "Run":
        """Write the run with some fields changed, and return it."""
        run = dataclasses.replace(self, **changes)
        run.write()
        return run

    def write(self) -> None:
        """Write run.json atomically."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "folder"}
        write_record(self.folder / RUN_RECORD, RUN_FORMAT, fields)


def run_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def runs_folder() -> Path:
    """Return the folder of all runs."""
    return home() / "runs"


def read_run(folder: Path) -> Run:
    """Read the run in a folder."""
    path = folder / RUN_RECORD
    try:
        fields = read_record(path, RUN_FORMAT, "train the run again")
        return Run(folder=folder.absolute(), **fields)
    except FileNotFoundError:
        raise UsageError(f"'{folder}' is not a run ({RUN_RECORD} is missing)") from None
    except TypeError as error:
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
            report_skipped_record(error)
        except DataError as error:
            report(str(error))
    yield from sorted(runs, key=lambda run: (run.created, run.name))


def find_run(text: str) -> Run:
    """Return a run by its name, its MLflow id, `variant@latest`, or the path of its folder."""
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
                unknown_choice_error("variant among the runs", variant, {r.variant for r in runs})
            )
        return matches[-1]
    for run in runs:
        if run.run_id == text:
            return run
    if not runs:
        raise UsageError(f"unknown run '{text}': there are none in {runs_folder()} yet")
    raise UsageError(
        f"{unknown_choice_error('run', text, [run.name for run in runs])} ('attune runs' lists all)"
    )


def read_run_aliases() -> dict[str, str]:
    """Return the alias of each run by its MLflow id, as last written."""
    path = home() / ALIASES
    if not path.is_file():
        return {}
    noted: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return {run_id: alias for alias, run_id in noted.items()}


def write_run_aliases(runs: dict[str, str]) -> None:
    """Write the MLflow id of the run of each alias."""
    new = home() / f"{ALIASES}.{os.getpid()}"
    new.write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    new.replace(home() / ALIASES)


def new_run_name(variant: str, data: str) -> str:
    """Return `<variant>-<data>-<n>` with the first free n."""
    start = f"{variant}-{data}-"
    taken = {p.name for p in runs_folder().glob(f"{start}*")}
    number = 1
    while f"{start}{number}" in taken:
        number += 1
    return f"{start}{number}"


def check_run_name(name: str) -> None:
    """Raise UsageError unless a name is valid as the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(f"'{name}' cannot be a run's name: use letters, digits, '-', '_' and '.'")
