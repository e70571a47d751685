"""The `attune` command."""

import os
import signal
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from attune.jobs import (
    annotate,
    data,
    demo,
    doctor,
    evaluate,
    jobs,
    promote,
    respond,
    runs,
    show_labels,
    stack,
    submit,
    train,
    tune,
    tune_decoding,
    ui,
    variants,
)
from attune.platform.core.disk import describe_full_disk, is_disk_full
from attune.platform.core.errors import DataError, ServiceError, UsageError
from attune.platform.core.home import home
from attune.platform.core.logging import JOB

STOPPED = 130  # a shell's exit code for a command stopped by Ctrl-C


class CommandsInOrder(TyperGroup):
    """The `attune` command group: its help lists commands in the order of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in order; Typer alone would list groups of commands last."""
        return [name for commands in COMMANDS.values() for name in commands]


app = typer.Typer(
    cls=CommandsInOrder,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train, tune, compare and rate empathetic dialogue models.

Start with `attune doctor`, which checks this machine, and `attune train VARIANT --preset tiny`,
which needs no download: a corpus is bundled.""",
    epilog="Runs, caches and logs are stored in `ATTUNE_HOME` (default: `.attune/` here).",
)

COMMANDS: dict[str, dict[str, tuple[Any, str]]] = {
    "Getting started": {
        "doctor": (doctor.doctor, "Check this machine, and say how to fix what is missing."),
        "demo": (demo.demo, "Train one variant of each system and compare them."),
    },
    "Data": {
        "data": (data.app, "Convert, inspect, filter and harvest conversations."),
        "annotate": (annotate.app, "Add labels that a trained model predicts to prepared data."),
    },
    "Train and tune": {
        "variants": (variants.variants, "List the systems, or the settings of one of them."),
        "train": (train.train, "Train a system, or resume its training."),
        "tune": (tune.app, "Search for the best settings of a system."),
        "tune-decoding": (
            tune_decoding.tune_decoding,
            "Search for the best decoding settings of a trained run.",
        ),
    },
    "Evaluate": {
        "runs": (runs.runs, "List the trained runs with their status and metrics."),
        "evaluate": (evaluate.evaluate, "Compute a run's metrics on the test split."),
        "promote": (promote.promote, "Make a run the champion if it is significantly better."),
        "show": (show_labels.app, "Draw the figures and print the tables of the papers."),
    },
    "Serve": {
        "respond": (respond.respond, "Print the answers of one or more runs to a conversation."),
        "ui": (ui.ui, "Open a web page on which runs answer side by side."),
    },
    "Cluster": {
        "up": (stack.up, "Start Ray, MLflow and the web page on this machine."),
        "down": (stack.down, "Stop what `attune up` started."),
        "status": (stack.status, "Show whether Ray, MLflow and the web page respond."),
        "submit": (submit.submit, "Run any other command as a job on a Ray cluster."),
        "jobs": (jobs.app, "List, follow, stop and wait for jobs."),
    },
}
"""By panel of `attune --help`: each command or group of commands, and its line there."""

for _panel, _commands in COMMANDS.items():
    for _name, (_command, _line) in _commands.items():
        _options: dict[str, Any] = {"rich_help_panel": _panel, "short_help": _line}
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, **_options)
        else:
            # Options after the submitted command belong to it, with or without `--`.
            _settings = {"allow_interspersed_args": _name != "submit"}
            app.command(name=_name, context_settings=_settings, **_options)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"attune {metadata.version('attune')}")
        raise typer.Exit


@app.callback()
def cli_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Run a command; print an error in one or two lines and save its traceback to a file."""
    # A cluster stops jobs with SIGTERM: clean up as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code = app(standalone_mode=False)
        if code == STOPPED:
            _exit_with_cli_error("stopped", STOPPED)
        sys.exit(code)
    except TyperException as error:  # raised by Typer: an unknown command, a missing option
        if message := error.format_message():  # empty if the help was printed
            _exit_with_cli_error(f"{message} (see --help)", error.exit_code)
        sys.exit(error.exit_code)
    except UsageError as error:
        _exit_with_cli_error(str(error), 2)
    except (DataError, ServiceError) as error:
        _exit_with_cli_error(str(error), 1)
    except BrokenPipeError:  # the reader of stdout has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        place = Path(getattr(error, "filename", None) or home())
        if is_disk_full(error, place):
            _exit_with_cli_error(describe_full_disk(place), 1)
        log = _save_cli_traceback()
        if log is None or JOB in os.environ:  # the log may be on another machine
            traceback.print_exc()
        details = "see above" if log is None else f"the traceback is in {log}"
        _exit_with_cli_error(f"{type(error).__name__}: {error}\nThis is a bug; {details}", 1)


def _exit_with_cli_error(message: str, code: int) -> None:
    print(f"attune: {message}", file=sys.stderr)
    sys.exit(code)


def _save_cli_traceback() -> Path | None:
    """Write the traceback to a file and return its path; None if it cannot be written."""
    text = f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}"
    for folder in (home() / "logs", Path(tempfile.gettempdir()) / "attune-logs"):
        log = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log.write_text(text, encoding="utf-8")
        except OSError:
            continue
        return log
    return None


if __name__ == "__main__":
    main()
