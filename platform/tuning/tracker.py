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
TOLD = "told"
"""In the folder of a run whose end MLflow knows: a driver may die before it is said."""
log = logging.getLogger(__name__)


class Tracker:
    """Takes jobs, and does them one after the other; what a store that is away does not take is
    sent later by `attune runs --send`."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._senders: dict[str, tracking.Sender] = {}
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="sweep tracking", daemon=True)

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

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except UsageError as error:
                log.warning("%s", error)
            except Exception:  # one job's fault must not end those after it
                log.exception("a part of the sweep is not told")

    def amend(self, folder: Path, **changes: Any) -> Run:
        """Change what a run's folder says of it, at once."""
        with self._writing:
            return read_run(folder).update(**changes)

    def begin(self, run: Run) -> None:
        """Tell of a run, or that it goes on, and send what it logs."""
        self._jobs.put(lambda: self._begin(run.folder))

    def group(self, runs: Sequence[Run], label: str, params: Mapping[str, Any]) -> None:
        """Tell of runs that are the same trial with different seeds, before they begin."""
        self._jobs.put(lambda: self._group([run.folder for run in runs], label, params))

    def end_group(self, run: Run, status: Status, metrics: Mapping[str, float]) -> None:
        """Tell what came of them, of which one is given, together."""

        def do() -> None:
            group = read_run(run.folder).parent
            if group is not None:
                tracking.finish_group(group, status, metrics)

        self._jobs.put(do)

    def end(self, run: Run, reason: str, for_good: bool = True) -> None:
        """Tell what came of a run, and why it ended, unless that is known."""
        self._jobs.put(lambda: self._end(run.folder, reason, for_good))

    def tag(self, run: Run, tags: Mapping[str, str]) -> None:
        """Say something about a run."""
        self._jobs.put(lambda: self._tag(run.folder, tags))

    def keep(self, run: Run, answers: pl.DataFrame | None, tags: Mapping[str, str]) -> None:
        """Have a run's model in MLflow too, registered."""

        def do() -> None:
            now = self._started(run.folder)
            tracking.finish(now, answers)
            tracking.tag(now, tags)

        self._jobs.put(do)

    def _group(self, folders: Sequence[Path], label: str, params: Mapping[str, Any]) -> None:
        runs = [read_run(folder) for folder in folders]
        if any(run.run_id for run in runs):  # told before
            return
        group = tracking.start_group(label, params, runs[0], runs[0].parent)
        for folder in folders:
            self.amend(folder, parent=group)

    def _begin(self, folder: Path) -> None:
        known = read_run(folder).run_id is not None
        run = self._started(folder)
        (folder / TOLD).unlink(missing_ok=True)
        if known:
            tracking.reopen(run)
        self._senders[run.name] = tracking.Sender(run).__enter__()

    def _started(self, folder: Path) -> Run:
        run = read_run(folder)
        if run.run_id is None:
            made = tracking.create(run, read_manifest(Path(run.data["folder"])))
            run = self.amend(folder, run_id=made.run_id, tracking=made.tracking)
        return run

    def _end(self, folder: Path, reason: str, for_good: bool) -> None:
        if (folder / TOLD).exists():
            return
        run = self._started(folder)
        sender = self._senders.pop(run.name, None) or tracking.Sender(run).__enter__()
        if unsent := sender.close(SECONDS_TO_SEND):
            log.warning("%d lines of run '%s' are not sent yet", unsent, run.name)
        told = tracking.finish(run, files=False)
        tracking.tag(run, {"ended": reason})
        if told and not unsent and for_good:
            (folder / TOLD).touch()

    def _tag(self, folder: Path, tags: Mapping[str, str]) -> None:
        tracking.tag(self._started(folder), tags)
