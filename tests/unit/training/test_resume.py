"""`attune train --resume`: what may differ from the run that is continued."""

import json
import shutil

import pytest

from attune.platform import tracking
from attune.platform.data.prepare import prepare
from attune.platform.runs.lock import lock_runs
from attune.platform.runs.model import save_model
from attune.platform.runs.record import RUN_RECORD, find_run
from attune.platform.training import driver, engine, setup
from attune.platform.training.settings import configure
from tests.commands import error_of, json_output

TRAIN = ("train", "dummy", "--preset", "tiny", "--name", "mine")


@pytest.fixture
def base_runs(home_with, build, prepared, monkeypatch):
    """Two runs to begin with, and training that stops at once."""
    home = home_with({"first": build("dummy"), "second": build("dummy")})
    (home / "data").mkdir()
    (home / "data" / "bundled").symlink_to(prepared)
    monkeypatch.setattr(driver, "train_all", lambda runs, *_: list(runs))


@pytest.fixture
def other_data(tmp_path):
    utterances = [{"role": "speaker", "text": "Hi."}, {"role": "listener", "text": "Oh."}]
    lines = [json.dumps({"id": split, "split": split, "utterances": utterances})
             for split in ("train", "valid", "test")]  # fmt: skip
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    prepare(str(tmp_path / "other.jsonl"), tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.usefixtures("base_runs")
def test_other_data_are_refused(call, other_data):
    json_output(call(*TRAIN, "--json"))
    for name in (("--name", "mine"), ()):  # without a name: the variant's latest
        message = error_of(call("train", "dummy", *name, "--resume", "--data", other_data))
        assert "run 'mine' was started with --data bundled" in message
        assert f"not {other_data}" in message
        assert "leave --data out" in message
    assert find_run("mine").data["name"] == "bundled"


@pytest.mark.usefixtures("base_runs")
def test_the_same_data_may_be_named(call, prepared, tmp_path):
    json_output(call(*TRAIN, "--json"))
    shutil.copytree(prepared, tmp_path / "copy")  # the content counts, not the folder
    for data in ((), ("--data", "bundled"), ("--data", prepared), ("--data", tmp_path / "copy")):
        json_output(call(*TRAIN, "--resume", *data, "--json"))


@pytest.mark.usefixtures("base_runs")
def test_another_run_to_begin_with_is_refused(call):
    json_output(call(*TRAIN, "--json"))
    message = error_of(call(*TRAIN, "--resume", "--init", "first"))
    assert "run 'mine' was started without --init, not with --init first" in message
    assert "leave --init out" in message
    tuned = ("train", "dummy", "--preset", "tiny", "--name", "tuned")
    json_output(call(*tuned, "--init", "first", "--json"))
    message = error_of(call(*tuned, "--resume", "--init", "second"))
    assert "run 'tuned' was started with --init first, not second" in message


@pytest.mark.usefixtures("base_runs")
def test_the_same_run_to_begin_with_may_be_named(call):
    """`dummy@latest` is the one it was when the run began, not the run itself."""
    for name, init in (("one", "first"), ("two", "dummy@latest")):
        command = ("train", "dummy", "--preset", "tiny", "--name", name)
        json_output(call(*command, "--init", init, "--json"))
        run = find_run(name)
        save_model(setup.set_up_run_model(run), run.model)
        for again in ((), ("--init", init)):
            json_output(call(*command, "--resume", *again, "--json"))


@pytest.mark.usefixtures("base_runs")
@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp32")])
def test_automatic_precision_is_resolved_once(call, monkeypatch, native, expected):
    command = ("train", "dummy", "--preset", "small", "--name", "mine")
    monkeypatch.setattr(engine, "has_native_bf16", lambda _: native)
    assert f"precision {expected}" in call(*command).stdout
    assert find_run("mine").training["precision"] == expected
    monkeypatch.setattr(engine, "has_native_bf16", lambda _: not native)
    for again in ((), ("--set", "precision=auto")):
        assert f"precision {expected}" in call(*command, "--resume", *again).stdout
        assert find_run("mine").training["precision"] == expected
    other = "fp32" if native else "bf16"
    message = error_of(call(*command, "--resume", "--set", f"precision={other}"))
    assert f"precision={expected}, not {other}" in message


def test_only_presets_for_everyday_use_select_the_precision():
    presets = ("tiny", "small", "paper")
    precisions = [configure("multi-trs", preset)[1].precision for preset in presets]
    assert precisions == ["fp32", "auto", "fp32"]


@pytest.mark.usefixtures("base_runs")
def test_a_refused_resume_changes_nothing(call):
    json_output(call(*TRAIN, "--json"))
    run = find_run("mine")
    record = (run.folder / RUN_RECORD).read_bytes()
    with lock_runs([run]):
        message = error_of(call(*TRAIN, "--resume", "--max-steps", "7", "--workers", "2"))
    assert "run 'mine' is being trained by another process" in message
    assert (run.folder / RUN_RECORD).read_bytes() == record


@pytest.mark.usefixtures("base_runs")
def test_a_refused_resume_of_seeds_leaves_their_group_alone(call, monkeypatch):
    changed = []
    monkeypatch.setattr(tracking, "start_group", lambda *_: "group")
    monkeypatch.setattr(tracking, "finish_group", lambda *call: changed.append(call))
    seeds = (*TRAIN, "--seeds", "1,2")
    call(*seeds)
    changed.clear()
    with lock_runs([find_run("mine-seed2")]):
        assert "'mine-seed2' is being trained" in error_of(call(*seeds, "--resume"))
    assert not changed


@pytest.mark.usefixtures("base_runs")
def test_a_run_that_finishes_before_it_is_locked_is_not_trained_again(call, monkeypatch):
    json_output(call(*TRAIN, "--json"))
    find = setup.find_resumable_run

    def find_and_finish(*arguments):
        run = find(*arguments)
        run.update(status="finished")
        return run

    monkeypatch.setattr(setup, "find_resumable_run", find_and_finish)
    assert "run 'mine' is finished" in error_of(call(*TRAIN, "--resume", "--max-steps", "7"))
    assert find_run("mine").max_steps is None
