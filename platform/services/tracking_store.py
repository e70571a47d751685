"""MLflow's local store, `ATTUNE_HOME/mlflow.db`, in a home folder that was copied or moved."""

import sqlite3
from contextlib import closing, suppress

from attune.platform.core.home import home

ARTIFACTS = "mlartifacts"
_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
"""The tables and columns in which MLflow stores absolute addresses of artifacts."""
_TIMEOUT_SECONDS = 60


def artifact_root() -> str:
    """Return the address of the local store's artifacts."""
    return (home() / ARTIFACTS).as_uri()


def relocate_tracking_store() -> None:
    """Rewrite the store's artifact addresses if they lie in another home folder.

    MLflow stores absolute addresses only; those of a copy would point into the original.
    """
    path = home() / "mlflow.db"
    if not path.is_file():
        return
    # A store that is damaged, or not of MLflow: MLflow reports it.
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path, _TIMEOUT_SECONDS)) as store:
        new = artifact_root()
        for old in _former_roots(store, new):
            with store:  # one transaction
                for table, column in _LOCATIONS:
                    store.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                        f"WHERE substr({column}, 1, ?) = ?",
                        (new, len(old) + 1, len(old) + 1, f"{old}/"),
                    )


def _former_roots(store: sqlite3.Connection, current: str) -> set[str]:
    """Return the other roots under which experiments have their artifacts."""
    rows = store.execute("SELECT name, artifact_location FROM experiments").fetchall()
    ends = ((str(location), f"/{ARTIFACTS}/{name}") for name, location in rows)
    roots = {
        location.removesuffix(end) + f"/{ARTIFACTS}"
        for location, end in ends
        if location.startswith("file:") and location.endswith(end)
    }
    return roots - {current}
