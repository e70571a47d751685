"""`attune annotate cause`: add cause labels to prepared data with a trained annotator.

The labels of a sample depend on its own context only, so that nothing of later turns can leak into
what models learn from them. The new folder has, besides the labels, the annotator's probabilities,
so that a run can choose another threshold. Its manifest records the annotator and the threshold.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch

from attune.models.base import Annotator
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import Threshold
from attune.platform.data.conversations import CAUSE_STREAMS
from attune.platform.data.dataset_folder import (
    check_folder_is_not_source,
    find_existing_dataset,
    publish_dataset_folder,
    read_dataset_manifest,
    read_dataset_samples,
)
from attune.platform.data.files import read_parquet_chunks
from attune.platform.enrichment.shards import (
    Shard,
    cut_into_shards,
    describe_shard_model,
    equal_shard_sizes,
    write_folder_from_shards,
)
from attune.platform.runs.model import Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import Progress, run_file_tasks, task_folder

CAUSES_KEY = "causes"
CAUSE_THRESHOLD = 0.5
CAUSE_SHARD_ROWS = 512
TOKENS_AT_A_TIME = 8192
CAUSES_COLUMN, MARKS = "context_causes", "probability"
CAUSES_FILE = "cause_probabilities.parquet"
"""By stream, the probabilities of each sample's utterances, in the order of the samples."""
PROBABILITIES_SCHEMA = pl.Schema({MARKS: pl.List(pl.Float64()), "stream": pl.String()})


@torch.no_grad()
def cause_probabilities(
    model: Model, samples: pl.DataFrame, progress: Progress = lambda _: None
) -> pl.Series:
    """Return for each sample the probabilities that the utterances of its context are causes."""
    variant = require_cause_annotator(model).eval()
    by_row: dict[int, list[float]] = {}
    stream = Stream(
        model.columns(samples), size=TOKENS_AT_A_TIME, by="tokens", shuffle=False, by_context=True
    )
    for batch in stream.epoch():
        turns = (batch["turn_roles"] > 0).sum(dim=1).tolist()
        for row, marks, count in zip(
            batch["index"].tolist(), variant.predict_causes(batch).tolist(), turns, strict=True
        ):
            by_row[row] = marks[:count]
        progress(len(batch))
    rows = [by_row[row] for row in range(samples.height)]
    return pl.Series(MARKS, rows, dtype=pl.List(pl.Float64))


def require_cause_annotator(model: Model) -> Annotator:
    """Return the variant of a model, which must be an annotator."""
    if not isinstance(model.variant, Annotator):
        raise UsageError(f"'{model.name}' does not annotate causes: name a run of an annotator")
    return model.variant


def annotate_causes_of_shard(shard: Shard) -> int:
    """Write the probabilities of a shard's samples, null for those without an emotion or context;
    return the number of samples."""
    torch.set_num_threads(1)  # a task has one core
    samples = shard.read().with_row_index("row")
    annotatable = samples.filter(_has_emotion_and_context())
    marks = pl.Series(MARKS, [], dtype=pl.List(pl.Float64))
    if annotatable.height:
        marks = cause_probabilities(load_model_once(Path(shard.model)), annotatable)
    probabilities = annotatable.select("row").with_columns(marks)
    aligned = samples.select("row").join(probabilities, on="row", how="left", maintain_order="left")
    return shard.write(aligned.select(MARKS, stream=pl.lit(shard.stream)))


def _has_emotion_and_context() -> pl.Expr:
    return pl.col("emotion").is_not_null() & (pl.col("context").list.len() > 0)


def annotate_causes(
    run: Run,
    data: Path,
    out: Path,
    *,
    threshold: float = CAUSE_THRESHOLD,
    replace: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Write the prepared folder `data` with cause labels to `out` and return the new manifest.

    `replace` overwrites cause labels of the data. If `out` is already the result, nothing is done.
    """
    if not 0 < threshold < 1:
        raise UsageError(f"--threshold: expected a probability between 0 and 1, got {threshold}")
    manifest = read_dataset_manifest(data)
    require_cause_annotator(load_model(run.model))  # raises here rather than in a task
    provenance = {**describe_shard_model(run), "threshold": threshold, "data": manifest["hash"]}
    check_folder_is_not_source(out, data)
    if (existing := find_existing_dataset(out, CAUSES_KEY, provenance)) is not None:
        return existing
    streams = [stream for stream in manifest["splits"] if stream not in CAUSE_STREAMS.values()]
    _check_can_annotate_causes(data, manifest, streams, replace)
    counts = {stream: manifest["splits"][stream]["samples"] for stream in streams}
    total(sum(counts.values()))
    inputs = {key: provenance[key] for key in ("weights", "data")}  # whatever the threshold
    with task_folder(out, CAUSES_KEY, inputs) as folder:
        shards = {
            stream: cut_into_shards(
                run, data, stream, equal_shard_sizes(count, CAUSE_SHARD_ROWS), folder
            )
            for stream, count in counts.items()
        }
        run_file_tasks(
            annotate_causes_of_shard, [s for part in shards.values() for s in part], progress
        )
        results = (CAUSES_FILE, PROBABILITIES_SCHEMA)
        join, record = partial(_add_causes, threshold), {CAUSES_KEY: provenance}
        return publish_dataset_folder(
            out, partial(write_folder_from_shards, data, shards, join, results, record)
        )


def _check_can_annotate_causes(
    data: Path, manifest: Mapping[str, Any], streams: Sequence[str], replace: bool
) -> None:
    """Raise an error if the data has cause labels that must not be replaced, or nothing to
    annotate."""
    annotator = manifest.get(CAUSES_KEY)
    is_labelled, is_annotatable = annotator is not None, False
    for stream in streams:
        path, columns = data / f"{stream}.parquet", ("emotion", "context", CAUSES_COLUMN)
        for rows in read_parquet_chunks(path, CAUSE_SHARD_ROWS, columns):
            is_labelled |= rows[CAUSES_COLUMN].explode().count() > 0
            is_annotatable |= rows.select(_has_emotion_and_context().any()).item()
    if is_labelled and not replace:
        origin = f"from '{annotator['run']}'" if annotator else "from its source"
        raise UsageError(
            f"'{data}' has cause labels already, {origin}: add --replace to annotate it anew"
        )
    if not is_annotatable:
        raise UsageError(f"'{data}': no sample has an emotion whose cause could be annotated")


def _add_causes(threshold: float, samples: pl.DataFrame, results: pl.DataFrame) -> pl.DataFrame:
    """Return samples with the cause labels of an annotator's probabilities."""
    return samples.with_columns(_above_cause_threshold(results[MARKS], threshold))


def _above_cause_threshold(marks: pl.Series, threshold: float) -> pl.Series:
    """Return cause labels: the utterances whose probability reaches a threshold."""
    return marks.list.eval(pl.element() >= threshold).alias(CAUSES_COLUMN)


def apply_cause_threshold(
    samples: pl.DataFrame, folder: Path, stream: str, threshold: Threshold
) -> pl.DataFrame:
    """Return a stream's samples, labelled anew from the annotator's probabilities."""
    if not (folder / CAUSES_FILE).exists():
        raise UsageError(
            f"{threshold}: '{folder}' has no probabilities of causes: add them with 'attune "
            f"annotate cause RUN --data DIR', or keep the labels of the data with "
            f"{threshold.setting}=0"
        )
    marks = (
        pl.scan_parquet(folder / CAUSES_FILE).filter(pl.col("stream") == stream).collect()[MARKS]
    )
    return samples.with_columns(_above_cause_threshold(marks, threshold.value))


def cause_shares(folder: Path) -> dict[str, float]:
    """Return by stream the share of causes among the labelled utterances."""
    shares = {}
    for stream in read_dataset_manifest(folder)["splits"]:
        labels = read_dataset_samples(folder, stream)[CAUSES_COLUMN].explode().drop_nulls()
        if len(labels):
            shares[stream] = float(labels.sum() / len(labels))
    return shares
