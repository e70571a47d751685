"""`attune submit`: any command of Attune as a Ray job."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs import options
from attune.jobs.console import Json, console, print_json
from attune.jobs.tune import plan_trials
from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:  # Ray takes seconds, which `--help` should not
    from attune.platform.services.jobs import Job, Jobs

EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": 130}
"""Of a job that is waited for; any other way to end is 1."""
HERE = ("submit", "jobs", "up", "down", "status")
"""What makes no sense as a job."""

Address = Annotated[
    str | None,
    typer.Option(
        metavar="http://HOST:8265",
        help="The cluster's job server.",
        show_default="RAY_ADDRESS, or what `attune up` started",
    ),
]


def submit(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, behind `--`.")
    ],
    address: Address = None,
    gpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=0, help="GPUs that each worker of a training takes.",
            show_default="1 if there are enough",
        ),
    ] = None,
    cpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores that each worker of a training takes.",
            show_default="all that there are, shared",
        ),
    ] = None,
    upload: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", exists=True,
            help="A file or folder named in COMMAND that the cluster cannot see: it is shipped, "
            "and kept in ATTUNE_HOME there.",
        ),
    ] = None,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="ATTUNE_HOME on the cluster, seen by all its machines.",
            show_default="the same path as here",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the job's output until it ends.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run any attune command as a job of a Ray cluster, with the code that is installed here.

    The cluster's machines need Attune's requirements (its code is shipped as a wheel), and must
    see ATTUNE_HOME; data they see at the same path as here, or it is shipped by --upload. A job
    that finds no room waits and says what for. `attune jobs` lists, shows, stops and waits for
    jobs; a stopped one goes on when it is submitted again with `--resume`.

    Options for the job stand before the command, the command's own behind it.

    Examples:

    - `attune submit -- train multi-trs --workers 2`
    - `attune submit --follow -- train mime --name mine --resume`
    - `attune submit --upload data/mine -- train mime --data data/mine`
    - `attune submit --address http://head:8265 --home /shared/attune --gpus-per-worker 1
      -- tune mime --space loss-weights --budget 2h`
    """
    known = [name for name in _group(context).commands if name not in HERE]
    if command[0] not in known:
        raise UsageError(unknown_choice("command", command[0], known))
    for path in upload or ():
        if str(path) not in {str(Path(part)) for part in command}:
            raise UsageError(f"--upload {path}: the command does not name it")
    words = _parse_command(_group(context), command)
    _check_settings(words)
    if home is not None and not home.startswith("/"):
        raise UsageError(f"--home {home}: give the whole path, beginning with '/'")
    from attune.platform.services import cluster
    from attune.platform.services.jobs import Jobs

    jobs = Jobs(address)
    named = command if home else _add_name(command, words)
    per_worker = {cluster.GPUS: gpus_per_worker, cluster.CPUS: cpus_per_worker}
    typed = [
        ("--address", address), ("--gpus-per-worker", gpus_per_worker),
        ("--cpus-per-worker", cpus_per_worker), ("--home", home),
        *(("--upload", path) for path in upload or ()),
    ]  # fmt: skip
    job = jobs.submit(
        named,
        options=[str(word) for option in typed if option[1] is not None for word in option],
        run=_option(named, "--name") or "",
        uploads=upload or (),
        place=home,
        variables={name: str(n) for name, n in per_worker.items() if n is not None},
    )
    screen = console(as_json)
    screen.print(f"job {job} at {jobs.address}: attune {shlex.join(named)}", markup=False)
    ended = follow_job(jobs, job, screen) if follow else None
    if not follow:
        screen.print(f"see 'attune jobs logs {job} --follow' and 'attune jobs list'", markup=False)
    if as_json:
        state = {"state": ended.state} if ended else {}
        print_json(
            {"job_id": job, "address": jobs.address, "command": named,
             "run": _option(named, "--name"), "dashboard": jobs.dashboard(job), **state}
        )  # fmt: skip
    if ended:
        raise typer.Exit(exit_code(ended))


def follow_job(jobs: "Jobs", job: str, screen: Console) -> "Job":
    """Show what a job prints until it ends, and how it ended; Ctrl-C leaves it alone."""
    shown = []

    def show(text: str) -> None:
        shown.append(text)
        screen.print(text, markup=False, end="")

    try:
        ended = jobs.follow(job, show)
    except KeyboardInterrupt:
        screen.print(f"the job goes on: 'attune jobs stop {job}' ends it", markup=False)
        raise
    if not shown and ended.message:
        screen.print(ended.message, markup=False)
    screen.print(f"job {job}: {ended.state}", markup=False)
    return ended


def exit_code(job: "Job") -> int:
    """What `wait` and `--follow` end with."""
    return EXIT_CODES.get(job.state, 1)


def _group(context: typer.Context) -> Any:
    return context.find_root().command


def _parse_command(group: Any, command: list[str]) -> dict[str, Any]:
    """What is asked for, by the names of the last sub-command's options; a wrong option is an error
    here rather than a job that fails."""
    name, *words = command
    each = group.commands[name]
    context = each.make_context(name, words)
    if hasattr(each, "commands"):
        left = [*context._protected_args, *context.args]
        return {**_parse_command(each, left), "group": name} if left else {}
    return {"command": name, **context.params}


def _check_settings(words: dict[str, Any]) -> None:
    """Refuse settings that the job would refuse."""
    if words.get("command") == "train":
        from attune.platform.training.settings import configure

        overrides = options.parse_overrides(words["settings"])
        configure(words["variant"], words["preset"] or "small", overrides)
    elif words.get("group") == "tune" and words["command"] == "run" and not words["resume"]:
        overrides = options.parse_overrides(words["settings"])
        plan_trials({k: v for k, v in words.items() if v is not None} | {"overrides": overrides})


def _add_name(command: list[str], words: dict[str, Any]) -> list[str]:
    """A new run or sweep gets its name now, so that the job can tell of it from the start."""
    if words.get("name") or words.get("resume") or words.get("seeds"):
        return command
    if words.get("command") == "train":
        from attune.platform.core.settings import find_variant
        from attune.platform.runs.record import new_run_name, runs_folder

        find_variant(words["variant"])
        data = Path(words["data"] or "bundled").name
        name = _reserve_name(runs_folder(), lambda: new_run_name(words["variant"], data))
    elif words.get("group") == "tune" and words["command"] == "run" and words["variants"]:
        from attune.platform.tuning import sweep

        start = f"tune-{'-'.join(words['variants'])}"[:60]
        name = _reserve_name(sweep.sweeps_folder(), lambda: sweep.new_sweep_name(start))
    else:
        return command
    return [*command, "--name", name]


def _reserve_name(folder: Path, new_name: Callable[[], str]) -> str:
    """A name that the next job does not get, though this one may begin much later."""
    while True:
        name = new_name()
        try:
            (folder / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return name


def _option(command: list[str], name: str) -> str | None:
    for part, following in zip(command, [*command[1:], ""], strict=True):
        if part == name:
            return following
        if part.startswith(f"{name}="):
            return part.partition("=")[2]
    return None
