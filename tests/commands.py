"""What a command said, or why it refused."""

import json


def spoken(done):
    """The one JSON object of a command, which must be all of stdout."""
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def refused(done, code=2):
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr
    return done.stderr
