"""`attune annotate emotions`: label the utterances of prepared data with a trained classifier.

    train.parquet valid.parquet test.parquet         samples, with the most likely labels in
                                                     `context_labels` and `response_label`
    emotions.parquet        conversation_id, turn, split and `probabilities`: the distribution of
                            each utterance over the labels, in the order of the manifest

Each utterance is labelled once, however many contexts contain it. Shards consist of whole
conversations, and memory does not grow with the corpus.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attune.platform.core.errors import UsageError
from attune.platform.core.settings import labels_utterances, variants_where
from attune.platform.data.conversations import SPLITS, whole_conversations
from attune.platform.data.dataset_folder import (
    check_folder_is_not_source,
    find_existing_dataset,
    publish_dataset_folder,
    read_dataset_manifest,
)
from attune.platform.data.files import read_parquet_chunks
from attune.platform.data.samples import SAMPLES, extract_utterance_samples, utterance_samples
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Floats
from attune.platform.enrichment.classifier import (
    classify_texts,
    fit_classifier_temperatures,
    require_classifier,
)
from attune.platform.enrichment.shards import (
    Shard,
    cut_into_shards,
    describe_shard_model,
    write_folder_from_shards,
)
from attune.platform.runs.model import Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import Progress, run_file_tasks, task_folder

LABELS_KEY = "emotions"
LABELS_FILE = "emotions.parquet"
PROBABILITIES = "probabilities"
LABEL_SHARD_ROWS = 2048
LABEL_SCHEMA = pl.Schema(
    {  # type: ignore[arg-type]
        "conversation_id": pl.String,
        "turn": pl.Int64,
        "split": pl.String,
        PROBABILITIES: pl.List(pl.Float32),
    }
)


def label_shard(shard: Shard) -> int:
    """Write the distributions of a shard's utterances; return the number of samples."""
    torch.set_num_threads(1)  # a task has one core
    turns = extract_utterance_samples(shard.read()).with_columns(
        label=pl.lit(None, dtype=pl.String)
    )
    model = load_model_once(Path(shard.model))
    probabilities = label_probabilities(model, turns, shard.options["temperature"])
    distributions = turns.select(
        "conversation_id",
        "turn",
        pl.lit(shard.stream).alias("split"),
        pl.Series(PROBABILITIES, probabilities).arr.to_list(),
    )
    return shard.write(distributions.cast(LABEL_SCHEMA))


def label_probabilities(model: Model, turns: pl.DataFrame, temperature: float) -> Floats:
    """Return the probabilities (N, labels) of utterances, each classified by itself."""
    log_probs = classify_texts(model, utterance_samples(turns), "context")
    return np.exp(calibration.apply_calibration_temperature(log_probs, temperature))


def label_utterances(
    run: Run,
    data: Path,
    out: Path,
    *,
    replace: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Write the prepared folder `data` with labelled utterances to `out`; return the new manifest.

    `replace` overwrites labels of the data. If `out` is already the result, nothing is done.
    """
    variant = require_classifier(load_model(run.model))
    if variant.requirements.labels != "utterances":
        able = " or ".join(variants_where(labels_utterances))
        raise UsageError(f"'{run.name}' does not label utterances: name a run of {able}")
    manifest = read_dataset_manifest(data)
    provenance = {
        **describe_shard_model(run),
        "temperature": fit_classifier_temperatures(run)["context"],
        "labels": list(variant.data_info.emotions),
        "data": manifest["hash"],
    }
    check_folder_is_not_source(out, data)
    if (existing := find_existing_dataset(out, LABELS_KEY, provenance)) is not None:
        return existing
    if not replace:
        _check_unlabelled(data, manifest)
    total(sum(manifest["splits"][split]["samples"] for split in SPLITS))
    with task_folder(out, LABELS_KEY, provenance) as folder:
        options = {"temperature": provenance["temperature"]}
        shards = {
            split: cut_into_shards(
                run, data, split, _labelled_conversation_sizes(data, split), folder, options=options
            )
            for split in SPLITS
        }
        run_file_tasks(label_shard, [s for part in shards.values() for s in part], progress)
        results = (LABELS_FILE, LABEL_SCHEMA)
        join, record = partial(add_labels, provenance["labels"]), {LABELS_KEY: provenance}
        return publish_dataset_folder(
            out, partial(write_folder_from_shards, data, shards, join, results, record)
        )


def _check_unlabelled(data: Path, manifest: Mapping[str, Any]) -> None:
    """Raise an error if utterances have labels already."""
    labeller = manifest.get(LABELS_KEY)
    columns = ("context_labels", "response_label")
    labelled = (
        rows["response_label"].count() + rows["context_labels"].explode().count()
        for split in SPLITS
        for rows in read_parquet_chunks(data / f"{split}.parquet", LABEL_SHARD_ROWS, columns)
    )
    if labeller or any(labelled):
        origin = f"from '{labeller['run']}'" if labeller else "from its source"
        raise UsageError(
            f"'{data}' has labels of utterances already, {origin}: add --replace to label it anew"
        )


def read_chunks_to_label(
    data: Path, split: str, columns: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Yield the samples of a split in chunks of whole conversations."""
    path = data / f"{split}.parquet"
    return whole_conversations(read_parquet_chunks(path, LABEL_SHARD_ROWS, columns))


def _labelled_conversation_sizes(data: Path, split: str) -> Iterator[int]:
    """Yield the sizes of shards that consist of whole conversations."""
    return (rows.height for rows in read_chunks_to_label(data, split, ["conversation_id"]))


def add_labels(
    labels: Sequence[str], samples: pl.DataFrame, distributions: pl.DataFrame
) -> pl.DataFrame:
    """Return samples of whole conversations with the most likely label of each utterance."""
    likeliest = (
        pl.col(PROBABILITIES)
        .list.arg_max()
        .replace_strict(dict(enumerate(labels)), return_dtype=pl.String)
    )
    by_conversation = distributions.group_by("conversation_id", maintain_order=True).agg(
        turn_labels=likeliest
    )
    turns = pl.col("context").list.len()
    return (
        samples.join(by_conversation, on="conversation_id", how="left", maintain_order="left")
        .with_columns(
            context_labels=pl.col("turn_labels").list.head(turns),
            response_label=pl.col("turn_labels").list.get(turns),
        )
        .select(SAMPLES.names())
    )
