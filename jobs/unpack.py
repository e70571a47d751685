"""What a job runs first whose data was uploaded: puts it into ATTUNE_HOME, where it stays."""

import os
import shutil
from pathlib import Path

from attune.jobs import cli
from attune.platform.core.home import home
from attune.platform.services.jobs import UPLOADS


def unpack(uploaded: Path) -> None:
    """Move each folder to the place that the job's command names, whole or not at all."""
    kept = home() / UPLOADS
    kept.mkdir(parents=True, exist_ok=True)
    for folder in uploaded.iterdir():
        if folder.is_dir() and not (kept / folder.name).exists():
            new = kept / f".{folder.name}.{os.getpid()}"
            shutil.copytree(folder, new)
            try:
                new.replace(kept / folder.name)
            except OSError:  # another job with the same data was faster
                shutil.rmtree(new)


if __name__ == "__main__":
    unpack(Path.cwd())
    cli.main()
