"""What several commands ask for in the same words: settings, decoding, runs that can answer."""

import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:  # torch takes a second, which `--help` should not
    from attune.models.decoding import Decoding
    from attune.platform.runs.record import Run

Decode = Annotated[
    str | None,
    typer.Option(
        metavar="greedy|beam|topk|nucleus",
        help="How words are chosen: the likeliest, by beam search, or drawn from the likely ones.",
        show_default="greedy",
    ),
]
DecodingChanges = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of decoding: max_tokens, beams, length_penalty, block_ngrams, top_k, "
        "top_p, temperature or seed. May be given several times.",
    ),
]

Controls = Annotated[
    list[str] | None,
    typer.Option(
        "--control",
        metavar="KEY=VALUE",
        help="What the model may be told of the answer, such as MIME's `stochasticity=on`. May be "
        "given several times.",
    ),
]

Threshold = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="From which probability on an annotator's mark is a cause, or above which a text is "
        "kept with a classifier's emotion.",
        show_default="0.5, or 0.6",
    ),
]


def parse_overrides(texts: Iterable[str] | None, option: str = "--set") -> dict[str, str]:
    """`key=value` as typed after an option; of a key given twice the last counts."""
    overrides = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(
                f"{option} {text}: write it as KEY=VALUE, without blanks around the '='"
            )
        overrides[key.strip()] = value.strip()
    return overrides


def minutes(value: float | None) -> float | None:
    """Check what follows `--max-minutes`; Typer's own `min` would admit 0."""
    if value is not None and not value > 0:  # neither is NaN
        raise UsageError(
            f"--max-minutes {value:g}: expected a number above 0; leave it out for no limit"
        )
    return value


def seeds(text: str) -> list[int]:
    """What follows `--seeds`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text}: write them as 1,2,3") from None
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise UsageError(f"--seeds {text}: different numbers from 0 on are expected")
    return numbers


def decoding(decode: str | None, settings: Mapping[str, str]) -> "Decoding":
    """How answers are to be made, checked."""
    from attune.models.decoding import Decoding
    from attune.platform.core.settings import apply_overrides

    methods = typing.get_args(typing.get_type_hints(Decoding)["method"])
    method = decode or settings.get("method") or Decoding.method
    if method not in methods:
        raise UsageError(unknown_choice("way of decoding", method, methods))
    chosen: Decoding = apply_overrides(Decoding(), {**settings, "method": method})
    return chosen


def controls(texts: Iterable[str] | None, runs: "Iterable[Run]") -> dict[str, str]:
    """What follows `--control`, which each of the runs must know."""
    from attune.platform.serving.responder import check_controls, run_controls

    chosen = parse_overrides(texts, "--control")
    for run in runs:
        check_controls(run.variant, run_controls(run), chosen)
    return chosen


def trained_run(text: str) -> "Run":
    """The run that a user names, which must have a model already."""
    from attune.platform.runs.record import find_run

    run = find_run(text)
    if not run.model.is_dir():
        raise UsageError(f"run '{run.name}' has no model yet: it is {run.status}")
    return run
