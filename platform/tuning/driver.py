"""The driver of a sweep: has Ray Tune run the trials that the trial manager chooses.

The state of a sweep is on disk: the search in the sweep's folder, each trial in its run's. A
resumed sweep starts a new experiment of Tune. With the median rule, earlier trials then report
their validations again without training, so that Tune knows what to compare with.
"""

import dataclasses
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import current_job
from attune.platform.services import cluster
from attune.platform.tuning import schedulers
from attune.platform.tuning import sweep as sweeps
from attune.platform.tuning.recorder import Show
from attune.platform.tuning.sweep import Sweep
from attune.platform.tuning.tracker import Tracker
from attune.platform.tuning.trial import TASK, train_trial
from attune.platform.tuning.trial_manager import RETRIES, TrialManager

CHECKPOINTS_PER_MEMBER = 4
"""Checkpoints that Tune keeps of each member of a population, for others to copy."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # metrics.jsonl has everything
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may end before its first validation
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints to stdout even with verbose=0
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would kill trials that can end with a checkpoint
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


def run(sweep: Sweep, show: Show = lambda *_: None) -> Sweep:
    """Run or resume a sweep; Ctrl-C, SIGTERM and `attune tune stop` leave it resumable."""
    os.environ.update(ENVIRONMENT)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if sweep.run_id is None:  # fail now, not in each trial, if the store is unreachable
        with tracking.open_experiment(next(iter(sweep.spaces))):
            pass
    with sweep.lock():
        sweep.stop_file.unlink(missing_ok=True)
        sweep.recover_unreported_trials()
        sweep = sweep.update(status="running", **current_job())
        sweep.enqueue_grid()
        # Only population-based training uses these; other draws are seeded by the trial's number.
        random.seed(sweep.seed)
        np.random.seed(sweep.seed)
        cluster.connect()
        with Tracker() as tracker, _stop_on_signal(sweep, show):
            manager = TrialManager(sweep, tracker, show)
            _run_experiment(sweep, manager)
            while manager.queue and not manager.stop_reason:  # requeued after Tune had ended
                _run_experiment(sweep, manager)
            ended = manager.finish()
    if manager.problem:
        raise UsageError(manager.problem)
    return ended


@contextmanager
def _stop_on_signal(sweep: Sweep, show: Show) -> Iterator[None]:
    """Request a stop at the first Ctrl-C or SIGTERM, and exit at the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, _: Any) -> None:
        if sweep.stop_file.exists():
            raise SystemExit(128 + number)
        sweep.stop_file.touch()
        show("stopping after this step, with checkpoints; again to stop at once", -1)

    before = {each: signal.signal(each, request_stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _run_experiment(sweep: Sweep, manager: TrialManager) -> None:
    population = sweep.scheduler == "pbt"
    at_once, resources = _plan_resources(sweep, manager)
    tasks = [dataclasses.asdict(task) for task in manager.create_population()] if population else []
    if population and not tasks:
        return
    one_metric = len(sweep.metrics) == 1 and sweep.scheduler != "none"
    mode = "max" if sweeps.is_maximized(sweep.metrics[0]) else "min"
    tuner = tune.Tuner(
        tune.with_resources(train_trial, resources),
        # A population is known from the start; other trials are suggested when there is room.
        param_space={TASK: tune.grid_search(tasks)} if population else {},
        tune_config=tune.TuneConfig(
            metric=sweep.metrics[0] if one_metric else None,
            mode=mode if one_metric else None,
            search_alg=None if population else SweepSearcher(manager),
            scheduler=schedulers.build_scheduler(sweep),
            num_samples=1 if population else -1,
            max_concurrent_trials=None if population else at_once,
            reuse_actors=sweep.workers == 1,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{os.getpid()}-{sum(manager.restarts.values())}",
            storage_path=str(sweep.folder / "ray"),
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=CHECKPOINTS_PER_MEMBER),
            callbacks=[manager, SilentProgressCallback()],
            verbose=0,
        ),
    )
    tuner.fit()


def _plan_resources(sweep: Sweep, manager: TrialManager) -> tuple[int, Any]:
    """Return the number of concurrent trials, and the resources of each."""
    import ray

    wanted = sweep.concurrent or sweep.samples * sweep.repeat
    at_once, whole = cluster.plan_capacity(sweep.workers, wanted)
    cores: float = whole
    if sweep.workers > 1:
        manager.cores = cores
        # Ray Train requests the workers' cores itself; if the trial also held some, it could wait
        # for ever. Tune requires some resource, hence one byte of memory.
        return at_once, tune.PlacementGroupFactory([{"memory": 1.0}])
    if sweep.concurrent and sweep.concurrent > at_once:  # each trial gets part of a core
        cores = int(1000 * ray.cluster_resources()["CPU"] / sweep.concurrent) / 1000
        at_once = sweep.concurrent
    manager.cores = cores
    gpus = ray.cluster_resources().get("GPU", 0)
    bundle = {"CPU": cores, **({"GPU": min(1.0, gpus / at_once)} if gpus else {})}
    return at_once, tune.PlacementGroupFactory([bundle])


class SweepSearcher(Searcher):
    """Tune's search algorithm: suggests the trials that the trial manager chooses."""

    def __init__(self, manager: TrialManager):
        super().__init__()
        self.manager = manager

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searchers to restore them, which sweeps never do

    def suggest(self, trial_id: str) -> Any:
        """Return the next task; None makes Tune ask again, FINISHED ends the search."""
        if (task := self.manager.next_task()) is not None:
            return {TASK: dataclasses.asdict(task)}
        return None if self.manager.waits else self.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Do nothing: the trial manager records how trials end."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the search is stored in the sweep's folder."""


class SilentProgressCallback(TrialProgressCallback):
    """Tune's progress output, switched off: it prints to stdout, where `--json` is, even with
    verbose=0."""

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_error(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Print nothing."""
