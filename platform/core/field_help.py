"""Help texts of settings, read from the docstrings of dataclass fields."""

import ast
import dataclasses
import inspect
import textwrap


def field_help(dataclass: type) -> dict[str, str]:
    """Return the docstring of each field, inherited ones too, from the source code."""
    texts: dict[str, str] = {}
    for cls in reversed(dataclass.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    texts[key] = " ".join(words.split())
    return texts
