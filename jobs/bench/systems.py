"""Systems: training speed and memory of `attune train` per system, compared with another commit.

The command trains each system for some steps, alternating with Multi-TRS and, at preset `paper`,
with the same system of another commit. That commit's code is checked out into a temporary
git worktree and computes in fp32, its default.
"""

import os
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from attune.jobs.bench.command import run_attune_command
from attune.jobs.bench.training import measure_training_run
from attune.jobs.tables import table

REFERENCE = "multi-trs"
SYSTEMS = (
    REFERENCE,
    "transformer",
    "emoprepend-1",
    "moel",
    "mime",
    "empdg-no-discriminators",
    "dual-vae",
    "dual-emp-paired",
)
"""`empdg-no-discriminators` is EmpDG's generator, which its first stage trains."""
PRESETS = ("compact", "paper")
BASE_PRESET = "paper"
"""The preset that is compared with another commit; it must have the same settings there."""
STEPS = 120
ROUNDS = 3
PACKAGES = ("infra", "jobs", "models", "platform", "ui")

Result = dict[str, float]


def measure_systems(data: Path, folder: Path, base: str | None) -> dict[str, Any]:
    """Return the measured turns of each system by preset, and those of the base commit."""
    with _check_out_benchmarked_commit(base, folder) as environment:
        return {
            preset: {
                system: _measure_system_turns(data, folder, preset, system, environment)
                for system in SYSTEMS
            }
            for preset in PRESETS
        }


def _measure_system_turns(
    data: Path, folder: Path, preset: str, system: str, environment: Mapping[str, str] | None
) -> dict[str, list[Result]]:
    """Return the results of a system, of Multi-TRS and of the base commit, one of each per turn."""
    turns: dict[str, list[Result]] = {"system": [], "reference": [], "base": []}
    for number in range(ROUNDS):
        home = folder / f"systems-{preset}-{system}-{number}"
        turns["system"].append(
            _train_benchmarked_system(data, home / "system", system, preset, precision="auto")
        )
        if system != REFERENCE:
            turns["reference"].append(
                _train_benchmarked_system(
                    data, home / "reference", REFERENCE, preset, precision="auto"
                )
            )
        if environment is not None and preset == BASE_PRESET:
            turns["base"].append(
                _train_benchmarked_system(data, home / "base", system, preset, environment)
            )
    return turns


def _train_benchmarked_system(
    data: Path, home: Path, system: str, preset: str,
    environment: Mapping[str, str] | None = None, precision: str = "fp32",
) -> Result:  # fmt: skip
    home.mkdir(parents=True)
    output = run_attune_command(
        home, "train", system, "--preset", preset, "--data", str(data), "--name", "bench",
        "--max-steps", str(STEPS), "--set", "evaluate_every=1000000",
        "--set", "track_checkpoint=false", "--set", f"precision={precision}",
        environment=environment,
    )  # fmt: skip
    return measure_training_run(Path(output["checkpoint"]).parent)


@contextmanager
def _check_out_benchmarked_commit(
    commit: str | None, folder: Path
) -> Iterator[dict[str, str] | None]:
    """Check out a commit; yield the environment variables with which its code runs."""
    if commit is None:
        yield None
        return
    git = ["git", "-C", str(Path(__file__).parent), "worktree"]
    tree, links = folder / "base", folder / "base-links"
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        (links / "attune").mkdir(parents=True)
        for package in PACKAGES:
            (links / "attune" / package).symlink_to(tree / package)
        yield {**os.environ, "PYTHONPATH": str(links)}
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def summarize_systems(turns: Mapping[str, list[Result]]) -> dict[str, float]:
    """Return the best samples/s and highest memory, and medians of the ratios within a turn."""
    rates = [turn["samples_per_second"] for turn in turns["system"]]
    summary = {
        "samples_per_second": max(rates),
        "peak_memory_mb": max(turn["peak_memory_mb"] for turn in turns["system"]),
    }
    for other in ("reference", "base"):
        if turns[other]:
            others = [turn["samples_per_second"] for turn in turns[other]]
            ratios = (rate / compared for rate, compared in zip(rates, others, strict=True))
            summary[f"ratio_to_{other}"] = statistics.median(ratios)
    return summary


def print_systems(screen: Console, results: dict[str, Any]) -> None:
    """Print a table per preset."""
    names = ("samples/s", f"of {REFERENCE}", "of the base commit", "peak MB")
    for preset, systems in results.items():
        rows = table(f"\nattune train at preset {preset}", "system", *names, numbers=names)
        for system, turns in systems.items():
            summary = summarize_systems(turns)
            ratios = (summary.get(f"ratio_to_{other}") for other in ("reference", "base"))
            rows.add_row(
                system,
                f"{summary['samples_per_second']:.1f}",
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{summary['peak_memory_mb']:,.0f}",
            )
        screen.print(rows)
