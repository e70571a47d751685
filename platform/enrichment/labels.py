"""`attune annotate emotions`: what each utterance of a corpus tells, by a trained classifier.

    train.parquet valid.parquet test.parquet         samples, with the likeliest labels in
                                                     `context_labels` and `response_label`
    emotions.parquet        conversation_id, turn, split and `probabilities`, one for each label in
                            the order of the manifest: the whole distribution of each utterance

An utterance is labelled once, however many contexts it stands in. Memory does not grow with the
corpus: Ray tasks label some conversations each, out of one file and into another, and what was done
waits in a folder beside the one to be made, so that an interruption loses little.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attune.platform.core.errors import UsageError
from attune.platform.core.files import checksum
from attune.platform.core.settings import labels_utterances, variants_where
from attune.platform.data.conversations import SPLITS, whole_conversations
from attune.platform.data.dataset_folder import (
    OutputFolder,
    combine_hashes,
    find_existing,
    read_manifest,
    read_samples,
    serialize_rows,
    write_manifest,
)
from attune.platform.data.files import ParquetWriter, read_parquet_chunks
from attune.platform.data.samples import SAMPLES, extract_utterances, utterance_samples
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Floats
from attune.platform.enrichment.classifier import (
    classify_texts,
    fit_temperatures,
    require_classifier,
)
from attune.platform.runs.model import MODEL_WEIGHTS, Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import run_file_tasks

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

Progress = Callable[[int], None]
"""Called with the number of samples that were just done."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The samples of some whole conversations, and the file for what their utterances tell."""

    model: str
    samples: str
    split: str
    start: int
    rows: int
    temperature: float
    file: str


def label_shard(shard: Shard) -> int:
    """Write the distributions of a shard's utterances; the number of samples they are from."""
    torch.set_num_threads(1)  # a task has one core
    turns = extract_utterances(_rows(shard)).with_columns(label=pl.lit(None, dtype=pl.String))
    probabilities = label_probabilities(
        load_model_once(Path(shard.model)), turns, shard.temperature
    )
    path = Path(shard.file)
    new = path.with_suffix(".new")
    turns.select(
        "conversation_id",
        "turn",
        pl.lit(shard.split).alias("split"),
        pl.Series(PROBABILITIES, probabilities).arr.to_list(),
    ).cast(LABEL_SCHEMA).write_parquet(new)
    new.replace(path)
    return shard.rows


def label_probabilities(model: Model, turns: pl.DataFrame, temperature: float) -> Floats:
    """(N, labels) of utterances, each read by itself."""
    log_probs = classify_texts(model, utterance_samples(turns), "context")
    return np.exp(calibration.apply_temperature(log_probs, temperature))


def label_utterances(
    run: Run,
    data: Path,
    out: Path,
    *,
    replace: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Make `out`: the prepared folder `data` with labels of utterances; returns its manifest.

    `replace` labels anew what has labels. Nothing is done where `out` is what would be made.
    """
    variant = require_classifier(load_model(run.model))
    if variant.requirements.labels != "utterances":
        able = " or ".join(variants_where(labels_utterances))
        raise UsageError(f"'{run.name}' labels no utterances: name a run of {able}")
    manifest = read_manifest(data)
    maker = {
        "run": run.name,
        "run_id": run.run_id,
        "variant": run.variant,
        "weights": checksum(run.model / MODEL_WEIGHTS),
        "temperature": fit_temperatures(run)["context"],
        "labels": list(variant.data_info.emotions),
        "data": manifest["hash"],
    }
    target = OutputFolder(out, overwrite=False)
    if out.resolve() == data.resolve():
        raise UsageError(f"--out '{out}' is the data itself: name another folder")
    if (existing := find_existing(out, LABELS_KEY, maker)) is not None:
        return existing
    _check(data, manifest, replace)
    total(sum(manifest["splits"][split]["samples"] for split in SPLITS))
    key = hashlib.sha256(json.dumps(maker).encode()).hexdigest()[:12]
    work = out.resolve().parent / f".{out.name}.{LABELS_KEY}-{key}"
    work.mkdir(parents=True, exist_ok=True)
    shards = [shard for split in SPLITS for shard in _shards(run, data, split, maker, work)]
    run_file_tasks(label_shard, shards, progress)
    with target.temporary_folder() as staging:
        manifest = _write(data, staging, manifest, shards, maker)
        target.publish(staging, manifest)
    shutil.rmtree(work)
    return manifest


def _check(data: Path, manifest: Mapping[str, Any], replace: bool) -> None:
    """Refuse what has labels already, unless told to replace them."""
    if replace:
        return
    by = manifest.get(LABELS_KEY)
    columns = ("context_labels", "response_label")
    labelled = (
        piece["response_label"].count() + piece["context_labels"].explode().count()
        for split in SPLITS
        for piece in read_parquet_chunks(data / f"{split}.parquet", LABEL_SHARD_ROWS, columns)
    )
    if by or any(labelled):
        who = f"'{by['run']}' has made them" if by else "its source brings them"
        raise UsageError(f"'{data}' has labels already ({who}): add --replace to label them anew")


def read_sample_chunks(
    data: Path, split: str, columns: Sequence[str] | None = None
) -> Iterator[pl.DataFrame]:
    """The samples of a split, some whole conversations at a time."""
    path = data / f"{split}.parquet"
    return whole_conversations(read_parquet_chunks(path, LABEL_SHARD_ROWS, columns))


def _shards(
    run: Run, data: Path, split: str, maker: Mapping[str, Any], work: Path
) -> Iterator[Shard]:
    start = 0
    for names in read_sample_chunks(data, split, ["conversation_id"]):
        yield Shard(
            model=str(run.model.resolve()),
            samples=str((data / f"{split}.parquet").resolve()),
            split=split,
            start=start,
            rows=names.height,
            temperature=maker["temperature"],
            file=str(work / f"{split}-{start:010d}.parquet"),
        )
        start += names.height


def _rows(shard: Shard) -> pl.DataFrame:
    part = pl.scan_parquet(shard.samples, row_index_name="row").slice(shard.start, shard.rows)
    return part.collect().sort("row").drop("row")


def _write(
    data: Path,
    folder: Path,
    manifest: Mapping[str, Any],
    shards: Sequence[Shard],
    maker: Mapping[str, Any],
) -> dict[str, Any]:
    """The folder's files with the new labels in them."""
    for name in manifest["contents"]:
        if name not in (LABELS_FILE, *(f"{split}.parquet" for split in SPLITS)):
            shutil.copyfile(data / name, folder / name)
    digests = {split: hashlib.sha256() for split in SPLITS}
    with ExitStack() as stack:
        label_writer = stack.enter_context(ParquetWriter(folder / LABELS_FILE, LABEL_SCHEMA))
        samples = {
            split: stack.enter_context(ParquetWriter(folder / f"{split}.parquet", SAMPLES))
            for split in SPLITS
        }
        for shard in shards:
            distributions = pl.read_parquet(shard.file)
            rows = add_labels(_rows(shard), distributions, maker["labels"])
            digests[shard.split].update(serialize_rows(rows))
            label_writer.write(distributions)
            samples[shard.split].write(rows)
    hashes = {split: digest.hexdigest() for split, digest in digests.items()}
    for stream in manifest["splits"]:
        if stream not in SPLITS:
            rows = read_samples(data, stream)
            hashes[stream] = hashlib.sha256(serialize_rows(rows)).hexdigest()
    return write_manifest(
        folder, {**manifest, "hash": combine_hashes(hashes), LABELS_KEY: dict(maker)}
    )


def add_labels(
    samples: pl.DataFrame, distributions: pl.DataFrame, labels: Sequence[str]
) -> pl.DataFrame:
    """Samples of whole conversations with the likeliest label of each of their utterances."""
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
