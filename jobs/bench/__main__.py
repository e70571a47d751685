"""The command `python -m attune.jobs.bench`: measure selected parts on a corpus."""

import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from attune.jobs.bench import (
    curation,
    generation,
    preparation,
    stopping,
    systems,
    training,
    tuning,
)
from attune.jobs.console import Json, console, print_json
from attune.platform.core.commit import commit
from attune.platform.core.errors import DataError, UsageError, unknown_choice_error
from attune.platform.data.sources import BUNDLED

PARTS = {
    "preparation": preparation.print_preparation_speed,
    "training": training.print_training_speed,
    "systems": systems.print_systems,
    "generation": generation.print_generation_speed,
    "tuning": tuning.print_tuning_overhead,
    "stopping": stopping.print_stopping,
    "curation": curation.print_curation_speed,
}


def run_benchmarks(
    source: Annotated[str, typer.Option(help="Corpus to prepare: bundled, or a path.")] = BUNDLED,
    parts: Annotated[
        str, typer.Option("--parts", metavar="A,B", help=f"Parts to measure: {', '.join(PARTS)}.")
    ] = ",".join(PARTS),
    run: Annotated[
        str | None,
        typer.Option(help="Trained run for part generation; by default, one is trained briefly."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Commit that part systems compares with."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure speed against reference implementations, on an otherwise idle machine."""
    wanted = parts.split(",")
    for name in wanted:
        if name not in PARTS:
            raise UsageError(unknown_choice_error("part", name, PARTS))
    screen = console(as_json)
    report: dict[str, Any] = {
        "source": BUNDLED if source == BUNDLED else Path(source).name,
        "commit": commit(),
        "machine": _describe_benchmark_machine(),
    }
    screen.print(f"{report['source']}, commit {report['commit'][:12]}, {report['machine']}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = preparation.prepare_benchmark_data(source, place, report)
        measures = {
            "preparation": lambda: preparation.measure_preparation(source, data, place),
            "training": lambda: training.measure_training(data, place),
            "systems": lambda: systems.measure_systems(data, place, base),
            "generation": lambda: generation.measure_generation(data, place, run),
            "tuning": lambda: tuning.measure_tuning(data, place),
            "stopping": lambda: stopping.measure_stopping(data, place),
            "curation": lambda: curation.measure_curation(data, place),
        }
        for name in wanted:
            report[name] = measures[name]()
            PARTS[name](screen, report[name])
    if as_json:
        print_json(report)


def _describe_benchmark_machine() -> str:
    import torch

    output = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    model = [line.partition(":")[2].strip() for line in output.splitlines() if "Model name" in line]
    return f"{model[0] if model else 'unknown processor'}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    try:
        typer.run(run_benchmarks)
    except (UsageError, DataError) as error:
        Console(stderr=True).print(f"bench: {error}", markup=False)
        raise SystemExit(2) from error
