"""What Attune says of runs to MLflow: what one is, how it goes, what came of it.

Only the process that drives a run speaks to MLflow. Workers append lines to the run's metrics file,
and a `Sender` passes them on: a store that is slow or away holds up nothing and loses nothing.
Everything goes through a client with explicit run ids; MLflow's global state is left alone.
"""

import attune.platform.tracking.environment  # noqa: F401 - before MLflow, which reads them
from attune.platform.tracking.connection import contact, opened, quick, store_uri
from attune.platform.tracking.models import add_version
from attune.platform.tracking.run_logging import (
    create,
    finish,
    finish_group,
    flush,
    log_evaluation,
    log_picture,
    reopen,
    start,
    start_group,
    tag,
)
from attune.platform.tracking.run_metadata import job_tags
from attune.platform.tracking.sender import Sender

__all__ = [
    "Sender",
    "add_version",
    "contact",
    "create",
    "finish",
    "finish_group",
    "flush",
    "job_tags",
    "log_evaluation",
    "log_picture",
    "opened",
    "quick",
    "reopen",
    "start",
    "start_group",
    "store_uri",
    "tag",
]
