"""The documents agree with the code: the example system trains; names, paths and commands exist."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.exceptions import TyperException

from attune.jobs import cli, submit
from attune.models import VARIANTS, all_variants
from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import find_run
from tests import contract
from tests.commands import json_output
from tests.golden.commands import runs_in_this_process

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
ADDING_A_SYSTEM = ROOT / "docs" / "adding-a-system.md"
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("infra/*.md"))
)
EXAMPLE_VARIANT = "seq2seq"
EXAMPLE_FILE = "models/seq2seq.py"  # what a reader of the example writes


@pytest.fixture
def seq2seq(tmp_path, monkeypatch):
    """Register the system of docs/adding-a-system.md; return its name and its ablation's."""
    code = re.search(r"```python\n(.*?)```", ADDING_A_SYSTEM.read_text(encoding="utf-8"), re.S)
    (tmp_path / "documented_seq2seq.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(VARIANTS, "seq2seq", "documented_seq2seq:Seq2Seq")
    return "seq2seq", "seq2seq-no-emotion"


def test_the_documented_system_keeps_the_contract(seq2seq, build, batch, tmp_path):
    for name in seq2seq:
        model = build(name)
        contract.check_loss_terms_have_gradients(model.variant, batch)
        contract.check_losses_build_no_modules(model.variant, batch)
        contract.check_updates_change_only_their_player(model.variant, batch)
        contract.check_losses_of_ranks_average_to_the_whole(model.variant, batch)
        contract.check_saved_model_is_restored(model, batch, tmp_path / name)
        contract.check_true_labels_are_not_used(model.variant, batch)
        contract.check_outputs_do_not_depend_on_the_batch(model.variant, batch)
        contract.check_stepwise_decoding_gives_the_likelihood(model.variant, batch)
        contract.check_likelihood_term(model.variant, batch)
        contract.check_answers_have_no_special_tokens(model, batch)
        contract.check_samples_are_memorised(build(name).variant, batch)


@pytest.mark.usefixtures("seq2seq")
def test_the_documented_system_is_trained_by_the_command(call, prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    settings = ("--set", "log_every=1", "--set", "batch_size=32")
    command = ("train", "seq2seq", "--data", prepared, "--preset", "tiny", "--max-steps", "40")
    with runs_in_this_process():
        result = json_output(call(*command, *settings, "--name", "mine", "--json"))
    assert result["steps"] == 40
    losses = [
        line["metrics"]["loss"]
        for line in read_metrics(find_run("mine").metrics_file)
        if "loss" in line["metrics"]
    ]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    answer = json_output(call("respond", "mine", "--context", "I am sad.", "--json"))["answers"][0]
    assert sum(answer["explanation"]["emotion"].values()) == pytest.approx(1.0)


def defined_names(path):
    """Every class, function and method of a Python file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def test_functions_of_the_architecture_are_in_the_files_named_beside_them():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    rows = re.findall(r"`([\w.]+)` \| `([\w/]+\.py)` \|", text)
    assert len(rows) > 25
    for name, path in rows:
        assert name in defined_names(ROOT / path), f"{path} has no {name}"
    arrows = re.findall(r"-->\|([\w.]+)\|", text)
    assert set(arrows) <= {name for name, _ in rows}


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(
            f"docs/{name}.md"
            for name in (
                "architecture",
                "adding-a-system",
                "data",
                "harvesting",
                "annotating",
                "curating",
                "metrics",
            )
        ),
    ],
)
def test_paths_in_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    folders = "platform|models|jobs|ui|infra|tests|docs"
    paths = set(re.findall(rf"`((?:{folders})/[\w/.-]*)`", text))
    links = set(re.findall(r"\]\(([\w/.-]+)\)", text))
    paths = {path for path in paths if path != EXAMPLE_FILE}
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


def anchors(text):
    """Return the anchors of the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_to_headings(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_every_document_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


@pytest.mark.parametrize("document", ["README.md", "docs/architecture.md"])
def test_every_package_of_the_platform_is_described(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for folder in (ROOT / "platform").iterdir():
        if (folder / "__init__.py").is_file():
            assert re.search(rf"`(platform/)?{folder.name}/`", text), folder.name


# Commands in documents: a complete one is parsed by the command line without being executed. Of a
# synopsis (with [], |, ... or without arguments) the names of the command and options are checked.

COMMAND = r"(?:\.venv/bin/)?attune (?=[a-z-])"


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """The command line, in a folder that has the files which the documents upload."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    return typer.main.get_command(cli.app)


def find_commands(text):
    """Yield every `attune ...` of a document, and whether it is in a code block: complete."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    for block in blocks:
        joined = re.sub(r" *\\?\n {2,}", " ", re.sub(r" +# .*", "", block))
        for line in joined.splitlines():
            start = re.search(rf"(?:^|\s){COMMAND}", line)
            if start and "kubectl" not in line:
                yield from ((command, True) for command in split_commands(line[start.start() :]))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for code in re.findall(rf"`({COMMAND}[^`]+)`", prose):
        yield from ((command, False) for command in split_commands(code))


def split_commands(line):
    for part in line.split("·"):
        yield re.sub(rf"^{COMMAND}", "", " ".join(part.split()))


def check_command(group, command, is_complete):
    """Parse a command as the command line does, or check the names in a synopsis or a mention."""
    if command in ("--help", "--version"):
        return
    if re.search(r"[\[\]|]|\.\.\.", command):
        check_synopsis(group, command)
        return
    try:
        options = submit.parse_submitted_command(group, shlex.split(command))
    except TyperException as error:
        message = error.format_message()  # empty where the command shows its help
        if is_complete or (message and not re.search("^Missing|requires an argument", message)):
            raise
        check_synopsis(group, command)
        return
    if isinstance(options.get("command"), list):  # of `attune submit`
        check_command(group, shlex.join(options["command"]), is_complete)
    variants = options.get("variants") or [options.get("variant")]
    for variant in (each for each in variants if each and each.islower()):
        assert variant in {*all_variants(), EXAMPLE_VARIANT, f"{EXAMPLE_VARIANT}-no-emotion"}


def check_synopsis(group, command):
    """Check the names of a command and its options; a group may be shown with alternatives."""
    name, _, rest = command.partition(" ")
    assert name in group.commands, f"unknown command {name}"
    chosen = [group.commands[name]]
    if rest and (subcommands := getattr(chosen[0], "commands", {})):
        words = [word for part in rest.split(" | ") for word in part.split()[0].split("|")]
        if name == "tune" and not set(words) & set(subcommands):
            words = ["run"]  # `attune tune VARIANT ...`
        assert set(words) <= set(subcommands), f"unknown command in: {command}"
        chosen += [subcommands[each] for each in words]
    own, _, submitted = rest.partition("-- ")
    known = {option for each in chosen for parameter in each.params for option in parameter.opts}
    unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own)) - known - {"--help"}
    assert not unknown, f"unknown options in: {command}"
    if submitted and not submitted[0].isupper():
        check_synopsis(group, submitted)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_documents_are_valid(document, command_line):
    text = (ROOT / document).read_text(encoding="utf-8")
    for command, is_complete in find_commands(text):
        try:
            check_command(command_line, command, is_complete)
        except (TyperException, UsageError) as error:
            raise AssertionError(f"{document}: attune {command}: {error}") from error


def test_commands_of_all_forms_are_detected():
    text = (
        "Use `attune runs\n--all` or `attune status · attune down`.\n"
        "```\n.venv/bin/attune train mime \\\n    --workers 2   # a comment\n"
        "docker compose exec ray-head attune ui\nattune jobs list | stop JOB\n```\n"
    )
    assert list(find_commands(text)) == [
        ("train mime --workers 2", True),
        ("ui", True),
        ("jobs list | stop JOB", True),
        ("runs --all", False),
        ("status", False),
        ("down", False),
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("doctor", True) in find_commands(readme)


@pytest.mark.parametrize(
    "command",
    [
        "trian mime",
        "train",
        "train mimi",
        "train mime --worker 2",
        "train mime --workers two",
        "train VARIANT [--worker N]",
        "jobs list | halt JOB",
        "data turns|curates ...",
        "submit -- train mime --worker 2",
        "submit [--follow] -- trian mime",
    ],
)
def test_a_wrong_command_in_a_document_is_an_error(command, command_line):
    with pytest.raises((AssertionError, KeyError, TyperException, UsageError)):
        check_command(command_line, command, is_complete=True)


def test_make_targets_and_modules_in_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M)) <= targets, document
        for module in re.findall(r"python -m (attune[\w.]*|tests[\w.]*)", text):
            assert importlib.util.find_spec(module.rstrip(".")), f"{document}: {module}"
