"""`attune submit`: any command of Attune as a Ray job."""

import shlex
from typing import Annotated

import typer

from attune.jobs.console import Json, console, print_json
from attune.platform.errors import UsageError, unknown


def submit(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, behind `--`.")
    ],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="http://HOST:8265",
            help="The cluster's job server.",
            show_default="RAY_ADDRESS, or this machine's",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the job's output until it ends.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run any attune command as a job of a Ray cluster, with the code that is installed here.

    The cluster's machines need Attune's requirements (its code is shipped as a wheel), and must
    see ATTUNE_HOME and the data at the same paths as here (a shared disk).

    Examples:

    - `attune submit -- train multi-trs --workers 2`
    - `attune submit --address http://head:8265 --follow -- train mime --data /data/ed`
    """
    known = _commands(context)
    if command[0] not in known:
        raise UsageError(unknown("command", command[0], known))
    from attune.platform import cluster

    job = cluster.submit(command, address)
    screen = console(as_json)
    screen.print(f"job {job.id} at {job.address}: attune {shlex.join(command)}", markup=False)
    if follow:
        status = job.follow(lambda text: screen.print(text, markup=False, end=""))
        screen.print(f"job {job.id}: {status}", markup=False)
    if as_json:
        print_json({"job_id": job.id, "address": job.address, "command": command})
    if follow and status != "SUCCEEDED":
        raise typer.Exit(1)


def _commands(context: typer.Context) -> list[str]:
    parent = context.find_root().command
    return [name for name in parent.list_commands(context) if name != "submit"]  # type: ignore[attr-defined]
