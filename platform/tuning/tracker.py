"""What a sweep says of its runs to MLflow, from a thread of its own: no trial waits for a store."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_manifest
from attune.platform.runs.record import Run, Status, read_run

SECONDS_TO_SEND = 10.0
END_SENT = "end_sent"
"""In the folder of a run whose end MLflow knows: a driver may die before it is said."""
log = logging.getLogger(__name__)


class Tracker:
    """Takes jobs, and does them one after the other; what a store that is away does not take is
    sent later by `attune runs --send`."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._senders: dict[str, tracking.Sender] = {}
        self._writing = threading.Lock()
        self._thread = threading.Thread(
            target=self._process_jobs, name="sweep tracking", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(0)

    def close(self, timeout: float) -> None:
        """Wait for what was asked for, for at most so many seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)

    def _process_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except UsageError as error:
                log.warning("%s", error)
            except Exception:  # one job's fault must not end those after it
                log.exception("a part of the sweep is not told")

    def update_run(self, folder: Path, **changes: Any) -> Run:
        """Change what a run's folder says of it, at once."""
        with self._writing:
            return read_run(folder).update(**changes)

    def start_run(self, run: Run) -> None:
        """Tell of a run, or that it goes on, and send what it logs."""
        self._jobs.put(lambda: self._start_run(run.folder))

    def start_group(self, runs: Sequence[Run], label: str, params: Mapping[str, Any]) -> None:
        """Tell of runs that are the same trial with different seeds, before they begin."""
        self._jobs.put(lambda: self._start_group([run.folder for run in runs], label, params))

    def finish_group(self, run: Run, status: Status, metrics: Mapping[str, float]) -> None:
        """Tell what came of them, of which one is given, together."""

        def do() -> None:
            start_group = read_run(run.folder).parent
            if start_group is not None:
                tracking.finish_group(start_group, status, metrics)

        self._jobs.put(do)

    def finish_run(self, run: Run, reason: str, final: bool = True) -> None:
        """Tell what came of a run, and why it ended, unless that is known."""
        self._jobs.put(lambda: self._finish_run(run.folder, reason, final))

    def tag_run(self, run: Run, tags: Mapping[str, str]) -> None:
        """Say something about a run."""
        self._jobs.put(lambda: self._tag_run(run.folder, tags))

    def register_model(
        self, run: Run, answers: pl.DataFrame | None, tags: Mapping[str, str]
    ) -> None:
        """Have a run's model in MLflow too, registered."""

        def do() -> None:
            now = self._ensure_created(run.folder)
            tracking.finish_run(now, answers)
            tracking.tag_run(now, tags)

        self._jobs.put(do)

    def _start_group(self, folders: Sequence[Path], label: str, params: Mapping[str, Any]) -> None:
        runs = [read_run(folder) for folder in folders]
        if any(run.run_id for run in runs):  # told before
            return
        start_group = tracking.start_group(label, params, runs[0], runs[0].parent)
        for folder in folders:
            self.update_run(folder, parent=start_group)

    def _start_run(self, folder: Path) -> None:
        known = read_run(folder).run_id is not None
        run = self._ensure_created(folder)
        (folder / END_SENT).unlink(missing_ok=True)
        if known:
            tracking.reopen_run(run)
        self._senders[run.name] = tracking.Sender(run).__enter__()

    def _ensure_created(self, folder: Path) -> Run:
        run = read_run(folder)
        if run.run_id is None:
            created = tracking.create_run(run, read_manifest(Path(run.data["folder"])))
            run = self.update_run(folder, run_id=created.run_id, tracking=created.tracking)
        return run

    def _finish_run(self, folder: Path, reason: str, final: bool) -> None:
        if (folder / END_SENT).exists():
            return
        run = self._ensure_created(folder)
        sender = self._senders.pop(run.name, None) or tracking.Sender(run).__enter__()
        if unsent := sender.close(SECONDS_TO_SEND):
            log.warning("%d lines of run '%s' are not sent yet", unsent, run.name)
        was_sent = tracking.finish_run(run, files=False)
        tracking.tag_run(run, {"ended": reason})
        if was_sent and not unsent and final:
            (folder / END_SENT).touch()

    def _tag_run(self, folder: Path, tags: Mapping[str, str]) -> None:
        tracking.tag_run(self._ensure_created(folder), tags)
