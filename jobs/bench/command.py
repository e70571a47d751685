"""The command line, run as a user runs it, in a home of the bench's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def attune(home: Path, *arguments: str) -> dict[str, Any]:
    """What the command says, asked with --json."""
    environment = {**os.environ, "ATTUNE_HOME": str(home)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "attune.jobs.cli", *arguments, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
