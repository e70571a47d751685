"""Errors that a user can act on, by the exit code that the command line gives them."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Wrong user input: a name, a key, a value, a path. Exit code 2, no traceback."""


class DataError(ValueError):
    """Wrong content of a file; the message names file, row and fix. Exit code 1."""


class ServiceError(RuntimeError):
    """A process or a server failed; the message has its output. Exit code 1, no traceback."""


def unknown_choice(kind: str, value: object, choices: Iterable[str]) -> str:
    """Return an error message such as `unknown emotion 'happi': did you mean 'happy'?`.

    It lists the choices where none is similar.
    """
    choices = sorted(choices)
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(choices)}"
    return f"unknown {kind} '{value}': {hint}"
