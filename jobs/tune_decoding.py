"""`attune tune-decoding`: which way of decoding suits a run that is trained already?"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import Json, console
from attune.jobs.sweeps import SAMPLES, check_choice, create_sweep, show_end, trial_progress
from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:
    from attune.platform.runs.record import Run
    from attune.platform.tuning.sweep import Sweep


def tune_decoding(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run that answers, by name, MLflow id or "
                       "`variant@latest`."),
    ],
    decode: Annotated[
        str | None,
        typer.Option(metavar="beam[,topk,nucleus]", help="Ways to try.",
                     show_default="beam,topk,nucleus"),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="A ready-made sweep (`mime-beams`, "
                     "`decoding`), or your own file."),
    ] = None,
    settings: options.DecodingOverrides = None,
    data: Annotated[
        str | None, typer.Option(metavar="bundled|DIR", show_default="what the run learned from")
    ] = None,
    split: Annotated[str, typer.Option(metavar="valid|test", help="What to answer.")] = "valid",
    contexts: Annotated[
        int | None, typer.Option(min=1, help="Answer only so many, drawn once for all trials.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Trials; a grid has as many as it has.",
                                 show_default=str(SAMPLES))
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME]", help="bleu, distinct_1, distinct_2, ...; of two the "
                     "front is shown.", show_default="bleu"),
    ] = None,
    search: Annotated[
        str | None, typer.Option(metavar="optuna|random|grid", show_default="optuna")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the search.")] = 0,
    label: Annotated[
        str | None, typer.Option("--name", help="The sweep's name.",
                                 show_default="decode-<run>-<n>")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep of that --name.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Try ways of decoding with a run that is trained already: beam, length penalty, top-k,
    nucleus, temperature.

    Examples:

    - `attune tune-decoding mime@latest`
    - `attune tune-decoding mime@latest --sweep mime-beams`
    - `attune tune-decoding mine --metric bleu,distinct_2 --contexts 200 --samples 40`
    """
    from attune.platform.tuning import decoding as trials
    from attune.platform.tuning import sweep as sweeps

    of = options.find_trained_run(name)
    trials.check(of)
    chosen = None
    if resume and label and (sweeps.sweeps_folder() / label / sweeps.RECORD).is_file():
        chosen = sweeps.find_sweep(label)
        if chosen.kind != "decoding":
            raise UsageError(
                f"'{label}' trains models: resume it with 'attune tune --name {label} --resume'"
            )
    elif resume and not label:
        raise UsageError("--resume: name the sweep to resume with --name")
    if chosen is None:
        asked = {"decode": decode, "sweep": sweep, "metric": metric, "search": search,
                 "samples": samples, "seed": seed}  # fmt: skip
        chosen = _new_decoding(
            of, label, asked, options.parse_overrides(settings), data, split, contexts
        )
    screen = console(as_json)
    screen.print(f"sweep {chosen.name} in {chosen.folder}", markup=False)
    with trial_progress(screen, chosen) as shown_lines:
        ended = trials.run(chosen, shown_lines)
    show_end(screen, ended, as_json)


def _new_decoding(
    of: "Run", label: str | None, asked: Mapping[str, Any], overrides: dict[str, str],
    data: str | None, split: str, contexts: int | None,
) -> "Sweep":  # fmt: skip
    from attune.platform.data.conversations import SPLITS
    from attune.platform.data.prepare import find_data
    from attune.platform.evaluation.answers import METRICS
    from attune.platform.tuning import spaces
    from attune.platform.tuning import sweep as sweeps

    if split not in SPLITS:
        raise UsageError(unknown_choice("split", split, SPLITS))
    ready = spaces.find_definition(asked["sweep"]) if asked["sweep"] else spaces.SweepDefinition()
    if ready.variants:
        raise UsageError(f"{ready.source} trains {', '.join(ready.variants)}: use 'attune tune'")
    options.parse_decoding(None, overrides)
    methods = (asked["decode"] or ready.decode or ",".join(spaces.DECODING_SPACES)).split(",")
    fixed = {**ready.set, **overrides}
    tried = spaces.build_decoding_spaces(methods, ready, fixed)
    metrics = tuple((asked["metric"] or ready.metric or "bleu").split(","))
    for metric in metrics:
        if metric not in METRICS:
            raise UsageError(unknown_choice("metric", metric, METRICS))
    search = check_choice("search", asked["search"] or ready.search or "optuna", spaces.SEARCHES)
    count = spaces.count_grid_points(tried) if search == "grid" else asked["samples"] or SAMPLES
    name = label or sweeps.new_sweep_name(f"decode-{of.name}"[:60])
    return create_sweep(
        name,
        kind="decoding",
        spaces={m: {k: spaces.to_json(t) for k, t in s.items()} for m, s in tried.items()},
        metrics=metrics,
        search=search,
        scheduler="none",
        samples=count,
        seed=asked["seed"],
        asked={"run": of.name, "data": str(find_data(data or of.data["folder"])), "split": split,
               "contexts": contexts, "overrides": fixed},
    )  # fmt: skip
