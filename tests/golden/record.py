"""Record the golden behaviour anew: `python -m tests.golden.record [NAME ...]`, at the root.

Names are those of files under `behaviour/`; without any, all are recorded, and files of variants
that no longer exist are removed. A commit that re-records contains nothing else and says why.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden import behaviour
from tests.golden.preparation import prepare_corpus


def main(chosen: list[str]) -> None:
    """Write a file for each of the chosen names."""
    torch.set_num_threads(1)
    behaviour.FOLDER.mkdir(exist_ok=True)
    if not chosen:
        for path in behaviour.FOLDER.glob("*.json"):
            path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTUNE_HOME"] = str(Path(folder) / "home")
        corpus = Path(folder) / "corpus"
        prepare_corpus(corpus)
        for name in chosen or behaviour.names():
            text = behaviour.text_of(behaviour.measure(name, corpus))
            behaviour.path_of(name).write_text(f"{text}\n", encoding="utf-8")
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
