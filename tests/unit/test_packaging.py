"""The folders at the root are one import package, and `platform` stays the standard library's."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from attune.platform.services.wheel import build

ROOT = Path(__file__).parents[2]
FOLDERS = ("platform", "models", "jobs", "ui", "infra")


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_platform_at_the_root_is_the_standard_library():
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform; print(platform.__file__); print(platform.system())"
    assert sysconfig.get_path("stdlib") in run(sys.executable, "-c", code, cwd=ROOT)


def test_editable_install_reads_the_folders():
    code = (
        "import attune.platform.core.errors as e, attune.models as m; print(e.__file__, m.__file__)"
    )
    actual = run(sys.executable, "-c", code, cwd=ROOT).split()
    assert actual == [str(ROOT / "platform/core/errors.py"), str(ROOT / "models/__init__.py")]


def test_every_folder_with_python_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    present = {
        "attune." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    # platform/ has no Python file of its own; as a package it lets `attune.platform` be located.
    assert present | {"attune.platform"} == set(settings["packages"])
    assert set(settings["package-dir"]) == {f"attune.{folder}" for folder in FOLDERS}


def test_models_import_only_torch():
    allowed = {"torch", "attune", "math", "dataclasses", "collections", "typing", "functools"}
    allowed |= {"abc", "importlib", "json"}  # VARIANTS are loaded on demand, and what is published
    for path in (ROOT / "models").rglob("*.py"):
        imported = set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert imported <= allowed, path


def test_only_ci_names_the_folder_of_real_data():
    folder = "shared" + "/data"
    tracked = run("git", "ls-files", cwd=ROOT).split()
    naming = [name for name in tracked if folder.encode() in (ROOT / name).read_bytes()]
    assert set(naming) <= {".ci/run"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy of what is tracked: a build leaves folders behind in its source.
    source = folder / "source"
    for name in run("git", "ls-files", cwd=ROOT).split():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--wheel-dir", folder, source, cwd=folder)
    return next(folder.glob("attune-*.whl"))


def test_wheel_holds_the_code_and_the_material(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".json"):
                assert f"attune/{path.relative_to(ROOT)}" in names
    assert "attune/platform/__init__.py" not in names
    assert not any(name.startswith("tests") for name in names)


def test_a_cluster_is_shipped_all_that_is_packaged(wheel, tmp_path):
    def contents(path):
        names = zipfile.ZipFile(path).namelist()
        return {name for name in names if name.startswith("attune/")}

    assert contents(build(tmp_path)) == contents(wheel)


def test_wheel_works_in_an_empty_environment_outside_the_clone(wheel, tmp_path):
    """Only the libraries come from here: a .pth names them, the editable install is not seen."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", wheel, cwd=tmp_path)
    purelib = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    ).strip()
    (Path(purelib) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = "import attune.platform.core.errors as errors; print(errors.__file__)"
    assert run(python, "-c", code, cwd=tmp_path).startswith(purelib)
    attune = environment / "bin" / "attune"
    run(attune, "data", "prepare", "--source", "bundled", "--out", "made", "--json", cwd=tmp_path)
    assert "afraid" in run(attune, "data", "inspect", "made", cwd=tmp_path)
