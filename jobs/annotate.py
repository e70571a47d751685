"""`attune annotate`: what a trained annotator finds, added to prepared data."""

from pathlib import Path
from typing import Annotated

import typer

from attune.jobs import options
from attune.jobs.console import Json, console, print_json, progress

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Add to prepared data what a trained annotator finds in it.",
)


@app.command("cause")
def cause_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `cause-annotator`, by name or MLflow id."),
    ],
    data: Annotated[str, typer.Option(metavar="bundled|DIR", help="The prepared data to mark.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder to make. It appears whole or not at all.",
            show_default="the data's name with -causes, beside it",
        ),
    ] = None,
    threshold: options.Threshold = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Mark anew what has marks of causes already.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Mark which utterances hold the cause of the emotion, from each sample's own context only.

    Makes a new prepared folder with the marks in `context_causes`; its manifest says which run made
    them, and with which threshold. The work is shared by the cores of the machine, or of the
    cluster that RAY_ADDRESS names. Given again after an interruption, it goes on.

    Examples:

    - `attune annotate cause cause-annotator@latest --data data/ed`
    - `attune annotate cause mine --data data/ed --out data/ed-strict --threshold 0.7`
    """
    from attune.platform.data.prepare import find_data
    from attune.platform.enrichment.causes import CAUSE_THRESHOLD, annotate_causes, cause_shares

    run = options.find_trained_run(name)
    folder = find_data(data)
    target = out or folder.with_name(f"{folder.name}-causes")
    with progress("samples") as bar:
        task = bar.add_task(f"{run.name} marks {folder.name}", total=None)
        manifest = annotate_causes(
            run,
            folder,
            target,
            threshold=CAUSE_THRESHOLD if threshold is None else threshold,
            replace=replace,
            total=lambda count: bar.update(task, total=count),
            progress=lambda done: bar.advance(task, done),
        )
    shares = cause_shares(target)
    screen = console(as_json)
    for stream, share in shares.items():
        screen.print(f"{stream}: {share:.1%} of the utterances hold a cause", markup=False)
    screen.print(f"marked data: {target} ({manifest['hash'][:12]})", markup=False)
    if as_json:
        print_json(
            {
                "out": str(target),
                "hash": manifest["hash"],
                "splits": manifest["splits"],
                "causes": manifest["causes"],
                "cause_share": shares,
            }
        )


@app.command("emotions")
def emotions_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `intent-classifier`, by name or MLflow id."),
    ],
    data: Annotated[str, typer.Option(metavar="bundled|DIR", help="The prepared data to label.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder to make. It appears whole or not at all.",
            show_default="the data's name with -emotions, beside it",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Label anew what has labels already.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Label every utterance with one of the 41 emotions and intents, and its whole distribution.

    Makes a new prepared folder with the likeliest labels in `context_labels` and `response_label`,
    and the calibrated probabilities of all labels in `emotions.parquet`, an utterance a row. The
    work is shared by the cores of the machine, or of the cluster that RAY_ADDRESS names. Given
    again after an interruption, it goes on.

    Examples:

    - `attune annotate emotions intent-classifier@latest --data data/os`
    - `attune annotate emotions mine --data data/ed --out data/ed-labelled --replace`
    """
    from attune.platform.data.prepare import find_data
    from attune.platform.enrichment.filters import read_emotionality
    from attune.platform.enrichment.labels import label_utterances

    run = options.find_trained_run(name)
    folder = find_data(data)
    target = out or folder.with_name(f"{folder.name}-emotions")
    with progress("samples") as bar:
        task = bar.add_task(f"{run.name} labels {folder.name}", total=None)
        manifest = label_utterances(
            run,
            folder,
            target,
            replace=replace,
            total=lambda count: bar.update(task, total=count),
            progress=lambda done: bar.advance(task, done),
        )
    dialogs = read_emotionality(target)
    mean = float(dialogs["emotionality"].to_numpy().mean())
    screen = console(as_json)
    screen.print(f"{dialogs['utterances'].sum():,} utterances of {dialogs.height:,} dialogs")
    screen.print(f"mean emotionality of a dialog: {mean:.3f}")
    screen.print(f"labelled data: {target} ({manifest['hash'][:12]})", markup=False)
    if as_json:
        print_json(
            {
                "out": str(target),
                "hash": manifest["hash"],
                "splits": manifest["splits"],
                "emotions": manifest["emotions"],
                "utterances": int(dialogs["utterances"].sum()),
                "emotionality": mean,
            }
        )
