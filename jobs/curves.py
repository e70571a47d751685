"""`python -m attune.jobs.curves RUN ... --out FILE`: how runs learned, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

from attune.platform import store
from attune.platform.errors import UsageError
from attune.platform.training.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attune.platform.store import Run

SHOWN = {"valid_perplexity": "perplexity on valid", "valid_emotion_accuracy": "emotions on valid"}


def main(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs to show together.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf.")],
) -> None:
    """Draw what runs had on valid against the steps they had done; a dot marks the best."""
    runs = [store.find(name) for name in names]
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        for run in runs:
            _draw(axes, run, metric)
        axes.set(xlabel="steps", title=label)
        axes.grid(visible=True, alpha=0.2)
        if "accuracy" in metric:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def _draw(axes: "Axes", run: "Run", metric: str) -> None:
    found = [
        (line["step"], line["metrics"][metric])
        for line in read_metrics(run.metrics_file)
        if metric in line["metrics"]
    ]
    if not found:
        raise UsageError(f"run '{run.name}' has not looked at valid yet")
    [line] = axes.plot(*zip(*found, strict=True), label=run.name, marker=".", markersize=3)
    best = [(step, value) for step, value in found if step == run.result.get("best_step")]
    for step, value in best:
        axes.plot(step, value, "o", color=line.get_color())


if __name__ == "__main__":
    typer.run(main)
