"""The lock of a run: held by one process, queried by others."""

import subprocess
import sys
import threading

import pytest

from attune.platform.core.errors import UsageError
from attune.platform.runs.lock import hold_lock, is_locked, lock_runs
from tests.runs import write_run


def test_the_lock_is_held_by_one(tmp_path):
    assert not is_locked(tmp_path)
    with hold_lock(tmp_path, "taken"):
        assert is_locked(tmp_path)
        with pytest.raises(UsageError, match="taken"), hold_lock(tmp_path, "taken"):
            pass
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from attune.platform.runs.lock import hold_lock\n"
        "with hold_lock(Path(sys.argv[1]), ''): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    assert is_locked(tmp_path)
    holder.kill()
    holder.communicate()
    assert not is_locked(tmp_path)


def test_a_query_never_makes_a_starting_run_fail(tmp_path):
    over = threading.Event()

    def query():
        while not over.is_set():
            is_locked(tmp_path)

    thread = threading.Thread(target=query)
    thread.start()
    try:
        for _ in range(2000):
            with hold_lock(tmp_path, "taken"):
                pass
    finally:
        over.set()
        thread.join()


def test_a_locked_record_is_read_after_the_lock(tmp_path):
    run = write_run(tmp_path, "one", "dummy", status="stopped")
    run.update(status="finished")
    with lock_runs([run]) as [current]:
        assert current.status == "finished"
