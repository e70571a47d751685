"""Sweeps for tests, written to their folders."""

from attune.models.base import Choice, Range
from attune.platform.runs.record import read_run
from attune.platform.tuning import spaces, sweep

SPACE = {
    "learning_rate": Range(low=1e-4, high=1e-2, scale="loguniform"),
    "batch_size": Choice(values=(16, 32)),
}


def write_sweep(name="s", **fields):
    """Write a sweep, of `SPACE` by default, and return it as another process reads it."""
    options = {"metrics": ("valid_perplexity",), "search": "random", "samples": 6, **fields}
    space = options.pop("space", {"dummy": SPACE})
    new = sweep.Sweep(
        name=name,
        folder=sweep.sweeps_folder() / name,
        spaces={v: {k: spaces.to_json(t) for k, t in s.items()} for v, s in space.items()},
        **options,
    )
    new.write()
    return sweep.read_sweep(new.folder)


def suggest_all(sweep):
    """Return all trials that a sweep suggests from now on."""
    suggestions = []
    while (suggestion := sweep.suggest_trial()) is not None:
        suggestions.append(suggestion)
    return suggestions


def update_run(folder, **overrides):
    """Update a run's record, as a sweep's tracker does."""
    return read_run(folder).update(**overrides)
