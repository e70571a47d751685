"""Runs as folders have them, without training any."""

from attune.platform.runs.record import Run


def write_run(home, name, variant, **fields):
    """A run with its record; finished, and nothing else is known of it, unless it is said."""
    given = {"config": {}, "training": {}, "data": {}, "status": "finished", **fields}
    run = Run(name=name, folder=home / "runs" / name, variant=variant, preset="tiny", **given)
    run.write()
    return run
