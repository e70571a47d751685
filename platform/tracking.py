"""What Attune says of runs to MLflow: what one is, how it goes, what came of it.

Only the process that drives a run speaks to MLflow. Workers append lines to the run's metrics file,
and a `Sender` passes them on: a store that is slow or away holds up nothing and loses nothing.
Everything goes through a client with explicit run ids; MLflow's global state is left alone.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl
import polars.selectors as cs

# What MLflow does unless told otherwise: try for minutes, talk of itself, print links to stdout,
# where our JSON goes, and report its use to its makers. Some of it is decided while it is imported:
# ruff: noqa: E402
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

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    Experiment,
    InputTag,
    LoggedModelOutput,
    Metric,
    Param,
)
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, ColSpec, DataType, Schema
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_GIT_COMMIT,
    MLFLOW_LOGGED_ARTIFACTS,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_RUN_NOTE,
    MLFLOW_SOURCE_NAME,
)
from sqlalchemy.exc import SQLAlchemyError

from attune.models.base import DialogueVariant
from attune.platform import runs
from attune.platform.errors import UsageError
from attune.platform.home import home
from attune.platform.settings import find_variant
from attune.platform.store import RECORD, Run, Status
from attune.platform.training import checkpoints

ADDRESS = "MLFLOW_TRACKING_URI"
QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
MOST_METRICS, MOST_PARAMS = 1000, 100
"""What MLflow takes at once."""
LONGEST_VALUE = 500
PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between looks at the metrics file; between tries while the store is away, at most."""
STATUS = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
SAMPLES = "sample_answers.json"
MODEL_CODE = Path(__file__).with_name("logged_model.py")
PACKAGES = ("attune", "torch", "ray", "deepspeed", "mlflow", "polars")
FAILURES = (MlflowException, SQLAlchemyError, OSError)
"""What a store that is away, broken or unwilling shows itself by."""

log = logging.getLogger(__name__)


def store_uri() -> str:
    """Where MLflow keeps what we tell it: a server, or a file under `ATTUNE_HOME`."""
    return os.environ.get(ADDRESS) or f"sqlite:///{home() / 'mlflow.db'}"


def start(run: Run, manifest: Mapping[str, Any]) -> Run:
    """Tell MLflow of a new run and of all that it is made from; the run then knows its id."""
    return create(run, manifest).changed()


def create(run: Run, manifest: Mapping[str, Any]) -> Run:
    """The same, without writing to the run's folder, which may change meanwhile."""
    with _opened(run.variant) as (client, experiment):
        tags = {**_tags(run), MLFLOW_RUN_NOTE: _note(run)}
        if run.parent is not None:
            tags[MLFLOW_PARENT_RUN_ID] = run.parent
        made = client.create_run(experiment, tags=tags, run_name=run.name)
        run_id = made.info.run_id
        params = [Param(key, value) for key, value in _params(run).items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + MOST_PARAMS])
        client.log_inputs(run_id, datasets=list(_datasets(run, manifest)))
        client.log_dict(run_id, dict(manifest), "data_manifest.json")
        client.log_dict(run_id, _environment(), "environment.json")
    return dataclasses.replace(run, run_id=run_id, tracking=_without_password(store_uri()))


def start_group(name: str, params: Mapping[str, Any], first: Run, parent: str | None = None) -> str:
    """Tell MLflow of a run whose parts are other runs (seeds, trials), of which one is given; its
    id, for them to be its parts by."""
    tags = _tags(first)
    if parent is not None:
        tags[MLFLOW_PARENT_RUN_ID] = parent
    with _opened(first.variant) as (client, experiment):
        made = client.create_run(experiment, tags=tags, run_name=name)
        given = [Param(key, _text(value)[:LONGEST_VALUE]) for key, value in params.items()]
        client.log_batch(made.info.run_id, params=given[:MOST_PARAMS])
    return str(made.info.run_id)


def finish_group(
    group: str, status: Status, metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None, artifacts: Path | None = None,
) -> None:  # fmt: skip
    """Say what came of the parts together; a folder's files go with it."""
    uri = store_uri()
    try:
        with _understood(uri):
            client = MlflowClient(tracking_uri=uri)
            for key, value in metrics.items():
                client.log_metric(group, key, value)
            for key, text in (tags or {}).items():
                client.set_tag(group, key, text)
            if artifacts is not None:
                client.log_artifacts(group, str(artifacts))
            client.set_terminated(group, STATUS[status])
    except UsageError as error:
        log.warning("%s; what came of all parts together is not told", error)


def tag(run: Run, tags: Mapping[str, str]) -> None:
    """Say something about a run."""
    with contact(run) as (client, run_id):
        for key, value in tags.items():
            client.set_tag(run_id, key, value)


@contextlib.contextmanager
def _opened(variant: str) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the store where new runs go, and the id of a variant's experiment there."""
    uri = store_uri()
    with _understood(uri):
        with quick(), _alone() if uri.startswith("sqlite:") else contextlib.nullcontext():
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
        yield client, _experiment(client, uri, variant)


def _tags(run: Run) -> dict[str, str]:
    tags = {
        MLFLOW_GIT_COMMIT: run.commit,
        MLFLOW_SOURCE_NAME: run.command,
        "variant": run.variant,
        "data_hash": run.data["hash"],
        **job_tags(run.job, run.dashboard),
    }
    harvest = run.data.get("harvest")
    return {**tags, "harvest_hash": harvest["hash"]} if harvest else tags


def job_tags(job: str, dashboard: str) -> dict[str, str]:
    """The Ray job that a run or sweep is in; by its metadata the job knows the run or sweep."""
    told = {"ray_job": job, "ray_dashboard": dashboard}
    return {key: value for key, value in told.items() if value}


def reopen(run: Run) -> None:
    """Say that a run goes on."""
    with contact(run) as (client, run_id):
        with quick():
            client.update_run(run_id, status=STATUS["running"])
        now = {MLFLOW_RUN_NOTE: _note(dataclasses.replace(run, status="running"))}
        for key, value in {**now, **job_tags(run.job, run.dashboard)}.items():
            client.set_tag(run_id, key, value)


def finish(run: Run, answers: pl.DataFrame | None = None, *, files: bool = True) -> bool:
    """Say what came of a run: outcome, best metrics, and, if `files` are wanted, sample answers,
    last checkpoint, the model.

    A store that is away does not spoil the run: it returns False, and `flush` says it later. It may
    be said again, too, by a run that was resumed.
    """
    if answers is not None:  # kept in the folder, for `flush`
        _write_table(answers, run.folder / SAMPLES)
    try:
        with contact(run) as (client, run_id):
            _finish(client, run_id, run, files)
    except UsageError as error:
        log.warning("%s; the end of run '%s' is not told yet", error, run.name)
        return False
    return True


def _finish(client: MlflowClient, run_id: str, run: Run, files: bool) -> None:
    with quick():
        client.set_tag(run_id, MLFLOW_RUN_NOTE, _note(run))
    for path in (run.folder / RECORD, run.folder / runs.VOCABULARY, run.folder / SAMPLES):
        if path.exists():
            client.log_artifact(run_id, str(path))
    if (run.folder / SAMPLES).exists():  # by this tag MLflow shows it as a table
        table = json.dumps([{"path": SAMPLES, "type": "table"}])
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, table)
    checkpoint = checkpoints.newest(run.checkpoints)
    if files and checkpoint is not None and run.training["track_checkpoint"]:
        client.log_artifacts(run_id, str(checkpoint), f"checkpoints/{checkpoint.name}")
    if run.error:
        client.set_tag(run_id, "error", run.error)
    if run.result.get("best_step") is not None:
        client.set_tag(run_id, "best_step", run.result["best_step"])
    model_id = _log_model(client, run_id, run) if files and run.model.is_dir() else None
    _log_best(client, run_id, run, model_id)
    client.set_terminated(run_id, STATUS[run.status])


def log_evaluation(
    run: Run, split: str, decode: str, metrics: Mapping[str, float | None], answers: Path
) -> None:
    """Add the metrics and the answers of `attune evaluate` to a run.

    `test/bleu` is of greedy answers, `test-beam/bleu` of beam search's: both can be looked at.
    """
    group = split if decode == "greedy" else f"{split}-{decode}"
    named = {f"{group}/{name}": value for name, value in metrics.items()}
    step, now = run.result.get("best_step") or 0, _milliseconds()
    with contact(run) as (client, run_id):
        with quick():
            client.set_tag(run_id, f"{group}/decode", decode)
        client.log_batch(run_id, metrics=list(_metrics(named, now, step)))
        client.log_artifact(run_id, str(answers), "answers")


def log_picture(run: Run, path: Path, metrics: Mapping[str, float]) -> None:
    """Add a picture, and what it shows in numbers, to a run."""
    step, now = run.result.get("best_step") or 0, _milliseconds()
    with contact(run) as (client, run_id):
        client.log_batch(run_id, metrics=list(_metrics(metrics, now, step)))
        client.log_artifact(run_id, str(path), "pictures")


def flush(run: Run, timeout: float) -> int:
    """Send what a past run left behind; returns the number of lines that are still not sent."""
    with Sender(run) as sender:
        left = sender.close(timeout)
    if not left and run.status != "running":
        with contact(run) as (client, run_id):
            known = client.get_run(run_id).info.status
        if known == STATUS["running"]:  # the store was away when the run ended
            finish(run)
    return left


class Sender:
    """Sends what a run logs, each step of each metric once, from a thread of its own.

    Whatever the store does, training does not notice: what could not be sent is tried again.
    Leaving the `with` waits for no store that is away; `close` does, and says how much is left.
    """

    def __init__(self, run: Run):
        self.run = run
        self._lines = _Lines(run.metrics_file)
        self._sent: dict[str, set[int]] = {}
        """By metric, the steps that the store has."""
        self._closing, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

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
        """Send the rest, for at most so many seconds; returns how many lines are not sent."""
        self._closing.set()
        self._thread.join(timeout)
        self._given_up.set()
        return sum(
            any(metric.step not in self._sent.get(metric.key, ()) for metric in _read(line))
            for line in self._lines.new()
        )

    def _work(self) -> None:
        pause = PAUSE
        while not self._given_up.is_set():
            closing = self._closing.is_set()  # asked first: what is written until then is sent
            try:
                self._send()
            except Exception as error:  # whatever it is, training goes on
                if pause == PAUSE:
                    log.warning(
                        "the tracking store %s does not answer (%s): metrics are kept in %s and "
                        "sent when it does",
                        self.run.tracking, _short(error), self.run.metrics_file,
                    )  # fmt: skip
                # It may have stored what it did not confirm: ask again what it has.
                self._sent.clear()
                pause = min(2 * pause, LONGEST_PAUSE)
                if closing:
                    self._given_up.wait(PAUSE)
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
        for line in self._lines.new():
            found = [m for m in _read(line) if m.step not in self._steps(m.key)]
            if len(metrics) + len(found) > MOST_METRICS:
                self._deliver(lines, metrics.values())
                lines, metrics = [], {}
            lines.append(line)
            for metric in found:
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
            self._lines.take(line)

    def _steps(self, key: str) -> set[int]:
        if key not in self._sent:
            client, run_id = self._client
            self._sent[key] = {metric.step for metric in client.get_metric_history(run_id, key)}
        return self._sent[key]

    @cached_property
    def _client(self) -> tuple[MlflowClient, str]:
        return _client(self.run)


class _Lines:
    """The whole lines of a growing file, from its beginning again where it was written anew."""

    def __init__(self, path: Path):
        self.path = path
        self._end, self._last = 0, b""

    def new(self) -> list[bytes]:
        """All behind the last line that was taken."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._end, self._last = 0, b""
                    file.seek(0)
                return [line for line in file if line.endswith(b"\n")]  # the last may be half
        except FileNotFoundError:
            return []

    def take(self, line: bytes) -> None:
        """Go on behind this line, the first of `new`."""
        self._end += len(line)
        self._last = line


def _read(line: bytes) -> list[Metric]:
    try:
        content = json.loads(line)
        return list(_metrics(content["metrics"], content["time"], content["step"]))
    except (ValueError, KeyError, TypeError):  # what a worker that died has left of a line
        return []


def _metrics(
    values: Mapping[str, float | None], when: int, step: int, model_id: str | None = None
) -> Iterator[Metric]:
    for key, value in values.items():
        if isinstance(value, int | float):
            # MLflow would store the largest number for infinity, which flattens its chart.
            finite = value if math.isfinite(value) else math.nan
            yield Metric(key, finite, when, step, model_id=model_id)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _client(run: Run) -> tuple[MlflowClient, str]:
    assert run.run_id is not None, "start() comes first"
    uri = store_uri()
    address = uri if _without_password(uri) == run.tracking else run.tracking
    return MlflowClient(tracking_uri=address), run.run_id


@contextlib.contextmanager
def contact(run: Run) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the store that a run is told of in, and the run's id there."""
    with _understood(run.tracking):
        yield _client(run)


@contextlib.contextmanager
def _understood(uri: str) -> Iterator[None]:
    """A store's failure as something a user can act on."""
    try:
        yield
    except FAILURES as error:
        fix = (
            f"start the tracking server, or unset {ADDRESS} to use the local store"
            if uri.startswith(("http:", "https:"))
            else "repair the file or move it away"
            if uri.startswith("sqlite:")
            else f"check {ADDRESS}"
        )
        raise UsageError(
            f"the tracking store {_without_password(uri)} failed ({_short(error)}): {fix}"
        ) from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time makes the local store's tables: of two, MLflow lets one fail."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "mlflow.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """For the first contact: be done in seconds, unless the user has set how long to try."""
    ours = {name: value for name, value in QUICK.items() if os.environ[name] == DEFAULTS[name]}
    with _variables(ours):
        yield


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, which are read at each request, for a moment."""
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


def _short(error: BaseException) -> str:
    """What is at the bottom of it: MLflow wraps a refused connection in four lines of others."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    told = deepest if isinstance(deepest, OSError) else error
    text = _without_password(str(told).strip()) or type(told).__name__
    return text.splitlines()[0][:200]


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)


def _experiment(client: MlflowClient, uri: str, variant: str) -> str:
    """The experiment of a variant: its id."""
    found: Experiment | None = client.get_experiment_by_name(variant)
    if found is None:
        server = uri.startswith(("http:", "https:"))  # which has its own place for artifacts
        artifacts = None if server else (home() / "mlartifacts" / variant).as_uri()
        try:
            made = client.create_experiment(variant, artifacts, {MLFLOW_RUN_NOTE: _system(variant)})
            return str(made)
        except MlflowException:
            found = client.get_experiment_by_name(variant)  # another run was faster
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        number = found.experiment_id
        raise UsageError(
            f"the experiment '{variant}' was deleted from {_without_password(uri)}: bring it back "
            f"with 'mlflow experiments restore -x {number}', or remove it for good with "
            f"'mlflow gc --experiment-ids {number}'"
        )
    return str(found.experiment_id)


def _system(name: str) -> str:
    variant, fixed = find_variant(name)
    reduced = ", ".join(f"{key}={_text(value)}" for key, value in fixed.items())
    ablation = f", reduced by {reduced}" if reduced else ""
    return f"**{variant.system}**{ablation} ({variant.paper})"


def _note(run: Run) -> str:
    data = run.data
    harvest = data.get("harvest")
    return "\n".join(
        [
            _system(run.variant),
            "",
            f"- Command: `{run.command}`",
            f"- Data: {data['name']}, hash {data['hash'][:12]}, in {data['folder']}",
            *(
                [f"- Unpaired text: hash {harvest['hash'][:12]}, in {harvest['folder']}"]
                if harvest
                else []
            ),
            f"- Preset {run.preset}, seed {run.seed}, workers: {run.workers}, ZeRO {run.zero}",
            f"- Outcome: {_outcome(run)}",
        ]
    )


def _outcome(run: Run) -> str:
    if run.status == "running":
        return "still running"
    result = run.result
    parts: list[str] = [f"{run.status}: {run.error}" if run.error else run.status]
    if "steps" in result:
        parts.append(f"{result['steps']:,} steps in {result['seconds']:,.0f} s")
    if result.get("best_step") is not None:
        metrics = result.get("metrics", {}).items()
        best = ", ".join(f"{name} {value:.4g}" for name, value in metrics if value is not None)
        parts.append(f"best at step {result['best_step']:,}: {best}")
    return "; ".join(parts)


def _params(run: Run) -> dict[str, str]:
    """Settings by the names of `--set`, and what else was asked for by the names of its options."""
    asked = {
        "preset": run.preset,
        "seed": run.seed,
        "workers": run.workers,
        "zero": run.zero,
        "max_steps": run.max_steps,
        "max_minutes": run.max_minutes,
        "data": run.data["name"],
        "init": run.init,
    }
    settings = {**run.training, **run.config, **asked}
    return {key: _text(value)[:LONGEST_VALUE] for key, value in _flat(settings)}


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _text(value: Any) -> str:
    """As it is typed after `--set`."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _datasets(run: Run, manifest: Mapping[str, Any]) -> Iterator[DatasetInput]:
    """The data that a run learns from, and the unpaired text beside them."""
    counts = {name: split["samples"] for name, split in manifest.get("splits", {}).items()}
    yield _dataset(
        run.data["name"], run.data, {"num_rows": counts.get("train"), "samples": counts}, "training"
    )
    if harvest := run.data.get("harvest"):
        threshold = {"threshold": run.config["harvest_threshold"]}
        yield _dataset(Path(harvest["folder"]).name, harvest, threshold, "unpaired")


def _dataset(
    name: str, data: Mapping[str, Any], profile: Mapping[str, Any], context: str
) -> DatasetInput:
    dataset = Dataset(
        name=name,
        digest=data["hash"][:12],
        source_type="local",
        source=json.dumps({"uri": data["folder"]}),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _write_table(frame: pl.DataFrame, path: Path) -> None:
    """As `MlflowClient.log_table` would, which appends where a run finishes a second time."""
    frame = frame.with_columns(cs.by_dtype(pl.List(pl.String)).list.join("\n"))
    content = {"columns": frame.columns, "data": frame.rows()}
    path.write_text(json.dumps(content, default=str), encoding="utf-8")


def _log_best(client: MlflowClient, run_id: str, run: Run, model_id: str | None) -> None:
    step, now = run.result.get("best_step") or 0, _milliseconds()
    best = {f"best_{name}": value for name, value in run.result.get("metrics", {}).items()}
    metrics = []
    for metric in _metrics(best, now, step, model_id):
        # At the time of the first time, what is said again does not count twice.
        known = {m.step: m.timestamp for m in client.get_metric_history(run_id, metric.key)}
        when = known.get(step, now)
        metrics.append(Metric(metric.key, metric.value, when, step, model_id=model_id))
    client.log_batch(run_id, metrics=metrics)


def _log_model(client: MlflowClient, run_id: str, run: Run) -> str | None:
    """Log the model as one that `mlflow.pyfunc.load_model` loads; register a finished run's."""
    variant, _ = find_variant(run.variant)
    if not issubclass(variant, DialogueVariant):  # a classifier has no answers to be asked for
        client.log_artifact(run_id, str(run.model))
        return None
    experiment = client.get_run(run_id).info.experiment_id
    logged = client.create_logged_model(
        experiment,
        name=run.name,
        source_run_id=run_id,
        params=_params(run),
        model_type="attune",
    )
    model_id = str(logged.model_id)
    step = run.result.get("best_step") or 0
    client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step)])
    context = ColSpec(AnyType(), "context")  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        place = logged.artifact_location
        mlflow.pyfunc.save_model(
            path=str(path),
            python_model=str(MODEL_CODE),
            artifacts={"model": str(run.model)},
            signature=ModelSignature(Schema([context]), Schema([ColSpec(DataType.string)])),
            input_example=[{"context": ["My dog is ill."]}],
            pip_requirements=["attune"],  # given, so that MLflow does not look for them with pip
            mlflow_model=Model(place, run_id, model_uuid=model_id, model_id=model_id),
        )
        client.log_model_artifacts(model_id, str(path))
    client.finalize_logged_model(model_id, "READY")
    if run.status == "finished":
        _register(client, run, model_id)
    return model_id


def _register(client: MlflowClient, run: Run, model_id: str) -> None:
    add_version(client, run.variant, _system(run.variant), run, model_id)


def add_version(
    client: MlflowClient, name: str, description: str, run: Run, model_id: str
) -> ModelVersion:
    """Put a run's model into the registry, under a name that may be new."""
    with contextlib.suppress(MlflowException):  # there already; else the next call says what is
        client.create_registered_model(name, description=description)
    # A local registry finds the logged model in the store that the environment names.
    with _variables({ADDRESS: client.tracking_uri}):
        return client.create_model_version(
            name,
            f"models:/{model_id}",
            run_id=run.run_id,
            model_id=model_id,
            description=f"{run.name}: {_outcome(run)}",
        )
