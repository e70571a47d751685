"""Run the command line as a user does, in a home of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_attune(home: Path, *arguments: str) -> dict[str, Any]:
    """Run a command with --json and return its output."""
    environment = {**os.environ, "ATTUNE_HOME": str(home)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "attune.jobs.cli", *arguments, "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(result.stderr)
    output: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return output
