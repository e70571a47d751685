"""Sweeps over decoding: one trained model answers the same contexts with different settings."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attune.models.base import DialogueVariant
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import current_job
from attune.platform.core.settings import find_variant, override_settings
from attune.platform.evaluation.evaluate_run import Conditions, evaluate_answers
from attune.platform.runs.record import Run, find_run
from attune.platform.services import cluster
from attune.platform.services import tasks as ray_tasks
from attune.platform.tuning.sweep import END_STATE, Sweep

Show = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The contexts and the decoding settings of one trial."""

    number: int
    model: str
    data: str
    split: str
    contexts: int | None
    settings: dict[str, Any]


def measure_trial(trial: Trial) -> tuple[int, dict[str, float]]:
    """Return the trial's number and the metrics of its answers."""
    conditions = Conditions(decoding=override_settings(Decoding(), trial.settings))
    metrics = evaluate_answers(
        Path(trial.model), Path(trial.data), trial.split, conditions,
        contexts=trial.contexts, keep_model=True,
    ).metrics  # fmt: skip
    return trial.number, {name: float(v) for name, v in metrics.items() if v is not None}


def check(run: Run) -> None:
    """Raise UsageError unless a run is a dialogue model."""
    if not issubclass(find_variant(run.variant)[0], DialogueVariant):
        raise UsageError(f"run '{run.name}' is a {run.variant}: expected a run of a dialogue model")


def run(sweep: Sweep, show: Show) -> Sweep:
    """Run or resume a sweep over decoding."""
    with sweep.lock():
        sweep.stop_file.unlink(missing_ok=True)
        sweep.recover_unreported_trials()
        return _run_trials(sweep.update(status="running", **current_job()), show)


def _run_trials(sweep: Sweep, show: Show) -> Sweep:
    model_run = find_run(sweep.asked["run"])
    sweep.enqueue_grid()
    ended_numbers = {trial.number for trial in sweep.get_trials() if END_STATE in trial.user_attrs}
    left = [trial.number for trial in sweep.get_trials() if trial.number not in ended_numbers]
    cluster.connect()
    import ray

    # A guided search learns after each batch of trials; otherwise all trials are one batch.
    cores = int(ray.cluster_resources().get("CPU", 1))
    most = cores if sweep.search == "optuna" else sweep.samples
    try:
        while batch := _start_trials(sweep, left, most):
            tasks = [_describe_trial(sweep, model_run, number) for number in batch]
            for number, metrics in ray_tasks.run_tasks(measure_trial, tasks):
                sweep.record_result(number, "finished", "", metrics)
                ended_numbers.add(number)
                show(_format_trial(sweep, number, metrics), len(ended_numbers))
                if sweep.stop_file.exists():
                    return sweep.update(status="stopped")
    except (KeyboardInterrupt, SystemExit):
        return sweep.update(status="stopped")
    return sweep.update(status="finished")


def _start_trials(sweep: Sweep, left: list[int], most: int) -> list[int]:
    numbers = [left.pop(0) for _ in range(min(most, len(left)))]
    while len(numbers) < most and (suggestion := sweep.suggest_trial()) is not None:
        numbers.append(suggestion[0])
    return numbers


def _describe_trial(sweep: Sweep, model_run: Run, number: int) -> Trial:
    attributes = sweep.get_trial(number).user_attrs
    return Trial(
        number=number,
        model=str(model_run.model),
        data=sweep.asked["data"],
        split=sweep.asked["split"],
        contexts=sweep.asked["contexts"],
        settings={
            **sweep.asked["overrides"],
            **attributes["settings"],
            "method": attributes["variant"],
        },
    )


def _format_trial(sweep: Sweep, number: int, metrics: dict[str, float]) -> str:
    attributes = sweep.get_trial(number).user_attrs
    shown = " ".join(f"{name} {metrics[name]:.4g}" for name in sweep.metrics if name in metrics)
    settings = " ".join(
        f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}"
        for k, v in attributes["settings"].items()
    )
    return f"trial {number}: {shown}  {attributes['variant']} {settings}"
