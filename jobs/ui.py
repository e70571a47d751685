"""`attune ui`: the page on which runs answer side by side."""

import errno
import socket
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from attune.jobs import options
from attune.jobs.console import console
from attune.platform.core.errors import UsageError
from attune.platform.runs.record import all_runs, runs_folder

if TYPE_CHECKING:  # gradio and torch take seconds, which `--help` should not
    from attune.ui.run_catalog import RunCatalog

LOCAL = ("127.0.0.1", "localhost", "::1")


def ui(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, by name, MLflow id or `variant@latest`.",
            show_default="all that have a model",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Where to listen; `0.0.0.0` lets everybody in who can reach this machine.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The page's port.")] = 7860,
    without_runs: Annotated[
        bool, typer.Option("--without-runs", help="Open it even if no run can answer yet.")
    ] = False,
) -> None:
    """Open a page on which runs answer a conversation side by side, until Ctrl-C.

    Type a conversation or pick an example; each run answers in a column of its own, word by word,
    with the emotion it reads. Without a RUN all can be chosen, and the newest of each variant is.

    Examples:

    - `attune ui`
    - `attune ui transformer@latest multi-trs@latest`
    - `attune ui mine --port 8000`
    - `attune ui --host 0.0.0.0`, and others open `http://THIS-MACHINE:7860`
    """
    check_address(host, port)
    catalog = build_catalog(names, without_runs)
    screen = console()
    screen.print("starting the page ...", style="dim")
    from attune.ui import app

    page = app.start(catalog, host, port)
    try:
        screen.print(f"Attune is at [bold]{page.local_url}[/bold] (Ctrl-C ends it)")
        if host not in LOCAL:
            screen.print("Everybody who can reach this machine can use it.", style="yellow")
        # Ctrl-C may reach another thread, which does not wake this one: wake up regularly.
        never = threading.Event()
        while not never.wait(timeout=0.2):
            pass
    except KeyboardInterrupt:
        screen.print("the page is closed")
    finally:
        page.close(verbose=False)


def check_address(host: str, port: int) -> None:
    """Check that the address can be bound, before heavy libraries are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                free = port + 1 if port < 65535 else port - 1
                raise UsageError(
                    f"port {port} is taken, perhaps by another page: close that one, or choose "
                    f"another port (--port {free})"
                ) from None
            raise UsageError(f"cannot listen at {host}:{port}: {error.strerror}") from None


def build_catalog(names: list[str] | None, without_runs: bool = False) -> "RunCatalog":
    """Return a catalog of the named runs, or of all; an empty one is an error by default."""
    selection = [options.trained_run(name) for name in names] if names else None
    if not (without_runs or selection) and not any(run.model.is_dir() for run in all_runs()):
        raise UsageError(_no_runs_message())
    from attune.ui.run_catalog import RunCatalog

    catalog = RunCatalog(selection)
    if not (without_runs or catalog.runs()):
        raise UsageError(_no_runs_message())
    return catalog


def _no_runs_message() -> str:
    return (
        f"no run in {runs_folder()} can answer yet: train one with 'attune train VARIANT --preset "
        f"tiny --max-minutes 2' ('attune variants' lists them), or see 'attune demo'"
    )
