"""Names are the field's usual words, and `platform/` knows no variant by name."""

import ast
import re
from pathlib import Path

import pytest

from attune.models import all_variants

ROOT = Path(__file__).parents[2]
FOLDERS = ("platform", "models", "jobs", "ui", "tests")
FORBIDDEN = {
    "told", "felt", "heard", "begun", "standing", "keeper", "teller", "climber", "asker", "likened",
    "look", "looks", "looked", "found", "made", "given", "said",
}  # fmt: skip
EXCEPTIONS: dict[str, str] = {}
"""Identifier -> the reason why it may contain a forbidden word."""


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_names(tree):
    """Every identifier that a module defines: not those of builtins or libraries that it uses."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


def words(name):
    """`TrialProgress` and `trial_progress` are both of `trial` and `progress`."""
    return {
        word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name.replace("_", " "))
    }


def private_words(tree):
    return {name for name in defined_names(tree) if words(name) & FORBIDDEN} - set(EXCEPTIONS)


def documentation(tree):
    """The docstrings of a module, and the texts below fields that document them."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def help_texts(tree):
    """The constants below `help=` and `epilog=` of the command line."""
    return {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in ("help", "epilog")
        for part in ast.walk(node.value)
    }


def variant_names(tree, skip=frozenset()):
    """The names of variants among a module's strings and identifiers, with their lines."""
    known = set(all_variants())
    identifiers = {name.replace("-", "_") for name in known}
    skip = skip | documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            mentioned = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", node.value))
            if node.value in known or mentioned & {name for name in known if "-" in name}:
                yield f"{node.lineno}: {node.value!r}"
    yield from sorted(set(defined_names(tree)) & identifiers)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_ordinary_words(folder):
    wrong = {str(path.relative_to(ROOT)): private_words(parse(path)) for path in sources(folder)}
    assert not {path: names for path, names in wrong.items() if names}


def test_exceptions_are_few_and_needed():
    defined = {name for path in sources(*FOLDERS) for name in defined_names(parse(path))}
    assert len(EXCEPTIONS) < 10
    assert set(EXCEPTIONS) <= defined


@pytest.mark.parametrize(
    "code",
    [
        "class LossKeeper: ...",
        "def told(): ...",
        "def f(*, given=1): ...",
        "made = 1",
        "self.looked_at = 1",
        "for found in range(3): ...",
        "import json as said",
    ],
)
def test_a_private_word_is_noticed(code):
    assert private_words(ast.parse(code))


def test_words_of_libraries_and_longer_words_are_no_offence():
    assert not private_words(ast.parse("x = path.look()\nlookup = foundation = 1"))


def test_platform_knows_no_variant_by_name():
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in sources("platform")
        if (names := list(variant_names(parse(path))))
    }
    assert not wrong


def test_commands_name_variants_only_in_demo_bench_and_help():
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in sources("jobs")
        if path.name != "demo.py" and "bench" not in path.parts
        for tree in [parse(path)]
        if (names := list(variant_names(tree, help_texts(tree))))
    }
    assert not wrong


@pytest.mark.parametrize(
    "code", ['x = "mime"', 'raise E(f"name a run of {x} or intent-classifier")', "moel = 1"]
)
def test_a_variant_by_name_is_noticed(code):
    assert list(variant_names(ast.parse(code)))


def test_docstrings_may_cite_a_variant():
    assert not list(variant_names(ast.parse('def f():\n    """As in `mime`."""')))


def test_files_are_short():
    """At most 500 lines, except where one paper is one file."""
    papers = {"emotion_cause.py", "empdg.py", "mime.py", "dual_emp.py", "meed2.py"}
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(*FOLDERS, "infra")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 500
        and not (path.parent.name == "models" and path.name in papers)
    }
    assert not long
