"""Tuning: what a trial costs beside `attune train` of the same steps, one after the other, and how
many steps ASHA saves on the same trials, beside what that costs of the best one."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from attune.jobs.bench.command import attune
from attune.platform.training.metrics_file import read_metrics

VARIANT, PRESET, STEPS, TRIALS = "multi-trs", "small", 300, 4
SETTINGS = ("--set", "patience=0", "--set", "log_every=1", "--set", "track_checkpoint=false")
LOOKS, LOOK = 9, 40
"""Looks at valid of a trial that is not stopped (ASHA stops at the 1st, the 3rd and the 9th), and
the steps of one."""
SAMPLES = 16
"""Trials of a sweep that ASHA is to shorten."""
WHOLE = 300.0
"""Seconds of a trial that overhead is stated for."""


def measure(data: Path, folder: Path) -> dict[str, Any]:
    """Both, in one home."""
    home = folder / "tuning"
    home.mkdir()
    asked = (VARIANT, "--data", str(data), "--preset", PRESET, *SETTINGS)
    return {**_cost(home, asked), **_saving(home, asked)}


def _cost(home: Path, asked: tuple[str, ...]) -> dict[str, Any]:
    """Seconds of a bare run's steps and of each trial's, and what lies between two trials."""
    space = home / "same.yaml"
    seeds = [0.1 + number / 1e6 for number in range(TRIALS)]  # the same but in name
    space.write_text(json.dumps({"space": {"dropout": seeds}, "search": "grid"}), encoding="utf-8")
    asked = (*asked, "--set", "evaluate_every=100", "--max-steps", str(STEPS))
    attune(home, "train", *asked, "--name", "bare")
    tune = ("--sweep", str(space), "--scheduler", "none", "--concurrent", "1", "--name", "bench")
    attune(home, "tune", *asked, *tune)
    times = [_times(home / "runs" / f"bench-{number:03d}") for number in range(TRIALS)]
    bare = _times(home / "runs" / "bare")
    between = [after[0] - before[-1] for before, after in itertools.pairwise(times)]
    steps = statistics.median(each[-1] - each[0] for each in times)
    start, slower = statistics.median(between), steps / (bare[-1] - bare[0])
    return {
        "bare_seconds": bare[-1] - bare[0],
        "trial_seconds": steps,
        "seconds_between_trials": between,
        "overhead_of_five_minutes": slower * (1 + start / WHOLE) - 1,
    }


def _saving(home: Path, asked: tuple[str, ...]) -> dict[str, Any]:
    """Steps and the best perplexity of the same random trials, stopped by ASHA and by nobody."""
    asked = (*asked, "--set", f"evaluate_every={LOOK}", "--max-steps", str(LOOKS * LOOK))
    search = ("--space", "optimizer", "--search", "random", "--samples", str(SAMPLES))
    found: dict[str, Any] = {}
    for scheduler in ("none", "asha"):
        told = attune(home, "tune", *asked, *search, "--scheduler", scheduler, "--name", scheduler)
        runs = (home / "runs").glob(f"{scheduler}-*/metrics.jsonl")
        found[scheduler] = {
            "steps": sum(max(line["step"] for line in read_metrics(run)) for run in runs),
            "best": told["best"]["metrics"]["valid_perplexity"],
        }
    return {"stopping": found}


def show(screen: Console, found: dict[str, Any]) -> None:
    """As people read it."""
    between = ", ".join(f"{seconds:.1f}" for seconds in found["seconds_between_trials"])
    screen.print(
        f"\ntuning {VARIANT} at preset {PRESET}: {STEPS} steps take {found['bare_seconds']:.1f} s "
        f"alone and {found['trial_seconds']:.1f} s as a trial; {between} s lie between two trials; "
        f"overhead of a trial of five minutes: {found['overhead_of_five_minutes']:.1%}"
    )
    none, asha = found["stopping"]["none"], found["stopping"]["asha"]
    screen.print(
        f"{SAMPLES} trials: {none['steps']:,} steps and a best perplexity of {none['best']:.2f} "
        f"where none is stopped, {asha['steps']:,} and {asha['best']:.2f} with ASHA: "
        f"{none['steps'] / asha['steps']:.1f} times fewer steps"
    )


def _times(run: Path) -> list[float]:
    """When each step was logged, in seconds."""
    return [line["time"] / 1000 for line in read_metrics(run / "metrics.jsonl")]
