"""Options and arguments that several commands share."""

import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.data.sources import AUTO, READERS

if TYPE_CHECKING:  # torch takes a second to import, which would slow down `--help`
    from attune.models.decoding import Decoding
    from attune.platform.runs.record import Run

Decode = Annotated[
    str | None,
    typer.Option(
        metavar="greedy|beam|topk|nucleus",
        help="Decoding method.",
        show_default="greedy",
    ),
]


def _key_value_option(name: str, text: str) -> Any:
    """Return an option of the form KEY=VALUE that can be given several times."""
    return typer.Option(name, metavar="KEY=VALUE", help=f"{text} Can be given several times.")


DecodingOverrides = Annotated[
    list[str] | None,
    _key_value_option(
        "--set",
        "A decoding setting: max_tokens, beams, length_penalty, block_ngrams, top_k, top_p, "
        "temperature or seed.",
    ),
]
Controls = Annotated[
    list[str] | None,
    _key_value_option(
        "--control",
        "A property of the answer that the variant lets you choose, such as MIME's "
        "`stochasticity=on`.",
    ),
]

Threshold = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Minimum probability for an annotator's label to count as a cause, or for a text to "
        "be kept with a classifier's emotion.",
        show_default="0.5, or 0.6",
    ),
]


OutFolder = Annotated[
    Path,
    typer.Option(metavar="DIR", help="The folder to write. It appears complete or not at all."),
]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="|".join((AUTO, *READERS)),
        help="The format of the files; `auto` recognises it.",
    ),
]


def copy_option(suffix: str) -> Any:
    """The option `--out` of a command that copies prepared data and adds columns to them."""
    return typer.Option(
        metavar="DIR",
        help="The folder to write. It appears complete or not at all.",
        show_default=f"the data's name with -{suffix}, beside it",
    )


def parse_override_options(texts: Iterable[str] | None, option: str = "--set") -> dict[str, str]:
    """Parse the KEY=VALUE texts of an option; the last value of a repeated key is used."""
    overrides = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {text}: expected KEY=VALUE, without blanks around the '='")
        overrides[key.strip()] = value.strip()
    return overrides


def check_minutes(value: float | None) -> float | None:
    """Check the value of `--max-minutes`; Typer's own `min` would accept 0."""
    if value is not None and not value > 0:  # also rejects NaN
        raise UsageError(
            f"--max-minutes {value:g}: expected a number above 0; leave it out for no limit"
        )
    return value


def parse_seeds_option(text: str) -> list[int]:
    """Parse the value of `--seeds`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--seeds {text}: expected numbers separated by commas, such as 1,2,3"
        ) from None
    if len(set(numbers)) != len(numbers) or min(numbers) < 0:
        raise UsageError(f"--seeds {text}: expected different numbers, none below 0")
    return numbers


def parse_decoding_options(decode: str | None, settings: Mapping[str, str]) -> "Decoding":
    """Return the decoding settings of `--decode` and `--set`, checked."""
    from attune.models.decoding import Decoding
    from attune.platform.core.settings import override_settings

    methods = typing.get_args(typing.get_type_hints(Decoding)["method"])
    method = decode or settings.get("method") or Decoding.method
    if method not in methods:
        raise UsageError(unknown_choice_error("decoding method", method, methods))
    chosen: Decoding = override_settings(Decoding(), {**settings, "method": method})
    return chosen


def parse_control_options(texts: Iterable[str] | None, runs: "Iterable[Run]") -> dict[str, str]:
    """Parse the values of `--control`, which every run must support."""
    from attune.platform.serving.responder import check_controls, run_controls

    chosen = parse_override_options(texts, "--control")
    for run in runs:
        check_controls(run.variant, run_controls(run), chosen)
    return chosen


def parse_run_option(text: str) -> "Run":
    """Return the run that a user names; one without a model is an error."""
    from attune.platform.runs.record import find_run

    run = find_run(text)
    if not run.model.is_dir():
        raise UsageError(f"run '{run.name}' has no model yet: it is {run.status}")
    return run
