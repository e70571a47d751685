"""Sweeps for tests, written to their folders."""

from attune.models.base import Choice, Range
from attune.platform.runs.record import read_run
from attune.platform.tuning import spaces, sweep

SPACE = {
    "learning_rate": Range(low=1e-4, high=1e-2, scale="loguniform"),
    "batch_size": Choice(values=(16, 32)),
}


def make(name="s", **fields):
    """A sweep of `SPACE`, unless told otherwise, as a process reads it."""
    given = {"metrics": ("valid_perplexity",), "search": "random", "samples": 6, **fields}
    space = given.pop("space", {"dummy": SPACE})
    found = sweep.Sweep(
        name=name,
        folder=sweep.sweeps_folder() / name,
        spaces={v: {k: spaces.to_json(t) for k, t in s.items()} for v, s in space.items()},
        **given,
    )
    found.write()
    return sweep.read_sweep(found.folder)


def asked(found):
    """All that a sweep asks for from now on."""
    drawn = []
    while (one := found.suggest_trial()) is not None:
        drawn.append(one)
    return drawn


def update_run(folder, **overrides):
    """What a sweep's tracker does at once: it changes what a run's folder says."""
    return read_run(folder).update(**overrides)
