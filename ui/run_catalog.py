"""Which runs the page offers, and their models, each loaded once."""

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


class Offer:
    """The runs that can be chosen: the given ones, or whatever lies in the store at the time."""

    def __init__(self, given: Sequence[Run] | None = None):
        for run in given or ():
            if not answers(run):
                raise UsageError(f"'{run.name}' does not answer: {run.variant} is a classifier")
        self._given = None if given is None else {run.name: run for run in given}

    def runs(self) -> Mapping[str, Run]:
        """By name; the newest first, given ones in their order."""
        if self._given is not None:
            return self._given
        found = [run for run in all_runs() if run.model.is_dir() and answers(run)]
        return {run.name: run for run in reversed(found)}

    def preselected(self, most: int) -> list[str]:
        """The given runs, or the newest of each variant."""
        if self._given is not None:
            return list(self._given)[:most]
        newest: dict[str, str] = {}
        for run in self.runs().values():
            newest.setdefault(run.variant, run.name)
        return list(newest.values())[:MAX_PRESELECTED]

    def find(self, name: str) -> Run:
        """A run that was chosen, which may have been deleted since."""
        run = self.runs().get(name)
        if run is None:
            raise UsageError(f"run '{name}' is no longer on disk: choose another")
        return run


def answers(run: Run) -> bool:
    """Whether a run's variant is a dialogue model; one that this version does not know is not."""
    try:
        variant, _ = find_variant(run.variant)
    except UsageError:
        return False
    return issubclass(variant, DialogueVariant)


class Responders:
    """The models in use; one that was trained further is loaded anew."""

    def __init__(self, load: Callable[[Run], Responder] = lambda run: Responder(run.model)):
        self._load = load
        self._loaded: OrderedDict[tuple[str, int], Responder] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Run) -> Responder:
        """The run's model."""
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
