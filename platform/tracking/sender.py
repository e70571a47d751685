"""Send the metrics of a run's file to the store, and retry while it is unreachable."""

import json
import logging
import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from mlflow import MlflowClient
from mlflow.entities import Metric

from attune.platform.runs.record import Run
from attune.platform.tracking.connection import run_client, summarize_error
from attune.platform.tracking.run_metadata import to_metrics

MAX_METRICS = 1000
"""MLflow's limit per request."""
PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds between reads of the metrics file; at most between retries."""

log = logging.getLogger(__name__)


class Sender:
    """Sends what a run logs, each step of each metric once, from a thread of its own.

    Failures of the store do not affect training: what could not be sent is retried. Leaving the
    `with` does not wait for an unreachable store; `close` does, and returns how much is left.
    """

    def __init__(self, run: Run):
        self.run = run
        self._reader = _LineReader(run.metrics_file)
        self._sent: dict[str, set[int]] = {}
        """The steps that the store has, by metric."""
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._send_until_closed, name="tracking", daemon=True
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
        self._closing.set()
        self._thread.join(PAUSE)

    def close(self, timeout: float) -> int:
        """Send the rest within `timeout` seconds; return the number of unsent lines."""
        self._closing.set()
        self._thread.join(timeout)
        self._abandoned.set()
        return sum(
            any(metric.step not in self._sent.get(metric.key, ()) for metric in _parse_line(line))
            for line in self._reader.read_new()
        )

    def _send_until_closed(self) -> None:
        pause = PAUSE
        while not self._abandoned.is_set():
            closing = self._closing.is_set()  # read first: all that was written before is sent
            try:
                self._send()
            except Exception as error:  # whatever it is, training continues
                if pause == PAUSE:
                    log.warning(
                        "the tracking store %s does not answer (%s): metrics are kept in %s and "
                        "sent when it does",
                        self.run.tracking, summarize_error(error), self.run.metrics_file,
                    )  # fmt: skip
                # It may have stored what it did not confirm: query its steps again.
                self._sent.clear()
                pause = min(2 * pause, MAX_PAUSE)
                if closing:
                    self._abandoned.wait(PAUSE)
                else:
                    self._closing.wait(pause)
            else:
                if closing:
                    return
                pause = PAUSE
                self._closing.wait(pause)

    def _send(self) -> None:
        lines: list[bytes] = []
        metrics: dict[tuple[int, str], Metric] = {}
        for line in self._reader.read_new():
            unsent = [m for m in _parse_line(line) if m.step not in self._stored_steps(m.key)]
            if len(metrics) + len(unsent) > MAX_METRICS:
                self._deliver(lines, metrics.values())
                lines, metrics = [], {}
            lines.append(line)
            for metric in unsent:
                metrics.setdefault((metric.step, metric.key), metric)
        self._deliver(lines, metrics.values())

    def _deliver(self, lines: Iterable[bytes], metrics: Iterable[Metric]) -> None:
        batch = list(metrics)
        if batch:
            client, run_id = self._client
            client.log_batch(run_id, metrics=batch)
        for metric in batch:
            self._sent[metric.key].add(metric.step)
        for line in lines:
            self._reader.advance(line)

    def _stored_steps(self, key: str) -> set[int]:
        if key not in self._sent:
            client, run_id = self._client
            self._sent[key] = {metric.step for metric in client.get_metric_history(run_id, key)}
        return self._sent[key]

    @cached_property
    def _client(self) -> tuple[MlflowClient, str]:
        return run_client(self.run)


class _LineReader:
    """Reads the complete lines of a growing file; starts over if the file was rewritten."""

    def __init__(self, path: Path):
        self.path = path
        self._end, self._last = 0, b""

    def read_new(self) -> list[bytes]:
        """Return all lines after the current position."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._end, self._last = 0, b""
                    file.seek(0)
                return [line for line in file if line.endswith(b"\n")]  # the last may be incomplete
        except FileNotFoundError:
            return []

    def advance(self, line: bytes) -> None:
        """Move the position past this line, the first of `read_new`."""
        self._end += len(line)
        self._last = line


def _parse_line(line: bytes) -> list[Metric]:
    try:
        content = json.loads(line)
        return list(to_metrics(content["metrics"], content["time"], content["step"]))
    except (ValueError, KeyError, TypeError):  # a partial line of a worker that died
        return []
