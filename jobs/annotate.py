"""`attune annotate`: add cause labels, or labels of utterances, to prepared data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attune.jobs import options
from attune.jobs.console import Json, console, console_progress_bar, print_json

if TYPE_CHECKING:
    from attune.platform.runs.record import Run

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Add to prepared data the labels that a trained annotator or classifier predicts.",
)


def _find_annotation_inputs(
    name: str, data: str, out: Path | None, suffix: str
) -> "tuple[Run, Path, Path]":
    """Return the run, the folder of the data, and the folder to write."""
    from attune.platform.data.prepare import find_prepared_data

    run, folder = options.parse_run_option(name), find_prepared_data(data)
    return run, folder, out or folder.with_name(f"{folder.name}-{suffix}")


@app.command("cause")
def annotate_causes_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `cause-annotator`, by name or MLflow id."),
    ],
    data: Annotated[
        str, typer.Option(metavar="bundled|DIR", help="The prepared data to annotate.")
    ],
    out: Annotated[Path | None, options.copy_option("causes")] = None,
    threshold: options.Threshold = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace cause labels of the data.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Label the utterances that are causes of the emotion, from each sample's own context only.

    Writes a new prepared folder with the labels in `context_causes`; its manifest records the run
    and the threshold. Uses all cores of the machine, or of the cluster that RAY_ADDRESS names.
    After an interruption, the same command resumes.

    Examples:

    - `attune annotate cause cause-annotator@latest --data data/ed`
    - `attune annotate cause mine --data data/ed --out data/ed-strict --threshold 0.7`
    """
    from attune.platform.enrichment.causes import CAUSE_THRESHOLD, annotate_causes, cause_shares

    run, folder, target = _find_annotation_inputs(name, data, out, "causes")
    with console_progress_bar("samples", f"{run.name} annotates {folder.name}") as bar:
        manifest = annotate_causes(
            run,
            folder,
            target,
            threshold=CAUSE_THRESHOLD if threshold is None else threshold,
            replace=replace,
            total=bar.total,
            progress=bar.advance,
        )
    shares = cause_shares(target)
    screen = console(as_json)
    for stream, share in shares.items():
        screen.print(f"{stream}: {share:.1%} of the utterances are causes", markup=False)
    screen.print(f"annotated data: {target} ({manifest['hash'][:12]})", markup=False)
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
def annotate_emotions_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `intent-classifier`, by name or MLflow id."),
    ],
    data: Annotated[str, typer.Option(metavar="bundled|DIR", help="The prepared data to label.")],
    out: Annotated[Path | None, options.copy_option("emotions")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace labels of the data.")] = False,
    as_json: Json = False,
) -> None:
    """Label every utterance with one of the 41 emotions and intents.

    Writes a new prepared folder with the most likely labels in `context_labels` and
    `response_label`, and the calibrated probabilities of all labels in `emotions.parquet`, one
    utterance per row. Uses all cores of the machine, or of the cluster that RAY_ADDRESS names.
    After an interruption, the same command resumes.

    Examples:

    - `attune annotate emotions intent-classifier@latest --data data/os`
    - `attune annotate emotions mine --data data/ed --out data/ed-labelled --replace`
    """
    from attune.platform.enrichment.filters import read_emotionality
    from attune.platform.enrichment.labels import label_utterances

    run, folder, target = _find_annotation_inputs(name, data, out, "emotions")
    with console_progress_bar("samples", f"{run.name} labels {folder.name}") as bar:
        manifest = label_utterances(
            run,
            folder,
            target,
            replace=replace,
            total=bar.total,
            progress=bar.advance,
        )
    dialogs = read_emotionality(target)
    mean = float(dialogs["emotionality"].to_numpy().mean())
    screen = console(as_json)
    screen.print(f"{dialogs['utterances'].sum():,} utterances of {dialogs.height:,} dialogues")
    screen.print(f"mean emotionality of a dialogue: {mean:.3f}")
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
