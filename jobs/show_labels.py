"""`attune show transfer`, `predictor` and `control`: the tables of MEED2's paper."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import (
    Json,
    console,
    console_evaluation_progress,
    console_progress,
    print_json,
)
from attune.jobs.show import app
from attune.jobs.tables import format_table_metric, table
from attune.platform.core.errors import UsageError, unknown_choice_error

__all__ = ["app"]

TRANSFERRED = ("perplexity", "distinct_1", "distinct_2", "sentence_similarity")
SCORES = ("accuracy", "weighted_precision", "weighted_recall", "weighted_f1")
RANDOM = "random"


@app.command()
def transfer(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs that answer.")],
    data: Annotated[
        list[str],
        typer.Option(metavar="bundled|DIR", help="Prepared data. May be given several times."),
    ],
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    decode: options.Decode = None,
    settings: options.DecodingOverrides = None,
    sentence_similarity: Annotated[
        str | None,
        typer.Option(
            metavar="minilm|DIR", help="Also compute the similarity of sentence embeddings."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate several runs on several corpora without training on them (MEED2's Table 3).

    Perplexity is per word, also for runs with subwords, so that runs can be compared. Answers and
    metrics are stored as by `attune evaluate`.

    Examples:

    - `attune show transfer meed2@latest meed2-no-emotion@latest --data data/ed --data data/edos`
    """
    from attune.platform.evaluation.evaluate_run import (
        Conditions,
        evaluate_run,
        load_measures,
        log_result,
        predicted_labels,
    )

    conditions = Conditions(
        decoding=options.parse_decoding_options(decode, options.parse_override_options(settings))
    )
    measures = load_measures(sentence_encoder=sentence_similarity)
    runs = [options.parse_run_option(name) for name in names]
    for run in runs:
        if predicted_labels(run):
            raise UsageError(f"'{run.name}' does not answer: name runs that do")
    rows: list[dict[str, Any]] = []
    for run in runs:
        for each in data:
            with console_evaluation_progress() as track:
                result = evaluate_run(
                    run, split, data=each, conditions=conditions, measures=measures, track=track
                )
            log_result(run, result, {"data": each} if each != run.data["folder"] else None)
            metrics = {
                name: value for name, value in result["metrics"].items() if name in TRANSFERRED
            }
            rows.append({"run": run.name, "data": each, **metrics})
    columns = [name for name in TRANSFERRED if name in rows[0]]
    rendered = table("", "run", "data", *columns, numbers=tuple(columns))
    for row in rows:
        rendered.add_row(
            row["run"], row["data"], *(format_table_metric(name, row[name]) for name in columns)
        )
    console(as_json).print(rendered)
    if as_json:
        print_json({"split": split, "rows": rows})


@app.command()
def predictor(
    names: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs of MEED2.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="bundled|DIR", help="Prepared data.", show_default="the first run's data"
        ),
    ] = None,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    as_json: Json = False,
) -> None:
    """Measure the label predictions of runs, next to guessing (Table 4 of MEED2's paper).

    Precision, recall and F1 are means over the labels, weighted by their frequency. The last row
    guesses each of the 41 labels with the same probability.

    Examples:

    - `attune show predictor meed2@latest meed2-joint@latest`
    """
    from attune.platform.data.dataset_folder import read_dataset_samples
    from attune.platform.data.prepare import find_prepared_data
    from attune.platform.evaluation import control

    runs = [options.parse_run_option(name) for name in names]
    samples = read_dataset_samples(find_prepared_data(data or runs[0].data["folder"]), split)
    rows = [{"run": run.name, **control.measure_label_predictions(run, samples)} for run in runs]
    rows.append({"run": RANDOM, **control.measure_random_guesses(samples)})
    rendered = table("", "run", *SCORES, numbers=SCORES)
    for row in rows:
        rendered.add_row(str(row["run"]), *(f"{row[name]:.4f}" for name in SCORES))
    console(as_json).print(rendered)
    if as_json:
        print_json({"split": split, "rows": rows})


@app.command()
def control(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of MEED2 with a labeller.")],
    labels: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL,...", help="The labels to request.", show_default="the eight intents"
        ),
    ] = None,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    count: Annotated[
        int | None,
        typer.Option(min=1, help="The number of contexts.", show_default="all of the split"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the contexts.")] = 0,
    decode: options.Decode = None,
    settings: options.DecodingOverrides = None,
    as_json: Json = False,
) -> None:
    """Request intents and measure how many answers are classified as the requested one.

    The second column is the share of answers to the same contexts without a request. The run's own
    labeller classifies the answers.

    Examples:

    - `attune show control meed2@latest`
    - `attune show control meed2@latest --labels consoling,questioning,joyful --count 100`
    """
    from attune.platform.data.labels import INTENTS, LABELS
    from attune.platform.evaluation.control import controllability
    from attune.platform.evaluation.figures import draw_samples
    from attune.platform.runs.model import load_model

    asked = [each.strip() for each in labels.split(",")] if labels else list(INTENTS)
    for label in asked:
        if label not in LABELS:
            raise UsageError(unknown_choice_error("label", label, LABELS))
    decoding = options.parse_decoding_options(decode, options.parse_override_options(settings))
    run = options.parse_run_option(name)
    samples = draw_samples(run, split, count, seed)
    with console_progress("answers") as bar:
        task = bar.add_task(run.name, total=(1 + len(asked)) * samples.height)
        shares = controllability(
            load_model(run.model), samples, asked, decoding, lambda done: bar.advance(task, done)
        )
    rendered = table(
        "", "label", "requested", "not requested", numbers=("requested", "not requested")
    )
    for each in shares:
        rendered.add_row(each.label, f"{each.asked:.1%}", f"{each.unasked:.1%}")
    mean = {
        kind: sum(getattr(each, kind) for each in shares) / len(shares)
        for kind in ("asked", "unasked")
    }
    rendered.add_row("mean", f"{mean['asked']:.1%}", f"{mean['unasked']:.1%}")
    console(as_json).print(rendered)
    if as_json:
        print_json(
            {"contexts": samples.height, "labels": [asdict(e) for e in shares], "mean": mean}
        )
