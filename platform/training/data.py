"""The training data of a run: checks before it starts, and the streams that its workers read."""

import functools
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
    DataFilters,
    DataRequirements,
    Variant,
)
from attune.platform.batching.encoding import (
    Columns,
    encoded_unpaired_columns,
    encoded_with_next_turn,
)
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.settings import Threshold, find_threshold_setting
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.enrichment.causes import apply_cause_threshold
from attune.platform.enrichment.filters import keep_emotional
from attune.platform.enrichment.unpaired import (
    UNPAIRED_FILES,
    check_unpaired_harvest,
    read_unpaired,
)
from attune.platform.runs.model import (
    CAUSES,
    CONTEXT_LABELS,
    Model,
    check_model_labels,
    read_model_split,
)
from attune.platform.runs.record import (
    Run,
)
from attune.platform.text.encoders import find_encoder


def load_training_streams(run: Run, model: Model) -> tuple[dict[str, Columns], Columns]:
    """Return the training streams of a run and its valid samples."""
    folder = _check_training_data_unchanged(run, run.data)
    variant, config = type(model.variant), model.variant.config
    valid = model.columns(read_training_samples(variant, config, folder, "valid"))
    paired = model.columns(read_training_samples(variant, config, folder, "train"))
    streams: dict[str, Columns] = {PAIRED: paired}
    requirements = variant.requirements_for(config)
    for name in requirements.streams:
        if name == FOLLOWED:
            streams[name] = encoded_with_next_turn(paired)
            if not len(streams[name]["index"]) or not len(encoded_with_next_turn(valid)["index"]):
                raise DataError(
                    f"{folder}: no response in train, or none in valid, is answered by the "
                    f"speaker: '{run.variant}' trains on such answers and needs other data"
                )
        elif name in (CONTEXTS, RESPONSES):
            texts = _read_unpaired_training_data(run, requirements.filters, config, name)
            streams[name] = encoded_unpaired_columns(model.columns(texts), name)
    return streams, valid


def read_training_samples(
    variant: type[Variant], config: Any, folder: Path, split: str
) -> pl.DataFrame:
    """Return the samples of train or valid that a variant with these settings learns from.

    The only place that applies the variant's thresholds to pairs. Raises an error if the samples
    lack the labels or causes that the variant reads.
    """
    requirements = variant.requirements_for(config)
    samples = read_training_split_once(
        variant, folder, split, read_dataset_manifest(folder)["hash"]
    )
    filters = requirements.filters
    emotionality = find_threshold_setting(config, filters.emotionality_threshold)
    if emotionality and split == "train":
        samples = keep_emotional(samples, folder, emotionality)
    check_model_labels(requirements, samples, f"{folder}, {split}")
    if CAUSES in requirements.columns:
        if cause := find_threshold_setting(config, filters.cause_threshold):
            samples = apply_cause_threshold(samples, folder, split, cause)
        if not samples[CAUSES].explode().count():
            raise DataError(
                f"{folder}: no utterance in {split} is marked as a cause or as none, which this "
                f"variant learns from: add marks with 'attune annotate cause RUN --data {folder}', "
                f"where RUN is a run of an annotator"
            )
    return samples


@functools.lru_cache(2)
def read_training_split_once(
    variant: type[Variant], folder: Path, split: str, data_hash: str
) -> pl.DataFrame:
    """Return a split of data with this hash, unfiltered; train and valid are cached, so that a
    process which checks, trains and tunes on the same data reads them once."""
    assert data_hash, "part of the cache key"
    return read_model_split(variant, folder, split)


def _read_unpaired_training_data(
    run: Run, filters: DataFilters, config: Any, stream: str
) -> pl.DataFrame:
    """Return unpaired text: from the harvest if one is set, else from the data."""
    if "harvest" not in run.data:
        return read_dataset_samples(Path(run.data["folder"]), UNPAIRED_FILES[stream])
    folder = _check_training_data_unchanged(run, run.data["harvest"])
    return read_unpaired(folder, stream, _harvest_threshold(filters, config))


def _harvest_threshold(filters: DataFilters, config: Any) -> Threshold:
    setting = filters.harvest_threshold
    assert setting is not None, "a variant with unpaired streams declares it"
    return Threshold(setting, getattr(config, setting))


def _harvest_folder(filters: DataFilters, config: Any) -> str:
    """Return the folder of the harvest as typed; empty if none is set."""
    assert filters.harvest is not None, "a variant with unpaired streams declares it"
    return str(getattr(config, filters.harvest))


def _check_training_data_unchanged(run: Run, data: Mapping[str, Any]) -> Path:
    """Return a data folder of a run; raise UsageError if its content has changed since then."""
    folder = Path(data["folder"])
    current_hash = read_dataset_manifest(folder)["hash"]
    if current_hash != data["hash"]:
        raise UsageError(
            f"{folder} has changed since run '{run.name}' was started (hash {current_hash[:12]} "
            f"instead of {data['hash'][:12]}): prepare the same data again, or start a new run"
        )
    return folder


def check_training_data(variant: type[Variant], name: str, config: Any, folder: Path) -> None:
    """Raise an error if anything that a variant needs is missing, before workers are started: its
    encoder, causes, labels or unpaired text."""
    requirements = variant.requirements_for(config)
    if requirements.encoder is not None:
        find_encoder(getattr(config, requirements.encoder))
    unpaired = {UNPAIRED_FILES[n] for n in requirements.streams if n in UNPAIRED_FILES}
    if unpaired and not _harvest_folder(requirements.filters, config):
        _check_unpaired_splits(unpaired, name, config, requirements.filters, folder)
    if (
        issubclass(variant, Annotator)
        or requirements.labels == "utterances"
        or {CAUSES, CONTEXT_LABELS} & set(requirements.columns)
        or find_threshold_setting(config, requirements.filters.emotionality_threshold)
    ):
        for split in ("train", "valid"):
            read_training_samples(variant, config, folder, split)


def _check_unpaired_splits(
    streams: set[str], name: str, config: Any, filters: DataFilters, folder: Path
) -> None:
    """Check that the data has unpaired text if no harvest is set; thresholds need a harvest."""
    threshold = _harvest_threshold(filters, config)
    if threshold != _harvest_threshold(filters, type(config)):
        raise UsageError(
            f"{threshold}: only the texts of a harvest have probabilities: name one with --set "
            f"{filters.harvest}=DIR"
        )
    if missing := streams - set(read_dataset_manifest(folder)["splits"]):
        raise UsageError(
            f"'{name}' also trains on unpaired text, but {folder} has no '{min(missing)}': create "
            f"it with 'attune data harvest CLASSIFIER_RUN --source PATH --out DIR', and select it "
            f"with --set {filters.harvest}=DIR"
        )


def training_harvest_record(requirements: DataRequirements, config: Any) -> dict[str, Any]:
    """Return the folder and hash of the harvest for the run record, if one is used."""
    filters = requirements.filters
    if not set(requirements.streams) & set(UNPAIRED_FILES):
        return {}
    if not (name := _harvest_folder(filters, config)):
        return {}
    folder = Path(name)
    harvest_hash = check_unpaired_harvest(folder)["hash"]
    for stream in UNPAIRED_FILES:  # raises if the threshold keeps nothing
        read_unpaired(folder, stream, _harvest_threshold(filters, config))
    return {"harvest": {"folder": str(folder.absolute()), "hash": harvest_hash}}
