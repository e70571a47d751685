"""`attune up`, `attune down` and `attune status`: the local stack of Ray, MLflow and the page."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.jobs.tables import table
from attune.platform.services import stack
from attune.platform.services.stack import MLFLOW, PAGE, PARTS, RAY, Part
from attune.platform.services.stack_processes import HOST, MLFLOW_USER

TITLES = {RAY: "Ray", MLFLOW: "MLflow", PAGE: "page"}


def up(
    ray_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of Ray's head (RAY_ADDRESS).", show_default="a free one"
        ),
    ] = None,
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of Ray's dashboard and job server.", show_default="8265"
        ),
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of MLflow.", show_default="5000")
    ] = None,
    ui_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the page.", show_default="7860")
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(min=1, help="Cores for Ray jobs.", show_default="all of this machine"),
    ] = None,
    mlflow_auth: Annotated[
        bool,
        typer.Option(
            "--mlflow-auth", help="Make MLflow require a user name and a generated password."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a Ray head, an MLflow server and the page on this machine, and print their addresses.

    They listen on this machine only. Ray requires a token, which attune commands read from
    ATTUNE_HOME. Parts that run already are left alone; parts that have died are started again.
    `attune down` stops all of them.

    Examples:

    - `attune up`, then `attune submit --follow -- train multi-trs --preset tiny --max-minutes 2`
    - `attune up --mlflow-port 5001 --ui-port 7861`
    - `attune up --cpus 4 --mlflow-auth`
    """
    screen = console(as_json)
    before = {name for name, part in stack.running_parts().items() if part.alive()}
    ports = {RAY: dashboard_port, MLFLOW: mlflow_port, PAGE: ui_port}
    parts = stack.up(
        ports, head_port=ray_port, cores=cpus, password=mlflow_auth,
        report=lambda text: screen.print(text, style="dim", markup=False),
    )  # fmt: skip
    for name, part in parts.items():
        state = "already runs" if name in before else "runs"
        screen.print(f"{TITLES[name]} {state} at [bold]{part.address}[/bold]")
    _print_stack_hints(screen, parts)
    if as_json:
        print_json({"parts": [_describe_stack_part(part) for part in parts.values()]})


def _print_stack_hints(screen: Console, parts: dict[str, Part]) -> None:
    screen.print(f"Ray's dashboard asks for the token in {stack.token_file()}", markup=False)
    if parts[MLFLOW].password:
        screen.print(
            f"MLflow asks for the user '{MLFLOW_USER}' and the password in {stack.password_file()}",
            markup=False,
        )
    screen.print("Next: 'attune submit -- COMMAND', 'attune status', 'attune down'")


def down(as_json: Json = False) -> None:
    """Stop what `attune up` started, and nothing else.

    Running jobs are stopped first. They write a checkpoint and continue from it when they are
    submitted again with `--resume`.
    """
    screen = console(as_json)
    stopped = stack.down(lambda text: screen.print(text, style="dim", markup=False))
    for part in stopped:
        screen.print(f"{TITLES[part.name]} stopped")
    if not stopped:
        screen.print("nothing was running")
    if as_json:
        print_json({"stopped": [part.name for part in stopped]})


def status(as_json: Json = False) -> None:
    """Show the address, health and memory of each part that `attune up` starts.

    The exit code is 1 if a part is missing or does not respond.
    """
    screen = console(as_json)
    parts = stack.running_parts()
    described = [_describe_stack_part(parts[name]) for name in PARTS if name in parts]
    if not described:
        screen.print("nothing is running: 'attune up' starts Ray, MLflow and the page")
    else:
        screen.print(_tabulate_stack_parts(described))
        total = sum(part["memory_mb"] or 0 for part in described)
        logs = ", ".join(part["log"] for part in described)
        screen.print(f"{total / 1024:.1f} GB in total; logs: {logs}", style="dim", markup=False)
    if any(part["health"] != "ok" for part in described):
        screen.print("'attune up' starts dead parts again", markup=False)
    all_ok = len(described) == len(PARTS) and all(part["health"] == "ok" for part in described)
    if as_json:
        print_json({"ok": all_ok, "parts": described})
    raise typer.Exit(0 if all_ok else 1)


def _describe_stack_part(part: Part) -> dict[str, Any]:
    problem = part.problem()
    return {
        "name": part.name,
        "address": part.address,
        "head": stack.head_address(part) if part.name == RAY else None,
        "metrics": f"http://{HOST}:{part.ports['metrics']}/metrics" if part.name == RAY else None,
        "health": problem or "ok",
        "pid": part.pid if part.alive() else None,
        "memory_mb": round(part.memory()),
        "log": str(part.log),
    }


def _tabulate_stack_parts(described: list[dict[str, Any]]) -> Table:
    rows = table("", "part", "address", "health", "pid", "memory", numbers=("memory",))
    for part in described:
        rows.add_row(
            TITLES[part["name"]], part["address"], escape(part["health"]), str(part["pid"] or ""),
            f"{part['memory_mb']:,} MB",
        )  # fmt: skip
    return rows
