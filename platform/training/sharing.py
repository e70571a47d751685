"""Stages that runs have in common are trained once.

A setting that plays no part in a stage or in those before it (`Variant.stage_independent_settings`)
leaves the weights after that stage bit-identical. Of two runs that differ only in such settings,
one can therefore start from the other's state at the end of that stage.
"""

import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from attune.platform.core.settings import find_variant
from attune.platform.runs.log import write_log
from attune.platform.runs.metrics_file import read_metrics, write_metrics
from attune.platform.runs.model import MODEL_DESCRIPTION, MODEL_WEIGHTS
from attune.platform.runs.record import Run
from attune.platform.training import checkpoints

SHARED_FIELDS = (
    "variant",
    "preset",
    "data",
    "seed",
    "workers",
    "zero",
    "max_steps",
    "max_minutes",
    "init",
)
"""Fields that must be equal in two runs that share a stage, beside the settings."""


def shared_stage(run: Run, settings: Iterable[str]) -> str | None:
    """Return the last stage of a run that none of the settings affects."""
    own = find_variant(run.variant)[0]
    stages = own.stage_independent_settings(own.Config(**run.config))
    order = list(stages)
    known = {key: place for place, keys in enumerate(stages.values()) for key in keys}
    places = [known.get(key, -1) for key in settings]
    first = min(places, default=-1)
    return order[first] if first >= 0 else None


def steps_until_shared_stage(run: Run, stage: str) -> int | None:
    """Return the steps a run had done when a stage ended; None if it has not ended."""
    path = run.stage_model(stage) / checkpoints.TRAIN_STATE
    return checkpoints.read_checkpoint_state(path.parent).total if path.is_file() else None


def start_after_shared_stage(run: Run, others: Iterable[Run]) -> Run:
    """Start a new run after the last stage that another run has already trained for it."""
    candidates = [
        (steps, stage, other)
        for other in others
        if (stage := _last_shared_stage(run, other)) is not None
        and (steps := steps_until_shared_stage(other, stage)) is not None
    ]
    if not candidates:
        return run
    steps, stage, other = max(candidates, key=lambda candidate: candidate[0])
    _copy_shared_stages(other, run, stage)
    write_log(run, f"begins after stage {stage}, at step {steps:,}, with what '{other.name}' did")
    return run.update(shared_steps=steps)


def _last_shared_stage(run: Run, other: Run) -> str | None:
    """Return the last stage that is identical in both runs."""
    if run.name == other.name or any(
        getattr(run, key) != getattr(other, key) for key in SHARED_FIELDS
    ):
        return None
    one, two = ({**each.config, **each.training} for each in (run, other))
    return shared_stage(run, [key for key in one if one[key] != two.get(key)])


def _copy_shared_stages(other: Run, run: Run, last: str) -> None:
    """Copy models, metrics and checkpoint as of the end of a stage."""
    state = checkpoints.read_checkpoint_state(other.stage_model(last))
    for stage in other.kept_stages():
        done = steps_until_shared_stage(other, stage)
        if done is not None and done <= state.total:
            whole = run.stage_model(stage)
            new = whole.with_name(f".{whole.name}.new")
            shutil.copytree(other.stage_model(stage), new)
            _update_shared_config(new / MODEL_DESCRIPTION, run.config)
            new.replace(whole)
    lines = read_metrics(other.metrics_file)
    write_metrics(run.metrics_file, [line for line in lines if line["step"] <= state.total])
    checkpoints.write_checkpoint(
        run.checkpoints,
        state,
        save_engines=lambda folder: folder.mkdir(),  # each stage starts with new ones
        save_weights=partial(shutil.copyfile, run.stage_model(last) / MODEL_WEIGHTS),
        first=True,
        barrier=lambda: None,
    )


def _update_shared_config(path: Path, config: dict[str, Any]) -> None:
    """Write this run's settings into a copied model: those of later stages differ."""
    description = {**json.loads(path.read_text(encoding="utf-8")), "config": config}
    path.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
