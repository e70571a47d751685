"""MLflow's environment variables: ours unless the user has set them."""

import contextlib
import os
from collections.abc import Iterator, Mapping

# What MLflow does unless told otherwise: try for minutes, talk of itself, print links to stdout,
# where our JSON goes, and report its use to its makers. Some of it is decided while it is imported,
# so this module comes before it.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

SHORT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""For the first contact."""


@contextlib.contextmanager
def temporary_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, which are read at each request, for a moment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
