"""The driver process of training: locks the runs, starts the workers, tracks, finishes."""

import dataclasses
import fcntl
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from attune.models.base import DialogueVariant
from attune.platform import tracking
from attune.platform.core.errors import ServiceError, UsageError
from attune.platform.core.logging import current_job
from attune.platform.core.settings import find_variant
from attune.platform.data.dataset_folder import read_manifest, read_samples
from attune.platform.runs.log import log_file, write_log
from attune.platform.runs.metrics_file import LineFollower, MetricsFollower
from attune.platform.runs.record import Run
from attune.platform.services import cluster
from attune.platform.serving.responder import Responder
from attune.platform.training.loop import PLAN, PROBLEM, RESULT

SAMPLE_ANSWERS = 20
MAX_ERROR_LENGTH = 1000
POLL_SECONDS = 0.5
"""Between two reads of what the workers logged; each takes a core from them for a moment."""
SEND_TIMEOUT = 60.0
"""How long to wait at the end for a tracking server that does not answer."""

ShowLine = Callable[[str, dict[str, Any]], None]
"""Called with the name of a run and each line that it logs, or `{"message": ...}`."""


def train(run: Run, show: ShowLine = lambda _, line: None) -> Run:  # noqa: ARG005
    """Train or resume a run; Ctrl-C and SIGTERM save a checkpoint and stop it."""
    [ended] = train_all([run], show)
    return ended


def train_all(runs: Sequence[Run], show: ShowLine) -> list[Run]:
    """Train several runs, as many at once as there are cores for. If one fails, the others continue
    and its error is raised at the end."""
    with ExitStack() as held:
        for run in runs:
            held.enter_context(_lock_run(run))
        _connect(runs)
        started = [_start(run) for run in runs]
        with tracking.TrackingQueue() as queue:
            for run in started:
                queue.start_sending(run)
            failures = _train_and_watch(started, show)
        unsent = queue.close(SEND_TIMEOUT)
        ended = []
        for run in started:
            ended.append(_finish(run, failures.get(run.name)))
            tracking.finish_run(ended[-1], sample_answers(ended[-1]))
            if lines := unsent.get(run.name):
                show(run.name, {"message": _unsent_message(run, lines)})
    for failure in failures.values():
        raise failure
    return ended


def _connect(runs: Sequence[Run]) -> None:
    """Connect to a cluster before MLflow shows the runs as running."""
    try:
        cluster.connect()
    except Exception as error:
        for run in runs:
            run.update(status="failed", error=_one_line(error))
        raise


def _start(run: Run) -> Run:
    run.stop_file.unlink(missing_ok=True)
    for left in (RESULT, PLAN, PROBLEM):
        (run.folder / left).unlink(missing_ok=True)
    run = dataclasses.replace(run, error="", **current_job())
    if run.run_id is None:
        run = tracking.start_run(run, read_manifest(Path(run.data["folder"])))
    else:
        tracking.reopen_run(run)
    write_log(run, "begins")
    return run.update(status="running")


@contextmanager
def _lock_run(run: Run) -> Iterator[None]:
    """Hold the run's lock, so that no other process trains it; it is released with the process."""
    with (run.folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"run '{run.name}' is being trained by another process") from None
        yield


def _train_and_watch(runs: Sequence[Run], show: ShowLine) -> dict[str, BaseException]:
    """Train in workers and show what they log; return the errors by run name."""
    from attune.platform.training.worker import work  # imports Ray

    failures: dict[str, BaseException] = {}
    at_once, cores = cluster.plan_capacity(max(run.workers for run in runs), len(runs))
    turns = threading.Semaphore(at_once)

    def fit(run: Run) -> None:
        with turns:
            if run.stop_file.exists():  # asked to stop before it started
                return
            try:
                cluster.fit(work, run, cores)
            except BaseException as error:
                failures[run.name] = error
            if (problem := run.folder / PROBLEM).exists():
                failures[run.name] = ServiceError(_failure_message(run, problem))

    threads = [
        threading.Thread(target=fit, args=(run,), name=f"fit {run.name}", daemon=True)
        for run in runs
    ]
    for thread in threads:
        thread.start()
    lines = [_RunDisplay(run) for run in runs]
    while alive := [thread for thread in threads if thread.is_alive()]:
        try:
            alive[0].join(POLL_SECONDS)
            for each in lines:
                each.show(show)
                if not each.has_plan:
                    each.report_waiting(cluster.describe_missing_resources(each.run, cores))
        except (KeyboardInterrupt, SystemExit):
            if any(run.stop_file.exists() for run in runs):  # asked twice: stop at once
                raise
            for run in runs:
                run.stop_file.touch()
            if not any(each.has_plan for each in lines):  # no worker has started
                break
            asked = "stopping after this step, with a checkpoint; again to stop at once"
            show(runs[0].name, {"message": asked})
    for each in lines:
        each.show(show)
    return failures


class _RunDisplay:
    """Shows each new line of a run's metrics and log once."""

    def __init__(self, run: Run):
        self.run = run
        self.metrics = MetricsFollower(run.metrics_file)
        self.log = LineFollower(log_file(run))
        self.metrics.read_new()  # an earlier driver has shown these
        self.log.read_new_lines()
        self.has_plan = False
        """Whether its workers have started."""
        self.was_waiting = self.reported_waiting = False

    def report_waiting(self, wanted: str) -> None:
        """Log what the run waits for, and when it has it; ignore what lasts less than two polls."""
        now = bool(wanted)
        if now == self.was_waiting != self.reported_waiting:
            write_log(self.run, f"waits for {wanted}" if wanted else "has all it needs")
            self.reported_waiting = now
        self.was_waiting = now

    def show(self, show: ShowLine) -> None:
        if not self.has_plan and (self.run.folder / PLAN).exists():
            plan = json.loads((self.run.folder / PLAN).read_text(encoding="utf-8"))
            show(self.run.name, plan)
            self.has_plan = True
        logged = [{"message": text} for text in self.log.read_new_lines()]
        for line in self.metrics.read_new() + logged:
            show(self.run.name, line)


def _finish(run: Run, failure: BaseException | None) -> Run:
    path = run.folder / RESULT
    if failure is None and path.exists():
        result = json.loads(path.read_text(encoding="utf-8"))
        ended = run.update(status="finished", result=result)
    elif failure is None:
        ended = run.update(status="stopped")
    else:
        ended = run.update(status="failed", error=_failure_summary(run, failure))
    write_log(ended, ": ".join(filter(None, (ended.status, ended.error))),
               "error" if ended.error else "info")  # fmt: skip
    return ended


def _failure_message(run: Run, problem: Path) -> str:
    """Return the error that the only worker wrote before it ended."""
    return f"run '{run.name}' failed: {_last_line(problem)}\nThe details are in {problem}"


def _failure_summary(run: Run, failure: BaseException) -> str:
    """Return the cause of a failure in one line."""
    if (problem := run.folder / PROBLEM).exists():
        return _last_line(problem)
    return _one_line(failure)


def _one_line(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {str(failure).strip()}".splitlines()[0][:MAX_ERROR_LENGTH]


def _last_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip().splitlines()[-1][:MAX_ERROR_LENGTH]


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
    samples = read_samples(Path(run.data["folder"]), "valid")
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
