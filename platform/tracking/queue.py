"""The background queue of calls to MLflow: neither training nor a trial waits for the store."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from attune.platform.core.errors import UsageError
from attune.platform.runs.record import Run
from attune.platform.tracking.connection import summarize_error
from attune.platform.tracking.sender import MetricsSender

PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds between reads of the metrics files; at most between retries."""

Job = Callable[[], None]

log = logging.getLogger(__name__)


class TrackingQueue:
    """Runs jobs in order in one background thread, and sends the metrics of runs in between.

    Failures of the store do not affect the caller: a failed job is logged, and metrics are sent
    again until the store takes them. Leaving the `with` does not wait for an unreachable store;
    `close` does.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._senders: dict[str, MetricsSender] = {}
        self._failing: set[str] = set()
        """The runs whose metrics the store did not take at the last attempt."""
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._process_jobs, name="tracking", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._jobs.put(None)
        self._thread.join(PAUSE)

    def submit(self, job: Job) -> None:
        """Run a job after those submitted before."""
        self._jobs.put(job)

    def start_sending(self, run: Run) -> None:
        """Send the metrics that a run logs from now on, and those of its file."""
        self._senders[run.name] = MetricsSender(run)

    def finish_sending(self, run: Run, timeout: float) -> int:
        """Within a job, send the rest of a run's metrics within `timeout` seconds.

        Return the number of unsent lines.
        """
        sender = self._senders.pop(run.name, None) or MetricsSender(run)
        deadline = time.monotonic() + timeout
        while not self._send_metrics_of(sender) and time.monotonic() < deadline:
            if self._abandoned.wait(PAUSE):
                break
        return sender.count_unsent()

    def close(self, timeout: float) -> dict[str, int]:
        """Run all jobs and send all metrics within `timeout` seconds.

        Return the number of unsent lines of each run that has some.
        """
        self._jobs.put(None)
        self._thread.join(timeout)
        self._abandoned.set()
        counts = {name: sender.count_unsent() for name, sender in self._senders.items()}
        return {name: count for name, count in counts.items() if count}

    def _process_jobs(self) -> None:
        pause = PAUSE
        while not self._abandoned.is_set():
            try:
                job = self._jobs.get(timeout=pause)
            except queue.Empty:
                pass
            else:
                if job is None:
                    break
                self._run_job(job)
            pause = PAUSE if self._send_all() else min(2 * pause, MAX_PAUSE)
        while not self._send_all() and not self._abandoned.wait(PAUSE):
            pass

    def _run_job(self, job: Job) -> None:
        try:
            job()
        except UsageError as error:
            log.warning("%s", error)
        except Exception:  # the jobs after it must run
            log.exception("a call to the tracking store failed")

    def _send_all(self) -> bool:
        """Send new metrics; return whether the store took all of them."""
        results = [self._send_metrics_of(sender) for sender in list(self._senders.values())]
        return all(results)

    def _send_metrics_of(self, sender: MetricsSender) -> bool:
        run = sender.run
        try:
            sender.send()
        except Exception as error:  # whatever it is, training continues
            if run.name not in self._failing:
                log.warning(
                    "the tracking store %s does not answer (%s): metrics are kept in %s and "
                    "sent when it does",
                    run.tracking, summarize_error(error), run.metrics_file,
                )  # fmt: skip
            self._failing.add(run.name)
            return False
        self._failing.discard(run.name)
        return True
