"""MLflow's environment variables: our defaults unless the user has set them."""

import contextlib
import os
from collections.abc import Iterator, Mapping

# By default MLflow retries for minutes, logs verbosely, prints links to stdout, where our JSON
# goes, and sends telemetry. It reads some variables when imported, so import this module first.
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
"""For the first request."""


@contextlib.contextmanager
def temporary_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which MLflow reads at each request, inside the `with`."""
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
