"""The Ray job and trial that a process works for, passed on through environment variables."""

import os
from typing import Any

JOB, TRIAL, DASHBOARD = "ATTUNE_JOB", "ATTUNE_TRIAL", "ATTUNE_DASHBOARD"
"""Job id, trial name, and the address of Ray's dashboard."""


def job_environment() -> dict[str, str]:
    """Return the variables that are set, to be set for workers on other machines."""
    return {name: os.environ[name] for name in (JOB, TRIAL, DASHBOARD) if name in os.environ}


def current_job() -> dict[str, Any]:
    """Return job and dashboard as runs and sweeps record them; empty strings outside a job."""
    return {"job": os.environ.get(JOB, ""), "dashboard": os.environ.get(DASHBOARD, "")}
