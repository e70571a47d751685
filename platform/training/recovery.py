"""Restore the metrics of a run from MLflow before it is resumed."""

from collections.abc import Callable
from typing import Any

from attune.platform import tracking
from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import load_metrics, write_metrics
from attune.platform.runs.record import Run

Report = Callable[[str], None]


def recover_metrics(run: Run, report: Report) -> None:
    """Restore the metrics up to the last checkpoint that are missing from the metrics file.

    They are read from MLflow; `report` says how many it does not have either.
    """
    checkpoint = run.newest_checkpoint()
    lines = load_metrics(run.metrics_file, report)
    if checkpoint is None:
        return
    done = int(checkpoint.name)
    if not (missing := _steps_to_recover(run, lines, done)):
        return
    try:
        sent = tracking.read_sent_metrics(run) if run.run_id is not None else []
    except UsageError:
        sent = []
    known = {(line["step"], name) for line in lines for name in line["metrics"]}
    restored = [
        line
        for line in sent
        if line["step"] <= done
        and not any((line["step"], name) in known for name in line["metrics"])
    ]
    lines = sorted([*lines, *restored], key=lambda line: (line["step"], line["time"]))
    write_metrics(run.metrics_file, lines)
    left = _steps_to_recover(run, lines, done)
    if len(left) < len(missing):
        report(f"{run.metrics_file}: restored {len(missing) - len(left)} steps from MLflow")
    if left:
        report(
            f"{run.metrics_file}: {len(left)} logged steps from {left[0]:,} to {left[-1]:,} are "
            f"missing, and MLflow does not have them; the training itself is not affected"
        )


def _steps_to_recover(run: Run, lines: list[dict[str, Any]], done: int) -> list[int]:
    """Return the steps up to `done` whose losses should have been logged, but are not there."""
    every = run.training.get("log_every", 1)
    logged = {line["step"] for line in lines if "loss" in line["metrics"]}
    return [step for step in range(every, done + 1, every) if step not in logged]
