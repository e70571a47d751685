"""Output of commands: tables and progress for people, one JSON object for scripts."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
]

WIDE = 1000
"""Columns of a file, a pipe or a job's log, where lines are not wrapped."""


def console(as_json: bool = False, max_width: int | None = None) -> Console:
    """Return the console for people: stderr with `--json`, whose object has stdout for itself.

    Text is wrapped at the width of the terminal, or at `max_width` if that is smaller.
    """
    terminal = sys.stdout.isatty()
    screen = Console(
        stderr=as_json,
        highlight=False,
        soft_wrap=not (terminal or max_width),
        width=None if terminal else max_width or WIDE,
    )
    if max_width is not None:
        screen.width = min(screen.width, max_width)
    return screen


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(content), flush=True)  # ASCII, whatever the terminal can show


def console_progress(unit: str) -> Progress:
    """Return a progress bar on stderr, shown only on a terminal; `unit` may name a task's field."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} " + unit),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@dataclass(frozen=True)
class ProgressBar:
    """The callbacks of a function that reports its progress."""

    total: Callable[[int], None]
    """Sets what is to be done in all."""
    advance: Callable[[int], None]
    """Adds what was just done."""


@contextmanager
def console_progress_bar(unit: str, description: str) -> Iterator[ProgressBar]:
    """Show one bar, whose total is known later or never."""
    with console_progress(unit) as bars:
        task = bars.add_task(description, total=None)
        yield ProgressBar(
            total=lambda count: bars.update(task, total=count),
            advance=partial(bars.advance, task),
        )


@contextmanager
def console_evaluation_progress() -> Iterator[Callable[[str, str, int], Callable[[int], None]]]:
    """Show a bar for each part of an evaluation (`evaluation.evaluate_run.Track`)."""
    with console_progress("{task.fields[unit]}") as bars:

        def track_on_console(unit: str, description: str, total: int) -> Callable[[int], None]:
            return partial(bars.advance, bars.add_task(description, total=total, unit=unit))

        yield track_on_console


@contextmanager
def console_training_progress(
    screen: Console, *names: str
) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Show the log of runs as they train: validation metrics as lines and, on a terminal, a
    progress bar for each run with losses and speed. Several runs are labelled by name."""
    several = len(names) > 1
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[name]}step {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    before = {name: f"{name}: " if several else "" for name in names}
    tasks = {
        name: bars.add_task("starting workers", total=1, name=before[name], start=not several)
        for name in names
    }

    def print_on_console(name: str, line: dict[str, Any]) -> None:
        task = tasks[name]
        if "message" in line:
            screen.print(f"{before[name]}{line['message']}", markup=False)
        elif "steps" in line:
            steps = line["steps"]
            bars.start_task(task)
            bars.update(task, total=sum(steps.values()), completed=line["done"])
            stages = ", ".join(f"{stage} {count:,}" for stage, count in steps.items())
            screen.print(f"{before[name]}steps at most: {stages}", markup=False)
        elif any(key.startswith("valid_") for key in line["metrics"]):
            metrics_text = "  ".join(f"{key[6:]} {v:.4g}" for key, v in line["metrics"].items())
            screen.print(
                f"{before[name]}step {line['step']:>7,}  valid: {metrics_text}", markup=False
            )
        else:
            metrics = line["metrics"]
            hidden = ("samples_per_second", "learning_rate", "stage")
            losses = "  ".join(f"{n} {v:.3f}" for n, v in metrics.items() if n not in hidden)
            speed = f"{metrics['samples_per_second']:,.0f} samples/s"
            bars.update(task, completed=line["step"], description=f"{losses}  {speed}")

    with bars:
        yield print_on_console
