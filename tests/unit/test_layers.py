"""import-linter keeps the layers of `pyproject.toml`, and notices imports that go up."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("platform", "models", "jobs", "ui", "infra")


@pytest.fixture
def tree(tmp_path):
    """A copy of the source, laid out as the import package `attune`."""
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            tmp_path / "attune" / folder,
            ignore=shutil.ignore_patterns("__pycache__", "material"),
        )
    return tmp_path


def lint(tree):
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(
        [*command, "--config", ROOT / "pyproject.toml"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def plant(tree, file, line):
    path = tree / "attune" / file
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")


def test_the_source_keeps_its_layers(tree):
    outcome = lint(tree)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "3 kept, 0 broken" in outcome.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("platform/text/vocabulary.py", "from attune.ui import app", "platform uses models BROKEN"),
        (
            "platform/core/home.py",
            "def late() -> None:\n    from attune.platform.runs import record",
            "Layers inside platform/ BROKEN",
        ),
        (
            "platform/text/vocabulary.py",
            "from attune.platform.text import word_vectors",
            "No cycles inside platform/ BROKEN",
        ),
    ],
    ids=["between layers", "inside platform, in a function", "a cycle inside a package"],
)
def test_an_import_that_goes_up_is_noticed(tree, file, line, contract):
    plant(tree, file, line)
    outcome = lint(tree)
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    assert contract in outcome.stdout


def test_no_import_is_exempt():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert not [each for each in contracts["contracts"] if "ignore_imports" in each]
