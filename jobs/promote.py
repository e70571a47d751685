"""`attune promote`: make a run the champion if it is better than the current one."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from attune.jobs import options
from attune.jobs.console import Json, console, print_json
from attune.jobs.evaluate import evaluate_as_command
from attune.jobs.tables import format_table_metric, table
from attune.platform.core.errors import UsageError

if TYPE_CHECKING:  # torch and MLflow take seconds, which `--help` should not
    from attune.platform.evaluation.promotion import Decision
    from attune.platform.runs.record import Run

VALID, PERPLEXITY = "valid", "perplexity"


def promote(
    name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, by name, MLflow id or `variant@latest`.")
    ],
    split: Annotated[
        str, typer.Option(metavar="valid|test", help="Split on which both are compared.")
    ] = VALID,
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Metric of `attune evaluate` to compare by, such as perplexity, emotion_accuracy "
            "or bleu, which are tested for significance, or distinct_2, which is not.",
        ),
    ] = PERPLEXITY,
    force: Annotated[
        bool, typer.Option("--force", help="Promote the run whatever the result.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a run with the champion of all runs, and make it the champion if it is better.

    In MLflow's registry the run becomes the `candidate` of the model `attune`. It is compared with
    the current `champion` by greedy answers to the same split of the same data, and is evaluated
    first if necessary. If both have answers, the difference is tested by approximate randomization
    over conversations and must be significant (p < 0.05). The reason is shown and stored in the
    registry.

    Select on valid, and use test only for the final comparison.
    `mlflow.pyfunc.load_model("models:/attune@champion")` loads the champion; `attune runs` marks
    champion and candidate.

    Examples:

    - `attune promote multi-trs@latest`
    - `attune promote mine --metric emotion_accuracy`
    - `attune promote mine --split test --force --json`
    """
    from attune.platform.evaluation import promotion

    promotion.check_metric(metric)
    run = options.parse_run_option(name)
    if run.run_id is None:
        raise UsageError(f"run '{run.name}' is not logged to MLflow, which has the champion")
    _ensure_answers_to_promote(run, split)
    decision = promotion.promote(run, split=split, metric=metric, force=force)
    screen = console(as_json)
    _print_promote_decision(screen, decision)
    if as_json:
        print_json(decision.to_json())


def _ensure_answers_to_promote(run: "Run", split: str) -> None:
    """Evaluate a run on a split unless it has answers to it."""
    from attune.platform.evaluation.evaluate_run import predicted_labels
    from attune.platform.evaluation.promotion import answers_name

    if predicted_labels(run):
        raise UsageError(f"'{run.name}' is a {run.variant}: expected a run of a dialogue model")
    if not (run.folder / "answers" / answers_name(split)).is_file():
        evaluate_as_command(run, split)


def _print_promote_decision(screen: Console, decision: "Decision") -> None:
    rendered = table("", "run", "", decision.metric.replace("_", " "), numbers=(decision.metric,))
    before = decision.champion
    roles = ("champion", "former champion") if decision.promoted else ("candidate", "champion")
    for judged, role in zip((decision.candidate, before), roles, strict=True):
        if judged is not None:
            rendered.add_row(
                escape(judged.name), role, format_table_metric(decision.metric, judged.value)
            )
    screen.print(rendered)
    done = "promoted" if decision.promoted else "not promoted"
    screen.print(f"{done}: {decision.reason}", markup=False)
