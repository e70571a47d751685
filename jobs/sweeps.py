"""`attune tune list|show|stop|report`: the sweeps that there are; and what those of training and
those of decoding share: how one begins, is watched, and ends."""

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
from attune.jobs.console import Json, console, print_json, training_progress
from attune.jobs.tables import format_metric, table
from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:
    from attune.platform.runs.record import Run
    from attune.platform.tuning.report import SeedStatistics
    from attune.platform.tuning.sweep import Sweep

SAMPLES = 16
SHOWN_TRIALS = 20
RUN = "run"


class _Tune(TyperGroup):
    """`attune tune mime` is short for `attune tune run mime`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Tune,
    no_args_is_help=True,
    help="""Find good settings, and how much each matters: `attune tune VARIANT ...`

`attune tune mime --space loss-weights` begins a sweep (`attune tune run --help` shows all options);
the other commands are about sweeps that there are.""",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A sweep, see `attune tune list`.")]


@app.command(name="list")
def list_sweeps(as_json: Json = False) -> None:
    """List the sweeps here, oldest first, and the ready-made ones.

    Examples:

    - `attune tune list`
    """
    from attune.platform.tuning import spaces, sweep

    screen = console(as_json)
    found = list(sweep.read_all_sweeps())
    made = table(
        "", "sweep", "of", "status", "trials", "metric", "best", numbers=("trials", "best")
    )
    summarize = []
    for each in found:
        one = {**each.summarize(), "kind": each.kind, "status": each.current_status,
               "variants": list(each.spaces), "metrics": list(each.metrics)}  # fmt: skip
        summarize.append(one)
        metric = each.metrics[0]
        best = format_metric(metric, one["best"]["metrics"].get(metric)) if one["best"] else "-"
        made.add_row(
            each.name, ", ".join(each.spaces), one["status"], str(one["trials"]), metric, best
        )
    screen.print(made if found else f"no sweeps in {sweep.sweeps_folder()} yet")
    ready = table("\nready-made, for --sweep", "name", "of", "")
    for name, one_ready in spaces.read_bundled_sweeps().items():
        of = ", ".join(one_ready.variants) or "attune tune-decoding RUN"
        ready.add_row(name, of, one_ready.about)
    screen.print(ready)
    if as_json:
        print_json({"sweeps": summarize, "ready": sorted(spaces.read_bundled_sweeps())})


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show the trials of a sweep, the best first, also while it runs.

    Examples:

    - `attune tune show tune-mime-1`
    """
    from attune.platform.tuning import report, sweep

    found = sweep.find_sweep(name)
    screen = console(as_json)
    screen.print(
        f"{found.name}: {found.current_status}, {found.spent:,.0f} s; {found.command}", markup=False
    )
    _show_trials(screen, found)
    if as_json:
        trials = report.build_table(found).to_dicts()
        print_json({**found.summarize(), "status": found.current_status, "table": trials})


@app.command()
def stop(name: Name, as_json: Json = False) -> None:
    """Ask a sweep to stop after this step, with checkpoints; --resume goes on with it.

    Examples:

    - `attune tune stop tune-mime-1`
    """
    from attune.platform.tuning import sweep

    found = sweep.find_sweep(name)
    if found.current_status != "running":
        raise UsageError(f"sweep '{name}' is not running: it is {found.current_status}")
    found.stop_file.touch()
    console(as_json).print(f"sweep {name} was asked to stop", markup=False)
    if as_json:
        print_json({"name": name, "asked": True})


@app.command()
def report(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to.", show_default="report/ in the sweep's folder"),
    ] = None,
    surface: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Also the metric over these two settings."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --seeds: how many of the best to train again.")
    ] = 1,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Train the best again with these seeds, two at least, "
                     "as `attune train --seeds` does; mean, deviation and interval are shown."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write what a sweep has shown: table, importance of each setting, slices, parallel
    coordinates, front, and what stopping early saved.

    Pictures as PNG and as one HTML page that needs no network; all are logged to the sweep's run in
    MLflow.

    Examples:

    - `attune tune report tune-mime-1`
    - `attune tune report tune-mime-1 --top 3 --seeds 1,2,3 --surface elbo_weight,response_weight`
    """
    from attune.platform import tracking
    from attune.platform.tuning import report as reports
    from attune.platform.tuning import sweep

    found = sweep.find_sweep(name)
    if not found.get_trials():
        raise UsageError(f"sweep '{name}' has no trials yet")
    if seeds and found.kind != "training":
        raise UsageError(f"--seeds trains again, and '{name}' has only decoded: leave it out")
    if seeds and len(set(options.seeds(seeds))) < 2:
        raise UsageError(f"--seeds {seeds}: a deviation needs two seeds at least")
    pair = tuple(surface.split(",")) if surface else None
    if pair is not None and len(pair) != 2:
        raise UsageError(f"--surface {surface}: two settings are expected, as in A,B")
    folder = out or found.folder / "report"
    reports.check_report(found, folder, pair)  # before hours of training
    screen = console(as_json)
    again = _again(found, top, options.seeds(seeds), screen) if seeds else []
    summary = reports.write_report(found, folder, pair, again)
    if found.run_id is not None:
        tracking.finish_group(found.run_id, found.status, {}, artifacts=folder)
    _show_trials(screen, found)
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


def _again(found: "Sweep", top: int, seeds: list[int], screen: Console) -> "list[SeedStatistics]":
    """The best configurations with other seeds; runs that are finished already are left alone."""
    from attune.platform.runs.record import RUN_RECORD, find_run, runs_folder
    from attune.platform.training import driver, setup
    from attune.platform.tuning import report as reports

    best = reports.build_table(found).filter(ended="finished").head(top)["trial"].to_list()
    asked = {key: value for key, value in found.asked.items() if key != "overrides"}
    by_trial: dict[int, list[Run]] = {}
    for number in best:
        kept = found.get_trial(number).user_attrs
        for seed in seeds:
            label = f"{found.name}-{number:03d}-again{seed}"
            if (runs_folder() / label / RUN_RECORD).is_file():
                run = find_run(label)
            else:
                overrides = {**found.asked["overrides"], **kept["settings"]}
                run = setup.new_run(kept["variant"], name=label, seed=seed, overrides=overrides,
                                    workers=found.workers, **asked)  # fmt: skip
                run = run.update(parent=found.run_id)
            by_trial.setdefault(number, []).append(run)
    left = [run for runs in by_trial.values() for run in runs if run.status != "finished"]
    if left:
        with training_progress(screen, *(run.name for run in left)) as shown_lines:
            done = {run.name: run for run in driver.train_all(left, shown_lines)}
        by_trial = {n: [done.get(run.name, run) for run in runs] for n, runs in by_trial.items()}
    if any(run.status != "finished" for runs in by_trial.values() for run in runs):
        screen.print("stopped: give the same command again to go on")
        raise typer.Exit(130)
    by_trial = {n: [_measured(run, found) for run in runs] for n, runs in by_trial.items()}
    return [
        reports.summarize_seeds(
            n, found.get_trial(n).user_attrs["settings"], runs, found.metrics[0]
        )
        for n, runs in by_trial.items()
    ]


def _measured(run: "Run", found: "Sweep") -> "Run":
    """A finished run with the sweep's metrics, some of which need its answers."""
    from attune.platform.training.loop import RESULT
    from attune.platform.tuning.trial import measure_answers

    measure_answers(run, found.metrics)
    return run.update(result=json.loads((run.folder / RESULT).read_text(encoding="utf-8")))


def _show_trials(screen: Console, found: "Sweep") -> None:
    from attune.platform.tuning import report as reports

    frame = reports.build_table(found)
    if frame.is_empty():
        screen.print("no trials yet")
        return
    chosen = "decode" if found.kind == "decoding" else "variant"
    of = [chosen] if len(found.spaces) > 1 else []
    keys = list(dict.fromkeys(key for space in found.spaces.values() for key in space))
    metrics = [name for name in found.metrics if name in frame.columns]
    names = [name.removeprefix("valid_").replace("_", " ") for name in metrics]
    made = table("", "trial", *of, *keys, *names, "ended", numbers=("trial", *keys, *names))
    for row in frame.head(SHOWN_TRIALS).iter_rows(named=True):
        values = (_value(row.get(key)) for key in keys)
        numbers = (format_metric(name, row[name]) for name in metrics)
        made.add_row(str(row["trial"]), *(row[key] for key in of), *values, *numbers, row["ended"])
    screen.print(made)
    if frame.height > SHOWN_TRIALS:
        screen.print(f"... and {frame.height - SHOWN_TRIALS} more")


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def progress(screen: Console, sweep: "Sweep") -> Iterator[Callable[[str, int], None]]:
    """A line for each trial that ends, and how many there are still."""
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


def tell_end(screen: Console, ended: "Sweep", as_json: bool) -> None:
    """The trials, how to go on where some are missing, and the exit code."""
    _show_trials(screen, ended)
    summarize = ended.summarize()
    if ended.status == "stopped":
        of = f"-decoding {ended.asked['run']}" if ended.kind == "decoding" else ""
        again = f"'attune tune{of} --name {ended.name} --resume'"
        screen.print(f"not all was tried: go on with {again}", markup=False)
    if as_json:
        print_json(summarize)
    if ended.status == "stopped" and (ended.stop_file.exists() or ended.kind == "decoding"):
        raise typer.Exit(130)
    if summarize["best"] is None:
        reasons = {t.user_attrs.get("reason", "") for t in ended.get_trials()} - {""}
        screen.print(f"no trial came to a result: {'; '.join(sorted(reasons))}", markup=False)
        raise typer.Exit(1)


def one_of(kind: str, value: str, choices: tuple[str, ...]) -> str:
    """A value that must be one of several."""
    if value not in choices:
        raise UsageError(unknown_choice(kind, value, choices))
    return value


def begin(name: str, **content: Any) -> "Sweep":
    """A new sweep, written to its folder."""
    from attune.platform.core.commit import commit
    from attune.platform.runs.record import check_run_name, runs_folder
    from attune.platform.tuning.sweep import RECORD, Sweep, sweeps_folder

    check_run_name(name)
    made = Sweep(
        name=name,
        folder=sweeps_folder() / name,
        command=" ".join(["attune", *sys.argv[1:]]),
        commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        **content,
    )
    if (made.folder / RECORD).exists():
        raise UsageError(
            f"a sweep named '{made.name}' exists already: choose another --name, or go on with it "
            f"by adding --resume"
        )
    left = sorted(each.name for each in runs_folder().glob(f"{name}-[0-9][0-9][0-9]*"))
    if made.kind == "training" and left:
        raise UsageError(
            f"there is a run '{left[0]}' already, which this sweep would take for its own trial: "
            f"choose another --name"
        )
    made.write()
    return made
