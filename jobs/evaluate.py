"""`attune evaluate`: compute the metrics of a run on a split, or of answers in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs import options
from attune.jobs.console import Json, console, console_evaluation_progress, print_json
from attune.jobs.tables import format_table_metric, table
from attune.platform.core.errors import UsageError

if TYPE_CHECKING:  # torch and polars take seconds to import, which `--help` should not
    from attune.models.published import Figure
    from attune.platform.runs.record import Run

TEST, DEFAULT_PROFILE = "test", "attune"


def evaluate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run, by name, MLflow id or `variant@latest`.",
            show_default=False,
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File to score instead of a run: Parquet or JSON lines with `answer` and "
            "`response`, raw or tokenized.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="bundled|DIR", help="Prepared data.", show_default="the run's training data"
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="train|valid|test", help="Split to answer.", show_default=TEST),
    ] = None,
    decode: options.Decode = None,
    settings: options.DecodingOverrides = None,
    control: options.Controls = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Evaluate the best model of an earlier training stage, such as `generator` of "
            "EmpDG.",
            show_default="the last stage",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="attune|empdg|meed2",
            help="Protocol: attune evaluates all samples of a split, empdg leaves out the last "
            "listener turn of each conversation, meed2 computes perplexity with the true label.",
        ),
    ] = DEFAULT_PROFILE,
    bertscore: Annotated[
        str | None,
        typer.Option(
            metavar="minilm|DIR[:LAYER]",
            help="Also compute BERTScore with MiniLM or the encoder in a folder, at its last layer "
            "or at LAYER.",
        ),
    ] = None,
    embedding_metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also compute Embedding Average, Greedy and Extrema with these word vectors "
            "(GloVe's text format, optionally compressed).",
        ),
    ] = None,
    sentence_similarity: Annotated[
        str | None,
        typer.Option(
            metavar="minilm|DIR",
            help="Also compute sentence-embedding similarity, with MiniLM or the encoder in a "
            "folder.",
        ),
    ] = None,
    threshold: options.Threshold = None,
    as_json: Json = False,
) -> None:
    """Answer a split with a run and compute metrics, or compute metrics of answers in a file.

    The metrics are perplexity, emotion accuracy, BLEU and distinct-n; one that does not apply to a
    model is shown as `-`. The answers are written as Parquet to the run's folder, and the metrics
    are logged to the run in MLflow. --answers accepts such a file, and any other: perplexity and
    accuracy are computed if it has the columns `log_likelihood`, `emotion` and
    `predicted_emotion`. BERTScore is rescaled with random pairs of training responses; with
    --answers, those of --data.

    A run of an annotator marks causes instead, and is scored where the data have them. A run of a
    classifier predicts emotions of contexts and responses, or labels of utterances. Besides its
    accuracy, the calibration error is shown before and after temperature scaling (fitted on valid),
    and what --threshold would keep.

    Examples:

    - `attune evaluate multi-trs@latest`
    - `attune evaluate mine --split valid --decode beam --set beams=10`
    - `attune evaluate mine --data data/ed --decode topk --set top_k=5 --set seed=1`
    - `attune evaluate empdg@latest --profile empdg`
    - `attune evaluate meed2@latest --profile meed2`
    - `attune evaluate empdg@latest --stage generator`, before adversarial training
    - `attune evaluate mine --bertscore minilm --embedding-metrics glove.6B.300d.txt`
    - `attune evaluate mine --sentence-similarity minilm`
    - `attune evaluate --answers theirs.jsonl --json`
    - `attune evaluate cause-annotator@latest --data data/reccon --threshold 0.4`
    - `attune evaluate emotion-classifier@latest`
    - `attune evaluate intent-classifier@latest`
    """
    from attune.platform.evaluation import evaluate_run as evaluation
    from attune.platform.evaluation.evaluate_run import Conditions

    if (name is None) == (answers is None):
        raise UsageError("expected either a RUN or --answers FILE")
    run = None if name is None else options.parse_run_option(name)
    predicted = None if run is None else evaluation.predicted_labels(run)
    answering = {
        "--decode": decode, "--set": settings, "--control": control, "--stage": stage,
        "--profile": profile != DEFAULT_PROFILE,
    }  # fmt: skip
    comparing = {
        "--bertscore": bertscore, "--embedding-metrics": embedding_metrics,
        "--sentence-similarity": sentence_similarity,
    }  # fmt: skip
    if predicted is None and threshold is not None:
        raise UsageError("--threshold is for runs of an annotator or a classifier")
    if run is None:
        of_runs = {"--data": data and not bertscore, "--split": split, **answering}
        _reject_evaluate_options(of_runs, "is for a RUN, not for answers in a file")
    elif predicted is not None:
        does = "marks causes" if predicted == evaluation.CAUSES else "classifies texts"
        _reject_evaluate_options(
            answering | comparing, f"is for dialogue models: '{run.name}' {does}"
        )
    conditions = Conditions()
    if run is not None and predicted is None:
        conditions = Conditions(
            decoding=options.parse_decoding_options(
                decode, options.parse_override_options(settings)
            ),
            controls=options.parse_control_options(control, [run]),
            profile=profile,
            stage=stage,
        )
    measures = evaluation.load_measures(bertscore, embedding_metrics, sentence_similarity)
    with console_evaluation_progress() as track:
        if run is None:
            assert answers is not None
            result = evaluation.evaluate_file(answers, measures, data, track)
        else:
            result = evaluation.evaluate_run(
                run, split or TEST, data=data, conditions=conditions, measures=measures,
                threshold=threshold, track=track, warn=console(True).print,
            )  # fmt: skip
    figures = {} if run is None else evaluation.published_figures(run, data, result)
    _print_evaluate_result(console(as_json), result, figures)
    if run is not None:
        evaluation.log_result(run, result, conditions.deviations())
    if as_json:
        print_json(result)


def evaluate_as_command(run: "Run", split: str) -> dict[str, Any]:
    """Evaluate a dialogue run by greedy answers, with a progress bar, and log the metrics."""
    from attune.platform.evaluation.evaluate_run import evaluate_run, log_result

    with console_evaluation_progress() as track:
        result = evaluate_run(run, split, track=track, warn=console(True).print)
    log_result(run, result)
    return result


def _reject_evaluate_options(typed: Mapping[str, Any], reason: str) -> None:
    """Raise UsageError for the first typed option; none of them applies."""
    for option, value in typed.items():
        if value:
            raise UsageError(f"{option} {reason}")


def _print_evaluate_result(
    screen: Console, result: dict[str, Any], published: Mapping[str, list["Figure"]]
) -> None:
    columns = ("metric", "value", "published") if published else ("metric", "value")
    rendered = table("", *columns, numbers=("value",))
    for metric, value in result["metrics"].items():
        printed = ", ".join(
            f"{format_table_metric(metric, each.value)} ({each.paper}, {each.source})"
            for each in published.get(metric, ())
        )
        row = (metric.replace("_", " "), format_table_metric(metric, value), printed)
        rendered.add_row(*row[: len(columns)])
    screen.print(rendered)
    notes = {each.note for figures in published.values() for each in figures if each.note}
    for note in sorted(notes):
        screen.print(f"published: {note}", style="dim", markup=False)
    screen.print(f"\n{result['signature']}", style="dim", markup=False)
    screen.print(f"answers: {result['answers']}", markup=False)
