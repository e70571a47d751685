"""`attune data`: from raw conversations to a folder that models learn from."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attune.jobs import curation
from attune.jobs.console import Json, console, print_json, progress
from attune.platform.core.errors import UsageError
from attune.platform.data.sources import AUTO, READERS

# Importing the tokenizer (nltk) takes two seconds, which `--help` should not: commands import it.

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Prepare conversations for training, and look at what was prepared.",
)


@app.command("prepare")
def prepare_command(
    source: Annotated[
        str,
        typer.Option(
            metavar="bundled|PATH",
            help="`bundled` for the corpus that comes with Attune, or your own file or folder.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder to make. It appears whole or not at all."),
    ],
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="|".join((AUTO, *READERS)), help="What the files are; auto looks."
        ),
    ] = AUTO,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Stop at the first bad row instead of setting it aside."),
    ] = False,
    any_emotion: Annotated[
        bool,
        typer.Option(
            "--any-emotion", help="Keep emotions outside the known ones (for harvesting)."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another preparation that lies in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn raw conversations into samples: one per listener turn, with the context so far.

    Reads EmpatheticDialogues (`ed`), EDOS (`edos`), RECCON (`reccon`), MELD (`meld`), cause marks
    of EmpatheticDialogues (`ed-causes`), EmpatheticIntents (`intents`) and anybody's own dialogues
    (`dialogues`: JSON lines, CSV or Parquet; docs/data.md shows the form). The same input gives the
    same bytes. Rows that cannot be used are set aside in DIR/rejects.jsonl, each with its file, row
    and reason.

    Examples:

    - `attune data prepare --source bundled --out data/bundled`
    - `attune data prepare --source empatheticdialogues/ --out data/ed`
    - `attune data prepare --source mine.jsonl --out data/mine --strict`
    """
    from attune.platform.data import dataset_folder, prepare

    with progress("utterances") as bar:
        task = bar.add_task("preparing", total=None)
        manifest = prepare.prepare(
            source,
            out,
            form=form,
            strict=strict,
            any_emotion=any_emotion,
            overwrite=overwrite,
            progress=lambda utterances: bar.advance(task, utterances),
        )
    _show_counts(console(as_json), out, manifest)
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
def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder.")],
    samples: Annotated[int, typer.Option(min=0, help="How many samples to show.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Which samples to show.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what a prepared folder holds: counts, emotions, lengths and a few samples."""
    from attune.platform.data import dataset_folder, inspection

    report = inspection.inspect(folder, samples=samples, seed=seed)
    screen = console(as_json)
    _show_counts(screen, folder, dataset_folder.read_manifest(folder))
    _show_emotions(screen, report["emotions"])
    _show_lengths(screen, report["lengths"])
    _show_vocabulary(screen, report["vocabulary"])
    _show_samples(screen, report["samples"])
    if as_json:
        print_json(report)


app.command("turns")(curation.turns)
app.command("curate")(curation.curate)
app.command("select")(curation.select)


@app.command("harvest")
def harvest_command(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `emotion-classifier`, by name or MLflow id."),
    ],
    source: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Conversations: a file or folder in any form that `data prepare` reads, or a "
            "prepared folder. May be given several times.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder to make. It appears whole or not at all."),
    ],
    threshold: Annotated[
        float, typer.Option(metavar="P", help="How sure a text's emotion must be to be counted.")
    ] = 0.6,
    min_length: Annotated[int, typer.Option(help="Tokens that a text has at least.")] = 3,
    as_json: Json = False,
) -> None:
    """Gather unpaired contexts and responses from conversations, each with its likeliest emotion.

    Reads EDOS, RECCON's DailyDialog, MELD, and anybody's own conversations (JSON lines of Reddit or
    Twitter, say; docs/harvesting.md shows the form). All texts are kept with their calibrated
    probabilities, so another threshold needs no classifier: give the command again, or train with
    `--set harvest=DIR --set harvest_threshold=P`. The work is shared by the cores of the machine,
    or of the cluster that RAY_ADDRESS names. Given again after an interruption, it goes on.

    Examples:

    - `attune data harvest emotion-classifier@latest --source edos/ --source meld/ --out data/open`
    - `attune data harvest mine --source reddit.jsonl.gz --out data/reddit --threshold 0.7`
    """
    from attune.jobs import options
    from attune.platform.data import dataset_folder
    from attune.platform.enrichment.unpaired import count_unpaired, harvest_texts

    if not 0 <= threshold < 1:
        raise UsageError(f"--threshold: expected a number from 0 to below 1, got {threshold}")
    run = options.find_trained_run(name)
    with progress("texts") as bar:
        task = bar.add_task(f"{run.name} harvests", total=None)
        manifest = harvest_texts(
            run,
            source,
            out,
            min_length=min_length,
            total=lambda count: bar.update(task, total=count),
            progress=lambda done: bar.advance(task, done),
        )
    streams = count_unpaired(out, threshold)
    screen = console(as_json)
    _show_harvest(screen, streams, threshold)
    _show_rejected(screen, out, manifest)
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


def _show_harvest(screen: Console, streams: dict[str, Any], threshold: float) -> None:
    table = _table(f"texts whose emotion is surer than {threshold}")
    table.add_column("emotion")
    for stream in streams:
        table.add_column(stream, justify="right")
    emotions = sorted({emotion for counts in streams.values() for emotion in counts["emotions"]})
    for emotion in emotions:
        kept = (f"{counts['emotions'].get(emotion, 0):,}" for counts in streams.values())
        table.add_row(emotion, *kept)
    table.add_row("all", *(f"{c['kept']:,} of {c['texts']:,}" for c in streams.values()))
    screen.print(table)


def _show_counts(screen: Console, folder: Path, manifest: dict[str, Any]) -> None:
    table = _table(escape(f"{folder} ({manifest['format']}, {manifest['hash'][:12]})"))
    for name in ("stream", "conversations", "samples"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for stream, counts in manifest["splits"].items():
        table.add_row(stream, f"{counts['conversations']:,}", f"{counts['samples']:,}")
    screen.print(table)
    for reason, count in manifest["tolerated"].items():
        screen.print(f"put right: {count:,} {reason}", markup=False)
    _show_rejected(screen, folder, manifest)


def _show_rejected(screen: Console, folder: Path, manifest: dict[str, Any]) -> None:
    rejected = manifest["rejected"]
    if rejected["rows"]:
        where = folder / rejected["file"]
        screen.print(f"set aside: {rejected['rows']:,} rows, listed in {where}", markup=False)
        for reason, count in rejected["reasons"].items():
            screen.print(f"  {count:,} x {reason}", markup=False)


def _show_emotions(screen: Console, emotions: dict[str, dict[str, int]]) -> None:
    if not emotions:
        screen.print("no conversation has an emotion")
        return
    streams = list(next(iter(emotions.values())))
    most = max(max(counts.values()) for counts in emotions.values())
    table = _table("samples by emotion")
    table.add_column("emotion")
    for stream in streams:
        table.add_column(stream, justify="right")
    table.add_column("")
    for emotion, counts in emotions.items():
        bar = "\u2588" * round(30 * counts[streams[0]] / most)
        table.add_row(escape(emotion), *(f"{counts[s]:,}" for s in streams), f"[cyan]{bar}[/cyan]")
    screen.print(table)


def _show_lengths(screen: Console, lengths: dict[str, dict[str, float]]) -> None:
    table = _table("lengths in train")
    table.add_column("")
    for column in next(iter(lengths.values())):
        table.add_column(column, justify="right")
    for name, row in lengths.items():
        table.add_row(name, *(f"{value:,.0f}" for value in row.values()))
    screen.print(table)


def _show_vocabulary(screen: Console, vocabulary: dict[str, Any]) -> None:
    screen.print(f"{vocabulary['types']:,} different tokens to learn from")
    for split, share in vocabulary["unknown_share"].items():
        if share is not None:
            screen.print(f"  {share:.2%} of the tokens of {split}'s responses are not among them")


def _show_samples(screen: Console, samples: list[dict[str, Any]]) -> None:
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


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
