"""`attune runs`: list the runs with their status and metrics."""

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.jobs.tables import format_table_metric, table
from attune.platform.runs.record import all_runs, read_run_aliases, runs_folder

if TYPE_CHECKING:
    from attune.platform.runs.record import Run
    from attune.platform.runs.status import CurrentStatus

SECONDS_TO_SEND = 30.0


def runs(
    variant: Annotated[
        str | None, typer.Option(metavar="V", help="Only the runs of this variant.")
    ] = None,
    send: Annotated[
        bool,
        typer.Option(
            "--send",
            help="First send what an unreachable tracking server could not take, and read champion "
            "and candidate from its registry.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the runs, oldest first, with their status and last metrics.

    Wherever a command takes a RUN, give its name, its MLflow id, or `variant@latest`.

    Examples:

    - `attune runs`
    - `attune runs --variant multi-trs`
    - `attune runs --json | jq '.runs[] | [.name, .metrics.valid_perplexity]'`
    """
    screen = console(as_json)
    shown_runs = list(all_runs(lambda problem: screen.print(problem, markup=False)))
    if variant is not None and variant not in {run.variant for run in shown_runs}:
        # Imported here because it imports torch, and only needed for a variant without runs.
        from attune.platform.core.settings import find_variant

        find_variant(variant)
    shown_runs = [run for run in shown_runs if variant in (None, run.variant)]
    statuses = _find_listed_statuses(shown_runs)
    if send:
        _send_listed_runs(
            [run for run in shown_runs if not _is_listed_run_active(run, statuses[run.name])],
            screen,
        )
    if shown_runs:
        screen.print(_runs_table(shown_runs, statuses))
        for run in shown_runs:
            if hint := _listed_run_hint(run, statuses[run.name]):
                screen.print(hint, markup=False)
    else:
        which = f" of '{variant}'" if variant else ""
        screen.print(f"no runs{which} in {runs_folder()} yet: see 'attune train --help'")
    if as_json:
        print_json({"runs": _runs_to_json(shown_runs, statuses)})


def _find_listed_statuses(runs: "list[Run]") -> "dict[str, CurrentStatus]":
    from attune.platform.runs.status import current_status

    job_ended = functools.cache(_has_listed_job_ended)
    return {run.name: current_status(run, job_ended) for run in runs}


def _is_listed_run_active(run: "Run", status: "CurrentStatus") -> bool:
    """Return whether another process sends the metrics of a run: it trains or finishes it."""
    from attune.platform.runs.lock import is_locked

    return status == "running" or is_locked(run.folder)


def _has_listed_job_ended(job: str, dashboard: str) -> bool | None:
    from attune.platform.services.jobs import has_ended  # imports Ray

    return has_ended(job, dashboard)


def _listed_run_hint(run: "Run", status: "CurrentStatus") -> str:
    from attune.platform.runs.status import resume_command

    if status == "interrupted":
        return f"{run.name} is interrupted: resume it with '{resume_command(run)}'"
    if status == "unknown":
        return (
            f"{run.name}: whether it is being trained is unknown, because the job server of its "
            f"Ray job {run.job} does not answer; if the job has ended, resume it with "
            f"'{resume_command(run)}'"
        )
    return ""


def _send_listed_runs(runs: "list[Run]", screen: Console) -> None:
    from attune.platform import tracking
    from attune.platform.evaluation import promotion

    for run in runs:
        if run.run_id is not None:
            unsent = tracking.flush_run(run, SECONDS_TO_SEND)
            if unsent:
                screen.print(f"{run.name}: {unsent} lines not sent, {run.tracking} is unreachable")
    tracked = [run for run in runs if run.run_id is not None]
    if tracked:
        promotion.update_aliases(tracked[-1])


def _runs_to_json(runs: "list[Run]", statuses: "dict[str, CurrentStatus]") -> list[dict[str, Any]]:
    aliases = read_run_aliases()
    return [_listed_run_to_json(run, statuses[run.name], aliases) for run in runs]


def _listed_run_to_json(
    run: "Run", status: "CurrentStatus", aliases: dict[str, str]
) -> dict[str, Any]:
    return {
        "name": run.name,
        "run_id": run.run_id,
        "variant": run.variant,
        "status": status,
        "data": run.data["name"],
        "seed": run.seed,
        "metrics": run.result.get("metrics", {}),
        "alias": aliases.get(run.run_id or ""),
        "job": run.job or None,
        "dashboard": run.dashboard or None,
    }


def _runs_table(runs: "list[Run]", statuses: "dict[str, CurrentStatus]") -> Table:
    described = _runs_to_json(runs, statuses)
    metrics = list(dict.fromkeys(name for run in described for name in run["metrics"]))
    short = [name.removeprefix("valid_").replace("_", " ") for name in metrics]
    rows = table("", "name", "variant", "data", "seed", "status", *short, numbers=("seed", *short))
    for run in described:
        values = [format_table_metric(name, run["metrics"].get(name)) for name in metrics]
        if run["alias"]:
            run["name"] = f"{run['name']} ({run['alias']})"
        named = (escape(str(run[key])) for key in ("name", "variant", "data", "seed", "status"))
        rows.add_row(*named, *values)
    return rows
