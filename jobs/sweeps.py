"""`attune tune list|show|stop|report`, and what `attune tune` and `attune tune-decoding` share."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from attune.jobs import options
from attune.jobs.console import Json, console, console_training_progress, print_json
from attune.jobs.tables import format_table_metric, table
from attune.platform.core.errors import UsageError, unknown_choice_error

if TYPE_CHECKING:
    from attune.platform.runs.record import Run
    from attune.platform.tuning.report import SeedStatistics
    from attune.platform.tuning.sweep import Sweep

SAMPLES = 16
SHOWN_TRIALS = 20
RUN = "run"


class _SweepCommands(TyperGroup):
    """`attune tune mime` is short for `attune tune run mime`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_SweepCommands,
    no_args_is_help=True,
    help="""Search for good settings, and measure how much each matters: `attune tune VARIANT ...`

`attune tune mime --space loss-weights` starts a sweep (`attune tune run --help` shows all options);
the other commands are for existing sweeps.""",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a sweep, see `attune tune list`.")
]


@app.command(name="list")
def list_sweeps(as_json: Json = False) -> None:
    """List the sweeps, oldest first, and the bundled ones.

    Examples:

    - `attune tune list`
    """
    from attune.platform.tuning import spaces, sweep

    screen = console(as_json)
    all_sweeps = list(sweep.read_all_sweeps())
    rows = table(
        "", "sweep", "of", "status", "trials", "metric", "best", numbers=("trials", "best")
    )
    summaries = []
    for each in all_sweeps:
        summary = {**each.summarize(), "kind": each.kind, "status": each.current_status,
               "variants": list(each.spaces), "metrics": list(each.metrics)}  # fmt: skip
        summaries.append(summary)
        metric = each.metrics[0]
        best = (
            format_table_metric(metric, summary["best"]["metrics"].get(metric))
            if summary["best"]
            else "-"
        )
        rows.add_row(
            each.name,
            ", ".join(each.spaces),
            summary["status"],
            str(summary["trials"]),
            metric,
            best,
        )
    screen.print(rows if all_sweeps else f"no sweeps in {sweep.sweeps_folder()} yet")
    ready = table("\nbundled, for --sweep", "name", "of", "")
    for name, definition in spaces.read_bundled_sweeps().items():
        of = ", ".join(definition.variants) or "attune tune-decoding RUN"
        ready.add_row(name, of, definition.about)
    screen.print(ready)
    if as_json:
        print_json({"sweeps": summaries, "ready": sorted(spaces.read_bundled_sweeps())})


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show the trials of a sweep, the best first, also while it runs.

    Examples:

    - `attune tune show tune-mime-1`
    """
    from attune.platform.tuning import report
    from attune.platform.tuning import sweep as sweeps

    sweep = sweeps.find_sweep(name)
    screen = console(as_json)
    screen.print(
        f"{sweep.name}: {sweep.current_status}, {sweep.spent:,.0f} s; {sweep.command}", markup=False
    )
    _print_sweep_trials(screen, sweep)
    if as_json:
        trials = report.build_table(sweep).to_dicts()
        print_json({**sweep.summarize(), "status": sweep.current_status, "table": trials})


@app.command()
def stop(name: Name, as_json: Json = False) -> None:
    """Request a running sweep to stop after the current step, with checkpoints; --resume continues.

    Examples:

    - `attune tune stop tune-mime-1`
    """
    from attune.platform.tuning import sweep as sweeps

    sweep = sweeps.find_sweep(name)
    if sweep.current_status != "running":
        raise UsageError(
            f"sweep '{name}': expected a running sweep, but it is {sweep.current_status}"
        )
    sweep.stop_file.touch()
    console(as_json).print(f"sweep {name} was asked to stop", markup=False)
    if as_json:
        print_json({"name": name, "asked": True})


@app.command()
def report(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the report.",
                     show_default="report/ in the sweep's folder"),
    ] = None,
    surface: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Also plot the metric over these two settings."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --seeds: number of best trials to train again.")
    ] = 1,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Train the best trials again with these seeds, at "
                     "least two; shows mean, standard deviation and confidence interval."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the report of a sweep: table, importance of each setting, figures and saved steps.

    The figures are written as PNG and as one HTML page that works offline. All files are logged to
    the sweep's run in MLflow.

    Examples:

    - `attune tune report tune-mime-1`
    - `attune tune report tune-mime-1 --top 3 --seeds 1,2,3 --surface elbo_weight,response_weight`
    """
    from attune.platform import tracking
    from attune.platform.tuning import report as reports
    from attune.platform.tuning import sweep as sweeps

    sweep = sweeps.find_sweep(name)
    if not sweep.get_trials():
        raise UsageError(f"sweep '{name}' has no trials yet")
    if seeds and sweep.kind != "training":
        raise UsageError(f"--seeds is for sweeps that train: '{name}' is a sweep over decoding")
    if seeds and len(set(options.parse_seeds_option(seeds))) < 2:
        raise UsageError(f"--seeds {seeds}: expected at least two seeds for a standard deviation")
    pair = tuple(surface.split(",")) if surface else None
    if pair is not None and len(pair) != 2:
        raise UsageError(f"--surface {surface}: expected two settings, as in A,B")
    folder = out or sweep.folder / "report"
    reports.check_report(sweep, folder, pair)  # before hours of training
    screen = console(as_json)
    again = (
        _train_sweep_best_again(sweep, top, options.parse_seeds_option(seeds), screen)
        if seeds
        else []
    )
    summary = reports.write_report(sweep, folder, pair, again)
    if sweep.run_id is not None:
        tracking.finish_group(sweep.run_id, sweep.status, {}, artifacts=folder)
    _print_sweep_trials(screen, sweep)
    if summary["importances"]:
        shares = (f"{setting} {share:.0%}" for setting, share in summary["importances"].items())
        screen.print(f"importance {summary['compared']}: {', '.join(shares)}", markup=False)
    for each in summary["repeated"]:
        screen.print(reports.format_seeds(each), markup=False)
    if summary["saved"]:
        screen.print(reports.format_savings(summary["saved"]), markup=False)
    screen.print(f"report: {folder / reports.PAGE}", markup=False)
    if as_json:
        print_json({**summary, "report": str(folder)})


def _train_sweep_best_again(
    sweep: "Sweep", top: int, seeds: list[int], screen: Console
) -> "list[SeedStatistics]":
    """Train the best configurations with other seeds; finished runs are not trained again."""
    from attune.platform.runs.lock import lock_runs
    from attune.platform.runs.record import RUN_RECORD, find_run, runs_folder
    from attune.platform.training import driver, setup
    from attune.platform.training.signals import StopSignals
    from attune.platform.tuning import report as reports

    best = reports.build_table(sweep).filter(ended="finished").head(top)["trial"].to_list()
    asked = {key: value for key, value in sweep.asked.items() if key != "overrides"}
    by_trial: dict[int, list[Run]] = {}
    for number in best:
        attributes = sweep.get_trial(number).user_attrs
        for seed in seeds:
            run_name = f"{sweep.name}-{number:03d}-again{seed}"
            if (runs_folder() / run_name / RUN_RECORD).is_file():
                run = find_run(run_name)
            else:
                overrides = {**sweep.asked["overrides"], **attributes["settings"]}
                run = setup.new_run(
                    attributes["variant"],
                    name=run_name,
                    seed=seed,
                    overrides=overrides,
                    workers=sweep.workers,
                    **asked,
                )
                run = run.update(parent=sweep.run_id)
            by_trial.setdefault(number, []).append(run)
    signals = StopSignals()
    with lock_runs([run for runs in by_trial.values() for run in runs]) as current:
        done = {run.name: run for run in current}
        if unfinished := [run for run in current if run.status != "finished"]:
            with console_training_progress(
                screen, *(run.name for run in unfinished)
            ) as shown_lines:
                trained = driver.train_all(unfinished, shown_lines, signals)
            done |= {run.name: run for run in trained}
    if any(run.status != "finished" for run in done.values()):
        screen.print("stopped: resume with the same command")
        raise typer.Exit(signals.exit_code)
    by_trial = {n: [done[run.name] for run in runs] for n, runs in by_trial.items()}
    by_trial = {
        n: [_measure_sweep_answers(run, sweep) for run in runs] for n, runs in by_trial.items()
    }
    return [
        reports.summarize_seeds(
            n, sweep.get_trial(n).user_attrs["settings"], runs, sweep.metrics[0]
        )
        for n, runs in by_trial.items()
    ]


def _measure_sweep_answers(run: "Run", sweep: "Sweep") -> "Run":
    """Return a finished run with the sweep's metrics, some of which need answers."""
    from attune.platform.training.loop import RESULT
    from attune.platform.tuning.trial import measure_answers

    measure_answers(run, sweep.metrics)
    return run.update(result=json.loads((run.folder / RESULT).read_text(encoding="utf-8")))


def _print_sweep_trials(screen: Console, sweep: "Sweep") -> None:
    from attune.platform.tuning import report as reports

    frame = reports.build_table(sweep)
    if frame.is_empty():
        screen.print("no trials yet")
        return
    chosen = "decode" if sweep.kind == "decoding" else "variant"
    of = [chosen] if len(sweep.spaces) > 1 else []
    keys = list(dict.fromkeys(key for space in sweep.spaces.values() for key in space))
    metrics = [name for name in sweep.metrics if name in frame.columns]
    names = [name.removeprefix("valid_").replace("_", " ") for name in metrics]
    rows = table("", "trial", *of, *keys, *names, "ended", numbers=("trial", *keys, *names))
    for row in frame.head(SHOWN_TRIALS).iter_rows(named=True):
        values = (_format_sweep_value(row.get(key)) for key in keys)
        numbers = (format_table_metric(name, row[name]) for name in metrics)
        rows.add_row(str(row["trial"]), *(row[key] for key in of), *values, *numbers, row["ended"])
    screen.print(rows)
    if frame.height > SHOWN_TRIALS:
        screen.print(f"... and {frame.height - SHOWN_TRIALS} more")


def _format_sweep_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def print_sweep_progress(screen: Console, sweep: "Sweep") -> Iterator[Callable[[str, int], None]]:
    """Show a line for each trial that ends, and a progress bar."""
    bars = Progress(
        SpinnerColumn(),
        TextColumn("trial {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bars.add_task("", total=sweep.samples)

    def show(text: str, done: int) -> None:
        if text:
            screen.print(text, markup=False)
        if done >= 0:
            bars.update(task, completed=done)

    with bars:
        yield show


def print_sweep_end(screen: Console, ended: "Sweep", as_json: bool) -> None:
    """Show the trials and how to resume a stopped sweep; exit with its code."""
    _print_sweep_trials(screen, ended)
    summary = ended.summarize()
    if ended.status == "stopped":
        of = f"-decoding {ended.asked['run']}" if ended.kind == "decoding" else ""
        again = f"'attune tune{of} --name {ended.name} --resume'"
        screen.print(f"the sweep was stopped: resume it with {again}", markup=False)
    if as_json:
        print_json(summary)
    if ended.status == "stopped" and (ended.stop_file.exists() or ended.kind == "decoding"):
        raise typer.Exit(130)
    if summary["best"] is None:
        reasons = {t.user_attrs.get("reason", "") for t in ended.get_trials()} - {""}
        screen.print(f"no trial has a result: {'; '.join(sorted(reasons))}", markup=False)
        raise typer.Exit(1)


def check_sweep_choice(kind: str, value: str, choices: tuple[str, ...]) -> str:
    """Return a value if it is one of the choices; raise UsageError otherwise."""
    if value not in choices:
        raise UsageError(unknown_choice_error(kind, value, choices))
    return value


def create_sweep_for_command(name: str, **content: Any) -> "Sweep":
    """Create a sweep and write its record."""
    from attune.platform.core.commit import commit
    from attune.platform.runs.record import check_run_name, runs_folder
    from attune.platform.tuning.sweep import RECORD, Sweep, sweeps_folder

    check_run_name(name)
    sweep = Sweep(
        name=name,
        folder=sweeps_folder() / name,
        command=" ".join(["attune", *sys.argv[1:]]),
        commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        **content,
    )
    if (sweep.folder / RECORD).exists():
        raise UsageError(
            f"a sweep named '{sweep.name}' exists already: choose another --name, or resume it "
            f"by adding --resume"
        )
    existing_runs = sorted(each.name for each in runs_folder().glob(f"{name}-[0-9][0-9][0-9]*"))
    if sweep.kind == "training" and existing_runs:
        raise UsageError(
            f"a run named '{existing_runs[0]}' exists already, and the sweep's trials would have "
            f"such names: choose another --name"
        )
    sweep.write()
    return sweep
