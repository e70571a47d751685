"""The runs that can be chosen on the page, and a cache of their models."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from attune.models.base import DialogueVariant
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import find_variant
from attune.platform.runs.model import MODEL_WEIGHTS
from attune.platform.runs.record import Run, all_runs
from attune.platform.serving.responder import Responder

MAX_PRESELECTED = 4
MAX_LOADED = 8


class RunCatalog:
    """The runs that can be chosen: a fixed selection, or all dialogue runs on disk."""

    def __init__(self, selection: Sequence[Run] | None = None):
        for run in selection or ():
            if not is_dialogue_run(run):
                raise UsageError(f"'{run.name}' does not answer: {run.variant} is a classifier")
        self._selection = None if selection is None else {run.name: run for run in selection}

    def runs(self) -> Mapping[str, Run]:
        """Return the runs by name: a selection in its order, otherwise the newest first."""
        if self._selection is not None:
            return self._selection
        runs = [run for run in all_runs() if run.model.is_dir() and is_dialogue_run(run)]
        return {run.name: run for run in reversed(runs)}

    def preselect(self, max_runs: int) -> list[str]:
        """Return the names of the selection, or of the newest run of each variant."""
        if self._selection is not None:
            return list(self._selection)[:max_runs]
        newest: dict[str, str] = {}
        for run in self.runs().values():
            newest.setdefault(run.variant, run.name)
        return list(newest.values())[:MAX_PRESELECTED]

    def find(self, name: str) -> Run:
        """Return a run by name; it may have been deleted since it was chosen."""
        run = self.runs().get(name)
        if run is None:
            raise UsageError(f"run '{name}' is no longer on disk: choose another")
        return run


def is_dialogue_run(run: Run) -> bool:
    """Return whether a run's variant is a dialogue model that this version knows."""
    try:
        variant, _ = find_variant(run.variant)
    except UsageError:
        return False
    return issubclass(variant, DialogueVariant)


class Responders:
    """A cache of loaded models; one that was trained further is loaded again."""

    def __init__(self, load: Callable[[Run], Responder] = lambda run: Responder(run.model)):
        self._load = load
        self._loaded: OrderedDict[tuple[str, int], Responder] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, run: Run) -> Responder:
        """Return the run's model, loaded once per version of its weights."""
        try:
            version = (run.model / MODEL_WEIGHTS).stat().st_mtime_ns
        except FileNotFoundError:
            raise UsageError(f"run '{run.name}' is no longer on disk: choose another") from None
        key = (str(run.model), version)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._load(run)
            self._loaded.move_to_end(key)
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
            return self._loaded[key]
