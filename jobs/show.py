"""`attune show`: figures and tables of the papers, from trained runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from attune.jobs import options
from attune.jobs.console import Json, console, console_progress, print_json
from attune.jobs.tables import table
from attune.platform.core.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Draw the papers' figures from trained runs.")
TURN_LENGTH = 60
"""The maximum number of characters of a turn in a table."""


@app.command()
def embeddings(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs of MIME, such as with and without mimicry."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("emotion-embeddings.png"),
    as_json: Json = False,
) -> None:
    """Draw the emotions' embeddings of MIME's runs side by side (Figure 3 of its paper).

    The picture has two principal components, coloured by group. The separation is the mean
    silhouette of the two groups in the full space: 1 if they are separate, 0 if they overlap.
    Picture and separation are logged to each run.

    Examples:

    - `attune show embeddings mime@latest mime-no-mimicry@latest --out figure-3.png`
    """
    from attune.platform.evaluation.figures import draw_embeddings

    summaries = draw_embeddings([options.parse_run_option(name) for name in names], out)
    screen = console(as_json)
    for summary in summaries:
        screen.print("{run}: separation {separation:.3f}".format(**summary), markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "runs": summaries})


@app.command()
def stochasticity(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of MIME.")],
    count: Annotated[int, typer.Option(min=1, help="Contexts to answer.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=99, help="Random seed.")] = 0,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    as_json: Json = False,
) -> None:
    """Print answers with and without stochasticity side by side (Table 7 of MIME's paper).

    Without it, the response emotion is that of the latent's mean; with it, the emotion is sampled,
    with a separate seed for each context.

    Examples:

    - `attune show stochasticity mime@latest`
    - `attune show stochasticity mime@latest --count 20 --seed 3 --json`
    """
    from attune.platform.evaluation.figures import draw_samples
    from attune.platform.serving.responder import Responder

    run = options.parse_run_option(name)
    controls = options.parse_control_options([f"seed={seed}", "stochasticity=off"], [run])
    contexts = draw_samples(run, split, count, seed)["context"].to_list()
    responder = Responder(run.model)
    answers: dict[str, list[str]] = {}
    with console_progress("answers") as bar:
        for switch in bar.track(("off", "on"), description="answering"):
            chosen = {**controls, "stochasticity": switch}
            answers[switch] = [a.text for a in responder.respond(contexts, controls=chosen)]
    rows = list(zip(contexts, answers["off"], answers["on"], strict=True))
    rendered = table("", "the speaker's last turn", "without stochasticity", "with")
    for context, off, on in rows:
        rendered.add_row(context[-1][:TURN_LENGTH], off, on)
    differ = sum(off != on for _, off, on in rows)
    screen = console(as_json)
    screen.print(rendered)
    screen.print(f"\n{differ} of {len(contexts)} answers differ")
    if as_json:
        described = [{"context": c, "without": off, "with": on} for c, off, on in rows]
        print_json({"run": run.name, "answers": described, "differing": differ / len(contexts)})


@app.command()
def attention(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of EmpDG.")],
    context: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT", help="A turn of the conversation; repeat the option for each turn."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("attention.png"),
    as_json: Json = False,
) -> None:
    """Draw the attention of each answer word to the context and its emotion words (Table 4 of
    EmpDG's paper), and log the picture to the run.

    Examples:

    - `attune show attention empdg@latest --context "I got a new job!" --out table-4.png`
    """
    from attune.platform.evaluation.figures import check_picture, draw_attention
    from attune.platform.serving.responder import Responder

    check_picture(out)
    run = options.parse_run_option(name)
    [answer] = Responder(run.model).respond([context])
    if answer.explanation.attention is None:
        raise UsageError(
            f"'{run.name}' is a {run.variant}, whose answers show no attention: name a run of "
            f"another variant ('attune show attention --help')"
        )
    draw_attention(run, answer.explanation, out)
    screen = console(as_json)
    screen.print(f"{run.name}: {answer.text}", markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        explained = dataclasses.asdict(answer.explanation)
        print_json({"picture": str(out), "answer": answer.text, "explanation": explained})


@app.command()
def critics(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of EmpDG with its critics.")],
    count: Annotated[int, typer.Option(min=1, help="Contexts to answer.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the contexts.")] = 0,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    as_json: Json = False,
) -> None:
    """Print the scores of EmpDG's critics for its answers and for human responses.

    The contexts are those whose response has a reply. Scores can only be compared within the same
    critic and context.

    Examples:

    - `attune show critics empdg@latest --count 20`
    """
    import polars as pl

    from attune.platform.evaluation.figures import draw_samples
    from attune.platform.serving.responder import Responder

    run = options.parse_run_option(name)
    responder = Responder(run.model)
    samples = draw_samples(run, split, count, seed, pl.col("next_turn").is_not_null())
    rows = responder.respond_with_scores(samples)
    if not rows[0]["scores"]:
        raise UsageError(
            f"'{run.name}' is a {run.variant}, which has no critics: name a run of another variant "
            f"('attune show critics --help')"
        )
    screen = console(as_json)
    names = tuple(rows[0]["scores"])
    rendered = table("", "the speaker's last turn", "by", "response", *names, numbers=names)
    for row in rows:
        last = row["context"][-1][:TURN_LENGTH]
        person = (f"{row['person_scores'][each]:.2f}" for each in names)
        rendered.add_row(last, "a person", row["response"], *person)
        rendered.add_row(
            "", run.name, row["answer"], *(f"{row['scores'][each]:.2f}" for each in names)
        )
    screen.print(rendered)
    if as_json:
        print_json({"run": run.name, "answers": rows})


@app.command()
def calibration(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `emotion-classifier` or `intent-classifier`."),
    ],
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("calibration.png"),
    as_json: Json = False,
) -> None:
    """Draw accuracy against confidence of a classifier (a reliability diagram).

    There is a curve for contexts and one for responses, each with and without the temperature that
    is fitted on valid. On the diagonal, probabilities are calibrated. Picture and calibration
    errors are logged to the run.

    Examples:

    - `attune show calibration emotion-classifier@latest --out calibration.png`
    """
    from attune.platform.evaluation.figures import draw_calibration

    run = options.parse_run_option(name)
    errors = draw_calibration(run, split, out)
    screen = console(as_json)
    for kind, error in errors.items():
        screen.print(f"{kind.replace('_', ', ')}: calibration error {error:.2%}", markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "run": run.name, "calibration_error": errors})


@app.command()
def emotions(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="A run that predicts emotions.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="Another run on the same data.")],
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="The split.")] = "test",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("emotions.png"),
    as_json: Json = False,
) -> None:
    """Draw and print the accuracy of two runs for each emotion (Figure 4 of Dual-Emp's paper).

    The spread is the standard deviation of the accuracy over the emotions. Predictions of an
    earlier `attune evaluate` are reused. The picture is logged to both runs.

    Examples:

    - `attune show emotions sing-emp-paired@latest dual-emp-paired@latest --out figure-4.png`
    """
    from attune.platform.evaluation.figures import draw_emotion_accuracies

    runs = (options.parse_run_option(first), options.parse_run_option(second))
    summaries, rows = draw_emotion_accuracies(runs, split, out)
    numbers = ("samples", *(run.name for run in runs), "difference")
    rendered = table("", "emotion", *numbers, numbers=numbers)
    for row in rows:
        accuracies = (f"{row['first']:.1%}", f"{row['second']:.1%}")
        difference = f"{row['second'] - row['first']:+.1%}"
        rendered.add_row(row["emotion"], f"{row['samples']:,}", *accuracies, difference)
    screen = console(as_json)
    screen.print(rendered)
    for summary in summaries:
        line = "{run}: accuracy {accuracy:.2%}, spread over emotions {spread:.2%}"
        screen.print(line.format(**summary), markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "runs": summaries, "emotions": rows})


@app.command()
def labels(
    data: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder from `attune annotate emotions`.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("labels.png"),
    as_json: Json = False,
) -> None:
    """Draw the emotions and intents that end the dialogues of a corpus (Figure 2 of MEED2's paper).

    Each dialogue counts with the most likely label of its last utterance. A second plot shows the
    emotionality of the dialogues.

    Examples:

    - `attune show labels data/os-emotional --out figure-2.png`
    """
    from attune.platform.evaluation.figures import draw_labels

    count, shares = draw_labels(data, out)
    rendered = table("", "label", "share", numbers=("share",))
    for label, share in sorted(shares.items(), key=lambda item: -item[1]):
        rendered.add_row(label, f"{share:.2%}")
    screen = console(as_json)
    screen.print(rendered)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "dialogs": count, "labels": shares})
