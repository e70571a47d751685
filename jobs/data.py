"""`attune data`: prepare conversations for training, inspect and enrich them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from attune.jobs import curation, options
from attune.jobs.console import Json, console, console_progress_bar, print_json
from attune.jobs.options import Format, OutFolder
from attune.jobs.tables import table
from attune.platform.core.errors import UsageError
from attune.platform.data.sources import AUTO

# Importing the tokenizer (nltk) takes two seconds, which `--help` should not: commands import it.

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Prepare conversations for training, and look at what was prepared.",
)


@app.command("prepare")
def prepare_data_command(
    source: Annotated[
        str,
        typer.Option(
            metavar="bundled|PATH",
            help="`bundled` for the corpus that comes with Attune, or your own file or folder.",
        ),
    ],
    out: OutFolder,
    form: Format = AUTO,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Stop at the first bad row instead of rejecting it."),
    ] = False,
    any_emotion: Annotated[
        bool,
        typer.Option("--any-emotion", help="Accept unknown emotions (for harvesting)."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other prepared data in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn raw conversations into samples: one per listener turn, with the context so far.

    Reads EmpatheticDialogues (`ed`), EDOS (`edos`), RECCON (`reccon`), MELD (`meld`), cause labels
    of EmpatheticDialogues (`ed-causes`), EmpatheticIntents (`intents`) and your own dialogues
    (`dialogues`: JSON lines, CSV or Parquet; see docs/data.md). The same input gives the same
    bytes. Rows that cannot be used are listed in DIR/rejects.jsonl, with file, row and reason.

    Examples:

    - `attune data prepare --source bundled --out data/bundled`
    - `attune data prepare --source empatheticdialogues/ --out data/ed`
    - `attune data prepare --source mine.jsonl --out data/mine --strict`
    """
    from attune.platform.data import dataset_folder, prepare

    with console_progress_bar("utterances", "preparing") as bar:
        manifest = prepare.prepare(
            source,
            out,
            form=form,
            strict=strict,
            any_emotion=any_emotion,
            overwrite=overwrite,
            progress=bar.advance,
        )
    _print_data_counts(console(as_json), out, manifest)
    if as_json:
        print_json(
            {
                "out": str(out),
                "hash": manifest["hash"],
                "format": manifest["format"],
                "splits": manifest["splits"],
                "rejected": dataset_folder.summarize_rejects(out, manifest),
            }
        )


@app.command("inspect")
def inspect_data_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder.")],
    samples: Annotated[int, typer.Option(min=0, help="The number of samples to show.")] = 3,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of the choice of samples.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show a prepared folder: counts, emotions, lengths and a few samples."""
    from attune.platform.data import dataset_folder, inspection

    report = inspection.inspect(folder, samples=samples, seed=seed)
    screen = console(as_json)
    _print_data_counts(screen, folder, dataset_folder.read_dataset_manifest(folder))
    _print_emotion_counts(screen, report["emotions"])
    _print_data_lengths(screen, report["lengths"])
    _print_data_vocabulary(screen, report["vocabulary"])
    _print_data_samples(screen, report["samples"])
    if as_json:
        print_json(report)


app.command("turns")(curation.turns)
app.command("curate")(curation.curate)
app.command("select")(curation.select)


@app.command("harvest")
def harvest_data_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `emotion-classifier`, by name or MLflow id."),
    ],
    source: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Conversations: a file or folder that `data prepare` reads, or a prepared folder. "
            "May be given several times.",
        ),
    ],
    out: OutFolder,
    threshold: Annotated[
        float,
        typer.Option(metavar="P", help="Count the texts whose emotion has a higher probability."),
    ] = 0.6,
    min_length: Annotated[int, typer.Option(help="Minimum number of tokens of a text.")] = 3,
    as_json: Json = False,
) -> None:
    """Collect unpaired contexts and responses from conversations, with their most likely emotions.

    Reads EDOS, RECCON's DailyDialog, MELD and your own conversations, such as JSON lines of Reddit
    or Twitter (docs/harvesting.md). All texts are kept with their calibrated probabilities, so the
    threshold can be changed later: repeat the command, or train with
    `--set harvest=DIR --set harvest_threshold=P`. Uses all cores of the machine, or of the cluster
    that RAY_ADDRESS names. After an interruption, the same command resumes.

    Examples:

    - `attune data harvest emotion-classifier@latest --source edos/ --source meld/ --out data/open`
    - `attune data harvest mine --source reddit.jsonl.gz --out data/reddit --threshold 0.7`
    """
    from attune.platform.data import dataset_folder
    from attune.platform.enrichment.unpaired import count_unpaired, harvest_unpaired_texts

    if not 0 <= threshold < 1:
        raise UsageError(f"--threshold: expected a number from 0 to below 1, got {threshold}")
    run = options.parse_run_option(name)
    with console_progress_bar("texts", f"{run.name} classifies") as bar:
        manifest = harvest_unpaired_texts(
            run,
            source,
            out,
            min_length=min_length,
            total=bar.total,
            progress=bar.advance,
        )
    streams = count_unpaired(out, threshold)
    screen = console(as_json)
    _print_harvested_data(screen, streams, threshold)
    _print_rejected_data(screen, out, manifest)
    screen.print(f"harvest: {out} ({manifest['hash'][:12]})", markup=False)
    if as_json:
        print_json(
            {
                "out": str(out),
                "hash": manifest["hash"],
                "threshold": threshold,
                "streams": streams,
                "harvest": manifest["harvest"],
                "rejected": dataset_folder.summarize_rejects(out, manifest),
            }
        )


def _print_harvested_data(screen: Console, streams: dict[str, Any], threshold: float) -> None:
    names = tuple(streams)
    title = f"texts whose emotion has a probability above {threshold}"
    shown = table(title, "emotion", *names, numbers=names)
    emotions = sorted({emotion for counts in streams.values() for emotion in counts["emotions"]})
    for emotion in emotions:
        kept = (f"{counts['emotions'].get(emotion, 0):,}" for counts in streams.values())
        shown.add_row(emotion, *kept)
    shown.add_row("all", *(f"{c['kept']:,} of {c['texts']:,}" for c in streams.values()))
    screen.print(shown)


def _print_data_counts(screen: Console, folder: Path, manifest: dict[str, Any]) -> None:
    title = escape(f"{folder} ({manifest['format']}, {manifest['hash'][:12]})")
    numbers = ("conversations", "samples")
    shown = table(title, "stream", *numbers, numbers=numbers)
    for stream, counts in manifest["splits"].items():
        shown.add_row(stream, f"{counts['conversations']:,}", f"{counts['samples']:,}")
    screen.print(shown)
    for reason, count in manifest["tolerated"].items():
        screen.print(f"corrected: {count:,} {reason}", markup=False)
    _print_rejected_data(screen, folder, manifest)


def _print_rejected_data(screen: Console, folder: Path, manifest: dict[str, Any]) -> None:
    rejected = manifest["rejected"]
    if rejected["rows"]:
        where = folder / rejected["file"]
        screen.print(f"rejected: {rejected['rows']:,} rows, listed in {where}", markup=False)
        for reason, count in rejected["reasons"].items():
            screen.print(f"  {count:,} x {reason}", markup=False)


def _print_emotion_counts(screen: Console, emotions: dict[str, dict[str, int]]) -> None:
    if not emotions:
        screen.print("no conversation has an emotion")
        return
    streams = tuple(next(iter(emotions.values())))
    most = max(max(counts.values()) for counts in emotions.values())
    shown = table("samples by emotion", "emotion", *streams, "", numbers=streams)
    for emotion, counts in emotions.items():
        bar = "\u2588" * round(30 * counts[streams[0]] / most)
        shown.add_row(escape(emotion), *(f"{counts[s]:,}" for s in streams), f"[cyan]{bar}[/cyan]")
    screen.print(shown)


def _print_data_lengths(screen: Console, lengths: dict[str, dict[str, float]]) -> None:
    columns = tuple(next(iter(lengths.values())))
    shown = table("lengths in train", "", *columns, numbers=columns)
    for name, row in lengths.items():
        shown.add_row(name, *(f"{value:,.0f}" for value in row.values()))
    screen.print(shown)


def _print_data_vocabulary(screen: Console, vocabulary: dict[str, Any]) -> None:
    screen.print(f"{vocabulary['types']:,} distinct tokens in train")
    for split, share in vocabulary["unknown_share"].items():
        if share is not None:
            screen.print(f"  {share:.2%} of the tokens of {split}'s responses are unknown")


def _print_data_samples(screen: Console, samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        name = f"\n{sample['conversation_id']} ({sample['emotion']})"
        screen.print(name, end="", markup=False, style="bold")
        screen.print(f" {sample['situation'] or ''}", markup=False, style="dim")
        for role, text in zip(sample["context_roles"], sample["context"], strict=True):
            screen.print(f"  {role:>8}: {text}", markup=False)
        if sample["response"]:
            screen.print(f"  response: {sample['response']}", markup=False, style="green")
        if sample["next_turn"]:
            screen.print(f"      next: {sample['next_turn']}", markup=False, style="dim")
