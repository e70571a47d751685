"""Re-record the golden behaviour: `python -m tests.golden.record [NAME ...]`, at the root.

Names are those of files under `behaviour/` and `commands/`; without any, all are recorded, and
files of variants that no longer exist are removed. A commit that re-records contains nothing else
and says why.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden import behaviour, commands
from tests.golden.preparation import prepare_corpus


def main(chosen: list[str]) -> None:
    """Write the files of the chosen names."""
    torch.set_num_threads(1)
    if strange := set(chosen) - set(behaviour.names()):
        sys.exit(f"unknown name '{min(strange)}': choose from {', '.join(behaviour.names())}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        prepare_corpus(corpus)
        for module, names in ((behaviour, behaviour.names()), (commands, list(commands.STEPS))):
            os.environ["ATTUNE_HOME"] = str(Path(folder) / module.FOLDER.name)
            module.FOLDER.mkdir(exist_ok=True)
            if not chosen:
                for path in module.FOLDER.glob("*.json"):
                    path.unlink()
            for name in names:
                if not chosen or name in chosen:
                    text = behaviour.text_of(module.measure(name, corpus))
                    module.path_of(name).write_text(f"{text}\n", encoding="utf-8")
                    print(module.path_of(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
