"""`python -m attune.jobs.curves RUN ... --out FILE`: how runs learned, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import find_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attune.platform.runs.record import Run

SHOWN = {
    "valid_perplexity": "perplexity on valid",
    "valid_emotion_accuracy": "emotions on valid",
    "valid_response_label_accuracy": "responses' labels on valid",
}


def main(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs to show together.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf.")],
) -> None:
    """Draw what runs had on valid against the steps they had done; a dot marks the best."""
    runs = [find_run(name) for name in names]
    shown = {
        metric: {run.name: found for run in runs if (found := _looks(run, metric))}
        for metric in SHOWN
    }
    shown = {metric: by_run for metric, by_run in shown.items() if by_run}
    if not shown:
        raise UsageError(f"none of {', '.join(names)} has looked at valid yet")
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (metric, by_run) in zip(panels, shown.items(), strict=True):
        for place, run in enumerate(runs):
            if run.name in by_run:
                _draw(axes, run, by_run[run.name], f"C{place}")
        axes.set(xlabel="steps", title=SHOWN[metric])
        axes.grid(visible=True, alpha=0.2)
        if "accuracy" in metric:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def _looks(run: "Run", metric: str) -> list[tuple[int, float]]:
    """A metric by step, of the looks that have it."""
    lines = read_metrics(run.metrics_file)
    return [(line["step"], line["metrics"][metric]) for line in lines if metric in line["metrics"]]


def _draw(axes: "Axes", run: "Run", found: list[tuple[int, float]], color: str) -> None:
    axes.plot(*zip(*found, strict=True), label=run.name, marker=".", markersize=3, color=color)
    best = [(step, value) for step, value in found if step == run.result.get("best_step")]
    for step, value in best:
        axes.plot(step, value, "o", color=color)


if __name__ == "__main__":
    typer.run(main)
