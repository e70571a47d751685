"""The git commit of the running code."""

import os
import subprocess
from pathlib import Path

VARIABLE = "ATTUNE_COMMIT"
"""Passes the commit to a job, whose code comes in a wheel without git history."""


def commit() -> str:
    """Return the commit of the running source tree, with `+` if it was changed; else ''."""
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
