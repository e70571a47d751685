"""The home folder: runs, the tracking store, caches, logs."""

import os
from pathlib import Path


def home() -> Path:
    """Return `ATTUNE_HOME`, by default `.attune/` in the working folder; always absolute."""
    return Path(os.environ.get("ATTUNE_HOME") or ".attune").absolute()
