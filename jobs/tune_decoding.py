"""`attune tune-decoding`: search for good decoding settings of a trained run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import Json, console
from attune.jobs.sweeps import (
    SAMPLES,
    check_sweep_choice,
    create_sweep_for_command,
    print_sweep_end,
    print_sweep_progress,
)
from attune.platform.core.errors import UsageError, unknown_choice_error

if TYPE_CHECKING:
    from attune.platform.runs.record import Run
    from attune.platform.tuning.sweep import Sweep


def tune_decoding(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of a dialogue model, by name, MLflow id or "
                       "`variant@latest`."),
    ],
    decode: Annotated[
        str | None,
        typer.Option(metavar="beam[,topk,nucleus]", help="Decoding methods to try.",
                     show_default="beam,topk,nucleus"),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="A bundled sweep (`mime-beams`, "
                     "`decoding`) or a sweep file."),
    ] = None,
    settings: options.DecodingOverrides = None,
    data: Annotated[
        str | None, typer.Option(metavar="bundled|DIR", show_default="the run's training data")
    ] = None,
    split: Annotated[str, typer.Option(metavar="valid|test", help="Split to answer.")] = "valid",
    contexts: Annotated[
        int | None,
        typer.Option(min=1, help="Number of contexts to answer, the same for all trials."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of trials; a grid search tries all "
                                      "combinations.",
                                 show_default=str(SAMPLES))
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="bleu, distinct_1, distinct_2, ...; with two, the "
                     "Pareto front is shown.", show_default="bleu"),
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="optuna|random|grid", show_default="optuna")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random seed of the search.")] = 0,
    label: Annotated[
        str | None, typer.Option("--name", help="The sweep's name.",
                                 show_default="decode-<run>-<n>")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the sweep --name.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Answer with many decoding settings of a trained run, and report the best.

    Varied are the number of beams, length penalty, top-k, nucleus and temperature.

    Examples:

    - `attune tune-decoding mime@latest`
    - `attune tune-decoding mime@latest --sweep mime-beams`
    - `attune tune-decoding mine --metric bleu,distinct_2 --contexts 200 --samples 40`
    """
    from attune.platform.tuning import decoding as trials
    from attune.platform.tuning import sweep as sweeps

    run = options.parse_run_option(name)
    trials.check(run)
    chosen = None
    if resume and label and (sweeps.sweeps_folder() / label / sweeps.RECORD).is_file():
        chosen = sweeps.find_sweep(label)
        if chosen.kind != "decoding":
            raise UsageError(
                f"'{label}' trains models: resume it with 'attune tune --name {label} --resume'"
            )
    elif resume and not label:
        raise UsageError("--resume: expected --name with the sweep to resume")
    if chosen is None:
        asked = {"decode": decode, "sweep": sweep, "metric": metric, "search": search,
                 "samples": samples, "seed": seed}  # fmt: skip
        chosen = _create_tune_decoding_sweep(
            run, label, asked, options.parse_override_options(settings), data, split, contexts
        )
    screen = console(as_json)
    screen.print(f"sweep {chosen.name} in {chosen.folder}", markup=False)
    with print_sweep_progress(screen, chosen) as shown_lines:
        ended = trials.run(chosen, shown_lines)
    print_sweep_end(screen, ended, as_json)


def _create_tune_decoding_sweep(
    run: "Run", label: str | None, asked: Mapping[str, Any], overrides: dict[str, str],
    data: str | None, split: str, contexts: int | None,
) -> "Sweep":  # fmt: skip
    from attune.platform.data.conversations import SPLITS
    from attune.platform.data.prepare import find_prepared_data
    from attune.platform.evaluation.answers import METRICS
    from attune.platform.tuning import spaces
    from attune.platform.tuning import sweep as sweeps

    if split not in SPLITS:
        raise UsageError(unknown_choice_error("split", split, SPLITS))
    ready = spaces.find_definition(asked["sweep"]) if asked["sweep"] else spaces.SweepDefinition()
    if ready.variants:
        raise UsageError(f"{ready.source} trains {', '.join(ready.variants)}: use 'attune tune'")
    options.parse_decoding_options(None, overrides)
    methods = (asked["decode"] or ready.decode or ",".join(spaces.DECODING_SPACES)).split(",")
    fixed = {**ready.set, **overrides}
    tried = spaces.build_decoding_spaces(methods, ready, fixed)
    metrics = tuple((asked["metric"] or ready.metric or "bleu").split(","))
    for metric in metrics:
        if metric not in METRICS:
            raise UsageError(unknown_choice_error("metric", metric, METRICS))
    search = check_sweep_choice(
        "search", asked["search"] or ready.search or "optuna", spaces.SEARCHES
    )
    count = spaces.count_grid_points(tried) if search == "grid" else asked["samples"] or SAMPLES
    name = label or sweeps.new_sweep_name(f"decode-{run.name}"[:60])
    return create_sweep_for_command(
        name,
        kind="decoding",
        spaces={m: {k: spaces.to_json(t) for k, t in s.items()} for m, s in tried.items()},
        metrics=metrics,
        search=search,
        scheduler="none",
        samples=count,
        seed=asked["seed"],
        asked={"run": run.name, "data": str(find_prepared_data(data or run.data["folder"])),
               "split": split, "contexts": contexts, "overrides": fixed},
    )  # fmt: skip
