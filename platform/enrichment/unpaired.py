"""`attune data harvest`: unpaired contexts and responses with emotions, from any conversations.

    unpaired_contexts.parquet unpaired_responses.parquet      texts in the schema of samples, with
                                                              `emotion` and its `probability`
    rejects.jsonl           rejected rows, with file, row and reason
    manifest.json           sources, classifier, counts and hash

A context is all turns before a listener's turn, a response is that turn. Every text that is long
enough is kept with its most likely emotion and the calibrated probability; the threshold is applied
when texts are read, so that another threshold does not need the classifier.

Sources are prepared first; then shards of their samples are classified. Memory does not grow with
the corpus.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attune.models.base import CONTEXTS, RESPONSES, TextClassifier, Variant
from attune.models.base import TextKind as Kind
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import file_checksum
from attune.platform.core.settings import Threshold, variants_where
from attune.platform.data.conversations import SPLITS, UNPAIRED
from attune.platform.data.dataset_folder import (
    MANIFEST,
    REJECTS,
    StreamWriter,
    combine_dataset_hashes,
    find_existing_dataset,
    publish_dataset_folder,
    read_dataset_manifest,
    write_dataset_manifest,
)
from attune.platform.data.files import read_parquet_chunks
from attune.platform.data.prepare import find_prepared_data, prepare
from attune.platform.data.samples import SAMPLES
from attune.platform.data.sources import BUNDLED, Source
from attune.platform.enrichment import calibration
from attune.platform.enrichment.classifier import (
    TEXT_KINDS,
    classify_texts,
    fit_classifier_temperatures,
    require_classifier,
)
from attune.platform.enrichment.shards import (
    Shard,
    cut_into_shards,
    describe_shard_model,
    equal_shard_sizes,
    read_shard_results,
)
from attune.platform.runs.model import Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import Progress, run_file_tasks, task_folder

HARVEST_KEY = "harvest"
MIN_LENGTH = 3
TEXT_SHARD_ROWS = 2048
PROBABILITY = "probability"
HARVESTED = pl.Schema({**SAMPLES, PROBABILITY: pl.Float64()})
STREAM_OF_KIND: Mapping[Kind, str] = dict(zip(TEXT_KINDS, UNPAIRED, strict=True))
UNPAIRED_FILES = {CONTEXTS: UNPAIRED[0], RESPONSES: UNPAIRED[1]}
"""By the name that models have for a stream, the one it has in a folder."""


def classify_unpaired_shard(shard: Shard) -> int:
    """Write a shard's texts with their emotions; return the number of samples."""
    torch.set_num_threads(1)  # a task has one core
    kind = shard.options["kind"]
    texts = extract_unpaired_texts(shard.read(), kind, shard.options["min_length"])
    if texts.height:
        model = load_model_once(Path(shard.model))
        texts = _add_unpaired_emotions(model, texts, kind, shard.options["temperature"])
    return shard.write(texts.select(HARVESTED.names()).cast(HARVESTED))


def extract_unpaired_texts(samples: pl.DataFrame, kind: Kind, min_length: int) -> pl.DataFrame:
    """Return the contexts, or the responses, that have at least `min_length` tokens; all other
    columns are empty."""
    text = pl.col("context_tokens").list.join(" ") if kind == "context" else "response_tokens"
    tokens = samples.select(text).to_series().str.count_matches(r"\S+")
    others = [
        pl.lit([] if isinstance(dtype, pl.List) else None, dtype=dtype).alias(name)
        for name, dtype in HARVESTED.items()
        if not name.startswith((kind, "conversation_id", "turn"))
    ]
    return samples.filter(tokens >= min_length).with_columns(others)


def _add_unpaired_emotions(
    model: Model, texts: pl.DataFrame, kind: Kind, temperature: float
) -> pl.DataFrame:
    """Return texts with the most likely emotion and its calibrated probability."""
    log_probs = classify_texts(model, texts, kind)
    emotions = model.variant.data_info.emotions
    best = np.exp(calibration.apply_calibration_temperature(log_probs, temperature).max(axis=1))
    return texts.with_columns(
        pl.Series("emotion", [emotions[number] for number in log_probs.argmax(axis=1)]),
        pl.Series(PROBABILITY, best),
    )


def _classifies_both_kinds(variant: type[Variant]) -> bool:
    return issubclass(variant, TextClassifier) and variant.trained_on == TEXT_KINDS


def harvest_unpaired_texts(
    run: Run,
    sources: Sequence[str],
    out: Path,
    *,
    min_length: int = MIN_LENGTH,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Write the texts of the sources with their emotions to `out` and return the manifest.

    If `out` is already the result, nothing is done.
    """
    if min_length < 1:
        raise UsageError(f"--min-length: expected at least 1, got {min_length}")
    variant = require_classifier(load_model(run.model))  # raises here rather than in a task
    if variant.trained_on != TEXT_KINDS:
        able = " or ".join(variants_where(_classifies_both_kinds))
        raise UsageError(f"'{run.name}' classifies utterances only: name a run of {able}")
    provenance = {
        **describe_shard_model(run),
        "temperature": fit_classifier_temperatures(run),
        "min_length": min_length,
        "sources": [_describe_unpaired_source(source) for source in sources],
    }
    if (existing := find_existing_dataset(out, HARVEST_KEY, provenance)) is not None:
        return existing
    with task_folder(out, HARVEST_KEY, provenance) as folder:
        prepared = [
            _prepare_unpaired_source(source, folder / f"source-{n}")
            for n, source in enumerate(sources)
        ]
        shards = {
            kind: _cut_unpaired_sources(run, prepared, kind, provenance, folder)
            for kind in TEXT_KINDS
        }
        both = [shard for of_kind in shards.values() for shard in of_kind]
        total(sum(shard.rows for shard in both))
        run_file_tasks(classify_unpaired_shard, both, progress)
        return publish_dataset_folder(out, partial(_write_unpaired, prepared, shards, provenance))


def _describe_unpaired_source(source: str) -> dict[str, Any]:
    """Return what identifies a source: its hash if it is prepared, else its files' checksums."""
    if _is_prepared_unpaired_source(source):
        return {"source": source, "hash": read_dataset_manifest(Path(source))["hash"]}
    files = Source(source)
    checksums = {path.name: file_checksum(path) for path in files.paths}
    return {"source": source, "format": files.format, "files": checksums}


def _is_prepared_unpaired_source(source: str) -> bool:
    return source != BUNDLED and (Path(source) / MANIFEST).is_file()


def _prepare_unpaired_source(source: str, folder: Path) -> Path:
    """Return the prepared folder of a source; files are prepared in `folder`, once."""
    if _is_prepared_unpaired_source(source):
        return find_prepared_data(source)
    if not (folder / MANIFEST).is_file():
        prepare(source, folder, any_emotion=True)
    return folder


def _cut_unpaired_sources(
    run: Run, prepared: Sequence[Path], kind: Kind, provenance: Mapping[str, Any], folder: Path
) -> list[Shard]:
    """Cut the pairs of all sources into shards for one kind of text."""
    options = {
        "kind": kind,
        "temperature": provenance["temperature"][kind],
        "min_length": provenance["min_length"],
    }
    shards = []
    for number, data in enumerate(prepared):
        splits = read_dataset_manifest(data)["splits"]
        for split in SPLITS:
            count = splits.get(split, {}).get("samples", 0)
            sizes, prefix = equal_shard_sizes(count, TEXT_SHARD_ROWS), f"{kind}-{number}-"
            shards += cut_into_shards(
                run, data, split, sizes, folder, prefix=prefix, options=options
            )
    return shards


def _write_unpaired(
    prepared: Sequence[Path],
    shards: Mapping[Kind, Sequence[Shard]],
    provenance: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Write the folder with the results of the shards and return its manifest."""
    hashes, counts = {}, {}
    for kind, stream in STREAM_OF_KIND.items():
        with StreamWriter(folder / f"{stream}.parquet", HARVESTED) as writer:
            for _, texts in read_shard_results(shards[kind]):
                writer.write(texts)
        hashes[stream], counts[stream] = writer.hash, writer.counts
    if not any(count["samples"] for count in counts.values()):
        raise DataError(
            f"no text of the sources has {provenance['min_length']} tokens: lower --min-length, or "
            f"name other sources"
        )
    manifest = {
        "hash": combine_dataset_hashes(hashes),
        "format": HARVEST_KEY,
        "splits": counts,
        "tolerated": {},
        "rejected": _collect_unpaired_rejects(prepared, folder / REJECTS),
        HARVEST_KEY: provenance,
    }
    return write_dataset_manifest(folder, manifest)


def _collect_unpaired_rejects(folders: Sequence[Path], path: Path) -> dict[str, Any]:
    """Write the rejected rows of all sources to one file and return their summary."""
    rejected = {folder: read_dataset_manifest(folder)["rejected"] for folder in folders}
    reasons: Counter[str] = Counter()
    for folder, summary in rejected.items():
        reasons.update(summary["reasons"])
        if summary["file"] and (folder / summary["file"]).is_file():
            with (folder / summary["file"]).open("rb") as source, path.open("ab") as file:
                shutil.copyfileobj(source, file)
    return {
        "rows": reasons.total(),
        "file": REJECTS if path.exists() else None,
        "reasons": dict(sorted(reasons.items())),
    }


def read_unpaired(folder: Path, stream: str, threshold: Threshold) -> pl.DataFrame:
    """Return the contexts or responses of a harvest whose emotion's probability exceeds a
    threshold."""
    kept = [
        piece.filter(pl.col(PROBABILITY) > threshold.value)
        for piece in _read_unpaired_chunks(folder, UNPAIRED_FILES[stream], HARVESTED.names())
    ]
    samples = pl.concat([SAMPLES.to_frame(), *(piece.select(SAMPLES.names()) for piece in kept)])
    if samples.is_empty():
        raise UsageError(
            f"{threshold}: no emotion of the {stream} in '{folder}' has a higher probability: "
            f"lower it ('attune data harvest' with another --threshold counts the texts)"
        )
    return samples


def count_unpaired(folder: Path, threshold: float) -> dict[str, Any]:
    """Return by stream the number of texts, and the number of each emotion above a threshold."""
    counts = {}
    for name, stream in UNPAIRED_FILES.items():
        texts, emotions = 0, Counter[str]()
        for piece in _read_unpaired_chunks(folder, stream, ["emotion", PROBABILITY]):
            texts += piece.height
            kept = piece.filter(pl.col(PROBABILITY) > threshold)
            emotions.update(dict(kept["emotion"].value_counts().iter_rows()))
        by_count = sorted(emotions.items(), key=lambda item: (-item[1], item[0]))
        counts[name] = {"texts": texts, "kept": emotions.total(), "emotions": dict(by_count)}
    return counts


def check_unpaired_harvest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder, which must be a harvest."""
    hint = "create one with 'attune data harvest CLASSIFIER_RUN --source PATH --out DIR'"
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"harvest={folder}: no such harvest; {hint}")
    manifest = read_dataset_manifest(folder)
    if manifest["format"] != HARVEST_KEY:
        raise UsageError(f"harvest={folder}: expected a harvest, got prepared data; {hint}")
    return manifest


def _read_unpaired_chunks(
    folder: Path, stream: str, columns: Sequence[str]
) -> Iterator[pl.DataFrame]:
    return read_parquet_chunks(folder / f"{stream}.parquet", TEXT_SHARD_ROWS, columns)
