"""Send the metrics of a run's file to the tracking store."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric

from attune.platform.runs.metrics_file import MetricsFollower
from attune.platform.runs.record import Run
from attune.platform.tracking.connection import run_client
from attune.platform.tracking.run_metadata import to_metrics

MAX_METRICS = 1000
"""MLflow's limit per request."""


class MetricsSender:
    """Sends what a run logs, each step of each metric once."""

    def __init__(self, run: Run):
        self.run = run
        self._follower = MetricsFollower(run.metrics_file)
        self._unsent: list[dict[str, Any]] = []
        self._stored_steps: dict[str, set[int]] = {}
        """The steps that the store has, by metric."""

    def send(self) -> None:
        """Send all unsent lines; what a failing store did not confirm stays unsent."""
        self._unsent += self._follower.read_new_metrics()
        try:
            while self._unsent:
                self._send_batch()
        except Exception:
            self._stored_steps.clear()  # it may have stored what it did not confirm
            raise

    def count_unsent(self) -> int:
        """Return the number of lines that the store has not confirmed."""
        self._unsent += self._follower.read_new_metrics()
        return len(self._unsent)

    def _send_batch(self) -> None:
        count, batch = 0, dict[tuple[int, str], Metric]()
        for line in self._unsent:
            metrics = [m for m in _line_metrics(line) if m.step not in self._query_steps(m.key)]
            if batch and len(batch) + len(metrics) > MAX_METRICS:
                break
            count += 1
            for metric in metrics:
                batch.setdefault((metric.step, metric.key), metric)
        self._log_metrics(batch.values())
        del self._unsent[:count]

    def _log_metrics(self, metrics: Iterable[Metric]) -> None:
        batch = list(metrics)
        if not batch:
            return
        client, run_id = self._client
        client.log_batch(run_id, metrics=batch)
        for metric in batch:
            self._stored_steps[metric.key].add(metric.step)

    def _query_steps(self, key: str) -> set[int]:
        if key not in self._stored_steps:
            client, run_id = self._client
            history = client.get_metric_history(run_id, key)
            self._stored_steps[key] = {metric.step for metric in history}
        return self._stored_steps[key]

    @cached_property
    def _client(self) -> tuple[MlflowClient, str]:
        return run_client(self.run)


def _line_metrics(line: Mapping[str, Any]) -> list[Metric]:
    return list(to_metrics(line["metrics"], line["time"], line["step"]))
