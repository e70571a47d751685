"""`attune demo`: train and compare one variant of each system in ten minutes."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs.console import Json, console, console_training_progress, print_json
from attune.jobs.evaluate import evaluate_as_command
from attune.jobs.tables import format_table_metric, table

if TYPE_CHECKING:
    from attune.platform.runs.record import Run

PLAN = (
    "transformer", "multi-trs", "emoprepend-1", "moel", "dual-vae", "mime", "empdg",
    "emotion-cause-soft", "sing-emp-paired", "meed2",
)  # fmt: skip
"""One variant of each system, in the order of the README's table. Dual-Emp is represented by its
forward model alone, because an epoch of the whole system takes four minutes."""
MAX_EPOCHS = 2
"""Enough to see differences between systems, while all of them take ten minutes."""
PRESET = "small"
COLUMNS = ("perplexity", "emotion_accuracy", "bleu", "distinct_1", "distinct_2")


def demo(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT",
            help="Variants to train and compare.",
            show_default="one of each system",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="tiny|small|compact|paper", help="Size of the models.")
    ] = PRESET,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Step limit of each run, for a faster demo.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one variant of each system on the bundled corpus, and compare them on its test split.

    The demo takes less than ten minutes on two cores and needs no network. Repeat the command to
    resume after an interruption; finished runs are not trained again.

    Examples:

    - `attune demo`
    - `attune demo mime mime-no-mimicry` compares a system with its ablation
    - `attune demo --preset tiny --max-steps 50` takes two minutes, with poor models
    """
    from attune.platform.training.settings import configure

    screen = console(as_json)
    plan = variants or PLAN
    for variant in plan:  # errors before the first run is trained
        configure(variant, preset)
    results = []
    for run in _train_demo_runs(
        [_find_or_create_demo_run(variant, preset, max_steps) for variant in plan],
        max_steps,
        screen,
    ):
        screen.print(f"evaluating {run.name}", markup=False)
        results.append((run, evaluate_as_command(run, "test")))
    _print_demo_comparison(screen, results)
    if as_json:
        print_json({"runs": [{"name": run.name, **result} for run, result in results]})


def _find_or_create_demo_run(variant: str, preset: str, max_steps: int | None) -> "Run":
    """Return a new run, or the one of an earlier demo."""
    from attune.platform.runs.record import RUN_RECORD, read_run, runs_folder
    from attune.platform.training import setup

    name = f"demo-{variant}" if preset == PRESET else f"demo-{variant}-{preset}"
    folder = runs_folder() / name
    if not (folder / RUN_RECORD).is_file():
        overrides = {"max_epochs": MAX_EPOCHS}
        return setup.new_run(
            variant, preset=preset, overrides=overrides, name=name, max_steps=max_steps
        )
    return read_run(folder)


def _train_demo_runs(runs: "list[Run]", max_steps: int | None, screen: Console) -> "list[Run]":
    """Train the unfinished runs, one per core: small models gain little from a second core."""
    from attune.platform.runs.lock import lock_runs
    from attune.platform.training import driver
    from attune.platform.training.signals import StopSignals

    signals = StopSignals()
    with lock_runs(runs) as runs:
        finished = {run.name: run for run in runs if run.status == "finished"}
        for run in finished.values():
            screen.print(f"{run.name} has finished already: {run.folder}", markup=False)
        left = [run.update(max_steps=max_steps) for run in runs if run.name not in finished]
        if left:
            with console_training_progress(screen, *(run.name for run in left)) as show:
                finished |= {run.name: run for run in driver.train_all(left, show, signals)}
    if any(run.status != "finished" for run in finished.values()):
        screen.print("stopped: resume with the same command")
        raise typer.Exit(signals.exit_code)
    return [finished[run.name] for run in runs]


def _print_demo_comparison(screen: Console, results: "list[tuple[Run, dict[str, Any]]]") -> None:
    names = [name.replace("_", " ") for name in COLUMNS]
    results_table = table(
        "\nOn the test split of the bundled corpus, greedy answers", "run", "minutes", *names,
        numbers=("minutes", *names),
    )  # fmt: skip
    results_table.columns[0].no_wrap = True
    for run, result in results:
        values = [format_table_metric(name, result["metrics"][name]) for name in COLUMNS]
        results_table.add_row(run.name, f"{run.result['seconds'] / 60:.1f}", *values)
    screen.print(results_table)
    names_of_runs = shlex.join(run.name for run, _ in results)
    store = results[0][0].tracking
    for does, command in (
        ("chat with them side by side", f"{_demo_command_path('attune')} ui {names_of_runs}"),
        ("browse the runs", f"{_demo_command_path('mlflow')} ui --backend-store-uri {store}"),
        (
            "train one yourself",
            f"{_demo_command_path('attune')} train multi-trs --set emotion_weight=1",
        ),
    ):
        screen.print(f"\n{does}:\n  {command}", markup=False, highlight=False)


def _demo_command_path(name: str) -> str:
    """Return a command as the user can type it: with its folder if `attune` was called by path."""
    beside = Path(sys.argv[0]).with_name(name)
    return str(beside) if "/" in sys.argv[0] else name
