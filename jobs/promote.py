"""`attune promote`: is this run better than the best so far? Then it takes its place."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from attune.jobs import options
from attune.jobs.console import Json, console, print_json
from attune.jobs.evaluate import evaluate_and_log
from attune.jobs.tables import format_metric, table
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
        str, typer.Option(metavar="valid|test", help="What both are compared on.")
    ] = VALID,
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What they are compared by: a metric of `attune evaluate`, such as perplexity, "
            "emotion_accuracy or bleu, which are tested, or distinct_2, which is not.",
        ),
    ] = PERPLEXITY,
    force: Annotated[bool, typer.Option("--force", help="Promote it whatever comes out.")] = False,
    as_json: Json = False,
) -> None:
    """Compare a run with the champion of all runs, and make it champion if it is better.

    In MLflow's registry the run becomes the `candidate` of the model `attune`. It is compared with
    the present `champion` on the same split of the same data, by greedy answers; a run that has not
    been evaluated there is evaluated first. Where both have answers the difference is tested by
    approximate randomisation over conversations, and only one that is not chance (p < 0.05) counts.
    The reason is shown, and kept in the registry.

    Choose on valid, and look at test when the choice is made. `mlflow.pyfunc.load_model(
    "models:/attune@champion")` loads whoever is champion; `attune runs` marks the two.

    Examples:

    - `attune promote multi-trs@latest`
    - `attune promote mine --metric emotion_accuracy`
    - `attune promote mine --split test --force --json`
    """
    from attune.platform.evaluation import promotion

    promotion.check_metric(metric)
    run = options.find_trained_run(name)
    if run.run_id is None:
        raise UsageError(f"run '{run.name}' is not tracked by MLflow, which keeps the champion")
    _ensure_answers(run, split)
    decision = promotion.promote(run, split=split, metric=metric, force=force)
    screen = console(as_json)
    _show(screen, decision)
    if as_json:
        print_json(decision.to_json())


def _ensure_answers(run: "Run", split: str) -> None:
    """Answers to the split must be there."""
    from attune.platform.evaluation.evaluate_run import predicted_labels
    from attune.platform.evaluation.promotion import answers_name

    if predicted_labels(run):
        raise UsageError(f"'{run.name}' does not answer: only runs that do can be promoted")
    if not (run.folder / "answers" / answers_name(split)).is_file():
        evaluate_and_log(run, split)


def _show(screen: Console, decision: "Decision") -> None:
    rendered = table("", "run", "", decision.metric.replace("_", " "), numbers=(decision.metric,))
    before = decision.champion
    roles = ("champion", "until now") if decision.promoted else ("candidate", "champion")
    for judged, role in zip((decision.candidate, before), roles, strict=True):
        if judged is not None:
            rendered.add_row(
                escape(judged.name), role, format_metric(decision.metric, judged.value)
            )
    screen.print(rendered)
    done = "promoted" if decision.promoted else "not promoted"
    screen.print(f"{done}: {decision.reason}", markup=False)
