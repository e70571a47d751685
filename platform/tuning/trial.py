"""The process of a trial: trains a run as `attune train` does, and reports validations to Ray Tune.

With one worker the run is trained in this process, which trains one trial after another, so that
only the first one has to import everything. After each validation it waits for Tune to decide
whether the trial continues. With several workers, Ray Train starts them, and the trial follows
their metrics file.
"""

import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attune.models.base import DialogueVariant
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.logging import TRIAL
from attune.platform.core.settings import find_variant
from attune.platform.runs.log import write_log
from attune.platform.runs.metrics_file import MetricsFollower, read_metrics
from attune.platform.runs.record import Run, read_run
from attune.platform.services import cluster
from attune.platform.training import checkpoints
from attune.platform.training.loop import PROBLEM, RESULT
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.settings import configure
from attune.platform.training.sharing import steps_until_shared_stage
from attune.platform.tuning.sweep import FINAL_METRICS

TASK = "task"
VALIDATION = "validation"
"""The reported number of validations, by which schedulers measure the progress of a trial."""
WRONG_METRIC = "wrong-metric"
"""A file in the folder of a run whose variant does not have the sweep's metric."""
THREAD_TIMEOUT_SECONDS = "60"
"""How long a stopped trial may take to end before its process is used for the next one."""
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Task:
    """What Tune passes to a trial; in a population, `settings` may differ from the run's record."""

    number: int
    variant: str
    folder: str
    settings: dict[str, Any]
    metrics: tuple[str, ...]
    population: bool = False
    over: bool = False
    """Whether it ended under an earlier driver: its validations are only reported again."""
    cores: float = 1
    rung: int | None = None
    """The validation at which it pauses; None if it is trained to its end."""
    shared: str | None = None
    """The last stage that is the same in all trials; only later validations count."""

    def run(self) -> Run:
        """Return the run with these settings."""
        return apply_settings(read_run(Path(self.folder)), self.settings)


class DivergedError(Exception):
    """The loss became NaN or infinite."""


class RungError(Exception):
    """The trial pauses at its rung; its checkpoint is written."""


class WrongMetricError(UsageError):
    """A variant does not have the sweep's metric."""


def apply_settings(run: Run, settings: Mapping[str, Any]) -> Run:
    """Return a run with some settings changed."""
    overrides = {**run.config, **run.training, **settings}
    config, training = configure(run.variant, run.preset, overrides)
    return dataclasses.replace(
        run, config=dataclasses.asdict(config), training=dataclasses.asdict(training)
    )


def train_trial(config: dict[str, Any]) -> None:
    """Train a run to its end, or until Tune stops it."""
    from ray import tune

    # Tune's setting: the next trial fails if the last one of its process does not end in time.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = THREAD_TIMEOUT_SECONDS
    os.environ[TRIAL] = tune.get_context().get_trial_id()
    task = Task(**config[TASK])
    run = task.run()
    try:
        _train_and_report(task, run)
    except (DivergedError, RungError):
        pass  # the metrics file shows it, and a retry would end in the same way
    except (UsageError, DataError) as error:  # a retry would fail, too
        name = WRONG_METRIC if isinstance(error, WrongMetricError) else PROBLEM
        (run.folder / name).write_text(str(error), encoding="utf-8")


def _train_and_report(task: Task, run: Run) -> None:
    reporter = MetricReporter(task, run)
    if task.population:
        _adopt_checkpoint(run)
    else:
        for step, metrics in read_validations(run):
            reporter(step, metrics, over=False)
    if task.over or run.stop_file.exists():
        return
    if not (run.folder / RESULT).exists():
        (_train_in_process if run.workers == 1 else _train_with_workers)(task, run, reporter)
    if (run.folder / RESULT).exists():
        measure_answers(run, task.metrics)


def read_validations(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of the validations up to a run's last checkpoint.

    Later ones are repeated when the run is resumed.
    """
    newest = run.newest_checkpoint()
    if newest is None:
        return []
    done = int(newest.name)
    lines = [line for line in read_metrics(run.metrics_file) if line["step"] <= done]
    return [(line["step"], line["metrics"]) for line in lines if is_validation(line["metrics"])]


def select_counted(
    run: Run, logged: Iterable[tuple[int, Mapping[str, float]]], metrics: Iterable[str],
    shared: str | None,
) -> list[tuple[int, Mapping[str, float]]]:  # fmt: skip
    """Return the logged validations that schedulers count.

    These are the ones with all of the sweep's metrics, after the `shared` stage.
    """
    since = 0 if shared is None else steps_until_shared_stage(run, shared)
    wanted = intermediate_metrics(metrics)
    return [
        (step, values)
        for step, values in logged
        if since is not None and step > since and is_validation(values)
        and all(name in values for name in wanted)
    ]  # fmt: skip


def intermediate_metrics(metrics: Iterable[str]) -> list[str]:
    """Return those of a sweep's metrics that every validation has."""
    return [name for name in metrics if name.removeprefix("valid_") not in FINAL_METRICS]


def is_validation(metrics: Mapping[str, float]) -> bool:
    """Return whether the metrics of a line are those of a validation."""
    return any(name.startswith("valid_") for name in metrics)


def has_diverged(run: Run) -> bool:
    """Return whether the last logged loss of a run is NaN or infinite."""
    lines = read_metrics(run.metrics_file)
    return bool(lines) and not _is_finite(lines[-1]["metrics"])


def _is_finite(metrics: Mapping[str, float]) -> bool:
    losses = (value for name, value in metrics.items() if name in ("loss", "valid_loss"))
    return all(math.isfinite(value) for value in losses)


class MetricReporter:
    """Reports validations to Tune, which raises SystemExit in the trial to stop it."""

    def __init__(self, task: Task, run: Run):
        self.task, self.run = task, run

    def __call__(self, step: int, metrics: Mapping[str, float], over: bool) -> None:
        """Report what a run logged at a step; `over` if it was its last one."""
        if not _is_finite(metrics):
            raise DivergedError
        if not is_validation(metrics):
            return
        if missing := [
            name for name in intermediate_metrics(self.task.metrics) if name not in metrics
        ]:
            if missing == ["valid_perplexity"] and self._trains_decoder_later():
                return
            known = ", ".join(sorted(n.removeprefix("valid_") for n in metrics))
            raise WrongMetricError(
                f"--metric {missing[0].removeprefix('valid_')}: expected a metric of "
                f"'{self.run.variant}', which has {known}, and, at the end of a trial, "
                f"{', '.join(FINAL_METRICS)}"
            )
        if over:  # nothing is left to decide
            return
        logged = [(line["step"], line["metrics"]) for line in read_metrics(self.run.metrics_file)]
        counted = select_counted(self.run, logged, self.task.metrics, self.task.shared)
        count = sum(each <= step for each, _ in counted)
        if not any(each == step for each, _ in counted):
            return
        from ray import tune

        report = {**metrics, "step": step, VALIDATION: count}
        if self.task.population:
            folder = self.run.checkpoints / f"{step:08d}"
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))
        else:
            tune.report(report)
        if self.task.rung is not None and count >= self.task.rung:
            raise RungError

    def _trains_decoder_later(self) -> bool:
        """Return whether a missing perplexity only means that the decoder is not trained yet."""
        return issubclass(find_variant(self.run.variant)[0], DialogueVariant)


def _adopt_checkpoint(run: Run) -> None:
    """Replace the run's checkpoint by the one from Tune, if that is another member's."""
    from ray import tune

    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return
    with checkpoint.as_directory() as folder:
        own = run.newest_checkpoint()
        if own is not None and checkpoints.is_same_checkpoint(own, Path(folder)):
            return
        (run.folder / RESULT).unlink(missing_ok=True)
        state = checkpoints.adopt_checkpoint(Path(folder), run.checkpoints)
    write_log(run, f"continuing with a better member's weights from step {state.total:,}")


def _train_in_process(task: Task, run: Run, reporter: MetricReporter) -> None:
    import ray
    import torch

    from attune.platform.training.worker import train, worker_gauges

    torch.set_num_threads(max(1, int(task.cores)))
    use_gpu = bool(ray.get_gpu_ids()) and torch.cuda.is_available()
    train(
        run,
        ProcessGroup(device=torch.device("cuda" if use_gpu else "cpu")),
        reporter,
        worker_gauges(run),
    )


def _train_with_workers(task: Task, run: Run, reporter: MetricReporter) -> None:
    from attune.platform.training.worker import work

    failures: list[BaseException] = []

    def fit() -> None:
        try:
            cluster.fit(work, run, int(task.cores))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=fit, name=f"fit {run.name}", daemon=True)
    thread.start()
    try:
        for step, metrics in follow_metrics(run, thread):
            reporter(step, metrics, over=False)
    except (SystemExit, DivergedError, RungError):  # the workers end after their current step
        run.stop_file.touch()
        thread.join()
        raise
    for failure in failures:
        raise failure


def follow_metrics(run: Run, thread: threading.Thread) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and metrics of each line logged after the last checkpoint, until the thread ends.

    A step that restarted workers repeat is yielded once. A validation is yielded when its
    checkpoint exists, because it may be repeated until then.
    """
    done = _last_checkpoint_step(run)
    follower = MetricsFollower(run.metrics_file)
    pending: dict[tuple[int, bool], dict[str, float]] = {}
    yielded: set[tuple[int, bool]] = set()
    is_alive = True
    while is_alive:
        thread.join(POLL_SECONDS)
        is_alive = thread.is_alive()
        checkpoint_step = _last_checkpoint_step(run)  # before its lines are read
        for line in follower.read_new_metrics():
            key = line["step"], is_validation(line["metrics"])
            if line["step"] > done and key not in yielded:
                pending[key] = line["metrics"]
        for step, is_valid in list(pending):
            if not is_valid or step <= checkpoint_step:
                yielded.add((step, is_valid))
                yield step, pending.pop((step, is_valid))


def _last_checkpoint_step(run: Run) -> int:
    newest = run.newest_checkpoint()
    return 0 if newest is None else int(newest.name)


def measure_answers(run: Run, metrics: tuple[str, ...]) -> None:
    """Add the metrics that need answers to all of valid to a finished run's result."""
    path = run.folder / RESULT
    result = json.loads(path.read_text(encoding="utf-8"))
    if all(name in result["metrics"] for name in metrics):
        return
    if not issubclass(find_variant(run.variant)[0], DialogueVariant):
        raise WrongMetricError(
            f"'{run.variant}' does not answer: {', '.join(metrics)} cannot be measured"
        )
    from attune.platform.evaluation.evaluate_run import evaluate_answers

    measured = evaluate_answers(run.model, Path(run.data["folder"]), "valid").metrics
    result["metrics"] |= {f"valid_{name}": measured[name] for name in FINAL_METRICS}
    new = path.with_suffix(".answers")
    new.write_text(json.dumps(result), encoding="utf-8")
    new.replace(path)
