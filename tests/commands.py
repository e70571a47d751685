"""What a command said, or why it refused."""

import json

from tests.golden.interface import assert_json_keys


def spoken(done):
    """The one JSON object of a command, which must be all of stdout and have the recorded keys."""
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    output = json.loads(line)
    assert_json_keys(done.args[1:], output)
    return output


def refused(done, code=2):
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr
    return done.stderr
