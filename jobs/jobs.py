"""`attune jobs`: list, show, stop and wait for the jobs of a Ray cluster."""

import shlex
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.jobs.submit import Address, follow_submitted_job, submitted_exit_code
from attune.jobs.tables import table

if TYPE_CHECKING:
    from attune.platform.services.jobs import Job, Jobs

app = typer.Typer(
    no_args_is_help=True,
    help="List, follow, stop and wait for the jobs that `attune submit` started.",
)

Name = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id, or the name of its run or sweep.")
]


@app.command(name="list")
def all_jobs(address: Address = None, as_json: Json = False) -> None:
    """List the jobs, oldest first, and the resources that pending ones wait for."""
    jobs = _connect_jobs_command(address)
    listed_jobs = jobs.all()
    screen = console(as_json)
    if listed_jobs:
        screen.print(_tabulate_jobs(listed_jobs))
    else:
        screen.print(f"no jobs at {jobs.address} yet: see 'attune submit --help'")
    if as_json:
        print_json({"address": jobs.address, "jobs": [asdict(job) for job in listed_jobs]})


@app.command()
def logs(
    name: Name,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Follow the output until the job ends, and exit with its code."
        ),
    ] = False,
    address: Address = None,
) -> None:
    """Print the output of a job, or its error if it printed nothing."""
    jobs = _connect_jobs_command(address)
    job = jobs.find(name)
    if follow:
        raise typer.Exit(submitted_exit_code(follow_submitted_job(jobs, job.id, console())))
    text = jobs.logs(job.id)
    # A job that could not start has no output.
    print(text if text.strip() else job.message, end="" if text.endswith("\n") else "\n")


@app.command()
def stop(name: Name, address: Address = None, as_json: Json = False) -> None:
    """Stop a job as Ctrl-C would, and wait until it has written its checkpoint."""
    jobs = _connect_jobs_command(address)
    job = jobs.find(name)
    screen = console(as_json)
    if job.over:
        screen.print(f"job {job.id} has already ended: {job.state}", markup=False)
    else:
        screen.print(f"stopping job {job.id}; it writes a checkpoint first ...", markup=False)
        jobs.stop(job.id)
        job = jobs.wait(job.id)
        screen.print(f"job {job.id}: {job.state}", markup=False)
    if job.state == "STOPPED" and job.command.split()[1:2] in (["train"], ["tune"]):
        screen.print(f"resume with '{_build_job_resume_command(job)}'", markup=False)
    if as_json:
        print_json(asdict(job))


@app.command()
def wait(name: Name, address: Address = None, as_json: Json = False) -> None:
    """Wait until a job has ended.

    The exit code is 0 if it succeeded, 1 if it failed and 130 if it was stopped.
    """
    jobs = _connect_jobs_command(address)
    screen = console(as_json)
    job = jobs.wait(jobs.find(name).id, lambda text: screen.print(text, markup=False))
    screen.print(f"job {job.id}: {job.state}", markup=False)
    if as_json:
        print_json(asdict(job))
    raise typer.Exit(submitted_exit_code(job))


def _connect_jobs_command(address: str | None) -> "Jobs":
    from attune.platform.services.jobs import Jobs

    return Jobs(address)


def _build_job_resume_command(job: "Job") -> str:
    """Return the command that submits a job again, with --resume."""
    words = shlex.split(job.command)[1:]
    words = words if "--resume" in words else [*words, "--resume"]
    return shlex.join(["attune", "submit", *shlex.split(job.options), "--", *words])


def _tabulate_jobs(jobs: "list[Job]") -> Table:
    rows = table("", "job", "state", "run", "age", "command", numbers=("age",))
    for job in jobs:
        state = f"waits for {job.waits_for}" if job.waits_for else job.state.lower()
        rows.add_row(
            escape(job.id),
            escape(state),
            escape(job.run),
            _format_job_age(job),
            escape(job.command),
        )
    return rows


def _format_job_age(job: "Job") -> str:
    """Format the time that a job took, or has taken so far."""
    seconds: Any = (job.ended or time.time()) - job.began
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
