"""`attune respond`: answer a conversation with one or several runs."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from attune.jobs import options
from attune.jobs.console import Json, console, console_progress, print_json

SHOWN_EMOTIONS = 3


def respond(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs, by name, MLflow id or `variant@latest`."),
    ],
    context: Annotated[
        list[str],
        typer.Option(
            metavar="TEXT",
            help="A turn of the conversation; repeat the option for each. Turns alternate between "
            "speaker and listener; the last one is the speaker's.",
        ),
    ],
    decode: options.Decode = None,
    settings: options.DecodingOverrides = None,
    control: options.Controls = None,
    as_json: Json = False,
) -> None:
    """Answer a conversation with one or several runs, and show the emotion that each predicts.

    Examples:

    - `attune respond multi-trs@latest --context "I lost my job today."`
    - `attune respond transformer@latest multi-trs@latest --context "My dog ran away."`
    - `attune respond mine --context "Hello." --context "Hi, how are you?" --context "Alone."`
    - `attune respond mine --context "I won!" --decode nucleus --set top_p=0.8 --set seed=7`
    - `attune respond mime@latest --context "I won!" --control stochasticity=on --control seed=3`
    """
    decoding = options.parse_decoding_options(decode, options.parse_override_options(settings))
    runs = [options.parse_run_option(name) for name in names]
    controls = options.parse_control_options(control, runs)
    from attune.platform.serving.responder import Responder

    answers: list[dict[str, Any]] = []
    with console_progress("answers") as bar:
        for run in bar.track(runs, description="answering"):
            [answer] = Responder(run.model).respond([context], decoding, controls)
            answers.append(
                {
                    "run": run.name,
                    "variant": run.variant,
                    "answer": answer.text,
                    "seconds": answer.seconds,
                    "explanation": dataclasses.asdict(answer.explanation),
                }
            )
    _print_respond_answers(console(as_json), context, answers)
    if as_json:
        print_json({"context": context, "answers": answers})


def _print_respond_answers(
    screen: Console, context: list[str], answers: list[dict[str, Any]]
) -> None:
    width = max(len("listener"), *(len(answer["run"]) for answer in answers))
    for turn, text in enumerate(context):
        screen.print(f"{('speaker', 'listener')[turn % 2]:>{width}}: {text}", markup=False)
    for answer in answers:
        text = answer["answer"] or "(nothing)"
        screen.print(f"{answer['run']:>{width}}: {text}", markup=False, style="green")
        for line in _respond_explanation_lines(answer["explanation"]):
            screen.print(f"{'':>{width}}  {line}", markup=False, style="dim")


def _respond_explanation_lines(explanation: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that explain an answer; the page also shows values of single words."""
    parts = {
        "emotion:": "emotion",
        "response label:": "response_label",
        "emotion group:": "groups",
        "listeners:": "listeners",
        "consensus:": "consensus",
    }
    for label, part in parts.items():
        if explanation[part]:
            yield f"{label} {_format_likeliest_to_respond(explanation[part])}"
    if explanation["imagined"]:
        yield f"reconstructed context: {explanation['imagined']}"
    if explanation["emotion_words"]:
        yield f"emotion words: {', '.join(explanation['emotion_words'])}"
    for group, probs in (explanation["response_emotion"] or {}).items():
        yield f"response emotion, {group} group: {_format_likeliest_to_respond(probs)}"


def _format_likeliest_to_respond(probs: dict[str, float]) -> str:
    best = sorted(probs, key=probs.__getitem__, reverse=True)[:SHOWN_EMOTIONS]
    return ", ".join(f"{name} {probs[name]:.0%}" for name in best)
