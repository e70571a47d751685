"""The current status of a run: its record cannot tell that its process was killed."""

import re
from collections.abc import Callable
from typing import Literal

from attune.platform.core.home import home
from attune.platform.runs.lock import is_locked
from attune.platform.runs.record import Run, Status

CurrentStatus = Status | Literal["interrupted", "unknown"]
TRIAL_NAME = re.compile(r"(?P<sweep>.+)-\d{3,}(-seed\d+)?")
"""The name of a run that is a trial of a sweep."""

JobEnded = Callable[[str, str], bool | None]
"""Called with a job's id and dashboard; returns whether it has ended, None if that is unknown."""


def current_status(run: Run, job_ended: JobEnded) -> CurrentStatus:
    """Return the status of a run: `interrupted` if its record says running, but no process holds
    its lock and its Ray job, if any, has ended; `unknown` if that cannot be determined."""
    if run.status != "running":
        return run.status
    try:
        if is_locked(run.folder) or _is_trial_of_locked_sweep(run):
            return "running"
    except OSError:  # a file system without locks
        return "unknown"
    ended = job_ended(run.job, run.dashboard) if run.job else True
    if ended is None:
        return "unknown"
    return "interrupted" if ended else "running"


def resume_command(run: Run) -> str:
    """Return the command that resumes a run."""
    if sweep := _sweep_name(run):
        return f"attune tune {run.variant} --name {sweep} --resume"
    submit = "submit -- " if run.job else ""
    return f"attune {submit}train {run.variant} --name {run.name} --resume"


def _is_trial_of_locked_sweep(run: Run) -> bool:
    """Return whether a run waits for its turn in a sweep that is running."""
    sweep = _sweep_name(run)
    return sweep is not None and is_locked(home() / "sweeps" / sweep)


def _sweep_name(run: Run) -> str | None:
    match = TRIAL_NAME.fullmatch(run.name)
    if match and (home() / "sweeps" / match["sweep"]).is_dir():
        return match["sweep"]
    return None
