"""Runs in MLflow: settings, metrics, artifacts and models.

Only the process that drives a run connects to MLflow. Workers append lines to the run's metrics
file, and a `TrackingQueue` sends them: a slow or unreachable store delays and loses nothing.
All calls use a client with explicit run ids; MLflow's global state is not changed.
"""

import attune.platform.tracking.environment  # noqa: F401 - before MLflow, which reads them
from attune.platform.tracking.connection import open_experiment, open_run, short_timeouts, store_uri
from attune.platform.tracking.models import add_version
from attune.platform.tracking.queue import TrackingQueue
from attune.platform.tracking.run_logging import (
    create_run,
    finish_group,
    finish_run,
    flush_run,
    log_evaluation,
    log_picture,
    read_sent_metrics,
    reopen_run,
    start_group,
    start_run,
    tag_run,
)
from attune.platform.tracking.run_metadata import job_tags

__all__ = [
    "TrackingQueue",
    "add_version",
    "create_run",
    "finish_group",
    "finish_run",
    "flush_run",
    "job_tags",
    "log_evaluation",
    "log_picture",
    "open_experiment",
    "open_run",
    "read_sent_metrics",
    "reopen_run",
    "short_timeouts",
    "start_group",
    "start_run",
    "store_uri",
    "tag_run",
]
