"""`attune train` gives what was recorded; `tests/golden` says what that is and how to re-record."""

import pytest

from attune.models import all_variants
from attune.platform.training import setup
from tests.golden import behaviour, commands
from tests.golden.preparation import DIALOGUES

pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))


@pytest.mark.parametrize("variant", commands.STEPS)
def test_a_command_matches_the_record(golden_corpus, variant):
    commands.check(variant, commands.measure(variant, golden_corpus))


def test_each_structure_of_stages_has_one_run(golden_corpus):
    structures = {}
    for name in all_variants():
        run = setup.new_run(
            name,
            data=str(golden_corpus / DIALOGUES),
            preset="tiny",
            overrides=behaviour.settings_for(name, golden_corpus),
            name=name,
        )
        structures[name] = commands.structure(setup.set_up_run_model(run).variant)
    assert len({structures[name] for name in commands.STEPS}) == len(commands.STEPS)
    assert {structures[name] for name in commands.STEPS} == set(structures.values())
    assert {path.stem for path in commands.FOLDER.iterdir()} == set(commands.STEPS)
