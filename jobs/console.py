"""How commands speak: pleasant tables for people, one JSON object for scripts."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
]


def console(as_json: bool = False) -> Console:
    """Where people read; with `--json` that is stderr, since stdout belongs to the object."""
    return Console(stderr=as_json, highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(content: dict[str, Any]) -> None:
    """The one JSON object, on one line."""
    print(json.dumps(content), flush=True)  # ASCII, whatever the terminal can show


def progress(unit: str) -> Progress:
    """A progress bar on stderr, shown on a terminal only."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} " + unit),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
