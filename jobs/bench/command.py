"""Run the command line in a subprocess, with its own ATTUNE_HOME."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_attune_command(
    home: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a command with --json, in this or the given environment, and return its output."""
    environment = {**(environment or os.environ), "ATTUNE_HOME": str(home)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "attune.jobs.cli", *arguments, "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(result.stderr)
    output: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return output
