"""`attune tune` and `attune tune-decoding`: which settings are worth how much?"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from attune.jobs import options
from attune.jobs.console import Json, console, print_json, training_progress
from attune.jobs.tables import shown, table
from attune.platform.errors import UsageError, unknown

if TYPE_CHECKING:
    from attune.platform.store import Run
    from attune.platform.tuning.report import Repeated
    from attune.platform.tuning.spaces import Ready
    from attune.platform.tuning.sweep import Sweep

SCHEDULERS = ("asha", "median", "pbt", "none")
SAMPLES = 16
LIMITS = ("samples", "budget", "concurrent")
"""What may be other when a sweep goes on."""
SHOWN_TRIALS = 20
RUN = "run"


class _Tune(TyperGroup):
    """`attune tune mime` is short for `attune tune run mime`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Tune,
    no_args_is_help=True,
    help="""Find good settings, and how much each matters: `attune tune VARIANT ...`

`attune tune mime --space loss-weights` begins a sweep (`attune tune run --help` shows all options);
the other commands are about sweeps that there are.""",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A sweep, see `attune tune list`.")]


@app.command(name=RUN)
def run(
    variants: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VARIANT...", show_default=False,
            help="See `attune variants`; several share the samples and the budget.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP[,GROUP]",
            help="What is tried: thresholds, loss-weights, gating, schedule, optimizer, ... or "
            "all; `attune variants NAME` lists a variant's groups.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help="A ready-made sweep (`attune tune list` shows them), or your own file, whose "
            "space overrides and adds to --space.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting that all trials share."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Trials; a grid has as many as it has.",
                     show_default=str(SAMPLES)),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]", show_default="perplexity",
            help="What is judged on valid: perplexity, emotion_accuracy, loss, bleu, distinct_2 "
            "... Of two the front is shown (`perplexity,distinct_2`).",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="asha|median|pbt|none", show_default="asha",
            help="Who is stopped early: all but a third after 1, 3, 9 ... looks; who is worse than "
            "the median; nobody, but the worst take over weights and settings of the best; nobody.",
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="optuna|random|grid", show_default="optuna",
            help="How settings are chosen: guided by what was found (TPE), at random, or all.",
        ),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Seeds for each trial; means count.", show_default="1")
    ] = None,
    concurrent: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at once; more than cores share them.",
                     show_default="as many as there is room for"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers-per-trial", min=1, help="Processes a trial.", show_default="1"),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="2h|30m|90s", help="Time for all trials together."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="bundled|DIR", help="As for `attune train`.",
                                 show_default="bundled")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="tiny|small|paper", show_default="small")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="RUN", help="All trials begin with this run's weights.")
    ] = None,
    zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="DeepSpeed's ZeRO stage.", show_default="0")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps of a trial at most.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Minutes of a trial at most.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Of the search and of each trial.",
                     show_default="0"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The sweep's name.", show_default="tune-<variant>-<n>")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the sweep of that --name (or the latest that is not finished); begin "
            "it where there is none. --samples, --budget and --concurrent may be others.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Try settings of one variant or several, and say which are best.

    Each trial is an ordinary run, so that `attune runs`, `evaluate`, `respond` and the page know
    it. Ctrl-C keeps all that was done, and --resume goes on.

    Examples:

    - `attune tune mime --space loss-weights --samples 16`
    - `attune tune emotion-cause-soft --space gating,thresholds --budget 2h --concurrent 2`
    - `attune tune mime empdg multi-trs --space optimizer --budget 8h`
    - `attune tune multi-trs --space loss-weights --scheduler pbt --samples 4`
    - `attune tune mime --space loss-weights --metric perplexity,distinct_2 --scheduler none`
    - `attune tune --sweep dual-emp-threshold --set harvest=data/reddit --data data/ed`
    - `attune tune --name mine --resume`
    """
    from attune.platform import cluster

    cluster.use_token()  # before Ray is imported, which looks for it only then
    from attune.platform.tuning import driver

    typed = {
        "variants": variants, "space": space, "sweep": sweep, "changes": options.changes(settings),
        "samples": samples, "metric": metric, "scheduler": scheduler, "search": search,
        "repeat": repeat, "concurrent": concurrent, "workers": workers,
        "budget": None if budget is None else _seconds(budget),
        "data": None if data is None else _data(data), "preset": preset,
        "init": init, "zero": zero, "max_steps": max_steps, "max_minutes": max_minutes,
        "seed": seed,
    }  # fmt: skip
    typed = {key: value for key, value in typed.items() if value not in (None, {}, [])}
    screen = console(as_json)
    found = _begun(name, typed) if resume else None
    found = found or _new(name, typed)
    screen.print(f"sweep {found.name} in {found.folder}", markup=False)
    with _progress(screen, found) as show:
        ended = driver.run(found, show)
    _ended(screen, ended, as_json)


def _ended(screen: Console, ended: "Sweep", as_json: bool) -> None:
    _show_trials(screen, ended)
    described = ended.described()
    if ended.status == "stopped":
        of = f"-decoding {ended.asked['run']}" if ended.kind == "decoding" else ""
        again = f"'attune tune{of} --name {ended.name} --resume'"
        screen.print(f"not all was tried: go on with {again}", markup=False)
    if as_json:
        print_json(described)
    if ended.status == "stopped" and (ended.stop_file.exists() or ended.kind == "decoding"):
        raise typer.Exit(130)
    if described["best"] is None:
        reasons = {t.user_attrs.get("reason", "") for t in ended.trials()} - {""}
        screen.print(f"no trial came to a result: {'; '.join(sorted(reasons))}", markup=False)
        raise typer.Exit(1)


def _data(text: str) -> str:
    """What names the data also in another working folder."""
    from attune.platform.corpora.prepare import find_data

    return text if text == "bundled" else str(find_data(text))


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise UsageError(f"--budget {text}: write it as 90s, 30m, 2h or 1d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _new(name: str | None, typed: Mapping[str, Any]) -> "Sweep":
    from attune.platform import store
    from attune.platform.commit import commit
    from attune.platform.settings import find_variant
    from attune.platform.training.start import check_zero
    from attune.platform.tuning import driver, spaces, sweep

    ready = spaces.find_ready(typed["sweep"]) if "sweep" in typed else spaces.Ready()
    variants = typed.get("variants") or list(ready.variants)
    if not variants or ready.decode:
        _refuse_without_variant(ready)
    for each in variants:
        check_zero(find_variant(each)[0], each, typed.get("zero", 0))
    fixed = {**ready.set, **typed.get("changes", {})}
    groups = [part.strip() for part in typed["space"].split(",")] if "space" in typed else []
    if not groups and not ready.space:
        known = ", ".join(spaces.groups_of(variants[0]))
        raise UsageError(f"say with --space what to try: '{variants[0]}' has {known}, or all")
    preset = typed.get("preset", "small")
    tried = spaces.of_variants(variants, groups, ready, fixed, preset)
    metrics = sweep.metric_names(typed.get("metric", ready.metric), variants)
    late = len(metrics) > 1 or any(m.removeprefix("valid_") in sweep.AT_THE_END for m in metrics)
    scheduler = _one_of("scheduler", typed.get("scheduler", "none" if late else "asha"), SCHEDULERS)
    usual = "random" if scheduler == "pbt" else ready.search or "optuna"
    search = _one_of("search", typed.get("search", usual), spaces.SEARCHES)
    driver.check(scheduler, search, metrics, tried, typed.get("workers", 1))
    count = sum(1 for _ in spaces.grid(tried)) if search == "grid" else SAMPLES
    if "init" in typed:
        options.trained_run(typed["init"])
    name = name or sweep.new_name(f"tune-{'-'.join(variants)}"[:60])
    store.check_name(name)
    made = sweep.Sweep(
        name=name,
        folder=sweep.folder_of_sweeps() / name,
        spaces={v: {k: spaces.to_json(t) for k, t in s.items()} for v, s in tried.items()},
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
            "preset": preset, "changes": fixed,
            **{k: typed[k] for k in ("data", "init", "zero", "max_steps", "max_minutes")
               if k in typed},
        },
        command=" ".join(["attune", *sys.argv[1:]]),
        commit=commit(),
        created=_now(),
    )  # fmt: skip
    return _written(made)


def _refuse_without_variant(ready: "Ready") -> None:
    if ready.decode:
        raise UsageError(f"{ready.source} is a sweep of decoding: use 'attune tune-decoding RUN'")
    raise UsageError("name a VARIANT, or a ready-made --sweep ('attune tune list' shows them)")


def _one_of(kind: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(unknown(kind, value, choices))
    return value


def _written(made: "Sweep") -> "Sweep":
    from attune.platform.tuning.sweep import RECORD

    if (made.folder / RECORD).exists():
        raise UsageError(
            f"a sweep named '{made.name}' exists already: choose another --name, or go on with it "
            f"by adding --resume"
        )
    made.write()
    return made


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _begun(name: str | None, typed: Mapping[str, Any]) -> "Sweep | None":
    """The sweep to go on with, which must be what is asked for, but for its limits."""
    from attune.platform.tuning import sweep

    if name is None:
        left = [s for s in sweep.all_sweeps() if s.status != "finished" and s.kind == "training"]
        wanted = typed.get("variants")
        left = [s for s in left if wanted in (None, list(s.spaces))]
        found = left[-1] if left else None
    else:
        known = (sweep.folder_of_sweeps() / name / sweep.RECORD).is_file()
        found = sweep.find(name) if known else None
    if found is None:
        return None
    was = {
        **{
            key: getattr(found, key) for key in ("search", "scheduler", "repeat", "workers", "seed")
        },
        "variants": list(found.spaces),
        **{"preset": "small", **found.asked},
    }
    for key, value in typed.items():
        changed = {k: v for k, v in value.items() if was["changes"].get(k) != v} \
            if key == "changes" else None  # fmt: skip
        if changed or (key in was and key != "changes" and was[key] != value):
            raise UsageError(
                f"sweep '{found.name}' was begun with other {key}: leave it out to go on, or begin "
                f"a new sweep under another --name"
            )
    return found.changed(**{key: typed[key] for key in LIMITS if key in typed})


@contextmanager
def _progress(screen: Console, sweep: "Sweep") -> Iterator[Callable[[str, int], None]]:
    """A line for each trial that ends, and how many there are still."""
    bars = Progress(
        SpinnerColumn(),
        TextColumn("trial {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bars.add_task("", total=sweep.samples)

    def show(text: str, done: int) -> None:
        if text:
            screen.print(text, markup=False)
        if done >= 0:
            bars.update(task, completed=done)

    with bars:
        yield show


@app.command(name="list")
def list_sweeps(as_json: Json = False) -> None:
    """List the sweeps here, oldest first, and the ready-made ones.

    Examples:

    - `attune tune list`
    """
    from attune.platform.tuning import spaces, sweep

    screen = console(as_json)
    found = list(sweep.all_sweeps())
    made = table(
        "", "sweep", "of", "status", "trials", "metric", "best", numbers=("trials", "best")
    )
    described = []
    for each in found:
        one = {**each.described(), "kind": each.kind, "status": each.status,
               "variants": list(each.spaces), "metrics": list(each.metrics)}  # fmt: skip
        described.append(one)
        metric = each.metrics[0]
        best = shown(metric, one["best"]["metrics"].get(metric)) if one["best"] else "-"
        made.add_row(
            each.name, ", ".join(each.spaces), each.status, str(one["trials"]), metric, best
        )
    screen.print(made if found else f"no sweeps in {sweep.folder_of_sweeps()} yet")
    ready = table("\nready-made, for --sweep", "name", "of", "")
    for name, one_ready in spaces.ready_made().items():
        of = ", ".join(one_ready.variants) or "attune tune-decoding RUN"
        ready.add_row(name, of, one_ready.about)
    screen.print(ready)
    if as_json:
        print_json({"sweeps": described, "ready": sorted(spaces.ready_made())})


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show the trials of a sweep, the best first, also while it runs.

    Examples:

    - `attune tune show tune-mime-1`
    """
    from attune.platform.tuning import report, sweep

    found = sweep.find(name)
    screen = console(as_json)
    screen.print(
        f"{found.name}: {found.status}, {found.spent:,.0f} s; {found.command}", markup=False
    )
    _show_trials(screen, found)
    if as_json:
        trials = report.table(found).to_dicts()
        print_json({**found.described(), "status": found.status, "table": trials})


@app.command()
def stop(name: Name, as_json: Json = False) -> None:
    """Ask a sweep to stop after this step, with checkpoints; --resume goes on with it.

    Examples:

    - `attune tune stop tune-mime-1`
    """
    from attune.platform.tuning import sweep

    found = sweep.find(name)
    if found.status != "running":
        raise UsageError(f"sweep '{name}' is not running: it is {found.status}")
    found.stop_file.touch()
    console(as_json).print(f"sweep {name} was asked to stop", markup=False)
    if as_json:
        print_json({"name": name, "asked": True})


@app.command()
def report(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to.", show_default="report/ in the sweep's folder"),
    ] = None,
    surface: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Also the metric over these two settings."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --seeds: how many of the best to train again.")
    ] = 1,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Train the best again with these seeds, as `attune "
                     "train --seeds` does; mean, deviation and interval are shown."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write what a sweep has shown: table, importance of each setting, slices, parallel
    coordinates, front, and what stopping early saved.

    Pictures as PNG and as one HTML page that needs no network; all are logged to the sweep's run in
    MLflow.

    Examples:

    - `attune tune report tune-mime-1`
    - `attune tune report tune-mime-1 --top 3 --seeds 1,2,3 --surface elbo_weight,response_weight`
    """
    from attune.platform import tracking
    from attune.platform.tuning import report as reports
    from attune.platform.tuning import sweep

    found = sweep.find(name)
    if not found.trials():
        raise UsageError(f"sweep '{name}' has no trials yet")
    if seeds and found.kind != "training":
        raise UsageError(f"--seeds trains again, and '{name}' has only decoded: leave it out")
    pair = tuple(surface.split(",")) if surface else None
    if pair is not None and len(pair) != 2:
        raise UsageError(f"--surface {surface}: two settings are expected, as in A,B")
    screen = console(as_json)
    again = _again(found, top, options.seeds(seeds), screen) if seeds else []
    folder = out or found.folder / "report"
    summary = reports.write(found, folder, pair, again)
    if found.run_id is not None:
        tracking.finish_group(found.run_id, found.status, {}, artifacts=folder)
    _show_trials(screen, found)
    for setting, share in summary["importances"].items():
        screen.print(f"importance of {setting}: {share:.0%}", markup=False)
    for each in summary["repeated"]:
        screen.print(reports.in_words(each), markup=False)
    if summary["saved"]:
        screen.print(reports.saving(summary["saved"]), markup=False)
    screen.print(f"report: {folder / reports.PAGE}", markup=False)
    if as_json:
        print_json({**summary, "report": str(folder)})


def _again(found: "Sweep", top: int, seeds: list[int], screen: Console) -> "list[Repeated]":
    """The best configurations with other seeds; runs that are finished already are left alone."""
    from attune.platform import store
    from attune.platform.training import driver, start
    from attune.platform.tuning import report as reports

    best = reports.table(found).filter(ended="finished").head(top)["trial"].to_list()
    asked = {key: value for key, value in found.asked.items() if key != "changes"}
    by_trial: dict[int, list[Run]] = {}
    for number in best:
        kept = found.frozen(number).user_attrs
        for seed in seeds:
            label = f"{found.name}-{number:03d}-again{seed}"
            if (store.folder_of_runs() / label / store.RECORD).is_file():
                run = store.find(label)
            else:
                changes = {**found.asked["changes"], **kept["settings"]}
                run = start.new_run(kept["variant"], name=label, seed=seed, changes=changes,
                                    workers=found.workers, **asked)  # fmt: skip
                run = run.changed(parent=found.run_id)
            by_trial.setdefault(number, []).append(run)
    left = [run for runs in by_trial.values() for run in runs if run.status != "finished"]
    if left:
        with training_progress(screen, *(run.name for run in left)) as shown_lines:
            done = {run.name: run for run in driver.train_all(left, shown_lines)}
        by_trial = {n: [done.get(run.name, run) for run in runs] for n, runs in by_trial.items()}
    if any(run.status != "finished" for runs in by_trial.values() for run in runs):
        screen.print("stopped: give the same command again to go on")
        raise typer.Exit(130)
    return [
        reports.repeated(n, found.frozen(n).user_attrs["settings"], runs, found.metrics[0])
        for n, runs in by_trial.items()
    ]


def decoding(
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
    settings: options.DecodingChanges = None,
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

    of = options.trained_run(name)
    trials.check(of)
    found = None
    if resume and label and (sweeps.folder_of_sweeps() / label / sweeps.RECORD).is_file():
        found = sweeps.find(label)
    elif resume and not label:
        raise UsageError("--resume: say with --name which sweep to go on with")
    if found is None:
        asked = {"decode": decode, "sweep": sweep, "metric": metric, "search": search,
                 "samples": samples, "seed": seed}  # fmt: skip
        found = _new_decoding(of, label, asked, options.changes(settings), data, split, contexts)
    screen = console(as_json)
    screen.print(f"sweep {found.name} in {found.folder}", markup=False)
    with _progress(screen, found) as shown_lines:
        ended = trials.run(found, shown_lines)
    _ended(screen, ended, as_json)


def _new_decoding(
    of: "Run", label: str | None, asked: Mapping[str, Any], changes: dict[str, str],
    data: str | None, split: str, contexts: int | None,
) -> "Sweep":  # fmt: skip
    from attune.platform import store
    from attune.platform.commit import commit
    from attune.platform.corpora.conversations import SPLITS
    from attune.platform.corpora.prepare import find_data
    from attune.platform.evaluation.answers import METRICS
    from attune.platform.tuning import spaces
    from attune.platform.tuning import sweep as sweeps

    if split not in SPLITS:
        raise UsageError(unknown("split", split, SPLITS))
    ready = spaces.find_ready(asked["sweep"]) if asked["sweep"] else spaces.Ready()
    if ready.variants:
        raise UsageError(f"{ready.source} trains {', '.join(ready.variants)}: use 'attune tune'")
    options.decoding(None, changes)
    methods = (asked["decode"] or ready.decode or ",".join(spaces.DECODING)).split(",")
    fixed = {**ready.set, **changes}
    tried = spaces.of_decoding(methods, ready, fixed)
    metrics = tuple((asked["metric"] or ready.metric or "bleu").split(","))
    for metric in metrics:
        if metric not in METRICS:
            raise UsageError(unknown("metric", metric, METRICS))
    search = _one_of("search", asked["search"] or ready.search or "optuna", spaces.SEARCHES)
    count = sum(1 for _ in spaces.grid(tried)) if search == "grid" else asked["samples"] or SAMPLES
    name = label or sweeps.new_name(f"decode-{of.name}"[:60])
    store.check_name(name)
    made = sweeps.Sweep(
        name=name,
        folder=sweeps.folder_of_sweeps() / name,
        kind="decoding",
        spaces={m: {k: spaces.to_json(t) for k, t in s.items()} for m, s in tried.items()},
        metrics=metrics,
        search=search,
        scheduler="none",
        samples=count,
        seed=asked["seed"],
        asked={"run": of.name, "data": str(find_data(data or of.data["folder"])), "split": split,
               "contexts": contexts, "changes": fixed},
        command=" ".join(["attune", *sys.argv[1:]]),
        commit=commit(),
        created=_now(),
    )  # fmt: skip
    return _written(made)


def _show_trials(screen: Console, found: "Sweep") -> None:
    from attune.platform.tuning import report as reports

    frame = reports.table(found)
    if frame.is_empty():
        screen.print("no trials yet")
        return
    chosen = "decode" if found.kind == "decoding" else "variant"
    of = [chosen] if len(found.spaces) > 1 else []
    keys = list(dict.fromkeys(key for space in found.spaces.values() for key in space))
    metrics = [name for name in found.metrics if name in frame.columns]
    names = [name.removeprefix("valid_").replace("_", " ") for name in metrics]
    made = table("", "trial", *of, *keys, *names, "ended", numbers=("trial", *keys, *names))
    for row in frame.head(SHOWN_TRIALS).iter_rows(named=True):
        values = (_value(row.get(key)) for key in keys)
        numbers = (shown(name, row[name]) for name in metrics)
        made.add_row(str(row["trial"]), *(row[key] for key in of), *values, *numbers, row["ended"])
    screen.print(made)
    if frame.height > SHOWN_TRIALS:
        screen.print(f"... and {frame.height - SHOWN_TRIALS} more")


def _value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
