"""Help texts out of the code they are about."""

import ast
import dataclasses
import inspect
import textwrap


def field_help(dataclass: type) -> dict[str, str]:
    """The docstring of each field, its own or inherited; Python keeps them in the source only."""
    found: dict[str, str] = {}
    for one in reversed(dataclass.__mro__):
        if not dataclasses.is_dataclass(one):
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    found[key] = " ".join(words.split())
    return found
