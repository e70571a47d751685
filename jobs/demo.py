"""`attune demo`: what there is to see in the first ten minutes."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs.console import Json, console, print_json, training_progress
from attune.jobs.tables import shown, table

if TYPE_CHECKING:
    from attune.platform.store import Run

PLAN = (
    "transformer", "multi-trs", "emoprepend-1", "moel", "dual-vae", "mime", "empdg",
    "emotion-cause-soft", "sing-emp-paired",
)  # fmt: skip
"""One variant of each system, in the order of the README's table. Of Dual-Emp the one with the
forward direction alone: an epoch of the whole takes four minutes."""
MAX_EPOCHS = 2
"""Enough to see systems differ, and few enough for all of them to take ten minutes."""
PRESET = "small"
COLUMNS = ("perplexity", "emotion_accuracy", "bleu", "distinct_1", "distinct_2")


def demo(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT",
            help="Which ones to train and compare.",
            show_default="one of each system",
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(metavar="tiny|small|paper", help="How large the models are.")
    ] = PRESET,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each at most, to see it all sooner.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train one variant of each system on the bundled corpus, and compare them on its test split.

    Takes less than ten minutes on two cores and needs no network. Given again, it goes on where it
    was interrupted and leaves alone what is finished.

    Examples:

    - `attune demo`
    - `attune demo mime mime-no-mimicry` compares a system with its ablation
    - `attune demo --preset tiny --max-steps 50` is over in two minutes, and the models are poor
    """
    from attune.jobs import evaluate
    from attune.models.decoding import Decoding
    from attune.platform.training.settings import configure

    screen = console(as_json)
    plan = variants or PLAN
    for variant in plan:  # before the first is trained
        configure(variant, preset)
    found = []
    for number, variant in enumerate(plan, start=1):
        screen.print(f"[bold]{number} of {len(plan)}: {variant}[/bold]")
        run = _trained(variant, preset, max_steps, screen)
        result = evaluate.of_run(run, None, evaluate.TEST, Decoding())
        evaluate.log(run, result)
        found.append((run, result))
    _show(screen, found)
    if as_json:
        print_json({"runs": [{"name": run.name, **result} for run, result in found]})


def _trained(variant: str, preset: str, max_steps: int | None, screen: Console) -> "Run":
    from attune.platform import store
    from attune.platform.training import driver, start

    name = f"demo-{variant}" if preset == PRESET else f"demo-{variant}-{preset}"
    folder = store.folder_of_runs() / name
    if (folder / store.RECORD).is_file():
        run = store.read(folder)
        if run.status == "finished":
            screen.print(f"{name} is finished already: {folder}", markup=False)
            return run
        run = run.changed(max_steps=max_steps)
    else:
        changes = {"max_epochs": MAX_EPOCHS}
        run = start.new_run(variant, preset=preset, changes=changes, name=name, max_steps=max_steps)
    with training_progress(screen, run.name) as show:
        run = driver.train(run, show)
    if run.status != "finished":
        screen.print("stopped: give the same command again to go on")
        raise typer.Exit(130)
    return run


def _show(screen: Console, found: "list[tuple[Run, dict[str, Any]]]") -> None:
    names = [name.replace("_", " ") for name in COLUMNS]
    made = table(
        "\nOn the test split of the bundled corpus, greedy answers", "run", "minutes", *names,
        numbers=("minutes", *names),
    )  # fmt: skip
    made.columns[0].no_wrap = True
    for run, result in found:
        values = [shown(name, result["metrics"][name]) for name in COLUMNS]
        made.add_row(run.name, f"{run.result['seconds'] / 60:.1f}", *values)
    screen.print(made)
    names_of_runs = shlex.join(run.name for run, _ in found)
    store = found[0][0].tracking
    for does, command in (
        ("talk to them side by side", f"{_bin('attune')} ui {names_of_runs}"),
        ("browse the runs", f"{_bin('mlflow')} ui --backend-store-uri {store}"),
        ("train one yourself", f"{_bin('attune')} train multi-trs --set emotion_weight=1"),
    ):
        screen.print(f"\n{does}:\n  {command}", markup=False, highlight=False)


def _bin(name: str) -> str:
    """How this command can be typed where it was typed: with the folder, if it was not on PATH."""
    beside = Path(sys.argv[0]).with_name(name)
    return str(beside) if "/" in sys.argv[0] else name
