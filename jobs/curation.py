"""`attune data turns`, `curate` and `select`: extract emotional dialogues from subtitles."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attune.jobs.console import Json, console, console_progress_bar, print_json
from attune.jobs.options import Format, OutFolder
from attune.jobs.tables import table
from attune.platform.data.sources import AUTO

EACH_LINE = "none"
"""For `--turns`: each line is a turn of its own."""


def turns(
    source: Annotated[
        str, typer.Option(metavar="PATH", help="Conversations whose speakers are known.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The classifier, as JSON.")],
    form: Format = AUTO,
    lines: Annotated[
        str,
        typer.Option(
            metavar="sentences|utterances",
            help="Train on single sentences, which lines of OPUS are, or on whole utterances.",
        ),
    ] = "sentences",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the SVM.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a linear SVM to predict whether two adjacent lines have the same speaker.

    `data curate` needs it to merge lines into turns. The data are MELD, or your own dialogues whose
    utterances have a `speaker` and, if known, `start` and `end` (docs/curating.md). Episodes are
    split by a hash of their names. Reports accuracy, balanced accuracy and F1 of "same" on test,
    next to those of always predicting "changed" and the accuracy in the paper.

    Examples:

    - `attune data turns --source meld/ --out turns.json`
    - `attune data turns --source meld/ --out whole.json --lines utterances`
    """
    from attune.platform.curation import turns

    with console_progress_bar("", "training the turn classifier"):
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
            help="A folder of subtitles, searched at any depth, or one file: OPUS XML or SRT, also "
            "with .gz. May be given several times.",
        ),
    ],
    out: OutFolder,
    model: Annotated[
        str,
        typer.Option(
            "--turns",
            metavar="FILE|none",
            help="The classifier from `attune data turns`; with `none` each line is a turn.",
        ),
    ],
    gap: Annotated[
        float, typer.Option(metavar="SECONDS", help="The silence that ends a dialogue.")
    ] = 5.0,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STEP",
            help="A cleaning step to skip: markup, lyrics, credits, sounds, speakers, "
            "spelling, short, long, letters, english, alone or duplicates. May be given several "
            "times.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum number of cores to use.", show_default="all of the cluster"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Extract dialogues from subtitles: clean lines, merge them into turns, split at silences.

    `attune data prepare --source DIR` reads the result. Reports the number of dialogues, turns and
    tokens before and after cleaning (Table 1 of Xie and Pu 2021), and the count of each step.
    Damaged files are listed in DIR/rejects.jsonl. Uses all cores of the machine, or of the cluster
    that RAY_ADDRESS names. After an interruption, the same command resumes.

    Examples:

    - `attune data curate --source OpenSubtitles/xml/en --turns turns.json --out os`
    - `attune data curate --source films/ --turns none --out films-clean --without lyrics`
    """
    from attune.platform.curation import curate
    from attune.platform.data import dataset_folder

    with console_progress_bar("files", "curating") as bar:
        manifest, speed = curate.curate(
            source,
            out,
            model=None if model == EACH_LINE else Path(model),
            gap=gap,
            without=without or (),
            workers=workers,
            total=bar.total,
            progress=bar.advance,
        )
    screen = console(as_json)
    _print_curation_statistics(screen, manifest["statistics"])
    _print_curation_steps(screen, manifest["steps"])
    rejected = dataset_folder.summarize_rejects(out, manifest)
    if rejected["rows"]:
        where = rejected["file"]
        screen.print(f"rejected: {rejected['rows']:,} damaged files, listed in {where}")
    if speed is not None:
        screen.print(
            f"{speed['lines']:,} lines in {speed['seconds']:,.1f} s: "
            f"{speed['lines_per_second']:,.0f} per second, "
            f"{speed['lines_per_second_per_core']:,.0f} per second of CPU time"
        )
    screen.print(f"dialogues: {out} ({manifest['hash'][:12]})", markup=False)
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
        typer.Argument(metavar="DIR", help="A folder from `attune annotate emotions`."),
    ],
    out: OutFolder,
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the N most emotional dialogues.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="E", help="Keep dialogues with at least this emotionality."),
    ] = None,
    rest: Annotated[bool, typer.Option("--rest", help="Keep the other dialogues instead.")] = False,
    as_json: Json = False,
) -> None:
    """Write the emotional dialogues of a labelled corpus to a prepared folder.

    The emotionality of an utterance is the sum of the probabilities of the 32 emotions; that of a
    dialogue is the mean over its utterances. Reports the number of dialogues, turns and tokens
    (Table 2 of Xie and Pu 2021); `attune show labels DIR` draws their Figure 2. With --rest the
    other dialogues are kept, on which the paper pre-trains.

    Examples:

    - `attune data select data/os-emotions --top 1000000 --out data/os-emotional`
    - `attune data select data/os-emotions --threshold 0.8 --out data/os-emotional`
    - `attune data select data/os-emotions --threshold 0.8 --rest --out data/os-rest`
    """
    from attune.platform.enrichment.filters import filter_dialogues

    with console_progress_bar("samples", "selecting") as bar:
        manifest, chosen = filter_dialogues(
            data,
            out,
            top=top,
            threshold=threshold,
            rest=rest,
            total=bar.total,
            progress=bar.advance,
        )
    spread = chosen["emotionality"].to_numpy()
    screen = console(as_json)
    _print_curation_statistics(screen, {"the rest" if rest else "selected": manifest["statistics"]})
    screen.print(f"emotionality from {spread.min():.3f} to {spread.max():.3f}")
    screen.print(f"dialogues: {out} ({manifest['hash'][:12]})", markup=False)
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


def _print_curation_statistics(screen: Console, statistics: dict[str, dict[str, float]]) -> None:
    """Print sizes, as in Tables 1 and 2 of Xie and Pu 2021."""
    shown = table("", "", *statistics, numbers=tuple(statistics))
    for row in next(iter(statistics.values())):
        digits = ".2f" if "_per_" in row else ".0f"
        values = (format(column[row], f",{digits}") for column in statistics.values())
        shown.add_row(row.replace("_", " "), *values)
    screen.print(shown)


def _print_curation_steps(screen: Console, steps: dict[str, int]) -> None:
    """Print what each cleaning step changed or dropped."""
    from attune.platform.curation.cleaning import DIALOG_STEPS, LINE_STEPS, TURN_STEPS

    what = {
        **dict.fromkeys(LINE_STEPS, "lines changed or dropped"),
        **dict.fromkeys(TURN_STEPS, "turns dropped"),
        **dict.fromkeys(DIALOG_STEPS, "dialogues dropped"),
    }
    shown = table("", "step", "count", "of", numbers=("count",))
    for step, count in steps.items():
        shown.add_row(step, f"{count:,}", what.get(step, "dialogues dropped"))
    screen.print(shown)
