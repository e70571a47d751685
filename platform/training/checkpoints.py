"""Checkpoints: folders that are written atomically, with a checksum of every file.

checkpoints/00000120/        by the number of steps done
  train_state.json           how far the run has come (`TrainState`)
  weights.safetensors        the whole variant
  engines/<player>/          DeepSpeed's: optimizer state
  checksums.json             of all of the above
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attune.platform.core.disk import (
    MEGABYTE,
    DiskFullError,
    describe_full_disk,
    folder_bytes_on_disk,
    free_disk_bytes,
)
from attune.platform.runs.record import Run, run_checkpoint_folders
from attune.platform.runs.status import resume_command

TRAIN_STATE, WEIGHTS, ENGINES, CHECKSUMS = (
    "train_state.json",
    "weights.safetensors",
    "engines",
    "checksums.json",
)
KEPT = 2
"""The number of intact checkpoints to keep: the last, and one before it in case it is damaged."""
SIZE_IN_WEIGHTS = 4
"""The size of a checkpoint in sizes of its weights: those, and DeepSpeed's copy of them with Adam's
two moments."""


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The progress of a run. With the seed and the weights it determines all later steps."""

    stage: int = 0
    step: int = 0
    """Steps done in this stage."""
    total: int = 0
    """Steps done in all stages."""
    seconds: float = 0.0
    """Seconds spent in this stage."""
    total_seconds: float = 0.0
    best: float | None = None
    """The stage's best value of its metric."""
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    validations_without_improvement: int = 0
    """Validations since `best_step`."""
    stage_over: bool = False
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    """Of each stage's first steps, if the run has a limit of minutes: what the number of steps is
    estimated from."""
    workers: int = 1
    zero: int = 0


def write_checkpoint(
    folder: Path, state: TrainState, *, save_engines: Callable[[Path], None],
    save_weights: Callable[[Path], None], first: bool, barrier: Callable[[], None],
) -> None:  # fmt: skip
    """Write a checkpoint; every worker calls this, the first one writes the shared files.

    A checkpoint that cannot be written completely leaves nothing behind.
    """
    final = folder / f"{state.total:08d}"
    staging = folder / f".{final.name}.new"
    if first:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    barrier()
    try:
        save_engines(staging / ENGINES)
        save_weights(staging / WEIGHTS)
        barrier()
        if first:
            _publish_checkpoint(staging, final, state)
    except BaseException:
        if first:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    if first:
        _delete_surplus_checkpoints(folder, final)
    barrier()


def _publish_checkpoint(staging: Path, final: Path, state: TrainState) -> None:
    """Complete a checkpoint with its state and checksums and move it to its place."""
    _write_checkpoint_state(staging, state)
    _flush_checkpoint(staging)
    shutil.rmtree(final, ignore_errors=True)
    staging.replace(final)


def _write_checkpoint_state(folder: Path, state: TrainState) -> None:
    (folder / TRAIN_STATE).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
    (folder / CHECKSUMS).write_text(
        json.dumps(_compute_checkpoint_checksums(folder), indent=1), encoding="utf-8"
    )


def _delete_surplus_checkpoints(folder: Path, newest: Path) -> None:
    """Delete all but the newest intact checkpoints; `newest` has just been written."""
    kept = 0
    paths = run_checkpoint_folders(folder)
    if len(paths) <= KEPT:
        return
    for path in reversed(paths):
        if kept < KEPT and (path == newest or _find_checkpoint_damage(path) is None):
            kept += 1
        else:
            shutil.rmtree(path)


def require_checkpoint_space(run: Run, weights: int) -> None:
    """Raise DiskFullError if the next checkpoint does not fit on the disk, before writing it."""
    if free_disk_bytes(run.folder) < _required_checkpoint_bytes(run.checkpoints, weights):
        raise DiskFullError(describe_full_disk(run.folder, *describe_checkpoint_need(run, weights)))


def describe_checkpoint_need(run: Run, weights: int) -> tuple[str, str]:
    """Return what a run needs on a full disk, and what to do, for a DiskFullError."""
    needed = _required_checkpoint_bytes(run.checkpoints, weights) / MEGABYTE
    last = find_valid_checkpoint(run.checkpoints, lambda _: None)
    kept = f"the checkpoint of step {int(last.name):,} is intact" if last else "it has none yet"
    advice = f"{kept}; free some space, then resume with '{resume_command(run)}'"
    return f"a checkpoint of run '{run.name}' needs {needed:,.1f} MB", advice


def _required_checkpoint_bytes(folder: Path, weights: int) -> int:
    """Return the size of the next checkpoint: that of the largest one there, else an estimate from
    the size of the weights. The one at the end of a stage is small: it has no optimizer state."""
    sizes = [folder_bytes_on_disk(path) for path in run_checkpoint_folders(folder)]
    return max(sizes, default=SIZE_IN_WEIGHTS * weights)


def adopt_checkpoint(source: Path, folder: Path) -> TrainState:
    """Replace a run's checkpoints by another run's. The best validation is reset, because the
    checkpoint does not hold the weights of that step."""
    state = dataclasses.replace(
        read_checkpoint_state(source),
        best=None,
        best_step=None,
        best_metrics={},
        validations_without_improvement=0,
        stage_over=False,
    )
    final = folder / f"{state.total:08d}"
    staging = folder / f".{final.name}.new"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    _write_checkpoint_state(staging, state)
    for old in run_checkpoint_folders(folder):
        shutil.rmtree(old)
    staging.replace(final)
    return state


def is_same_checkpoint(one: Path, other: Path) -> bool:
    """Return whether two checkpoints have the same content, by their checksums."""
    if not (one / CHECKSUMS).is_file() or not (other / CHECKSUMS).is_file():
        return False
    return (one / CHECKSUMS).read_text(encoding="utf-8") == (other / CHECKSUMS).read_text(
        encoding="utf-8"
    )


def find_valid_checkpoint(folder: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint whose checksums are right; report damaged ones."""
    for path in reversed(run_checkpoint_folders(folder)):
        problem = _find_checkpoint_damage(path)
        if problem is None:
            return path
        report(f"checkpoint {path} is damaged ({problem}): trying the one before it")
    return None


def read_checkpoint_state(path: Path) -> TrainState:
    """Read the state that a checkpoint was written at."""
    return TrainState(**json.loads((path / TRAIN_STATE).read_text(encoding="utf-8")))


def _find_checkpoint_damage(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if its files are those that were written."""
    try:
        expected: Any = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    if not isinstance(expected, dict) or not {TRAIN_STATE, WEIGHTS} <= set(expected):
        return f"{CHECKSUMS} is incomplete"
    actual = _compute_checkpoint_checksums(path)
    if missing := sorted(set(expected) - set(actual)):
        return f"{missing[0]} is missing"
    wrong = sorted(name for name, checksum in expected.items() if actual[name] != checksum)
    return f"{wrong[0]} does not match its checksum" if wrong else None


def _compute_checkpoint_checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {str(path.relative_to(folder)): _checkpoint_checksum(path) for path in files}


def _checkpoint_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _flush_checkpoint(folder: Path) -> None:
    """Flush all files, so that a power cut after the rename leaves none empty."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
