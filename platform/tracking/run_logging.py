"""Log runs to MLflow: start, resume and finish them, add evaluations and pictures."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.utils.mlflow_tags import (
    MLFLOW_LOGGED_ARTIFACTS,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
)

from attune.platform.core.errors import UsageError
from attune.platform.runs.model import VOCABULARY_FILE
from attune.platform.runs.record import RUN_RECORD, Run, Status
from attune.platform.tracking import run_metadata
from attune.platform.tracking.connection import (
    explain_failures,
    open_experiment,
    open_run,
    short_timeouts,
    store_uri,
    without_password,
)
from attune.platform.tracking.models import log_model
from attune.platform.tracking.queue import TrackingQueue

MAX_PARAMS = 100
"""MLflow's limit per request."""
STATUS = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
SAMPLES = "sample_answers.json"

log = logging.getLogger(__name__)


def start_run(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Create a run in MLflow with its settings and data, and record its id in the run."""
    return create_run(run, manifest).update()


def create_run(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Create a run in MLflow without writing to its folder, which may change meanwhile."""
    with open_experiment(run.variant) as (client, experiment):
        tags = {**run_metadata.run_tags(run), MLFLOW_RUN_NOTE: run_metadata.run_note(run)}
        if run.parent is not None:
            tags[MLFLOW_PARENT_RUN_ID] = run.parent
        mlflow_run = client.create_run(experiment, tags=tags, run_name=run.name)
        run_id = mlflow_run.info.run_id
        params = [Param(key, value) for key, value in run_metadata.run_params(run).items()]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
        client.log_inputs(run_id, datasets=list(run_metadata.run_datasets(run, manifest)))
        client.log_dict(run_id, dict(manifest), "data_manifest.json")
        client.log_dict(run_id, run_metadata.describe_environment(), "environment.json")
    return dataclasses.replace(run, run_id=run_id, tracking=without_password(store_uri()))


def start_group(name: str, params: Mapping[str, Any], first: Run, parent: str | None = None) -> str:
    """Create the parent run of a group (seeds, trials) and return its id.

    `first` is a run of the group, whose tags it takes.
    """
    tags = run_metadata.run_tags(first)
    if parent is not None:
        tags[MLFLOW_PARENT_RUN_ID] = parent
    with open_experiment(first.variant) as (client, experiment):
        mlflow_run = client.create_run(experiment, tags=tags, run_name=name)
        logged_params = [
            Param(key, run_metadata.format_value(value)) for key, value in params.items()
        ]
        client.log_batch(mlflow_run.info.run_id, params=logged_params[:MAX_PARAMS])
    return str(mlflow_run.info.run_id)


def finish_group(
    group: str, status: Status, metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None, artifacts: Path | None = None,
) -> None:  # fmt: skip
    """Log the results of a group and the files of a folder, and end its parent run."""
    uri = store_uri()
    try:
        with explain_failures(uri):
            client = MlflowClient(tracking_uri=uri)
            for key, value in metrics.items():
                client.log_metric(group, key, value)
            for key, text in (tags or {}).items():
                client.set_tag(group, key, text)
            if artifacts is not None:
                client.log_artifacts(group, str(artifacts))
            client.set_terminated(group, STATUS[status])
    except UsageError as error:
        log.warning("%s; the results of the group are not logged", error)


def tag_run(run: Run, tags: Mapping[str, str]) -> None:
    """Set tags of a run."""
    with open_run(run) as (client, run_id):
        for key, value in tags.items():
            client.set_tag(run_id, key, value)


def reopen_run(run: Run) -> None:
    """Set a resumed run's status to running."""
    with open_run(run) as (client, run_id):
        with short_timeouts():
            client.update_run(run_id, status=STATUS["running"])
        now = {MLFLOW_RUN_NOTE: run_metadata.run_note(dataclasses.replace(run, status="running"))}
        for key, value in {**now, **run_metadata.job_tags(run.job, run.dashboard)}.items():
            client.set_tag(run_id, key, value)


def read_sent_metrics(run: Run) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics file that were sent: MLflow keeps the step and the time
    of each."""
    lines: dict[tuple[int, int], dict[str, float]] = {}
    with open_run(run) as (client, run_id):
        for name in client.get_run(run_id).data.metrics:
            if name.startswith("best_") or "/" in name:  # of its end, and of evaluations
                continue
            for metric in client.get_metric_history(run_id, name):
                lines.setdefault((metric.step, metric.timestamp), {})[name] = metric.value
    return [
        {"step": step, "time": when, "metrics": metrics}
        for (step, when), metrics in sorted(lines.items())
    ]


def finish_run(run: Run, answers: pl.DataFrame | None = None, *, files: bool = True) -> bool:
    """Log the outcome and best metrics of a run, and with `files` sample answers, the last
    checkpoint and the model.

    Return False if the store is unreachable; `flush_run` logs it later. A resumed run may be
    finished again.
    """
    if answers is not None:  # kept in the folder, for `flush_run`
        _write_table(answers, run.folder / SAMPLES)
    try:
        with open_run(run) as (client, run_id):
            _log_outcome(client, run_id, run, files)
    except UsageError as error:
        log.warning("%s; the end of run '%s' is not logged yet", error, run.name)
        return False
    return True


def _log_outcome(client: MlflowClient, run_id: str, run: Run, files: bool) -> None:
    with short_timeouts():
        client.set_tag(run_id, MLFLOW_RUN_NOTE, run_metadata.run_note(run))
    for path in (run.folder / RUN_RECORD, run.folder / VOCABULARY_FILE, run.folder / SAMPLES):
        if path.exists():
            client.log_artifact(run_id, str(path))
    if (run.folder / SAMPLES).exists():  # by this tag MLflow shows it as a table
        table = json.dumps([{"path": SAMPLES, "type": "table"}])
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, table)
    checkpoint = run.newest_checkpoint()
    if files and checkpoint is not None and run.training["track_checkpoint"]:
        client.log_artifacts(run_id, str(checkpoint), f"checkpoints/{checkpoint.name}")
    if run.error:
        client.set_tag(run_id, "error", run.error)
    if run.result.get("best_step") is not None:
        client.set_tag(run_id, "best_step", run.result["best_step"])
    model_id = log_model(client, run_id, run) if files and run.model.is_dir() else None
    _log_best(client, run_id, run, model_id)
    client.set_terminated(run_id, STATUS[run.status])


def _log_best(client: MlflowClient, run_id: str, run: Run, model_id: str | None) -> None:
    step, now = run.result.get("best_step") or 0, run_metadata.current_milliseconds()
    best = {f"best_{name}": value for name, value in run.result.get("metrics", {}).items()}
    metrics = []
    for metric in run_metadata.to_metrics(best, now, step, model_id):
        # With the first timestamp, a metric that is logged again is not stored twice.
        known = {m.step: m.timestamp for m in client.get_metric_history(run_id, metric.key)}
        when = known.get(step, now)
        metrics.append(Metric(metric.key, metric.value, when, step, model_id=model_id))
    client.log_batch(run_id, metrics=metrics)


def _write_table(frame: pl.DataFrame, path: Path) -> None:
    """Write a table as `MlflowClient.log_table` does, which would append at a second finish."""
    frame = frame.with_columns(cs.by_dtype(pl.List(pl.String)).list.join("\n"))
    content = {"columns": frame.columns, "data": frame.rows()}
    path.write_text(json.dumps(content, default=str), encoding="utf-8")


def log_evaluation(
    run: Run, split: str, decode: str, metrics: Mapping[str, float | None], answers: Path
) -> None:
    """Add the metrics and the answers of `attune evaluate` to a run.

    `test/bleu` is of greedy answers, `test-beam/bleu` of beam search's: both are kept.
    """
    group = split if decode == "greedy" else f"{split}-{decode}"
    named = {f"{group}/{name}": value for name, value in metrics.items()}
    step, now = run.result.get("best_step") or 0, run_metadata.current_milliseconds()
    with open_run(run) as (client, run_id):
        with short_timeouts():
            client.set_tag(run_id, f"{group}/decode", decode)
        client.log_batch(run_id, metrics=list(run_metadata.to_metrics(named, now, step)))
        client.log_artifact(run_id, str(answers), "answers")


def log_picture(run: Run, path: Path, metrics: Mapping[str, float]) -> None:
    """Add a picture and its metrics to a run."""
    step, now = run.result.get("best_step") or 0, run_metadata.current_milliseconds()
    with open_run(run) as (client, run_id):
        client.log_batch(run_id, metrics=list(run_metadata.to_metrics(metrics, now, step)))
        client.log_artifact(run_id, str(path), "pictures")


def flush_run(run: Run, timeout: float) -> int:
    """Send the unsent metrics of a past run; return the number of lines that are still unsent."""
    with TrackingQueue() as queue:
        queue.start_sending(run)
        left = queue.close(timeout).get(run.name, 0)
    if not left and run.status != "running":
        with open_run(run) as (client, run_id):
            known = client.get_run(run_id).info.status
        if known == STATUS["running"]:  # the store was unreachable when the run ended
            finish_run(run)
    return left
