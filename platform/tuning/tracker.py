"""Log the trials of a sweep to MLflow in the background, so that no trial waits for the store."""

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform import tracking
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.runs.record import Run, Status, read_run

SECONDS_TO_SEND = 10.0
END_SENT = "end_sent"
"""A file in the folder of a run whose end MLflow has; a driver may die before it is sent."""
log = logging.getLogger(__name__)


class Tracker(tracking.TrackingQueue):
    """A `TrackingQueue` for the runs of trials, which also updates their records.

    What an unreachable store does not take is sent later by `attune runs --send`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writing = threading.Lock()

    def update_run(self, folder: Path, **changes: Any) -> Run:
        """Change a run's record at once."""
        with self._writing:
            return read_run(folder).update(**changes)

    def start_run(self, run: Run) -> None:
        """Create or reopen a run in MLflow, and send its metrics from now on."""
        self.submit(lambda: self._start_run(run.folder))

    def start_group(self, runs: Sequence[Run], label: str, params: Mapping[str, Any]) -> None:
        """Create the parent run of a trial's seeds, before they start."""
        self.submit(lambda: self._start_group([run.folder for run in runs], label, params))

    def finish_group(self, run: Run, status: Status, metrics: Mapping[str, float]) -> None:
        """Log the joint results of a trial's seeds, of which `run` is one."""

        def finish() -> None:
            parent = read_run(run.folder).parent
            if parent is not None:
                tracking.finish_group(parent, status, metrics)

        self.submit(finish)

    def finish_run(self, run: Run, reason: str, final: bool = True) -> None:
        """Log the outcome of a run and why it ended, unless MLflow has it already."""
        self.submit(lambda: self._finish_run(run.folder, reason, final))

    def tag_run(self, run: Run, tags: Mapping[str, str]) -> None:
        """Set tags of a run."""
        self.submit(lambda: tracking.tag_run(self._ensure_created(run.folder), tags))

    def register_model(
        self, run: Run, answers: pl.DataFrame | None, tags: Mapping[str, str]
    ) -> None:
        """Log and register a run's model."""

        def register() -> None:
            current = self._ensure_created(run.folder)
            tracking.finish_run(current, answers)
            tracking.tag_run(current, tags)

        self.submit(register)

    # The methods below run in the queue's thread.

    def _start_group(self, folders: Sequence[Path], label: str, params: Mapping[str, Any]) -> None:
        runs = [read_run(folder) for folder in folders]
        if any(run.run_id for run in runs):  # an earlier driver has created them
            return
        parent = tracking.start_group(label, params, runs[0], runs[0].parent)
        for folder in folders:
            self.update_run(folder, parent=parent)

    def _start_run(self, folder: Path) -> None:
        is_known = read_run(folder).run_id is not None
        run = self._ensure_created(folder)
        (folder / END_SENT).unlink(missing_ok=True)
        if is_known:
            tracking.reopen_run(run)
        self.start_sending(run)

    def _ensure_created(self, folder: Path) -> Run:
        run = read_run(folder)
        if run.run_id is None:
            created = tracking.create_run(run, read_dataset_manifest(Path(run.data["folder"])))
            run = self.update_run(folder, run_id=created.run_id, tracking=created.tracking)
        return run

    def _finish_run(self, folder: Path, reason: str, final: bool) -> None:
        if (folder / END_SENT).exists():
            return
        run = self._ensure_created(folder)
        if unsent := self.finish_sending(run, SECONDS_TO_SEND):
            log.warning("%d lines of run '%s' are not sent yet", unsent, run.name)
        was_sent = tracking.finish_run(run, files=False)
        tracking.tag_run(run, {"ended": reason})
        if was_sent and not unsent and final:
            (folder / END_SENT).touch()
