"""Figures of the papers, drawn from trained runs and from data, and the learning curves of runs.

What a figure of one paper shows comes from its variant: `Variant.figures` names the method that
returns tensors and labels. This module computes the summary numbers, draws, saves and logs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.models import all_variants
from attune.models.base import Explanation, LabelledPoints
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.settings import find_variant
from attune.platform.data.conversations import SPLITS
from attune.platform.data.labels import EMOTIONS, LABELS
from attune.platform.data.prepare import find_prepared_data
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Reliability
from attune.platform.enrichment.classifier import (
    classify_texts,
    fit_classifier_temperatures,
    require_classifier,
    with_known_emotion,
)
from attune.platform.enrichment.filters import filtered_label_distribution, read_emotionality
from attune.platform.evaluation.emotion_metrics import by_emotion, predict_emotions
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.model import MODEL_WEIGHTS, load_model, read_model_split
from attune.platform.runs.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"positive": "tab:orange", "negative": "tab:blue"}
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
CURVES = {
    "valid_perplexity": "perplexity on valid",
    "valid_emotion_accuracy": "emotions on valid",
    "valid_response_label_accuracy": "responses' labels on valid",
}
"""Metrics that learning curves show, with their titles."""


def check_picture(out: Path) -> None:
    """Refuse a file that is not a picture, before anything is computed."""
    if out.suffix not in PICTURE_SUFFIXES:
        raise UsageError(f"--out {out}: expected a file ending in {', '.join(PICTURE_SUFFIXES)}")


def read_run_split(run: Run, split: str) -> pl.DataFrame:
    """Return a split of the data that a run was trained on."""
    if split not in SPLITS:
        raise UsageError(unknown_choice_error("split", split, SPLITS))
    return read_model_split(
        find_variant(run.variant)[0], find_prepared_data(run.data["folder"]), split
    )


def draw_samples(
    run: Run, split: str, count: int | None, seed: int, condition: pl.Expr | bool = True
) -> pl.DataFrame:
    """Return `count` random samples of a split that meet a condition, or all of them."""
    samples = read_run_split(run, split).filter(condition)
    if samples.is_empty():
        raise UsageError(f"the split '{split}' has no such samples: choose another")
    return samples.sample(min(count or samples.height, samples.height), seed=seed)


def draw_embeddings(runs: Sequence[Run], out: Path) -> list[dict[str, Any]]:
    """Draw the labelled points of runs side by side; return the separation of their groups.

    Two principal components, coloured by group. The separation is the mean silhouette of the groups
    in the full space.
    """
    from sklearn.metrics import silhouette_score

    check_picture(out)
    labelled = [_figure_data(run, "embeddings") for run in runs]
    figure = _new_figure(5 * len(runs), 4.2)
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    summaries: list[dict[str, Any]] = []
    for axes, run, points in zip(panels, runs, labelled, strict=True):
        separation = float(silhouette_score(points.points.numpy(), points.groups))
        _draw_points(axes, points)
        axes.set_title(f"{run.name} ({run.variant})\nseparation {separation:.3f}")
        summaries.append({"run": run.name, "variant": run.variant, "separation": separation})
    figure.axes[0].legend(frameon=False)
    separations = ({"emotion_separation": summary["separation"]} for summary in summaries)
    _save_and_log(figure, out, zip(runs, separations, strict=True))
    return summaries


def draw_attention(run: Run, explanation: Explanation, out: Path) -> None:
    """Draw the attention of each answer word to the context and to its emotion words."""
    assert explanation.attention is not None
    sources = {"context": explanation.words, "emotion words": explanation.emotion_words}
    maps = {title: (sources[title] or (), rows) for title, rows in explanation.attention.items()}
    answer_words = explanation.answer_words or ()
    widths = [max(len(words), 1) for words, _ in maps.values()]
    figure = _new_figure(0.24 * (sum(widths) + 14), 0.24 * (len(answer_words) + 10))
    panels = figure.subplots(1, len(maps), squeeze=False, width_ratios=widths)[0]
    for axes, (title, (words, rows)) in zip(panels, maps.items(), strict=True):
        axes.imshow([list(row) for row in rows] or [[0.0]], aspect="auto", cmap="Oranges", vmin=0)
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(answer_words)), answer_words)
        axes.set_title(title)
    _save_and_log(figure, out, [(run, {})])


def draw_calibration(run: Run, split: str, out: Path) -> dict[str, float]:
    """Draw a classifier's reliability diagrams; return its calibration errors.

    One panel per kind of text, as predicted and scaled by the temperature fitted on valid.
    """
    check_picture(out)
    model = load_model(run.model)
    variant = require_classifier(model)
    samples, truth = with_known_emotion(read_run_split(run, split), variant.data_info.emotions)
    if samples.is_empty():
        raise UsageError(f"no sample of '{split}' has an emotion: choose another")
    figure = _new_figure(4.2 * len(variant.trained_on), 4)
    errors: dict[str, float] = {}
    panels = figure.subplots(1, len(variant.trained_on), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, variant.trained_on, strict=True):
        log_probs = classify_texts(model, samples, kind)
        temperature = fit_classifier_temperatures(run)[kind]
        before = calibration.reliability(log_probs, truth)
        after = calibration.reliability(
            calibration.apply_calibration_temperature(log_probs, temperature), truth
        )
        _draw_reliability(
            axes, {"uncalibrated": before, f"at temperature {temperature:.2f}": after}
        )
        axes.set(title=f"{kind}s of {split}", xlabel="probability of the likeliest emotion")
        errors |= {f"{kind}_uncalibrated": before.error, f"{kind}_calibrated": after.error}
    figure.axes[0].set(ylabel="accuracy")
    metrics = {f"calibration_error_{name}": error for name, error in errors.items()}
    _save_and_log(figure, out, [(run, metrics)])
    return errors


def draw_emotion_accuracies(
    runs: tuple[Run, Run], split: str, out: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw the accuracy of two runs by emotion; return a summary per run and a row per emotion.

    The spread is the standard deviation of the accuracy over the emotions. Predictions that
    `attune evaluate` wrote are used where they are newer than the model.
    """
    check_picture(out)
    first, second = (by_emotion(_read_predictions(run, split)) for run in runs)
    if not first.select("emotion", "samples").equals(second.select("emotion", "samples")):
        names = " and ".join(f"'{run.name}'" for run in runs)
        raise UsageError(f"{names} have other samples in {split}: name runs on the same data")
    accuracies = (first["accuracy"].to_numpy(), second["accuracy"].to_numpy())
    counts = first["samples"].to_numpy()
    summaries: list[dict[str, Any]] = [
        {
            "run": run.name,
            "variant": run.variant,
            "accuracy": float(values @ counts / counts.sum()),
            "spread": float(values.std()),
        }
        for run, values in zip(runs, accuracies, strict=True)
    ]
    figure = _new_figure(9, 3.4)
    _draw_accuracies(figure.subplots(), first["emotion"].to_list(), accuracies, summaries)
    figure.axes[0].set(ylabel=f"accuracy on {split}")
    spreads = ({"emotion_accuracy_spread": summary["spread"]} for summary in summaries)
    _save_and_log(figure, out, zip(runs, spreads, strict=True))
    columns = ("emotion", "samples", "first", "second")
    rows = zip(first["emotion"], first["samples"], *map(list, accuracies), strict=True)
    return summaries, [dict(zip(columns, row, strict=True)) for row in rows]


def draw_labels(data: Path, out: Path) -> tuple[int, dict[str, float]]:
    """Draw the labels of last utterances and how emotional dialogues are; return their number and
    the shares of the labels."""
    check_picture(out)
    dialogues = read_emotionality(data)
    shares = filtered_label_distribution(dialogues, list(LABELS))
    figure = _new_figure(11, 3.4)
    by_label, by_dialogue = figure.subplots(1, 2, width_ratios=(3, 1))
    colors = [COLORS["positive" if label in EMOTIONS else "negative"] for label in shares]
    by_label.bar(range(len(shares)), list(shares.values()), color=colors)
    by_label.set_xticks(range(len(shares)), list(shares), rotation=90)
    by_label.margins(x=0.01)
    by_label.set(ylabel="share of dialogues", title="label of the last utterance")
    by_dialogue.hist(dialogues["emotionality"].to_numpy(), bins=20, range=(0, 1), color="gray")
    by_dialogue.set(xlabel="emotionality", ylabel="dialogues")
    _save_and_log(figure, out, [])
    return dialogues.height, shares


def draw_curves(runs: Sequence[Run], out: Path) -> None:
    """Draw the validation metrics of runs against their steps; a dot marks the best checkpoint."""
    check_picture(out)
    curves = {
        metric: {run.name: points for run in runs if (points := _read_validations(run, metric))}
        for metric in CURVES
    }
    curves = {metric: by_run for metric, by_run in curves.items() if by_run}
    if not curves:
        names = ", ".join(run.name for run in runs)
        raise UsageError(f"none of {names} has been validated yet")
    figure = _new_figure(8, 3, font_size=9)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (metric, by_run) in zip(panels, curves.items(), strict=True):
        for number, run in enumerate(runs):
            if run.name in by_run:
                _draw_curve(axes, run, by_run[run.name], f"C{number}")
        axes.set(xlabel="steps", title=CURVES[metric])
        axes.grid(visible=True, alpha=0.2)
        if "accuracy" in metric:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].legend(frameon=False)
    _save_and_log(figure, out, [], dpi=120)


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """The schedule of a stage, a value for each step."""

    name: str
    rates: Sequence[float]
    """The learning rate."""
    dropout: Sequence[float]
    """The factor of all dropout rates."""


def draw_schedules(schedules: Mapping[str, Sequence[StageSchedule]], out: Path) -> None:
    """Draw the schedules of each variant's stages one after another; dotted lines separate them."""
    check_picture(out)
    columns = 3
    rows = -(-len(schedules) // columns)
    figure = _new_figure(9, 1.7 * rows, font_size=7)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (variant, stages) in zip(panels, schedules.items(), strict=False):
        rates = [value for stage in stages for value in stage.rates]
        dropout = [value * max(rates) for stage in stages for value in stage.dropout]
        axes.plot(rates, color="C0", label="learning rate")
        axes.plot(dropout, color="C1", linewidth=0.8, label="dropout, as a share of its rate")
        start = 0
        for stage in stages:
            if start:
                axes.axvline(start, linestyle=":", color="gray", linewidth=0.8)
            start += len(stage.rates)
        axes.set(title=f"{variant}: {', '.join(stage.name for stage in stages)}", ylim=(0, None))
    for axes in panels[len(schedules) :]:
        axes.remove()
    figure.axes[0].legend(frameon=False)
    figure.supxlabel("steps")
    _save_and_log(figure, out, [], dpi=110)


def _figure_data(run: Run, name: str) -> LabelledPoints:
    """Call the method that the run's variant declares for a figure."""
    variant = load_model(run.model).variant
    if name not in variant.figures:
        able = [each for each, (kind, _) in all_variants().items() if name in kind.figures]
        raise UsageError(
            f"'{run.name}' is a {run.variant}, which has no figure '{name}': "
            f"name a run of {' or '.join(able)}"
        )
    points: LabelledPoints = getattr(variant, variant.figures[name])()
    return points


def _draw_points(axes: "Axes", labelled: LabelledPoints) -> None:
    from sklearn.decomposition import PCA

    points = labelled.points.numpy()
    reduction = PCA(n_components=2, svd_solver="full").fit(points)
    flat = reduction.transform(points)
    for group, color in COLORS.items():
        members = [number for number, name in enumerate(labelled.groups) if name == group]
        axes.scatter(flat[members, 0], flat[members, 1], s=14, color=color, label=group)
        for number in members:
            axes.annotate(
                labelled.names[number],
                flat[number],
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=6.5,
            )
    explained = reduction.explained_variance_ratio_
    axes.set(xlabel=f"first component, {explained[0]:.0%}", ylabel=f"second, {explained[1]:.0%}")


def _draw_reliability(axes: "Axes", diagrams: Mapping[str, Reliability]) -> None:
    for (label, diagram), color in zip(diagrams.items(), COLORS.values(), strict=True):
        error = f"{label}: {diagram.error:.1%}"
        axes.plot(diagram.confidence, diagram.accuracy, ".-", color=color, label=error)
    axes.plot([0, 1], [0, 1], ":", color="gray", linewidth=1)
    axes.legend(frameon=False, title="calibration error")


def _draw_accuracies(
    axes: "Axes",
    emotions: list[str],
    accuracies: Sequence[npt.NDArray[np.float64]],
    summaries: list[dict[str, Any]],
) -> None:
    """Draw a bar of each of two runs for each emotion."""
    offsets = (-0.4, 0.0)
    for run, values, color, offset in zip(
        summaries, accuracies, COLORS.values(), offsets, strict=True
    ):
        label = f"{run['run']}: {run['accuracy']:.1%}, spread {run['spread']:.1%}"
        positions = [number + offset for number in range(len(values))]
        axes.bar(positions, values, width=0.4, align="edge", color=color, label=label)
    axes.set_xticks(range(len(emotions)), emotions, rotation=90)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _draw_curve(axes: "Axes", run: Run, points: list[tuple[int, float]], color: str) -> None:
    axes.plot(*zip(*points, strict=True), label=run.name, marker=".", markersize=3, color=color)
    for step, value in points:
        if step == run.result.get("best_step"):
            axes.plot(step, value, "o", color=color)


def _read_validations(run: Run, metric: str) -> list[tuple[int, float]]:
    """Return step and value of each validation that has a metric."""
    lines = read_metrics(run.metrics_file)
    return [(line["step"], line["metrics"][metric]) for line in lines if metric in line["metrics"]]


def _read_predictions(run: Run, split: str) -> pl.DataFrame:
    """Return `emotion` and `predicted_emotion` of a split, computed unless they are stored."""
    for kind in ("greedy", "emotions"):
        path = run.folder / "answers" / f"{split}-{kind}.parquet"
        if path.is_file() and path.stat().st_mtime > (run.model / MODEL_WEIGHTS).stat().st_mtime:
            predictions = pl.read_parquet(path, columns=["emotion", "predicted_emotion"])
            if predictions["predicted_emotion"].count():
                return predictions
    return predict_emotions(load_model(run.model), read_run_split(run, split))


def _new_figure(width: float, height: float, font_size: int = 8) -> "Figure":
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(
        {"font.size": font_size, "axes.spines.top": False, "axes.spines.right": False}
    )
    return Figure(figsize=(width, height), layout="constrained")


def _save_and_log(
    figure: "Figure", out: Path, metrics: Iterable[tuple[Run, Mapping[str, float]]], dpi: int = 130
) -> None:
    """Save a figure, and log it with its metrics to the runs that are tracked."""
    from attune.platform.tracking import log_picture  # MLflow takes seconds to import

    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=dpi)
    for run, values in metrics:
        if run.run_id is not None:
            log_picture(run, out, values)
