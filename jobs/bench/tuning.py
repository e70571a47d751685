"""Tuning: overhead of sequential trials over `attune train` with the same steps."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from attune.jobs.bench.command import run_attune_command
from attune.platform.runs.metrics_file import read_metrics

VARIANT, PRESET, STEPS, TRIALS = "multi-trs", "small", 300, 4
SETTINGS = ("--set", "patience=0", "--set", "log_every=1", "--set", "track_checkpoint=false")
WHOLE = 300.0
"""Duration in seconds of the trial whose overhead is reported."""


def tuning_benchmark_options(data: Path) -> tuple[str, ...]:
    """Return the variant, the data and the settings of the benchmark."""
    return (VARIANT, "--data", str(data), "--preset", PRESET, *SETTINGS)


def measure_tuning(data: Path, folder: Path) -> dict[str, Any]:
    """Return the seconds of a bare run's steps, of a trial's steps, and between two trials."""
    home = folder / "tuning"
    home.mkdir()
    space = home / "same.yaml"
    seeds = [0.1 + number / 1e6 for number in range(TRIALS)]  # nearly equal: the same work
    space.write_text(json.dumps({"space": {"dropout": seeds}, "search": "grid"}), encoding="utf-8")
    asked = (
        *tuning_benchmark_options(data),
        "--set",
        "evaluate_every=100",
        "--max-steps",
        str(STEPS),
    )
    run_attune_command(home, "train", *asked, "--name", "bare")
    tune = ("--sweep", str(space), "--scheduler", "none", "--concurrent", "1", "--name", "bench")
    run_attune_command(home, "tune", *asked, *tune)
    times = [
        _benchmark_tuning_times(home / "runs" / f"bench-{number:03d}") for number in range(TRIALS)
    ]
    bare = _benchmark_tuning_times(home / "runs" / "bare")
    between = [after[0] - before[-1] for before, after in itertools.pairwise(times)]
    steps = statistics.median(each[-1] - each[0] for each in times)
    start, slower = statistics.median(between), steps / (bare[-1] - bare[0])
    return {
        "bare_seconds": bare[-1] - bare[0],
        "trial_seconds": steps,
        "seconds_between_trials": between,
        "overhead_of_five_minutes": slower * (1 + start / WHOLE) - 1,
    }


def print_tuning_overhead(screen: Console, results: dict[str, Any]) -> None:
    """Print the overhead of a trial."""
    between = ", ".join(f"{seconds:.1f}" for seconds in results["seconds_between_trials"])
    screen.print(
        f"\ntuning {VARIANT} at preset {PRESET}: {STEPS} steps take "
        f"{results['bare_seconds']:.1f} s alone and {results['trial_seconds']:.1f} s as a trial; "
        f"{between} s between two trials; "
        f"overhead of a trial of five minutes: {results['overhead_of_five_minutes']:.1%}"
    )


def _benchmark_tuning_times(run: Path) -> list[float]:
    """Return the time in seconds at which each step was logged."""
    return [line["time"] / 1000 for line in read_metrics(run / "metrics.jsonl")]
