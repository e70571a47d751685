"""Errors that a user can act on, by the exit code that the command line gives them."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Wrong user input: a name, a key, a value, a path. Exit code 2, no traceback."""


class DataError(ValueError):
    """Wrong content of a file; the message names file, row and fix. Exit code 1."""


class ServiceError(RuntimeError):
    """A process or a server failed; the message has its output. Exit code 1, no traceback."""


def unknown_choice_error(
    kind: str, value: object, choices: Iterable[str], otherwise: str | None = None
) -> str:
    """Return an error message such as `unknown emotion 'happi': did you mean 'happy'?`.

    Where no choice is similar, it ends with `otherwise`, or else with a list of all choices.
    """
    choices = sorted(map(str, choices))
    near = _similar_choices(str(value), choices)
    if near:
        hint = f"did you mean {' or '.join(repr(choice) for choice in near)}?"
    else:
        hint = otherwise or f"choose from {', '.join(choices)}"
    return f"unknown {kind} '{value}': {hint}"


def _similar_choices(value: str, choices: list[str]) -> list[str]:
    """Return the choices that contain a value, or else the one with the most similar spelling."""
    containing = [choice for choice in choices if len(value) > 2 and value in choice]
    return containing[:3] or difflib.get_close_matches(value, choices, n=1)
