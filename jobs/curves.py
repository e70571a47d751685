"""`python -m attune.jobs.curves RUN ... --out FILE`: the learning curves of runs, as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from attune.platform.evaluation.figures import draw_curves
from attune.platform.runs.record import find_run


def curves_command(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs to show together.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf.")],
) -> None:
    """Draw the validation metrics of runs against their steps; a dot marks the best checkpoint."""
    draw_curves([find_run(name) for name in names], out)


if __name__ == "__main__":
    typer.run(curves_command)
