"""The JSON output or the error message of a finished command."""

import json

from tests.golden.interface import assert_json_keys


def json_output(result):
    """Return the JSON object that a command printed: all of stdout, with the recorded keys."""
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    output = json.loads(line)
    assert_json_keys(result.args[1:], output)
    return output


def error_of(result, code=2):
    """Return the error of a command that failed with `code`, at most two lines on stderr."""
    assert result.returncode == code, result.stderr
    assert not result.stdout
    assert len(result.stderr.splitlines()) <= 2
    assert "Traceback" not in result.stderr
    return result.stderr
