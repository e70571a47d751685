"""What `attune train` logs and validates: one run for each distinct structure of stages.

The command is the real one, with DeepSpeed's engines, checkpoints, validation and the best weights
of a stage for the next. In `runs_in_this_process` the worker is this process instead of one of
Ray's; `tests/stack/test_ray.py` has one of the runs on a real cluster give the same values.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from typer.testing import CliRunner

from attune.jobs.cli import app
from attune.models.base import Variant
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import Run, find_run
from attune.platform.services import cluster
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.worker import train
from tests.golden.behaviour import differences, settings_for
from tests.golden.preparation import DIALOGUES

FOLDER = Path(__file__).parent / "commands"
STEPS = {
    "multi-trs": 4,
    "emoprepend-1": 16,
    "empdg": 10,
    "emotion-cause-hard": 8,
    "dual-emp": 4,
    "meed2": 6,
    "cause-annotator": 4,
    "emotion-classifier": 4,
}
"""Total steps of the run by variant, one for each structure of stages; the first stage of
emoprepend-1 is long enough for its best weights not to be its last."""
SCHEDULE = {"log_every": 1, "evaluate_every": 1, "patience": 0}
SPEED = "samples_per_second"


def structure(variant: Variant) -> tuple[Any, ...]:
    """Return the stages of a variant without names: players, updates, streams, metrics."""
    return tuple(
        (
            len(stage.players),
            tuple((list(stage.players).index(u.player), u.repeat) for u in stage.updates),
            stage.streams,
            stage.metric,
        )
        for stage in variant.stages()
    )


def arguments(variant: str, corpus: Path) -> list[str]:
    """Return the arguments of the command that trains a variant on the corpus in a folder."""
    settings = {**settings_for(variant, corpus), **SCHEDULE}
    return [
        "train", variant, "--data", str(corpus / DIALOGUES), "--preset", "tiny",
        "--max-steps", str(STEPS[variant]), "--name", variant, "--json",
        *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")),
    ]  # fmt: skip


@contextmanager
def runs_in_this_process() -> Iterator[None]:
    """Train in this process on one thread instead of in a Ray worker."""

    def fit(_work: Any, run: Run, _cores: int) -> None:
        torch.set_num_threads(1)  # it counts for the thread that calls it
        train(run, ProcessGroup())

    with mock.patch.multiple(
        cluster,
        connect=lambda: None,
        plan_capacity=lambda *_: (1, 1),
        fit=fit,
        describe_missing_resources=lambda *_: "",
    ):
        yield


def measure(variant: str, corpus: Path) -> dict[str, Any]:
    """Run the command in this process; ATTUNE_HOME must hold no run of the variant's name."""
    with runs_in_this_process():
        done = CliRunner().invoke(app, arguments(variant, corpus))
    assert done.exit_code == 0, done.output
    return measures_of(variant, json.loads(done.stdout.splitlines()[-1])["metrics"])


def measures_of(name: str, result: dict[str, float]) -> dict[str, Any]:
    """Return what a finished run logged, except its speed, and the metrics that were printed."""
    lines = [
        {
            "step": line["step"],
            "metrics": _round({k: v for k, v in line["metrics"].items() if k != SPEED}),
        }
        for line in read_metrics(find_run(name).metrics_file)
    ]
    return {"lines": lines, "result": _round(result)}


def check(variant: str, measures: dict[str, Any]) -> None:
    """Raise an AssertionError where a run differs from the one that was recorded."""
    expected = json.loads(path_of(variant).read_text(encoding="utf-8"))
    lines = differences(_values(expected), _values(measures))
    assert not lines, "\n".join([f"{len(lines)} values differ:", *lines[:20]])


def path_of(variant: str) -> Path:
    """Return the file in which the run of a variant is recorded."""
    return FOLDER / f"{variant}.json"


def _values(measures: dict[str, Any]) -> dict[str, Any]:
    """Return the values in ascending order: metrics may be renamed, which changes their order."""
    return {
        "lines": [[line["step"], sorted(line["metrics"].values())] for line in measures["lines"]],
        "result": sorted(measures["result"].values()),
    }


def _round(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.8g}") for name, value in metrics.items()}
