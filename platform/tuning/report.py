"""The report of a sweep: a table of its trials, the importance of each setting, and figures."""

import base64
import copy
import json
import math
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import Run
from attune.platform.tuning.sweep import (
    END_STATE,
    METRICS,
    REASON,
    RUNS,
    SETTINGS,
    SPACE_NAME,
    VALIDATIONS,
    Sweep,
    is_maximized,
    metric_value,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from optuna import Study
    from optuna.trial import FrozenTrial

TABLE, PAGE, SUMMARY, AGAINST = "trials.csv", "report.html", "summary.json", "against.png"
MIN_TRIALS = 5
"""The number of trials below which importances are not computed."""
CONFIDENCE = 0.95
"""The confidence level of intervals over seeds."""
PANELS_PER_ROW = 4
"""The number of panels side by side in a figure."""


@dataclass(frozen=True, kw_only=True)
class SeedStatistics:
    """The first metric of a configuration over several seeds."""

    trial: int
    config: dict[str, Any]
    runs: list[str]
    mean: float
    std: float
    low: float
    high: float


def build_table(sweep: Sweep) -> pl.DataFrame:
    """Return one row for each trial, the best first; those that did not finish come last."""
    waiting = {each.number for each in sweep.collect_progress() if each.waits}
    rows = [_build_row(sweep, trial, trial.number in waiting) for trial in sweep.get_trials()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    frame = pl.DataFrame([{name: row.get(name) for name in names} for row in rows], strict=False)
    if frame.is_empty():
        return frame
    first = sweep.metrics[0]
    frame = frame.with_columns(pl.col(pl.Float64).fill_nan(None))
    frame = frame.with_columns(_unfinished=pl.col("ended") != "finished")
    by = ["_unfinished", *([first] if first in frame.columns else []), "trial"]
    down = [name == first and is_maximized(first) for name in by]
    return frame.sort(by, descending=down, nulls_last=True).drop("_unfinished")


def _build_row(sweep: Sweep, trial: "FrozenTrial", waits: bool) -> dict[str, Any]:
    attributes = trial.user_attrs
    runs = sweep.load_runs(trial)
    return {
        "trial": trial.number,
        _space_column(sweep): attributes[SPACE_NAME],
        **attributes[SETTINGS],
        **{
            name: metric_value(attributes.get(METRICS, {}), name)
            for name in _metric_columns(sweep, attributes)
        },
        "steps": sum(run.result.get("steps", 0) for run in runs) if runs else None,
        **(_sample_counts(runs[0]) if runs else {}),
        "ended": attributes.get(END_STATE) or ("waits" if waits else "interrupted"),
        "reason": attributes.get(REASON, ""),
        "runs": " ".join(attributes.get(RUNS, ())),
    }


def _space_column(sweep: Sweep) -> str:
    return "variant" if sweep.kind == "training" else "decode"


def _sample_counts(run: Run) -> dict[str, int]:
    """Return the number of training samples of each stream, which thresholds change."""
    return {f"samples_{name}": count for name, count in run.result.get("samples", {}).items()}


def _metric_columns(sweep: Sweep, attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of a trial's metrics, those of the sweep first."""
    others = sorted(set(attributes.get(METRICS, {})) - set(sweep.metrics))
    return [*sweep.metrics, *others]


@dataclass(frozen=True, kw_only=True)
class ComparableTrials:
    """Trials whose values can be compared with each other."""

    trials: "list[FrozenTrial]"
    validation: int | None
    """The validation at which they are compared; None if all were trained to their end."""

    def __str__(self) -> str:
        if self.validation is None:
            return f"among the {len(self.trials)} trials that finished"
        return (
            f"among the {len(self.trials)} trials that reached validation {self.validation}, "
            f"at that validation"
        )


def select_comparable(sweep: Sweep) -> ComparableTrials:
    """Return the finished trials, or those that reached the validation that half of all reached.

    The latter are returned if more than half did not finish: the few that did were selected by
    their values and do not show the effect of a setting.
    """
    known = [t for t in sweep.study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    tried = [
        t for t in sweep.get_trials() if t.user_attrs.get(END_STATE) not in ("failed", "diverged")
    ]
    lengths = sorted((len(trial.user_attrs.get(VALIDATIONS, ())) for trial in tried), reverse=True)
    half = lengths[(len(lengths) - 1) // 2] if lengths else 0
    if 2 * len(known) >= len(tried) or not half or len(sweep.metrics) > 1:
        return ComparableTrials(trials=known, validation=None)
    return ComparableTrials(
        trials=[t for trial in tried if (t := _truncate_trial(trial, half))], validation=half
    )


def _truncate_trial(trial: "FrozenTrial", validation: int) -> "FrozenTrial | None":
    """Return a trial as if it had ended at a validation, or None if it did not reach it."""
    from optuna.trial import create_trial

    values = trial.user_attrs.get(VALIDATIONS, ())
    if len(values) < validation:
        return None
    return create_trial(
        params=trial.params, distributions=trial.distributions, value=values[validation - 1]
    )


def compute_importances(sweep: Sweep, place: int = 0) -> dict[str, float]:
    """Return each setting's share of a metric's variance (fANOVA), the largest first.

    The result is empty if there are too few trials, or if all have the same value.
    """
    import optuna

    trials = select_comparable(sweep).trials
    if len(trials) < MIN_TRIALS:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shares = optuna.importance.get_param_importances(
                _build_study(sweep, trials),
                evaluator=optuna.importance.FanovaImportanceEvaluator(seed=sweep.seed),
                target=_metric_value_of(place),
            )
        except (ValueError, RuntimeError):
            return {}
    return {name: float(value) for name, value in shares.items()}


def _metric_value_of(place: int) -> "Callable[[FrozenTrial], float]":
    return lambda trial: float(trial.values[place])


def compute_savings(sweep: Sweep) -> dict[str, float] | None:
    """Return how many steps early stopping and shared stages saved, or None if none.

    The comparison assumes that every trial alone would take as many steps as the finished ones.
    """
    ended: dict[str, list[Run]] = {"finished": [], "stopped early": []}
    for trial in sweep.get_trials():
        ended.get(trial.user_attrs.get(END_STATE, ""), []).extend(sweep.load_runs(trial))
    runs = [run for some in ended.values() for run in some]
    whole = [run.result.get("steps", 0) for run in ended["finished"]]
    done = sum(run.result.get("steps", 0) - run.shared_steps for run in runs)
    full = statistics.fmean(whole) * len(runs) if whole else 0
    if not 0 < done < full:
        return None
    return {"steps": done, "steps_of_full_runs": full, "times_fewer": full / done}


def summarize_seeds(
    trial: int, config: dict[str, Any], runs: Sequence[Run], metric: str
) -> SeedStatistics:
    """Return mean, standard deviation and 95 % confidence interval of the mean (Student's t)."""
    from scipy import stats

    values = [metric_value(run.result.get("metrics", {}), metric) for run in runs]
    mean, count = statistics.fmean(values), len(values)
    std = statistics.stdev(values) if count > 1 else math.nan
    reach = (
        stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * std / math.sqrt(count)
        if count > 1
        else math.nan
    )
    return SeedStatistics(
        trial=trial, config=config, runs=[run.name for run in runs], mean=mean, std=std,
        low=mean - reach, high=mean + reach,
    )  # fmt: skip


def write_report(
    sweep: Sweep, folder: Path, surface: tuple[str, str] | None = None,
    again: Sequence[SeedStatistics] = (),
) -> dict[str, Any]:  # fmt: skip
    """Write table, summary and figures into a folder, atomically, and return the summary."""
    check_report(sweep, folder, surface)
    folder = folder.resolve()  # with_name needs a name, which `.` does not have
    new_folder = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    frame = build_table(sweep)
    frame.write_csv(new_folder / TABLE)
    summary = {
        **sweep.summarize(),
        "importances": compute_importances(sweep),
        "compared": str(select_comparable(sweep)),
        "saved": compute_savings(sweep),
        "repeated": [vars(each) for each in again],
    }
    (new_folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns that its figures are experimental
        _write_figures(sweep, new_folder, surface)
        _write_dependence(sweep, frame, new_folder / AGAINST)
        _write_page(sweep, new_folder / PAGE, frame, summary, surface)
    shutil.rmtree(folder, ignore_errors=True)
    new_folder.replace(folder)
    return summary


def check_report(sweep: Sweep, folder: Path, surface: tuple[str, str] | None) -> None:
    """Raise UsageError for an unknown setting, or a folder with anything but an earlier report."""
    is_replaceable = (folder / SUMMARY).is_file() or not folder.exists()
    if not is_replaceable and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"--out {folder}: expected a new folder or an earlier report, got a folder with other "
            f"files: choose another"
        )
    known = {name for trial in sweep.get_trials() for name in trial.params}
    for name in surface or ():
        if name not in known:
            raise UsageError(f"--surface: {unknown_choice_error('setting', name, known)}")


def _draw_figures(
    sweep: Sweep, plots: Any, surface: tuple[str, str] | None
) -> Iterator[tuple[str, str, Any]]:
    """Yield name, title and figure, drawn by one of Optuna's two plotting modules.

    Figures for which there are too few trials are left out.
    """
    import optuna

    comparable = select_comparable(sweep)
    done = comparable.trials
    if not done:
        return
    study = _build_study(sweep, done)
    settings = sorted({name for trial in done for name in trial.params})
    varied = [name for name in settings if len({trial.params.get(name) for trial in done}) > 1]
    names = [metric.removeprefix("valid_").replace("_", " ") for metric in sweep.metrics]
    at = f" after validation {comparable.validation}" if comparable.validation else ""
    labels = [f"{name}{at}" for name in names]
    for place, label in enumerate(labels):
        options: dict[str, Any] = {"target": _metric_value_of(place), "target_name": label}
        ending = "" if place == 0 else f"-{place + 1}"
        if varied:
            figure = plots.plot_slice(study, params=varied, **options)
            yield f"slices{ending}", f"{label} against each setting", figure
        if len(varied) > 1:
            figure = plots.plot_parallel_coordinate(study, params=varied, **options)
            yield f"parallel{ending}", f"{label} and all settings together", figure
        figure = plots.plot_optimization_history(study, **options)
        yield f"history{ending}", f"{label} of each trial", figure
        if surface:
            figure = plots.plot_contour(study, params=list(surface), **options)
            yield f"surface{ending}", f"{label} over {' and '.join(surface)}", figure
        if compute_importances(sweep, place):
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=sweep.seed)
            figure = plots.plot_param_importances(study, evaluator=evaluator, **options)
            yield f"importances{ending}", f"importance of each setting for {label}", figure
    trials = [_with_validations(sweep, trial) for trial in sweep.get_trials()]
    if any(len(trial.intermediate_values) > 1 for trial in trials):
        figure = plots.plot_intermediate_values(_build_study(sweep, trials))
        yield "validations", f"{names[0]} by step, stopped trials included", figure
    if len(sweep.metrics) == 2:
        front = plots.plot_pareto_front(study, target_names=labels)
        yield "front", " against ".join(labels), front


def _with_validations(sweep: Sweep, trial: "FrozenTrial") -> "FrozenTrial":
    """Return a trial with the first metric by step, as logged by its (first) run."""
    lines = [line for run in sweep.load_runs(trial)[:1] for line in read_metrics(run.metrics_file)]
    name, copied = sweep.metrics[0], copy.copy(trial)
    copied.intermediate_values = {
        line["step"]: line["metrics"][name] for line in lines if name in line["metrics"]
    }
    return copied


def _build_study(sweep: Sweep, trials: "Sequence[FrozenTrial]") -> "Study":
    """Return a study of these trials only; the figures would warn about others."""
    import optuna

    study = optuna.create_study(directions=sweep.directions)
    study.add_trials(trials)
    return study


def _write_figures(sweep: Sweep, folder: Path, surface: tuple[str, str] | None) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter
    from optuna.visualization import matplotlib as plots

    for name, title, drawn in _draw_figures(sweep, plots, surface):
        axes: Axes = np.ravel(drawn)[0]
        figure = axes.get_figure(root=True)
        assert figure is not None
        for each in figure.axes:
            each.set_title("")  # Optuna's title, which ours would overlap
            if name.startswith("slices"):  # words and small powers overlap
                each.xaxis.set_minor_formatter(NullFormatter())
                each.tick_params(axis="x", labelrotation=45)
        figure.suptitle(title)
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        plt.close("all")


def find_only_setting(sweep: Sweep, done: pl.DataFrame) -> str | None:
    """Return the only setting that was varied, or None if there are several."""
    tried = {
        _space_column(sweep),
        *(n for trial in sweep.get_trials() for n in trial.user_attrs[SETTINGS]),
    }
    varied = [name for name in sorted(tried) if done[name].n_unique() > 1]
    return varied[0] if len(varied) == 1 else None


def build_panels(sweep: Sweep, done: pl.DataFrame) -> dict[str, dict[str, str]]:
    """Return the panels of `against.png`: by title, the labels and columns of the table."""
    counted = [n for n in done.columns if n.startswith("samples_") and done[n].n_unique() > 1]
    counts = {name.removeprefix("samples_"): name for name in counted}
    measured = [name for name in done.columns if name in sweep.metrics or is_maximized(name)]
    titles = {name.removeprefix("valid_").replace("_", " "): name for name in measured}
    each = {title: {title: name} for title, name in titles.items()}
    return {"samples": counts, **each} if counts else each


def _write_dependence(sweep: Sweep, frame: pl.DataFrame, path: Path) -> None:
    """If only one setting was varied, draw sample counts and metrics against it."""
    if frame.is_empty():
        return
    done = frame.filter(pl.col("ended") == "finished")
    setting = find_only_setting(sweep, done)
    if setting is None:
        return
    from matplotlib import pyplot as plt

    done, drawn = done.sort(setting), build_panels(sweep, done)
    wide = min(PANELS_PER_ROW, len(drawn))
    high = math.ceil(len(drawn) / wide)
    with plt.style.context("default"):  # Optuna's figures have changed it
        figure = plt.figure(figsize=(3.2 * wide, 2.8 * high), layout="constrained")
        for place, (title, lines) in enumerate(drawn.items(), start=1):
            axes = figure.add_subplot(high, wide, place)
            for label, name in lines.items():
                axes.plot(done[setting].to_list(), done[name].to_list(), marker="o", label=label)
            axes.set(xlabel=setting.replace("_", " "), title=title)
            if len(lines) > 1:
                axes.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _write_page(
    sweep: Sweep, path: Path, frame: pl.DataFrame, summary: Mapping[str, Any],
    surface: tuple[str, str] | None,
) -> None:  # fmt: skip
    """Write the report as one page that includes plotly's script."""
    from html import escape

    from optuna import visualization
    from plotly.io import to_html

    parts = [f"<h1>{escape(sweep.name)}</h1>", f"<p><code>{escape(sweep.command)}</code></p>"]
    if (less := summary["saved"]) is not None:
        parts.append(f"<p>{escape(format_savings(less))}</p>")
    for each in summary["repeated"]:
        parts.append(f"<p>{escape(format_seeds(each))}</p>")
    parts.append(f"<p>Settings are compared {escape(summary['compared'])}.</p>")
    if (one := path.with_name(AGAINST)).is_file():
        picture = base64.b64encode(one.read_bytes()).decode()
        parts.append(f'<img src="data:image/png;base64,{picture}">')
    script: bool = True
    for _, title, figure in _draw_figures(sweep, visualization, surface):
        figure.update_layout(title=title)
        parts.append(to_html(figure, full_html=False, include_plotlyjs=script))
        script = False
    rows = (
        "".join(f"<td>{escape(_format_cell(value))}</td>" for value in row) for row in frame.rows()
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in frame.columns)
    parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
    style = (
        "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{padding:2px 10px;text-align:left;border-bottom:1px solid #ddd}"
    )
    page = (
        f'<!doctype html><meta charset="utf-8"><title>{escape(sweep.name)}</title>'
        f"<style>{style}</style>{''.join(parts)}"
    )
    path.write_text(page, encoding="utf-8")


def format_savings(less: Mapping[str, float]) -> str:
    """Return a sentence about the steps saved."""
    return (
        f"{less['steps']:,.0f} steps instead of the {less['steps_of_full_runs']:,.0f} of full "
        f"runs: {less['times_fewer']:.1f} times fewer"
    )


def format_seeds(each: Mapping[str, Any]) -> str:
    """Return a sentence about the metric of a configuration over several seeds."""
    return (
        f"trial {each['trial']} with {len(each['runs'])} seeds: {each['mean']:.4g} "
        f"± {each['std']:.3g} ({CONFIDENCE:.0%} confidence interval of the mean: "
        f"{each['low']:.4g} to {each['high']:.4g})"
    )


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
