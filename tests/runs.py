"""Records of runs that were not trained, and the progress of runs that are being trained."""

from attune.platform.runs.metrics_file import read_metrics
from attune.platform.runs.record import METRICS_FILE, Run, runs_folder


def write_run(home, name, variant, **fields):
    """Write the record of a run, finished unless the fields say otherwise."""
    values = {"config": {}, "training": {}, "data": {}, "status": "finished", **fields}
    run = Run(name=name, folder=home / "runs" / name, variant=variant, preset="tiny", **values)
    run.write()
    return run


def last_step(name):
    """Return the last step in the metrics file of a run."""
    path = runs_folder() / name / METRICS_FILE
    return max((line["step"] for line in read_metrics(path)), default=0)


def last_checkpoint(name):
    """Return the step of the last checkpoint of a run."""
    folder = runs_folder() / name / "checkpoints"
    return max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
