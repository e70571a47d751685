"""Checkpoints: folders that appear whole or not at all, with a checksum for every file.

checkpoints/00000120/        by the number of steps done
  standing.json              where the run stands (`Standing`)
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

from attune.platform.runs.record import checkpoint_folders

STANDING, WEIGHTS, ENGINES, SUMS = (
    "standing.json",
    "weights.safetensors",
    "engines",
    "checksums.json",
)
KEPT = 2  # the last, and the one before it, should the last be damaged


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a run has come. With the seed, it determines all that follows."""

    stage: int = 0
    step: int = 0
    """Done in this stage."""
    total: int = 0
    """Done in all stages."""
    seconds: float = 0.0
    """Spent in this stage."""
    total_seconds: float = 0.0
    best: float | None = None
    """The stage's best value of its metric."""
    best_step: int | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    waited: int = 0
    """Looks at valid since then."""
    stage_over: bool = False
    workers: int = 1
    zero: int = 0


def write(
    folder: Path, standing: Standing, *, save_engines: Callable[[Path], None],
    save_weights: Callable[[Path], None], first: bool, barrier: Callable[[], None],
) -> None:  # fmt: skip
    """Write a checkpoint; every worker calls this, the first one does what only one may do."""
    final = folder / f"{standing.total:08d}"
    making = folder / f".{final.name}.new"
    if first:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    barrier()
    save_engines(making / ENGINES)
    save_weights(making / WEIGHTS)
    barrier()
    if first:
        (making / STANDING).write_text(json.dumps(dataclasses.asdict(standing)), encoding="utf-8")
        (making / SUMS).write_text(json.dumps(_sums(making), indent=1), encoding="utf-8")
        _to_disk(making)
        shutil.rmtree(final, ignore_errors=True)
        making.replace(final)
        for old in checkpoint_folders(folder)[:-KEPT]:
            shutil.rmtree(old)
    barrier()


def adopt(source: Path, folder: Path) -> Standing:
    """Go on from another run's checkpoint instead of one's own. Which look was the best is
    forgotten: the weights of that one are not in it."""
    standing = dataclasses.replace(
        standing_of(source), best=None, best_step=None, best_metrics={}, waited=0, stage_over=False
    )
    final = folder / f"{standing.total:08d}"
    making = folder / f".{final.name}.new"
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(source, making)
    (making / STANDING).write_text(json.dumps(dataclasses.asdict(standing)), encoding="utf-8")
    (making / SUMS).write_text(json.dumps(_sums(making), indent=1), encoding="utf-8")
    for old in checkpoint_folders(folder):
        shutil.rmtree(old)
    making.replace(final)
    return standing


def is_same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same, by their checksums."""
    if not (one / SUMS).is_file() or not (other / SUMS).is_file():
        return False
    return (one / SUMS).read_text(encoding="utf-8") == (other / SUMS).read_text(encoding="utf-8")


def last_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose checksums are right; damaged ones are reported."""
    for path in reversed(checkpoint_folders(folder)):
        problem = _problem(path)
        if problem is None:
            return path
        report(f"checkpoint {path} is damaged ({problem}): going back to the one before it")
    return None


def standing_of(path: Path) -> Standing:
    """Where a run stood."""
    return Standing(**json.loads((path / STANDING).read_text(encoding="utf-8")))


def _problem(path: Path) -> str | None:
    try:
        expected: dict[str, Any] = json.loads((path / SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{SUMS} cannot be read"
    found = _sums(path)
    if missing := sorted(set(expected) - set(found)):
        return f"{missing[0]} is missing"
    wrong = sorted(name for name, checksum in expected.items() if found[name] != checksum)
    return f"{wrong[0]} is not what was written" if wrong else None


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {str(path.relative_to(folder)): _checksum(path) for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _to_disk(folder: Path) -> None:
    """A power cut after the renaming must not find empty files."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
