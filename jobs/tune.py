"""`attune tune`: search for good settings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import Json, console
from attune.jobs.sweeps import (
    RUN,
    SAMPLES,
    app,
    check_sweep_choice,
    create_sweep_for_command,
    print_sweep_end,
    print_sweep_progress,
)
from attune.platform.core.errors import UsageError

if TYPE_CHECKING:
    from attune.platform.tuning.spaces import Space, SweepDefinition
    from attune.platform.tuning.sweep import Sweep

__all__ = ["app"]

SCHEDULERS = ("asha", "median", "pbt", "none")
LIMITS = ("samples", "budget", "concurrent")
"""The options that may change when a sweep is resumed."""


@app.command(name=RUN)
def run(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT...", show_default=False,
            help="See `attune variants`; several variants share the trials and the budget.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP[,GROUP]",
            help="Groups of settings to vary: thresholds, loss-weights, gating, schedule, "
            "optimizer, ... or all; `attune variants NAME` lists a variant's groups.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help="A bundled sweep (`attune tune list` shows them) or a sweep file, whose space "
            "overrides and extends --space.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of all trials."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Number of trials; a grid search tries all combinations.",
                     show_default=str(SAMPLES)),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]", show_default="perplexity",
            help="Metric on valid by which trials are ranked: perplexity, emotion_accuracy, loss, "
            "bleu, distinct_2 ... With two (`perplexity,distinct_2`), the Pareto front is shown.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="asha|median|pbt|none", show_default="asha; none for a grid",
            help="Early stopping. asha stops all but the best third after 1, 3, 9 ... validations, "
            "median those worse than the median; with pbt the worst continue with weights and "
            "perturbed settings of the best; none stops no trial.",
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="optuna|random|grid", show_default="optuna",
            help="How settings are chosen: by TPE from earlier results, at random, or all "
            "combinations.",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds per trial; the mean counts.", show_default="1"),
    ] = None,
    concurrent: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at once; may exceed the number of cores.",
                     show_default="one per core or GPU"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers-per-trial", min=1, help="Processes per trial.", show_default="1"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="2h|30m|90s", help="Time limit for all trials together."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="bundled|DIR", help="As for `attune train`.",
                                 show_default="bundled")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="tiny|small|compact|paper", show_default="small")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="RUN", help="Start all trials from this run's weights.")
    ] = None,
    zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage of DeepSpeed.", show_default="0")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Step limit of a trial.")] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(callback=options.check_minutes, help="Time limit of a trial in minutes."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Random seed of the search and of the trials.",
                     show_default="0"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The sweep's name.", show_default="tune-<variant>-<n>")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the sweep --name, or the latest unfinished one; start it if it does not "
            "exist. --samples, --budget and --concurrent may change.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train variants with many settings and report the best.

    Each trial is an ordinary run, which `attune runs`, `evaluate`, `respond` and the page can use.
    Ctrl-C stops with checkpoints; --resume continues.

    Examples:

    - `attune tune mime --space loss-weights --samples 16`
    - `attune tune emotion-cause-soft --space gating,thresholds --budget 2h --concurrent 2`
    - `attune tune mime empdg multi-trs --space optimizer --budget 8h`
    - `attune tune multi-trs --space loss-weights --scheduler pbt --samples 4`
    - `attune tune mime --space loss-weights --metric perplexity,distinct_2 --scheduler none`
    - `attune tune --sweep dual-emp-threshold --set harvest=data/reddit --data data/ed`
    - `attune tune --name mine --resume`
    """
    from attune.platform.services import cluster

    cluster.use_token()  # before Ray is imported, which reads it only then
    from attune.platform.tuning import driver

    typed = {
        "variants": variants, "space": space, "sweep": sweep,
        "overrides": options.parse_override_options(settings),
        "samples": samples, "metric": metric, "scheduler": scheduler, "search": search,
        "repeat": repeat, "concurrent": concurrent, "workers": workers,
        "budget": None if budget is None else _parse_tune_seconds(budget),
        "data": None if data is None else _resolve_tune_data(data), "preset": preset,
        "init": init, "zero": zero, "max_steps": max_steps, "max_minutes": max_minutes,
        "seed": seed,
    }  # fmt: skip
    typed = {key: value for key, value in typed.items() if value not in (None, {}, [])}
    screen = console(as_json)
    started = (_find_tune_to_resume(name, typed) if resume else None) or _create_tune_sweep(
        name, typed
    )
    screen.print(f"sweep {started.name} in {started.folder}", markup=False)
    with print_sweep_progress(screen, started) as show:
        ended = driver.run(started, show)
    print_sweep_end(screen, ended, as_json)


def _resolve_tune_data(text: str) -> str:
    """Return the data's name, or its absolute path, for use from any working folder."""
    from attune.platform.data.prepare import find_prepared_data

    return text if text == "bundled" else str(find_prepared_data(text))


def _parse_tune_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise UsageError(f"--budget {text}: expected a duration such as 90s, 30m, 2h or 1d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _create_tune_sweep(name: str | None, typed: Mapping[str, Any]) -> "Sweep":
    from attune.platform.tuning import schedulers, spaces
    from attune.platform.tuning import sweep as sweeps

    plan = plan_tune_trials(typed)
    definition, metrics = plan.definition, plan.metrics
    late = len(metrics) > 1 or any(
        m.removeprefix("valid_") in sweeps.FINAL_METRICS for m in metrics
    )
    usual = "random" if typed.get("scheduler") == "pbt" else definition.search or "optuna"
    search = check_sweep_choice("search", typed.get("search", usual), spaces.SEARCHES)
    # A grid search is meant to measure every combination.
    usual = "none" if late or search == "grid" else "asha"
    scheduler = check_sweep_choice("scheduler", typed.get("scheduler", usual), SCHEDULERS)
    schedulers.check_compatibility(scheduler, search, metrics, plan.spaces, typed.get("workers", 1))
    count = spaces.count_grid_points(plan.spaces) if search == "grid" else SAMPLES
    if "init" in typed:
        options.parse_run_option(typed["init"])
    name = name or sweeps.new_sweep_name(f"tune-{'-'.join(plan.spaces)}"[:60])
    return create_sweep_for_command(
        name,
        spaces=_tune_spaces_to_json(plan.spaces),
        metrics=metrics,
        search=search,
        scheduler=scheduler,
        samples=count if search == "grid" else typed.get("samples", count),
        repeat=typed.get("repeat", 1),
        concurrent=typed.get("concurrent"),
        workers=typed.get("workers", 1),
        budget=typed.get("budget"),
        seed=typed.get("seed", 0),
        asked={
            "preset": plan.preset, "overrides": plan.overrides,
            **{k: typed[k] for k in ("data", "init", "zero", "max_steps", "max_minutes")
               if k in typed},
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """The trials of a sweep: what they share, what they vary and what they are compared by."""

    definition: "SweepDefinition"
    preset: str
    overrides: dict[str, Any]
    spaces: "dict[str, Space]"
    metrics: tuple[str, ...]


def plan_tune_trials(typed: Mapping[str, Any]) -> TrialPlan:
    """Return the trials that the options of `attune tune` ask for; checks every setting."""
    from attune.platform.core.settings import find_variant
    from attune.platform.training.setup import check_zero_stage
    from attune.platform.tuning import spaces
    from attune.platform.tuning import sweep as sweeps

    definition = (
        spaces.find_definition(typed["sweep"]) if "sweep" in typed else spaces.SweepDefinition()
    )
    variants = typed.get("variants") or list(definition.variants)
    if not variants or definition.decode:
        _reject_tune_without_variant(definition)
    for each in variants:
        check_zero_stage(find_variant(each)[0], each, typed.get("zero", 0))
    overrides = {**definition.set, **typed.get("overrides", {})}
    preset = typed.get("preset", "small")
    return TrialPlan(
        definition=definition,
        preset=preset,
        overrides=overrides,
        spaces=_select_tune_spaces(typed, definition, variants, overrides, preset),
        metrics=sweeps.parse_metrics(typed.get("metric", definition.metric), variants),
    )


def _select_tune_spaces(
    typed: Mapping[str, Any], definition: "SweepDefinition", variants: list[str],
    fixed: Mapping[str, Any], preset: str,
) -> "dict[str, Space]":  # fmt: skip
    """Return the search space of each variant."""
    from attune.platform.tuning import spaces

    groups = [part.strip() for part in typed["space"].split(",")] if "space" in typed else []
    if not groups and not definition.space:
        known = ", ".join(spaces.get_search_groups(variants[0]))
        raise UsageError(
            f"expected --space with the settings to vary: '{variants[0]}' has {known}, or all"
        )
    return spaces.build_variant_spaces(variants, groups, definition, fixed, preset)


def _tune_spaces_to_json(tried: "Mapping[str, Space]") -> dict[str, dict[str, Any]]:
    from attune.platform.tuning import spaces

    return {v: {k: spaces.to_json(t) for k, t in s.items()} for v, s in tried.items()}


def _reject_tune_without_variant(definition: "SweepDefinition") -> None:
    if definition.decode:
        raise UsageError(
            f"{definition.source} is a sweep over decoding: use 'attune tune-decoding RUN'"
        )
    raise UsageError("expected a VARIANT, or a bundled --sweep ('attune tune list' shows them)")


def _find_tune_to_resume(name: str | None, typed: Mapping[str, Any]) -> "Sweep | None":
    """Return the sweep to resume; only its limits may differ from its record."""
    from attune.platform.tuning import spaces
    from attune.platform.tuning import sweep as sweeps

    if name is None:
        left = [
            s for s in sweeps.read_all_sweeps() if s.status != "finished" and s.kind == "training"
        ]
        wanted = typed.get("variants")
        left = [s for s in left if wanted in (None, list(s.spaces))]
        sweep = left[-1] if left else None
    else:
        known = (sweeps.sweeps_folder() / name / sweeps.RECORD).is_file()
        sweep = sweeps.find_sweep(name) if known else None
    if sweep is None:
        return None
    if sweep.kind != "training":
        raise UsageError(
            f"'{sweep.name}' is a sweep over decoding: resume it with 'attune tune-decoding "
            f"{sweep.asked['run']} --name {sweep.name} --resume'"
        )
    was = {
        **{
            key: getattr(sweep, key) for key in ("search", "scheduler", "repeat", "workers", "seed")
        },
        "variants": list(sweep.spaces),
        "metric": sweep.metrics,
        **{"data": "bundled", "preset": "small", **sweep.asked},
    }
    now = dict(typed)
    if "metric" in typed:
        now["metric"] = sweeps.parse_metrics(typed["metric"], list(sweep.spaces))
    if "overrides" in typed:
        now["overrides"] = {**was["overrides"], **typed["overrides"]}
    if {"space", "sweep"} & set(typed):
        definition = (
            spaces.find_definition(typed["sweep"]) if "sweep" in typed else spaces.SweepDefinition()
        )
        tried = _select_tune_spaces(
            typed, definition, list(sweep.spaces), was["overrides"], was["preset"]
        )
        now["space"], was["space"] = _tune_spaces_to_json(tried), sweep.spaces
    for key in sorted(set(now) - {*LIMITS, "sweep"}):
        if was.get(key) != now[key]:
            raise UsageError(
                f"sweep '{sweep.name}' was started with other {key}: leave it out to resume, or "
                f"start a new sweep under another --name"
            )
    return sweep.update(**{key: typed[key] for key in LIMITS if key in typed})
