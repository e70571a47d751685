"""The driver process of training: locks the runs, starts the workers, tracks, finishes."""

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from attune.models.base import DialogueVariant
from attune.platform import tracking
from attune.platform.core.disk import DiskFullError, explain_full_disk
from attune.platform.core.errors import DataError, ServiceError, UsageError
from attune.platform.core.logging import current_job
from attune.platform.core.settings import find_variant
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.runs.lock import lock_runs
from attune.platform.runs.log import log_file, write_log
from attune.platform.runs.metrics_file import LineFollower, MetricsFollower, read_metrics
from attune.platform.runs.record import Run
from attune.platform.runs.status import resume_command
from attune.platform.services import cluster
from attune.platform.serving.responder import Responder
from attune.platform.training.inputs import check_inputs
from attune.platform.training.loop import PLAN, PROBLEM, RESULT
from attune.platform.training.recovery import recover_metrics
from attune.platform.training.signals import StopSignals, skip_ray_shutdown

SAMPLE_ANSWERS = 20
MAX_ERROR_LENGTH = 1000
POLL_SECONDS = 0.5
"""Between two reads of what the workers logged; each takes a core from them for a moment."""
SEND_TIMEOUT = 60.0
"""How long to wait at the end for a tracking server that does not answer."""
STOPPING = (
    "stopping after this step, with a checkpoint; a second signal (Ctrl-C, SIGTERM) stops at once "
    "and loses the steps since the last checkpoint"
)

ShowLine = Callable[[str, dict[str, Any]], None]
"""Called with the name of a run and each line that it logs, or `{"message": ...}`."""


def train(run: Run, show: ShowLine = lambda _, line: None) -> Run:  # noqa: ARG005
    """Train or resume a run; Ctrl-C and SIGTERM save a checkpoint and stop it."""
    with lock_runs([run]) as runs:
        [ended] = train_all(runs, show)
    return ended


def train_all(runs: Sequence[Run], show: ShowLine, signals: StopSignals | None = None) -> list[Run]:
    """Train several runs, as many at once as there are cores for. If one fails, the others continue
    and its error is raised at the end. The caller holds their locks (`lock_runs`)."""
    signals = signals or StopSignals()
    for run in runs:
        check_inputs(run)
        recover_metrics(run, partial(_report, run, show))
    _connect(runs)
    started = [_start(run) for run in runs]
    with tracking.TrackingQueue() as queue:
        for run in started:
            queue.start_sending(run)
        with signals.deferred():
            failures = _train_and_watch(started, show, signals)
    unsent = queue.close(SEND_TIMEOUT)
    ended = []
    for run in started:
        try:
            with explain_full_disk(run.folder, partial(_describe_unsaved_end, run)):
                ended.append(_finish(run, failures.get(run.name)))
        except DiskFullError as error:
            failure = failures.setdefault(run.name, error)
            error_line = _first_line(run, failure)
            ended.append(dataclasses.replace(run, status="failed", error=error_line))
        answers = None if ended[-1].status == "failed" else sample_answers(ended[-1])
        tracking.finish_run(ended[-1], answers)
        if lines := unsent.get(run.name):
            show(run.name, {"message": _unsent_message(run, lines)})
    if failures:
        (_, first), *others = failures.items()
        for name, failure in others:
            show(name, {"message": str(failure)})
        raise first
    return ended


def _report(run: Run, show: ShowLine, message: str) -> None:
    """Log a warning and show it."""
    write_log(run, message, "warning")
    show(run.name, {"message": message})


def _connect(runs: Sequence[Run]) -> None:
    """Connect to a cluster before MLflow shows the runs as running."""
    try:
        cluster.connect()
    except Exception as error:
        for run in runs:
            run.update(status="failed", error=_first_line(run, error))
        raise


def _start(run: Run) -> Run:
    run.stop_file.unlink(missing_ok=True)
    for previous in (RESULT, PLAN, PROBLEM):
        (run.folder / previous).unlink(missing_ok=True)
    run = dataclasses.replace(run, error="", **current_job())
    if run.run_id is None:
        run = tracking.start_run(run, read_dataset_manifest(Path(run.data["folder"])))
    else:
        tracking.reopen_run(run)
    write_log(run, "training started")
    return run.update(status="running")


class _RunThread(threading.Thread):
    """Waits for the workers of one run.

    `ended` tells when they have ended. On Python 3.11 `join` and `is_alive` cannot: a signal during
    `join` with a timeout marks a thread as stopped that still runs.
    """

    def __init__(self, run: Run, cores: int, slots: threading.Semaphore):
        super().__init__(name=f"fit {run.name}", daemon=True)
        self.training, self.cores, self.slots = run, cores, slots
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Train the run, unless it was asked to stop before its turn."""
        try:
            with self.slots:
                if not self.training.stop_file.exists():
                    self._fit()
        finally:
            self.ended.set()

    def _fit(self) -> None:
        from attune.platform.training.worker import work  # imports Ray

        try:
            cluster.fit(work, self.training, self.cores)
        except BaseException as error:
            self.failure = error
        self.failure = _explain_failure(self.training, self.failure)


def _train_and_watch(
    runs: Sequence[Run], show: ShowLine, signals: StopSignals
) -> dict[str, BaseException]:
    """Train in workers and show what they log; return the errors by run name."""
    at_once, cores = cluster.plan_capacity(max(run.workers for run in runs), len(runs))
    slots = threading.Semaphore(at_once)
    threads = [_RunThread(run, cores, slots) for run in runs]
    for thread in threads:
        thread.start()
    displays = [_RunDisplay(run) for run in runs]
    was_asked = False
    while waiting := [thread for thread in threads if not thread.ended.is_set()]:
        waiting[0].ended.wait(POLL_SECONDS)
        if any(thread.failure for thread in threads):
            cluster.release_resources_of_killed_runs()
        for display in displays:
            display.show(show)
            if not display.has_plan:
                missing = cluster.describe_missing_resources(display.run, cores)
                display.report_waiting(missing)
        if signals.received and not was_asked:
            was_asked = True
            _ask_to_stop(displays, show)
        if was_asked and not any(
            display.has_plan and not thread.ended.is_set()
            for display, thread in zip(displays, threads, strict=True)
        ):
            break  # the workers of the others have not started: there is nothing to save
        if len(signals.received) > 1:
            _abandon([thread.training for thread in waiting], show)
            skip_ray_shutdown(signals.exit_code)
            raise SystemExit(signals.exit_code)
    if any(not thread.ended.is_set() for thread in threads):
        skip_ray_shutdown(signals.exit_code)
    for display in displays:
        display.show(show)
    return {thread.training.name: thread.failure for thread in threads if thread.failure}


def _ask_to_stop(displays: "Sequence[_RunDisplay]", show: ShowLine) -> None:
    for display in displays:
        display.run.stop_file.touch()
    is_training = any(display.has_plan for display in displays)
    show(displays[0].run.name, {"message": STOPPING if is_training else "stopping"})


def _abandon(runs: Sequence[Run], show: ShowLine) -> None:
    """Record that runs were stopped without waiting for a checkpoint, and show what is lost."""
    for run in runs:
        checkpoint = run.newest_checkpoint()
        saved = 0 if checkpoint is None else int(checkpoint.name)
        logged = max((line["step"] for line in read_metrics(run.metrics_file)), default=0)
        message = (
            f"run '{run.name}' was stopped at once, at step {max(logged, saved):,} or later: the "
            f"steps after its last checkpoint (step {saved:,}) are lost"
        )
        show(run.name, {"message": f"{message}; resume with '{resume_command(run)}'"})
        write_log(run.update(status="stopped"), message, "warning")


class _RunDisplay:
    """Shows each new line of a run's metrics and log once."""

    def __init__(self, run: Run):
        self.run = run
        self.metrics = MetricsFollower(run.metrics_file)
        self.log = LineFollower(log_file(run))
        self.metrics.read_new_metrics()  # an earlier driver has shown these
        self.log.read_new_lines()
        self.has_plan = False
        """Whether its workers have started."""
        self.was_waiting = self.reported_waiting = False

    def report_waiting(self, wanted: str) -> None:
        """Log what the run waits for, and when it has it; ignore what lasts less than two polls."""
        now = bool(wanted)
        if now == self.was_waiting != self.reported_waiting:
            write_log(self.run, f"waits for {wanted}" if wanted else "resources available")
            self.reported_waiting = now
        self.was_waiting = now

    def show(self, show: ShowLine) -> None:
        if not self.has_plan and (self.run.folder / PLAN).exists():
            plan = json.loads((self.run.folder / PLAN).read_text(encoding="utf-8"))
            show(self.run.name, plan)
            self.has_plan = True
        logged = [{"message": text} for text in self.log.read_new_lines()]
        for line in self.metrics.read_new_metrics() + logged:
            show(self.run.name, line)


def _finish(run: Run, failure: BaseException | None) -> Run:
    path = run.folder / RESULT
    if failure is None and path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        ended = run.update(status="finished", result=result)
    elif failure is None:
        ended = run.update(status="stopped")
    else:
        ended = run.update(status="failed", error=_first_line(run, failure))
    write_log(ended, ": ".join(filter(None, (ended.status, ended.error))),
               "error" if ended.error else "info")  # fmt: skip
    return ended


def _describe_unsaved_end(run: Run) -> tuple[str, str]:
    return (
        f"the record of run '{run.name}' could not be written",
        f"free some space, then resume with '{resume_command(run)}'",
    )


def _explain_failure(run: Run, failure: BaseException | None) -> BaseException | None:
    """Return an error that says why a run failed; None if it did not."""
    if (problem := run.folder / PROBLEM).exists():  # written by a worker
        text = problem.read_text(encoding="utf-8").strip()
        details = f"\nThe details are in {problem}" if "\n" in text else ""
        return ServiceError(f"{_failure_prefix(run)}{_last_line(text)}{details}")
    for error in getattr(failure, "worker_failures", {}).values():
        cause = getattr(error, "_base_exc", error)
        if isinstance(cause, UsageError | DataError | ServiceError):
            return ServiceError(f"{_failure_prefix(run)}{cause}")
    if killed := cluster.describe_kill(failure):
        return ServiceError(
            f"{_failure_prefix(run)}{killed}; use fewer seeds at once, fewer --workers, a smaller "
            f"--set batch_size or a smaller --preset, or resume with '{resume_command(run)}'"
        )
    return failure


def _first_line(run: Run, failure: BaseException) -> str:
    """Return the cause of a failure in one line."""
    kind = "" if isinstance(failure, ServiceError) else f"{type(failure).__name__}: "
    text = str(failure).strip().removeprefix(_failure_prefix(run))
    return f"{kind}{text}".splitlines()[0][:MAX_ERROR_LENGTH]


def _failure_prefix(run: Run) -> str:
    return f"run '{run.name}' failed: "


def _last_line(text: str) -> str:
    return text.splitlines()[-1][:MAX_ERROR_LENGTH]


def _unsent_message(run: Run, unsent: int) -> str:
    return (
        f"{unsent} logged lines could not be sent to {run.tracking}; they are kept in "
        f"{run.metrics_file} and are sent by 'attune runs --send' once it answers"
    )


def sample_answers(run: Run) -> pl.DataFrame | None:
    """Return the model's answers to some contexts of valid."""
    variant, _ = find_variant(run.variant)
    if not run.model.is_dir() or not issubclass(variant, DialogueVariant):
        return None
    samples = read_dataset_samples(Path(run.data["folder"]), "valid")
    samples = samples.sample(min(SAMPLE_ANSWERS, samples.height), seed=0)
    answers = Responder(run.model).respond(samples["context"].to_list())
    predicted = [
        max(answer.explanation.emotion, key=answer.explanation.emotion.__getitem__)
        if answer.explanation.emotion
        else None
        for answer in answers
    ]
    return pl.DataFrame(
        {
            "context": samples["context"].list.join(" / "),
            "response": samples["response"],
            "answer": [answer.text for answer in answers],
            "emotion": samples["emotion"],
            "predicted_emotion": pl.Series(predicted, dtype=pl.String),
        }
    )
