"""Stopping early: how many steps ASHA saves on the same trials, beside what that costs of the best
one."""

from pathlib import Path
from typing import Any

from rich.console import Console

from attune.jobs.bench.command import run_attune
from attune.jobs.bench.tuning import asked_of
from attune.platform.runs.metrics_file import read_metrics

LOOKS, LOOK = 9, 20
"""Looks at valid of a trial that is not stopped (ASHA stops at the 1st, the 3rd and the 9th), and
the steps of one."""
SAMPLES = 16
"""Trials of a sweep that ASHA is to shorten."""


def measure(data: Path, folder: Path) -> dict[str, Any]:
    """Steps and the best perplexity of the same random trials, stopped by ASHA and by nobody."""
    home = folder / "stopping"
    home.mkdir()
    asked = (*asked_of(data), "--set", f"evaluate_every={LOOK}", "--max-steps", str(LOOKS * LOOK))
    search = ("--space", "optimizer", "--search", "random", "--samples", str(SAMPLES))
    found: dict[str, Any] = {}
    for scheduler in ("none", "asha"):
        told = run_attune(
            home, "tune", *asked, *search, "--scheduler", scheduler, "--name", scheduler
        )
        runs = (home / "runs").glob(f"{scheduler}-*/metrics.jsonl")
        found[scheduler] = {
            "steps": sum(max(line["step"] for line in read_metrics(run)) for run in runs),
            "best": told["best"]["metrics"]["valid_perplexity"],
        }
    return found


def show(screen: Console, found: dict[str, Any]) -> None:
    """As people read it."""
    none, asha = found["none"], found["asha"]
    screen.print(
        f"\n{SAMPLES} trials: {none['steps']:,} steps and a best perplexity of {none['best']:.2f} "
        f"where none is stopped, {asha['steps']:,} and {asha['best']:.2f} with ASHA: "
        f"{none['steps'] / asha['steps']:.1f} times fewer steps"
    )
