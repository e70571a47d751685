"""Early stopping: steps that ASHA saves on the same trials, and its effect on the best metric."""

from pathlib import Path
from typing import Any

from rich.console import Console

from attune.jobs.bench.command import run_attune_command
from attune.jobs.bench.tuning import tuning_benchmark_options
from attune.platform.runs.metrics_file import read_metrics

VALIDATIONS, STEPS_PER_VALIDATION = 9, 20
"""Validations of a trial that is not stopped (ASHA stops at the 1st, 3rd and 9th), and the steps
between two of them."""
SAMPLES = 16
"""Number of trials of the sweep."""


def measure_stopping(data: Path, folder: Path) -> dict[str, Any]:
    """Return steps and best perplexity of the same random trials, with and without ASHA."""
    home = folder / "stopping"
    home.mkdir()
    asked = (
        *tuning_benchmark_options(data),
        "--set",
        f"evaluate_every={STEPS_PER_VALIDATION}",
        "--max-steps",
        str(VALIDATIONS * STEPS_PER_VALIDATION),
    )
    search = ("--space", "optimizer", "--search", "random", "--samples", str(SAMPLES))
    results: dict[str, Any] = {}
    for scheduler in ("none", "asha"):
        output = run_attune_command(
            home, "tune", *asked, *search, "--scheduler", scheduler, "--name", scheduler
        )
        runs = (home / "runs").glob(f"{scheduler}-*/metrics.jsonl")
        results[scheduler] = {
            "steps": sum(max(line["step"] for line in read_metrics(run)) for run in runs),
            "best": output["best"]["metrics"]["valid_perplexity"],
        }
    return results


def print_stopping(screen: Console, results: dict[str, Any]) -> None:
    """Print steps and best perplexity with and without ASHA."""
    none, asha = results["none"], results["asha"]
    screen.print(
        f"\n{SAMPLES} trials: {none['steps']:,} steps and a best perplexity of {none['best']:.2f} "
        f"without stopping, {asha['steps']:,} and {asha['best']:.2f} with ASHA: "
        f"{none['steps'] / asha['steps']:.1f} times fewer steps"
    )
