"""`python -m attune.jobs.rates VARIANT ... --out FILE`: learning rate and dropout of whole runs."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from attune.platform.evaluation.figures import StageSchedule, draw_schedules
from attune.platform.training import data, setup
from attune.platform.training.loop import Training
from attune.platform.training.schedules import rate, scheduled_dropout_factor


def rates_command(
    variants: Annotated[list[str], typer.Argument(metavar="VARIANT", help="Variants to show.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf.")],
    source: Annotated[
        str, typer.Option("--data", metavar="bundled|DIR", help="Data that the runs would use.")
    ] = "bundled",
    preset: Annotated[str, typer.Option(metavar="tiny|small|compact|paper")] = "compact",
) -> None:
    """Draw the learning rate and the factor of dropout at each step of a whole run."""
    folder = Path(source).absolute() if source != "bundled" else source
    with tempfile.TemporaryDirectory() as home:
        os.environ["ATTUNE_HOME"] = home
        draw_schedules({name: plan_rates(name, str(folder), preset) for name in variants}, out)


def plan_rates(variant: str, source: str, preset: str) -> list[StageSchedule]:
    """Return the schedule of each stage of a run that is not limited otherwise."""
    run = setup.new_run(variant, data=source, preset=preset, name=variant)
    model = setup.set_up_run_model(run)
    training = Training(run, model, *data.load_training_streams(run, model))
    schedules = []
    for number, stage in enumerate(training.stages):
        steps = training.stage_steps(number)
        schedules.append(
            StageSchedule(
                name=stage.name,
                rates=[rate(training.settings, stage, step, steps) for step in range(steps)],
                dropout=[
                    scheduled_dropout_factor(training.settings, step, steps)
                    for step in range(steps)
                ],
            )
        )
    return schedules


if __name__ == "__main__":
    typer.run(rates_command)
