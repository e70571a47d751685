"""The sweep driver's output."""

from typing import ClassVar

from attune.platform.tuning import driver


class Trial:
    """A trial of Tune without a validation."""

    last_result: ClassVar = {}


def test_tune_prints_nothing_to_stdout(capsys):
    callback = driver.SilentProgressCallback()
    callback.on_trial_result(1, [], Trial(), {})
    callback.on_trial_error(1, [], Trial())
    callback.on_trial_complete(1, [], Trial())
    assert capsys.readouterr().out == ""
