"""The data a run trains on: checks before it starts, then the streams that its workers read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from attune.models.base import (
    CONTEXTS,
    FOLLOWED,
    PAIRED,
    RESPONSES,
    Annotator,
    DataRequirements,
    Variant,
)
from attune.platform.batching.encoding import Columns, unpaired_columns, with_next_turn
from attune.platform.core.errors import DataError, UsageError
from attune.platform.data.dataset_folder import read_manifest, read_samples
from attune.platform.enrichment.causes import apply_cause_threshold
from attune.platform.enrichment.filters import keep_emotional
from attune.platform.enrichment.unpaired import UNPAIRED_FILES, check_harvest, read_unpaired
from attune.platform.runs.model import (
    CAUSES,
    CONTEXT_LABELS,
    Model,
    check_labels,
    read_split,
)
from attune.platform.runs.record import (
    Run,
)
from attune.platform.text.encoders import locate


def load_streams(run: Run, model: Model) -> tuple[dict[str, Columns], Columns]:
    """Return the streams that a run trains on, and the valid samples."""
    folder = _check_unchanged(run, run.data)
    valid = model.columns(read_training_samples(model.variant, folder, "valid"))
    paired = model.columns(read_training_samples(model.variant, folder, "train"))
    streams: dict[str, Columns] = {PAIRED: paired}
    for name in model.variant.requirements_for(model.variant.config).streams:
        if name == FOLLOWED:
            streams[name] = with_next_turn(paired)
            if not len(streams[name]["index"]) or not len(with_next_turn(valid)["index"]):
                raise DataError(
                    f"{folder}: no response in train, or none in valid, is answered by the "
                    f"speaker: '{run.variant}' learns from such answers, and needs other data"
                )
        elif name in (CONTEXTS, RESPONSES):
            streams[name] = unpaired_columns(
                model.columns(_read_unpaired_stream(run, model.variant.config, name)), name
            )
    return streams, valid


def read_training_samples(variant: Variant, folder: Path, split: str) -> pl.DataFrame:
    """Return the samples of train or valid after a variant's thresholds: only causes marked with
    enough confidence and, in train, only emotional dialogs."""
    samples = read_split(variant, folder, split)
    threshold = getattr(variant.config, "cause_threshold", 0.0)
    if threshold and CAUSES in variant.requirements_for(variant.config).columns:
        samples = apply_cause_threshold(samples, folder, split, threshold)
    threshold = getattr(variant.config, "emotionality_threshold", 0.0)
    if threshold and split == "train":
        samples = keep_emotional(samples, folder, threshold)
    return samples


def _read_unpaired_stream(run: Run, config: Any, stream: str) -> pl.DataFrame:
    """Return unpaired text: from the harvest if one is set, else from the data."""
    if "harvest" not in run.data:
        return read_samples(Path(run.data["folder"]), UNPAIRED_FILES[stream])
    return read_unpaired(
        _check_unchanged(run, run.data["harvest"]), stream, config.harvest_threshold
    )


def _check_unchanged(run: Run, data: Mapping[str, Any]) -> Path:
    """Return a folder that a run trains on; its content must not have changed since the start."""
    folder = Path(data["folder"])
    current_hash = read_manifest(folder)["hash"]
    if current_hash != data["hash"]:
        raise UsageError(
            f"{folder} has changed since the run '{run.name}' began (hash {current_hash[:12]} "
            f"instead of {data['hash'][:12]}): prepare it as it was, or begin a new run"
        )
    return folder


def check_data(variant: type[Variant], name: str, config: Any, folder: Path) -> None:
    """Raise an error if anything that a variant needs is missing, before workers are started: its
    encoder, causes, labels or unpaired text."""
    requirements = variant.requirements_for(config)
    if requirements.encoder is not None:
        locate(getattr(config, requirements.encoder))
    if issubclass(variant, Annotator) or requirements.labels == "utterances":
        read_split(variant, folder, "train")
    unpaired = {UNPAIRED_FILES[n] for n in requirements.streams if n in UNPAIRED_FILES}
    if unpaired and not config.harvest:
        _check_unpaired_splits(unpaired, name, config, folder)
    if threshold := getattr(config, "emotionality_threshold", 0.0):
        keep_emotional(read_samples(folder, "train"), folder, threshold)
    if CONTEXT_LABELS in requirements.columns:
        for split in ("train", "valid"):
            check_labels(requirements, read_samples(folder, split), f"{folder}, {split}")
    if CAUSES not in requirements.columns:
        return
    for split in ("train", "valid"):
        samples = read_samples(folder, split)
        if threshold := getattr(config, "cause_threshold", 0.0):
            samples = apply_cause_threshold(samples, folder, split, threshold)
        if not samples["context_causes"].explode().count():
            raise DataError(
                f"{folder}: no utterance in {split} is marked as a cause or not, which '{name}' "
                f"learns from: mark them with 'attune annotate cause RUN --data {folder}', RUN "
                f"being an annotator"
            )


def _check_unpaired_splits(streams: set[str], name: str, config: Any, folder: Path) -> None:
    """Check that the data has unpaired text if no harvest is set; thresholds need a harvest."""
    if config.harvest_threshold != type(config).harvest_threshold:
        raise UsageError(
            f"harvest_threshold={config.harvest_threshold}: only a harvest's texts have "
            f"probabilities: name one with --set harvest=DIR"
        )
    if missing := streams - set(read_manifest(folder)["splits"]):
        raise UsageError(
            f"'{name}' learns from unpaired text too, and {folder} has no '{min(missing)}': make "
            f"some with 'attune data harvest CLASSIFIER_RUN --source PATH --out DIR', and name it "
            f"with --set harvest=DIR"
        )


def harvest_record(requirements: DataRequirements, config: Any) -> dict[str, Any]:
    """Return the folder and hash of the harvest for the run record, if one is used."""
    if not set(requirements.streams) & set(UNPAIRED_FILES) or not config.harvest:
        return {}
    folder = Path(config.harvest)
    harvest_hash = check_harvest(folder)["hash"]
    for stream in UNPAIRED_FILES:  # raises if the threshold keeps nothing
        read_unpaired(folder, stream, config.harvest_threshold)
    return {"harvest": {"folder": str(folder.absolute()), "hash": harvest_hash}}
