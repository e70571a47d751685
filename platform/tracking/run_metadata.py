"""The metadata of a run in MLflow: tags, parameters, datasets, metrics and a note."""

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_GIT_COMMIT, MLFLOW_SOURCE_NAME

from attune.platform.core.settings import find_variant
from attune.platform.runs.record import Run

MAX_VALUE_LENGTH = 500
PACKAGES = ("attune", "torch", "ray", "deepspeed", "mlflow", "polars")


def run_tags(run: Run) -> dict[str, str]:
    """Return the tags that runs are searched by."""
    tags = {
        MLFLOW_GIT_COMMIT: run.commit,
        MLFLOW_SOURCE_NAME: run.command,
        "variant": run.variant,
        "data_hash": run.data["hash"],
        **job_tags(run.job, run.dashboard),
    }
    harvest = run.data.get("harvest")
    return {**tags, "harvest_hash": harvest["hash"]} if harvest else tags


def job_tags(job: str, dashboard: str) -> dict[str, str]:
    """Return the tags with the Ray job of a run or sweep."""
    tags = {"ray_job": job, "ray_dashboard": dashboard}
    return {key: value for key, value in tags.items() if value}


def describe_variant(name: str) -> str:
    """Describe a variant in Markdown: system, ablation and paper."""
    variant, fixed = find_variant(name)
    reduced = ", ".join(f"{key}={format_value(value)}" for key, value in fixed.items())
    ablation = f", reduced by {reduced}" if reduced else ""
    return f"**{variant.system}**{ablation} ({variant.paper})"


def run_note(run: Run) -> str:
    """Return the description of a run that MLflow shows first."""
    data = run.data
    harvest = data.get("harvest")
    return "\n".join(
        [
            describe_variant(run.variant),
            "",
            f"- Command: `{run.command}`",
            f"- Data: {data['name']}, hash {data['hash'][:12]}, in {data['folder']}",
            *(
                [f"- Unpaired text: hash {harvest['hash'][:12]}, in {harvest['folder']}"]
                if harvest
                else []
            ),
            f"- Preset {run.preset}, seed {run.seed}, workers: {run.workers}, ZeRO {run.zero}",
            f"- Outcome: {describe_outcome(run)}",
        ]
    )


def describe_outcome(run: Run) -> str:
    """Describe the outcome of a run in one line."""
    if run.status == "running":
        return "still running"
    result = run.result
    parts: list[str] = [f"{run.status}: {run.error}" if run.error else run.status]
    if "steps" in result:
        parts.append(f"{result['steps']:,} steps in {result['seconds']:,.0f} s")
    if result.get("best_step") is not None:
        metrics = result.get("metrics", {}).items()
        best = ", ".join(f"{name} {value:.4g}" for name, value in metrics if value is not None)
        parts.append(f"best at step {result['best_step']:,}: {best}")
    return "; ".join(parts)


def run_params(run: Run) -> dict[str, str]:
    """Return the settings by their names after `--set`, and the options by their names."""
    asked = {
        "preset": run.preset,
        "seed": run.seed,
        "workers": run.workers,
        "zero": run.zero,
        "max_steps": run.max_steps,
        "max_minutes": run.max_minutes,
        "data": run.data["name"],
        "init": run.init,
    }
    settings = {**run.training, **run.config, **asked}
    return {key: format_value(value) for key, value in _flatten(settings)}


def _flatten(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def format_value(value: Any) -> str:
    """Return a value as typed after `--set`, cut to MLflow's maximum length."""
    if value is None:
        return "none"
    return (value if isinstance(value, str) else json.dumps(value))[:MAX_VALUE_LENGTH]


def run_datasets(run: Run, manifest: Mapping[str, Any]) -> Iterator[DatasetInput]:
    """Yield the training data of a run, and its unpaired text if it has some."""
    counts = {name: split["samples"] for name, split in manifest.get("splits", {}).items()}
    yield _dataset_input(
        run.data["name"], run.data, {"num_rows": counts.get("train"), "samples": counts}, "training"
    )
    if harvest := run.data.get("harvest"):
        setting = find_variant(run.variant)[0].requirements.filters.harvest_threshold
        threshold = {"threshold": run.config[setting]} if setting else {}
        yield _dataset_input(Path(harvest["folder"]).name, harvest, threshold, "unpaired")


def _dataset_input(
    name: str, data: Mapping[str, Any], profile: Mapping[str, Any], context: str
) -> DatasetInput:
    dataset = Dataset(
        name=name,
        digest=data["hash"][:12],
        source_type="local",
        source=json.dumps({"uri": data["folder"]}),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, context)])


def describe_environment() -> dict[str, Any]:
    """Return the versions of Python and the packages, the platform and the number of CPUs."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def to_metrics(
    values: Mapping[str, float | None], when: int, step: int, model_id: str | None = None
) -> Iterator[Metric]:
    """Yield the metrics of one step without those that are None."""
    for key, value in values.items():
        if isinstance(value, int | float):
            # MLflow would store the largest number for infinity, which flattens its chart.
            finite = value if math.isfinite(value) else math.nan
            yield Metric(key, finite, when, step, model_id=model_id)


def current_milliseconds() -> int:
    """Return the current time in MLflow's unit."""
    return time.time_ns() // 1_000_000
