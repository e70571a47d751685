"""What can go wrong for a user, told apart by what the command line does about it."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Something typed is wrong: a name, a key, a value, a path. Exit code 2, no traceback."""


class DataError(ValueError):
    """A file does not hold what it should; the message names file, row and fix. Exit code 1."""


class ServiceError(RuntimeError):
    """A process or a server does not do what it should; the message says what it said. Exit code 1,
    no traceback."""


def unknown_choice(kind: str, given: object, choices: Iterable[str]) -> str:
    """`unknown emotion 'happi': did you mean 'happy'?`, or the choices where nothing is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(str(given), choices, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(choices)}"
    return f"unknown {kind} '{given}': {hint}"
