"""The files that a run is started with, checked before it is resumed."""

import json

from attune.platform.core.errors import DataError
from attune.platform.core.files import file_checksum
from attune.platform.runs.model import LEXICON_FILE, VOCABULARY_FILE
from attune.platform.runs.record import Run
from attune.platform.text.subwords import TOKENIZER
from attune.platform.training.engine import BASE_SETTINGS

INPUTS = "inputs.json"
"""In a run's folder: the checksums of the files that it was started with."""
INPUT_FILES = (VOCABULARY_FILE, TOKENIZER, LEXICON_FILE, BASE_SETTINGS)


def write_input_checksums(run: Run) -> None:
    """Write the checksums of a new run's files, for `check_inputs`."""
    files = {name: run.folder / name for name in INPUT_FILES}
    checksums = {name: file_checksum(path) for name, path in files.items() if path.is_file()}
    (run.folder / INPUTS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")


def check_inputs(run: Run) -> None:
    """Raise DataError if a file that the run was started with is missing or has changed."""
    try:
        expected = json.loads((run.folder / INPUTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for name, value in expected.items():
        path, copy = run.folder / name, run.model / name
        if path.is_file() and file_checksum(path) == value:
            continue
        problem = (
            "has changed since the run was started, or is damaged"
            if path.is_file()
            else "is missing"
        )
        is_intact = copy.is_file() and file_checksum(copy) == value
        fix = f"restore it with 'cp {copy} {path}'" if is_intact else "start a new run"
        raise DataError(f"{path} {problem}: {fix}")
