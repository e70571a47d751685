"""Records of runs that were not trained, for tests."""

from attune.platform.runs.record import Run


def write_run(home, name, variant, **fields):
    """Write the record of a run, finished unless the fields say otherwise."""
    values = {"config": {}, "training": {}, "data": {}, "status": "finished", **fields}
    run = Run(name=name, folder=home / "runs" / name, variant=variant, preset="tiny", **values)
    run.write()
    return run
