"""The sweep driver's output."""

from typing import ClassVar

from attune.platform.tuning import (
    driver,
)


def test_tune_prints_nothing_for_a_trial_without_validation(capsys):
    """What it says otherwise stands between people and --json."""

    class Trial:
        last_result: ClassVar = {}

    driver.SilentProgressCallback().on_trial_complete(1, [], Trial())
    assert capsys.readouterr().out == ""
