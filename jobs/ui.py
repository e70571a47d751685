"""`attune ui`: the web page on which runs answer side by side."""

import errno
import socket
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from attune.jobs import options
from attune.jobs.console import console
from attune.platform.core.errors import UsageError
from attune.platform.runs.record import all_runs, runs_folder

if TYPE_CHECKING:  # gradio and torch take seconds to import, which would slow down `--help`
    from attune.ui.run_catalog import RunCatalog

LOCAL = ("127.0.0.1", "localhost", "::1")


def ui(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, by name, MLflow id or `variant@latest`.",
            show_default="all runs that have a model",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; with `0.0.0.0` everybody who can reach this machine can "
            "use the page.",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    without_runs: Annotated[
        bool, typer.Option("--without-runs", help="Open the page even if no run has a model yet.")
    ] = False,
) -> None:
    """Serve a web page on which runs answer a conversation side by side, until Ctrl-C.

    Type a conversation or pick an example. Each run answers in its own column, word by word, with
    the emotion that it predicts. Without RUN all runs can be selected on the page, and the newest
    run of each variant is selected at first.

    Examples:

    - `attune ui`
    - `attune ui transformer@latest multi-trs@latest`
    - `attune ui mine --port 8000`
    - `attune ui --host 0.0.0.0` (others open `http://THIS-MACHINE:7860`)
    """
    check_ui_address(host, port)
    catalog = parse_ui_runs(names, without_runs)
    screen = console()
    screen.print("starting the page ...", style="dim")
    from attune.ui import app

    page = app.start(catalog, host, port)
    try:
        screen.print(f"Attune is at [bold]{page.local_url}[/bold] (Ctrl-C stops it)")
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


def check_ui_address(host: str, port: int) -> None:
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
                    f"port {port} is in use, perhaps by another page: close that one, or choose "
                    f"another port, such as --port {free}"
                ) from None
            raise UsageError(
                f"cannot listen at {host}:{port} ({error.strerror}): choose an address of this "
                f"machine with --host, such as 127.0.0.1, and a port above 1023 with --port"
            ) from None


def parse_ui_runs(names: list[str] | None, without_runs: bool = False) -> "RunCatalog":
    """Return a catalog of the named runs, or of all; an empty one is an error by default."""
    selection = [options.parse_run_option(name) for name in names] if names else None
    if not (without_runs or selection) and not any(run.model.is_dir() for run in all_runs()):
        raise UsageError(_describe_missing_ui_runs())
    from attune.ui.run_catalog import RunCatalog

    catalog = RunCatalog(selection)
    if not (without_runs or catalog.runs()):
        raise UsageError(_describe_missing_ui_runs())
    return catalog


def _describe_missing_ui_runs() -> str:
    return (
        f"no run in {runs_folder()} has a model yet: train one with 'attune train VARIANT --preset "
        f"tiny --max-minutes 2' ('attune variants' lists them), or see 'attune demo'"
    )
