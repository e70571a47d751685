"""The connection to the tracking store: its address, timeouts and error messages."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from sqlalchemy.exc import SQLAlchemyError

from attune.platform.core.disk import is_disk_full
from attune.platform.core.errors import UsageError
from attune.platform.core.home import home
from attune.platform.runs.record import Run
from attune.platform.services.tracking_store import artifact_root, relocate_tracking_store
from attune.platform.tracking.environment import DEFAULTS, SHORT_TIMEOUTS, temporary_variables
from attune.platform.tracking.run_metadata import describe_variant

ADDRESS = "MLFLOW_TRACKING_URI"
FAILURES = (MlflowException, SQLAlchemyError, OSError)
"""The exceptions of a store that is unreachable, damaged or refuses a request."""


def store_uri() -> str:
    """Return the address of the store: a server, or a file under `ATTUNE_HOME`."""
    if address := os.environ.get(ADDRESS):
        return address
    relocate_tracking_store()
    return f"sqlite:///{home() / 'mlflow.db'}"


@contextlib.contextmanager
def open_experiment(variant: str) -> Iterator[tuple[MlflowClient, str]]:
    """Connect to the store of new runs; yield a client and the id of a variant's experiment."""
    uri = store_uri()
    with explain_failures(uri):
        with (
            short_timeouts(),
            _lock_store() if uri.startswith("sqlite:") else contextlib.nullcontext(),
        ):
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
        yield client, _find_or_create_experiment(client, uri, variant)


def run_client(run: Run) -> tuple[MlflowClient, str]:
    """Return a client of the store that a run is logged to, and the run's id there."""
    assert run.run_id is not None, "start_run() comes first"
    uri = store_uri()
    address = uri if without_password(uri) == run.tracking else run.tracking
    return MlflowClient(tracking_uri=address), run.run_id


@contextlib.contextmanager
def open_run(run: Run) -> Iterator[tuple[MlflowClient, str]]:
    """Yield `run_client(run)`; a failure of the store becomes a UsageError."""
    with explain_failures(run.tracking):
        yield run_client(run)


@contextlib.contextmanager
def explain_failures(uri: str) -> Iterator[None]:
    """Turn a failure of the store into a UsageError that says how to fix it."""
    try:
        yield
    except FAILURES as error:
        fix = (
            "free some space on the disk"
            if is_disk_full(error, home())
            else f"start the tracking server, or unset {ADDRESS} to use the local store"
            if uri.startswith(("http:", "https:"))
            else "repair the file or move it away"
            if uri.startswith("sqlite:")
            else f"check {ADDRESS}"
        )
        raise UsageError(
            f"the tracking store {without_password(uri)} failed ({summarize_error(error)}): {fix}"
        ) from error


@contextlib.contextmanager
def _lock_store() -> Iterator[None]:
    """Hold a lock: MLflow fails if two processes create the local store's tables at once."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "mlflow.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def short_timeouts() -> Iterator[None]:
    """Fail within seconds on the first request, unless the user has set timeouts."""
    ours = {
        name: value for name, value in SHORT_TIMEOUTS.items() if os.environ[name] == DEFAULTS[name]
    }
    with temporary_variables(ours):
        yield


def summarize_error(error: BaseException) -> str:
    """Return one line about the root cause, which MLflow wraps in several exceptions."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    shown = deepest if isinstance(deepest, OSError) else error
    text = without_password(str(shown).strip()) or type(shown).__name__
    return text.splitlines()[0][:200]


def without_password(text: str) -> str:
    """Return a text without the passwords in its addresses."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _find_or_create_experiment(client: MlflowClient, uri: str, variant: str) -> str:
    """Return the id of a variant's experiment."""
    experiment: Experiment | None = client.get_experiment_by_name(variant)
    if experiment is None:
        server = uri.startswith(("http:", "https:"))  # which has its own place for artifacts
        artifacts = None if server else f"{artifact_root()}/{variant}"
        try:
            experiment_id = client.create_experiment(
                variant, artifacts, {MLFLOW_RUN_NOTE: describe_variant(variant)}
            )
            return str(experiment_id)
        except MlflowException:
            experiment = client.get_experiment_by_name(variant)  # another run was faster
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        number = experiment.experiment_id
        raise UsageError(
            f"the experiment '{variant}' was deleted from {without_password(uri)}: bring it back "
            f"with 'mlflow experiments restore -x {number}', or remove it for good with "
            f"'mlflow gc --experiment-ids {number}'"
        )
    return str(experiment.experiment_id)
