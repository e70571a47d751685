"""`attune submit`: run any attune command as a Ray job."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs import options
from attune.jobs.console import Json, console, print_json
from attune.jobs.tune import plan_tune_trials
from attune.platform.core.errors import UsageError, unknown_choice_error

if TYPE_CHECKING:  # Ray takes seconds to import, which would slow down `--help`
    from attune.platform.services.jobs import Job, Jobs

EXIT_CODES = {"SUCCEEDED": 0, "STOPPED": 130}
"""Exit codes by final state; any other state is 1."""
LOCAL_COMMANDS = ("submit", "jobs", "up", "down", "status")
"""Commands that cannot be submitted."""

Address = Annotated[
    str | None,
    typer.Option(
        metavar="http://HOST:8265",
        help="The cluster's job server.",
        show_default="RAY_ADDRESS, or the one that `attune up` started",
    ),
]


def submit(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The command to run, after `--`.")
    ],
    address: Address = None,
    gpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=0, help="GPUs of each training worker.",
            show_default="1 if there are enough",
        ),
    ] = None,
    cpus_per_worker: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cores of each training worker.",
            show_default="all cores, shared equally",
        ),
    ] = None,
    upload: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", exists=True,
            help="A file or folder named in COMMAND that the cluster cannot see. It is copied to "
            "ATTUNE_HOME there. Can be given several times.",
        ),
    ] = None,
    home: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="ATTUNE_HOME on the cluster; all its machines must see it.",
            show_default="the same path as here",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the job's output until it ends.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run any attune command as a job of a Ray cluster, with the code that is installed here.

    The machines of the cluster need Attune's requirements installed; its code is sent as a wheel.
    All must see ATTUNE_HOME. Data must be visible there under the same path as here, or be sent
    with --upload. A job waits while the resources it needs are in use, and reports which.
    `attune jobs` lists, follows, stops and waits for jobs; submit a stopped job again with
    `--resume` to continue it.

    Options of the job come before the command, options of the command after it.

    Examples:

    - `attune submit -- train multi-trs --workers 2`
    - `attune submit --follow -- train mime --name mine --resume`
    - `attune submit --upload data/mine -- train mime --data data/mine`
    - `attune submit --address http://head:8265 --home /shared/attune --gpus-per-worker 1
      -- tune mime --space loss-weights --budget 2h`
    """
    known = [name for name in _find_group_to_submit(context).commands if name not in LOCAL_COMMANDS]
    if command[0] not in known:
        raise UsageError(unknown_choice_error("command", command[0], known))
    for path in upload or ():
        if str(path) not in {str(Path(part)) for part in command}:
            raise UsageError(f"--upload {path}: expected a path that occurs in COMMAND")
    words = parse_submitted_command(_find_group_to_submit(context), command)
    _check_submitted_settings(words)
    if home is not None and not home.startswith("/"):
        raise UsageError(f"--home {home}: expected an absolute path, such as /shared/attune")
    from attune.platform.services import cluster
    from attune.platform.services.jobs import Jobs

    jobs = Jobs(address)
    named = command if home else _add_submitted_name(command, words)
    per_worker = {cluster.GPUS: gpus_per_worker, cluster.CPUS: cpus_per_worker}
    typed = [
        ("--address", address), ("--gpus-per-worker", gpus_per_worker),
        ("--cpus-per-worker", cpus_per_worker), ("--home", home),
        *(("--upload", path) for path in upload or ()),
    ]  # fmt: skip
    job = jobs.submit(
        named,
        options=[str(word) for option in typed if option[1] is not None for word in option],
        run=_find_submitted_option(named, "--name") or "",
        uploads=upload or (),
        place=home,
        variables={name: str(n) for name, n in per_worker.items() if n is not None},
    )
    screen = console(as_json)
    screen.print(f"job {job} at {jobs.address}: attune {shlex.join(named)}", markup=False)
    ended = follow_submitted_job(jobs, job, screen) if follow else None
    if not follow:
        screen.print(f"Next: 'attune jobs logs {job} --follow', 'attune jobs list'", markup=False)
    if as_json:
        state = {"state": ended.state} if ended else {}
        print_json(
            {"job_id": job, "address": jobs.address, "command": named,
             "run": _find_submitted_option(named, "--name"),
             "dashboard": jobs.dashboard(job), **state}
        )  # fmt: skip
    if ended:
        raise typer.Exit(submitted_exit_code(ended))


def follow_submitted_job(jobs: "Jobs", job: str, screen: Console) -> "Job":
    """Print the output of a job until it ends; Ctrl-C does not stop the job."""
    shown = []

    def show(text: str) -> None:
        shown.append(text)
        screen.print(text, markup=False, end="")

    try:
        ended = jobs.follow(job, show)
    except KeyboardInterrupt:
        screen.print(f"the job continues: 'attune jobs stop {job}' stops it", markup=False)
        raise
    if not shown and ended.message:
        screen.print(ended.message, markup=False)
    screen.print(f"job {job}: {ended.state}", markup=False)
    return ended


def submitted_exit_code(job: "Job") -> int:
    """Return the exit code of `wait` and `--follow` for a job that has ended."""
    return EXIT_CODES.get(job.state, 1)


def _find_group_to_submit(context: typer.Context) -> Any:
    return context.find_root().command


def parse_submitted_command(group: Any, command: list[str]) -> dict[str, Any]:
    """Return the options of a command by name; a wrong option fails here and not in the job."""
    name, *words = command
    each = group.commands[name]
    context = each.make_context(name, words)
    if hasattr(each, "commands"):
        left = [*context._protected_args, *context.args]
        return {**parse_submitted_command(each, left), "group": name} if left else {}
    return {"command": name, **context.params}


def _check_submitted_settings(words: dict[str, Any]) -> None:
    """Refuse settings that the job would refuse."""
    if words.get("command") == "train":
        from attune.platform.training.settings import configure

        overrides = options.parse_override_options(words["settings"])
        configure(words["variant"], words["preset"] or "small", overrides)
    elif words.get("group") == "tune" and words["command"] == "run" and not words["resume"]:
        overrides = options.parse_override_options(words["settings"])
        plan_tune_trials(
            {k: v for k, v in words.items() if v is not None} | {"overrides": overrides}
        )


def _add_submitted_name(command: list[str], words: dict[str, Any]) -> list[str]:
    """Add --name to a command that creates a run or sweep, so that its job is listed with it."""
    if words.get("name") or words.get("resume") or words.get("seeds"):
        return command
    if words.get("command") == "train":
        from attune.platform.core.settings import find_variant
        from attune.platform.runs.record import new_run_name, runs_folder

        find_variant(words["variant"])
        data = Path(words["data"] or "bundled").name
        name = _reserve_submitted_name(runs_folder(), lambda: new_run_name(words["variant"], data))
    elif words.get("group") == "tune" and words["command"] == "run" and words["variants"]:
        from attune.platform.tuning import sweep

        start = f"tune-{'-'.join(words['variants'])}"[:60]
        name = _reserve_submitted_name(sweep.sweeps_folder(), lambda: sweep.new_sweep_name(start))
    else:
        return command
    return [*command, "--name", name]


def _reserve_submitted_name(folder: Path, new_name: Callable[[], str]) -> str:
    """Create the folder of a new name, which reserves it for a job that starts later."""
    while True:
        name = new_name()
        try:
            (folder / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return name


def _find_submitted_option(command: list[str], name: str) -> str | None:
    """Return the value of an option in the words of a command."""
    for part, following in zip(command, [*command[1:], ""], strict=True):
        if part == name:
            return following
        if part.startswith(f"{name}="):
            return part.partition("=")[2]
    return None
