"""Which commit the code that runs is of."""

import os
import subprocess
from pathlib import Path

VARIABLE = "ATTUNE_COMMIT"
"""Says so to a job, whose code comes in a wheel without a history."""


def commit() -> str:
    """The commit of the source tree that runs, with `+` where it was changed; else ''."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
        if not tracked:
            return ""
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except FileNotFoundError:  # no git here
        return ""
