"""The `attune` command."""

import os
import signal
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
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
from attune.platform.core.errors import DataError, ServiceError, UsageError
from attune.platform.core.home import home
from attune.platform.core.logging import JOB

STOPPED = 130  # a shell's exit code for a command ended by Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train, tune, compare and rate empathetic dialogue models.

Begin with `attune doctor`, which says whether this machine has all it needs, and
`attune data prepare --source bundled --out DIR`, which needs no download.""",
    epilog="Runs, caches and logs are kept in `ATTUNE_HOME` (default: `.attune/` in this folder).",
)
app.add_typer(data.app, name="data")
app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(train.train)
app.add_typer(tune.app, name="tune")  # its command and those of `sweeps.py`
app.command(name="tune-decoding")(tune_decoding.tune_decoding)
app.command()(stack.up)
app.command()(stack.down)
app.command()(stack.status)
# Options behind the submitted command belong to it, with or without `--`.
app.command(context_settings={"allow_interspersed_args": False})(submit.submit)
app.add_typer(jobs.app, name="jobs")
app.command()(variants.variants)
app.command()(runs.runs)
app.command()(respond.respond)
app.command()(evaluate.evaluate)
app.command()(promote.promote)
app.command()(ui.ui)
app.add_typer(show_labels.app, name="show")  # its commands and those of `show.py`
app.add_typer(annotate.app, name="annotate")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"attune {metadata.version('attune')}")
        raise typer.Exit


@app.callback()
def options(
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
            _fail("stopped", STOPPED)
        sys.exit(code)
    except TyperException as error:  # typer's own: an unknown command, a missing option
        if message := error.format_message():  # empty where it has just shown the help
            _fail(f"{message} (--help shows what there is)", error.exit_code)
        sys.exit(error.exit_code)
    except UsageError as error:
        _fail(str(error), 2)
    except (DataError, ServiceError) as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader has closed, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        log = _save_traceback()
        if JOB in os.environ:  # its file may be on another machine
            traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        _fail(f"{what}\nThis should not have happened; the details are in {log}", 1)


def _fail(message: str, code: int) -> None:
    print(f"attune: {message}", file=sys.stderr)
    sys.exit(code)


def _save_traceback() -> Path:
    folder = home() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="attune-logs-"))
    log = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}.log"
    log.write_text(f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}", encoding="utf-8")
    return log


if __name__ == "__main__":
    main()
