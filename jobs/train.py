"""`attune train`: one variant, one or several seeds, on this machine or in a cluster."""

import statistics
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from attune.jobs import options
from attune.jobs.console import Json, console, console_training_progress, print_json
from attune.platform.core.errors import UsageError

if TYPE_CHECKING:
    from attune.platform.training.signals import StopSignals


def train(
    variant: Annotated[str, typer.Argument(metavar="VARIANT", help="See `attune variants`.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="bundled|DIR",
            help="The bundled corpus, or a folder written by `attune data prepare`.",
            show_default="bundled",
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="tiny|small|compact|paper", show_default="small")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE",
            help="A setting of the variant or of training; `attune variants VARIANT` lists them.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Start with the weights and vocabulary of this run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes; they share each batch.", show_default="1"),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(min=0, max=3, help="DeepSpeed's ZeRO stage.", show_default="0"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**32 - 1, help="Seed of initial weights, data order and noise.",
            show_default="0",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(
            metavar="A,B,...",
            help="Train a run for each seed, as many at once as resources allow; report the mean.",
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of steps of all stages together.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            callback=options.check_minutes, help="Maximum minutes of all stages together."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name.", show_default="<variant>-<data>-<n>")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run of that --name (default: the variant's latest unfinished one) "
            "from its last checkpoint; start it if it does not exist.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train a variant; Ctrl-C saves a checkpoint, from which --resume continues.

    Examples:

    - `attune train multi-trs`
    - `attune train multi-trs --data data/ed --preset paper --workers 2 --max-minutes 60`
    - `attune train transformer --set learning_rate=5e-4 --set tied=true --seeds 1,2,3`
    - `attune train multi-trs --name mine --resume`
    """
    from attune.platform.runs.lock import lock_runs
    from attune.platform.runs.status import resume_command
    from attune.platform.training import setup
    from attune.platform.training.signals import StopSignals

    if seed is not None and seeds is not None:
        raise UsageError("--seed and --seeds exclude each other")
    asked: dict[str, Any] = {
        "data": data, "preset": preset, "overrides": options.parse_override_options(settings),
        "init": init, "workers": workers, "zero": zero,
        "max_steps": max_steps, "max_minutes": max_minutes,
    }  # fmt: skip
    asked = {key: value for key, value in asked.items() if value or (key, value) == ("zero", 0)}
    screen = console(as_json)
    signals = StopSignals()
    if seeds is None:
        with lock_runs([_find_or_create_run_to_train(variant, name, seed, asked, resume)]) as [run]:
            runs = _train_all_runs([setup.apply_run_limits(run, asked)], screen, signals)
    else:
        numbers = options.parse_seeds_option(seeds)
        runs = _train_seeds(variant, name, numbers, asked, resume, screen, signals)
    results = [_train_result(run) for run in runs]
    _print_train_results(screen, results)
    stopped = [run for run in runs if run.status == "stopped"]
    for run in stopped:
        screen.print(f"stopped: resume with '{resume_command(run)}'", markup=False)
    if as_json:
        print_json(results[0] if seeds is None else _summarize_trained_seeds(results))
    if stopped:
        raise typer.Exit(signals.exit_code)


def _find_or_create_run_to_train(
    variant: str, name: str | None, seed: int | None, asked: dict[str, Any], resume: bool
) -> Any:
    from attune.platform.core.settings import find_variant
    from attune.platform.training import setup

    find_variant(variant)
    seed_option: dict[str, Any] = {} if seed is None else {"seed": seed}
    if resume:
        run = setup.find_resumable_run(variant, name, {**asked, **seed_option})
        if run is not None:
            return run
    return setup.new_run(variant, name=name, **asked, **seed_option)


def _train_seeds(
    variant: str, name: str | None, seeds: list[int], asked: dict[str, Any], resume: bool,
    screen: Console, signals: "StopSignals",
) -> list[Any]:  # fmt: skip
    """Train a run for each seed, all under one in MLflow that gets their mean and deviation."""
    from attune.platform import tracking
    from attune.platform.runs.lock import lock_runs
    from attune.platform.training import setup

    if resume and not name:
        raise UsageError("--seeds with --resume: name the runs to resume with --name")
    with lock_runs(
        [_find_or_create_seed_to_train(variant, name, number, asked, resume) for number in seeds]
    ) as runs:
        unfinished = [
            setup.apply_run_limits(run, asked) for run in runs if run.status != "finished"
        ]
        parent = next((run.parent for run in runs if run.parent), None)
        if parent is None:
            numbers = ",".join(str(seed) for seed in seeds)
            parent = tracking.start_group(f"{name or variant}-seeds", {"seeds": numbers}, runs[0])
        unfinished = [run.update(parent=parent) for run in unfinished]
        try:
            trained = {r.name: r for r in _train_all_runs(unfinished, screen, signals)}
        except BaseException:
            tracking.finish_group(parent, "failed", {})
            raise
    runs = [trained.get(run.name, run) for run in runs]
    together = _summarize_trained_seeds([_train_result(run) for run in runs])
    group_metrics = {
        f"{n}_{kind}": v for kind in ("mean", "std") for n, v in together[kind].items()
    }
    all_finished = all(run.status == "finished" for run in runs)
    tracking.finish_group(parent, "finished" if all_finished else "stopped", group_metrics)
    return runs


def _find_or_create_seed_to_train(
    variant: str, name: str | None, seed: int, asked: dict[str, Any], resume: bool
) -> Any:
    """Return the run of one seed; with --resume, a finished one stays as it is."""
    from attune.platform.runs.record import RUN_RECORD, find_run, runs_folder

    label = f"{name}-seed{seed}" if name else None
    if resume and label and (runs_folder() / label / RUN_RECORD).is_file():
        run = find_run(label)
        if run.status == "finished":
            return run
    return _find_or_create_run_to_train(variant, label, seed, asked, resume)


def _train_all_runs(runs: list[Any], screen: Console, signals: "StopSignals") -> list[Any]:
    from attune.platform.training import driver

    if not runs:
        return []
    for run in runs:
        precision = run.training["precision"]
        screen.print(f"run {run.name} in {run.folder}, precision {precision}", markup=False)
        if run.notice:
            screen.print(f"note: {run.notice}", markup=False)
    with console_training_progress(screen, *(run.name for run in runs)) as show:
        return driver.train_all(runs, show, signals)


def _train_result(run: Any) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "checkpoint": str(run.model),
        "steps": run.result.get("steps"),
        "seconds": run.result.get("seconds"),
        "metrics": run.result.get("metrics", {}),
    }


def _summarize_trained_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    names = [n for n in results[0]["metrics"] if all(n in r["metrics"] for r in results)]
    values = {n: [r["metrics"][n] for r in results] for n in names}
    return {
        "runs": results,
        "mean": {n: statistics.fmean(v) for n, v in values.items()},
        "std": {n: statistics.stdev(v) if len(v) > 1 else 0.0 for n, v in values.items()},
    }


def _print_train_results(screen: Console, results: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    names = list(dict.fromkeys(name for r in results for name in r["metrics"]))
    for column in ("run", "steps", "seconds", *names):
        table.add_column(column, justify="left" if column == "run" else "right")
    for result in results:
        numbers = (f"{result['metrics'][n]:.4g}" if n in result["metrics"] else "" for n in names)
        seconds = "" if result["seconds"] is None else f"{result['seconds']:.0f}"
        table.add_row(result["name"], str(result["steps"] or ""), seconds, *numbers)
    screen.print(table)


if __name__ == "__main__":
    from attune.jobs import cli

    sys.argv.insert(1, "train")
    cli.main()
