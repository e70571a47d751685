"""`attune data turns`, `curate` and `select`: emotional dialogs out of subtitles."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attune.jobs.console import Json, console, print_json, progress
from attune.jobs.tables import table
from attune.platform.data.sources import AUTO, READERS

EACH_LINE = "none"
"""For `--turns`: each line is a turn of its own."""


def turns(
    source: Annotated[
        str, typer.Option(metavar="PATH", help="Conversations whose speakers are known.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The classifier, as JSON.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="|".join((AUTO, *READERS)), help="What the files are; auto looks."
        ),
    ] = AUTO,
    lines: Annotated[
        str,
        typer.Option(
            metavar="sentences|utterances",
            help="What a line is: each sentence, as in OPUS, or an utterance as it stands.",
        ),
    ] = "sentences",
    seed: Annotated[int, typer.Option(min=0, help="Of the SVM.")] = 0,
    as_json: Json = False,
) -> None:
    """Teach a linear SVM whether two neighbouring lines have the same speaker, for `data curate`.

    Learns from MELD, or from your own dialogues where utterances have a `speaker` and, if known,
    `start` and `end` (docs/curating.md). Episodes go to train, valid and test by their names; the
    accuracy on test, its mean over both answers, and the F1 of "same" stand beside those of always
    saying "changed", and beside the paper's accuracy.

    Examples:

    - `attune data turns --source meld/ --out turns.json`
    - `attune data turns --source meld/ --out whole.json --lines utterances`
    """
    from attune.platform.curation import turns

    with progress("") as bar:
        bar.add_task("learning who speaks", total=None)
        classifier = turns.train(source, form, lines, seed)
        classifier.save(out)
    report = classifier.report
    columns = {
        "accuracy": "accuracy",
        "balanced_accuracy": "balanced accuracy",
        "f1_same": 'F1 of "same"',
    }
    shown = table("", "on held-out episodes", *columns.values(), numbers=tuple(columns.values()))
    for name, scores in (
        ("the classifier", report),
        ('always "changed"', report["always_changed"]),
    ):
        shown.add_row(name, *(f"{scores[column]:.2%}" for column in columns))
    shown.add_row("Xie and Pu 2021, on their own lines", f"{report['published']:.2%}")
    screen = console(as_json)
    screen.print(shown)
    counts = ", ".join(f"{split} {count:,}" for split, count in report["pairs"].items())
    screen.print(f"pairs of {lines}: {counts}", markup=False)
    screen.print(f"classifier: {out}", markup=False)
    if as_json:
        print_json({"out": str(out), "lines": lines, **report})


def curate(
    source: Annotated[
        list[Path],
        typer.Option(
            metavar="PATH",
            help="A folder of subtitles, with folders inside it or not, or one file: OPUS XML and "
            "SRT, packed with .gz or not. May be given several times.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder to make. It appears whole or not at all."),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--turns",
            metavar="FILE|none",
            help="A classifier by `attune data turns`, or none: each line is a turn.",
        ),
    ],
    gap: Annotated[
        float, typer.Option(metavar="SECONDS", help="The silence that ends a dialog.")
    ] = 5.0,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP",
            help="A step of cleaning to leave out: markup, lyrics, credits, sounds, speakers, "
            "spelling, short, long, letters, english, alone or duplicates. May be given several "
            "times.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Cores to use at once.", show_default="all of the cluster"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make dialogs out of subtitles: clean lines, join them to turns, cut where nobody speaks.

    `attune data prepare --source DIR` reads what it makes. Each step of cleaning is counted, and
    dialogs, turns and tokens are told before and after (Table 1 of MEED2's paper). A damaged file
    is listed in DIR/rejects.jsonl and does not stop the others. The work is shared by the cores of
    the machine, or of the cluster that RAY_ADDRESS names. Given again after an interruption, it
    goes on.

    Examples:

    - `attune data curate --source OpenSubtitles/xml/en --turns turns.json --out os`
    - `attune data curate --source films/ --turns none --out films-clean --without lyrics`
    """
    from attune.platform.curation import curate
    from attune.platform.data import dataset_folder

    with progress("files") as bar:
        task = bar.add_task("curating", total=None)
        manifest, speed = curate.curate(
            source,
            out,
            model=None if model == EACH_LINE else Path(model),
            gap=gap,
            without=without or (),
            workers=workers,
            total=lambda count: bar.update(task, total=count),
            progress=lambda done: bar.advance(task, done),
        )
    screen = console(as_json)
    _show_statistics(screen, manifest["statistics"])
    _show_steps(screen, manifest["steps"])
    rejected = dataset_folder.summarize_rejects(out, manifest)
    if rejected["rows"]:
        where = rejected["file"]
        screen.print(f"set aside: {rejected['rows']:,} damaged files, listed in {where}")
    if speed is not None:
        screen.print(
            f"{speed['lines']:,} lines in {speed['seconds']:,.1f} s: "
            f"{speed['lines_per_second']:,.0f} a second, "
            f"{speed['lines_per_second_per_core']:,.0f} a second of a core"
        )
    screen.print(f"dialogs: {out} ({manifest['hash'][:12]})", markup=False)
    screen.print(f"next: attune data prepare --source {out} --out DIR", markup=False, style="dim")
    if as_json:
        print_json(
            {
                "out": str(out),
                "hash": manifest["hash"],
                "files": manifest["curation"]["files"],
                "lines": manifest["lines"],
                "statistics": manifest["statistics"],
                "steps": manifest["steps"],
                "rejected": rejected,
                "speed": speed,
            }
        )


def select(
    data: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder made by `attune annotate emotions`."),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder to make. It appears whole or not at all."),
    ],
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N most emotional dialogs.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="E", help="All dialogs whose emotionality is at least this."),
    ] = None,
    rest: Annotated[bool, typer.Option("--rest", help="Keep the others instead.")] = False,
    as_json: Json = False,
) -> None:
    """Keep the emotional dialogs of a labelled corpus, as a prepared folder of their own.

    The emotionality of an utterance is the sum of the probabilities of the 32 emotions, that of a
    dialog the mean over its utterances. Dialogs, turns and tokens are told as in Table 2 of MEED2's
    paper; `attune show labels DIR` draws its Figure 2. With --rest it is the other dialogs that are
    kept: the paper learns from these first, and from the emotional ones after.

    Examples:

    - `attune data select data/os-emotions --top 1000000 --out data/os-emotional`
    - `attune data select data/os-emotions --threshold 0.8 --out data/os-emotional`
    - `attune data select data/os-emotions --threshold 0.8 --rest --out data/os-rest`
    """
    from attune.platform.enrichment.filters import select_dialogues

    with progress("samples") as bar:
        task = bar.add_task("selecting", total=None)
        manifest, chosen = select_dialogues(
            data,
            out,
            top=top,
            threshold=threshold,
            rest=rest,
            total=lambda count: bar.update(task, total=count),
            progress=lambda done: bar.advance(task, done),
        )
    spread = chosen["emotionality"].to_numpy()
    screen = console(as_json)
    _show_statistics(screen, {"the rest" if rest else "selected": manifest["statistics"]})
    screen.print(f"emotionality from {spread.min():.3f} to {spread.max():.3f}")
    screen.print(f"dialogs: {out} ({manifest['hash'][:12]})", markup=False)
    if as_json:
        print_json(
            {
                "out": str(out),
                "hash": manifest["hash"],
                "splits": manifest["splits"],
                "statistics": manifest["statistics"],
                "emotionality": {
                    "least": float(spread.min()),
                    "mean": float(spread.mean()),
                    "most": float(spread.max()),
                },
            }
        )


def _show_statistics(screen: Console, statistics: dict[str, dict[str, float]]) -> None:
    """As in Tables 1 and 2 of MEED2's paper."""
    shown = table("", "", *statistics, numbers=tuple(statistics))
    for row in next(iter(statistics.values())):
        digits = ".2f" if "_per_" in row else ".0f"
        values = (format(column[row], f",{digits}") for column in statistics.values())
        shown.add_row(row.replace("_", " "), *values)
    screen.print(shown)


def _show_steps(screen: Console, steps: dict[str, int]) -> None:
    from attune.platform.curation.cleaning import DIALOG_STEPS, LINE_STEPS, TURN_STEPS

    what = {
        **dict.fromkeys(LINE_STEPS, "lines changed or left out"),
        **dict.fromkeys(TURN_STEPS, "turns left out"),
        **dict.fromkeys(DIALOG_STEPS, "dialogs left out"),
    }
    shown = table("", "step", "count", "of", numbers=("count",))
    for step, count in steps.items():
        shown.add_row(step, f"{count:,}", what.get(step, "dialogs left out"))
    screen.print(shown)
