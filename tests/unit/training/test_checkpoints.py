"""Checkpoints on disk: which ones are kept, damage, and a disk without space."""

import errno

import pytest

from attune.platform.core.disk import DiskFullError
from attune.platform.training import checkpoints
from attune.platform.training.checkpoints import CHECKSUMS, WEIGHTS, TrainState, write_checkpoint
from tests.runs import write_run


def write(folder, step, save_weights=lambda path: path.write_text("weights")):
    write_checkpoint(
        folder, TrainState(total=step), save_engines=lambda path: path.mkdir(),
        save_weights=save_weights, first=True, barrier=lambda: None,
    )  # fmt: skip


def names(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_the_two_newest_intact_checkpoints_are_kept(tmp_path):
    """A damaged one may have a higher step than those that are written after it."""
    for step in (10, 20, 90):
        write(tmp_path, step)
    assert names(tmp_path) == [20, 90]
    (tmp_path / "00000090" / WEIGHTS).write_text("weight")
    write(tmp_path, 30)
    assert names(tmp_path) == [20, 30]
    (tmp_path / "00000030" / WEIGHTS).unlink()
    write(tmp_path, 40)
    assert names(tmp_path) == [20, 40]
    assert checkpoints.find_valid_checkpoint(tmp_path, pytest.fail).name == "00000040"


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"train_state.json": ""}', "\0\0"])
def test_damaged_checksums_are_damage(tmp_path, content):
    for step in (10, 20):
        write(tmp_path, step)
    (tmp_path / "00000020" / CHECKSUMS).write_text(content)
    reported = []
    assert checkpoints.find_valid_checkpoint(tmp_path, reported.append).name == "00000010"
    assert "00000020 is damaged (checksums.json" in reported[0]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    write(tmp_path, 10)

    def fill_disk(path):
        path.write_text("wei")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write(tmp_path, 20, fill_disk)
    assert names(tmp_path) == [10]


def test_space_is_checked_before_a_checkpoint_of_known_size(tmp_path, monkeypatch):
    run = write_run(tmp_path, "mine", "dummy")
    write(run.checkpoints, 10, lambda path: path.write_bytes(bytes(5_000_000)))
    checkpoints.require_checkpoint_space(run, 0)
    monkeypatch.setattr(checkpoints, "free_disk_bytes", lambda _: 4_000_000)
    with pytest.raises(DiskFullError) as failure:
        checkpoints.require_checkpoint_space(run, 0)
    message = str(failure.value)
    assert "is full" in message
    assert "a checkpoint of run 'mine' needs 5.0 MB" in message
    assert "the checkpoint of step 10 is intact" in message
    assert "resume with 'attune train dummy --name mine --resume'" in message
