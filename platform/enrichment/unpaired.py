"""`attune data harvest`: contexts and responses of any conversations, each with a likely emotion.

    unpaired_contexts.parquet unpaired_responses.parquet      texts in the schema of samples, with
                                                              `emotion` and its `probability`
    rejects.jsonl           rows that were set aside, with file, row and reason
    manifest.json           what the folder is, and which classifier made it

A context is all turns before a listener's turn, a response is that turn. Every text that is long
enough is kept with the likeliest emotion and its calibrated probability, whatever that is: a
threshold is only looked at when texts are read, so that another one needs no classifier.

Memory does not grow with the corpus. Sources are prepared in pieces; Ray tasks label a few thousand
samples each, out of one file and into another; the results are joined a file at a time. What was
done waits in a folder beside the one to be made, so that an interrupted harvest goes on.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from attune.models.base import CONTEXTS, RESPONSES, TextClassifier, Variant
from attune.models.base import TextKind as Kind
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import checksum
from attune.platform.core.settings import Threshold, variants_where
from attune.platform.data.conversations import SPLITS, UNPAIRED
from attune.platform.data.dataset_folder import (
    MANIFEST,
    REJECTS,
    OutputFolder,
    combine_hashes,
    find_existing,
    read_manifest,
    serialize_rows,
    write_manifest,
)
from attune.platform.data.files import ParquetWriter, read_parquet_chunks
from attune.platform.data.prepare import find_data, prepare
from attune.platform.data.samples import SAMPLES
from attune.platform.data.sources import BUNDLED, Source
from attune.platform.enrichment import calibration
from attune.platform.enrichment.classifier import (
    TEXT_KINDS,
    Progress,
    classify_texts,
    fit_temperatures,
    require_classifier,
)
from attune.platform.runs.model import MODEL_WEIGHTS, Model, load_model, load_model_once
from attune.platform.runs.record import Run
from attune.platform.services.tasks import run_file_tasks

HARVEST_KEY = "harvest"
MIN_LENGTH = 3
TEXT_SHARD_ROWS = 2048
PROBABILITY = "probability"
HARVESTED = pl.Schema({**SAMPLES, PROBABILITY: pl.Float64()})
STREAM_OF_KIND: Mapping[Kind, str] = dict(zip(TEXT_KINDS, UNPAIRED, strict=True))
UNPAIRED_FILES = {CONTEXTS: UNPAIRED[0], RESPONSES: UNPAIRED[1]}
"""By the name that models have for a stream, the one it has in a folder."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some samples of a prepared file, and the file for their labelled texts."""

    model: str
    samples: str
    start: int
    rows: int
    kind: Kind
    temperature: float
    min_length: int
    file: str


def classify_shard(shard: Shard) -> int:
    """Write a shard's texts with their emotions; the number of samples they are from."""
    torch.set_num_threads(1)  # a task has one core
    part = pl.scan_parquet(shard.samples, row_index_name="row").slice(shard.start, shard.rows)
    texts = extract_texts(part.collect().sort("row"), shard.kind, shard.min_length)
    if texts.height:
        texts = _label_texts(
            load_model_once(Path(shard.model)), texts, shard.kind, shard.temperature
        )
    path = Path(shard.file)
    new = path.with_suffix(".new")
    texts.select(HARVESTED.names()).cast(HARVESTED).write_parquet(new)
    new.replace(path)
    return shard.rows


def extract_texts(samples: pl.DataFrame, kind: Kind, min_length: int) -> pl.DataFrame:
    """The contexts, or the responses, of samples, and nothing else of them; short ones are left
    out."""
    spoken = pl.col("context_tokens").list.join(" ") if kind == "context" else "response_tokens"
    tokens = samples.select(spoken).to_series().str.count_matches(r"\S+")
    others = [
        pl.lit([] if isinstance(dtype, pl.List) else None, dtype=dtype).alias(name)
        for name, dtype in HARVESTED.items()
        if not name.startswith((kind, "conversation_id", "turn"))
    ]
    return samples.filter(tokens >= min_length).with_columns(others)


def _label_texts(model: Model, texts: pl.DataFrame, kind: Kind, temperature: float) -> pl.DataFrame:
    log_probs = classify_texts(model, texts, kind)
    emotions = model.variant.data_info.emotions
    best = np.exp(calibration.apply_temperature(log_probs, temperature).max(axis=1))
    return texts.with_columns(
        pl.Series("emotion", [emotions[number] for number in log_probs.argmax(axis=1)]),
        pl.Series(PROBABILITY, best),
    )


def _classifies_both_kinds(variant: type[Variant]) -> bool:
    return issubclass(variant, TextClassifier) and variant.learns == TEXT_KINDS


def harvest_texts(
    run: Run,
    sources: Sequence[str],
    out: Path,
    *,
    min_length: int = MIN_LENGTH,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Make `out`: the texts of the sources with their emotions; returns its manifest.

    Nothing is done where `out` is what would be made.
    """
    if min_length < 1:
        raise UsageError(f"--min-length: expected at least 1, got {min_length}")
    if (
        require_classifier(load_model(run.model)).learns != TEXT_KINDS
    ):  # refused here, not in a task
        able = " or ".join(variants_where(_classifies_both_kinds))
        raise UsageError(f"'{run.name}' classifies utterances only: name a run of {able}")
    target = OutputFolder(out, overwrite=False)
    maker = {
        "run": run.name,
        "run_id": run.run_id,
        "variant": run.variant,
        "weights": checksum(run.model / MODEL_WEIGHTS),
        "temperature": fit_temperatures(run),
        "min_length": min_length,
        "sources": [_identity(source) for source in sources],
    }
    if (there := find_existing(out, HARVEST_KEY, maker)) is not None:
        return there
    key = hashlib.sha256(json.dumps(maker).encode()).hexdigest()[:12]
    work = out.resolve().parent / f".{out.name}.harvest-{key}"
    work.mkdir(parents=True, exist_ok=True)
    try:
        with target.temporary_folder() as staging:
            folders = [
                _prepare_source(source, work / f"source-{n}") for n, source in enumerate(sources)
            ]
            shards = {kind: list(_shards(run, folders, kind, maker, work)) for kind in TEXT_KINDS}
            both = [shard for of_kind in shards.values() for shard in of_kind]
            total(sum(shard.rows for shard in both))
            run_file_tasks(classify_shard, both, progress)
            manifest = _write(staging, folders, shards, maker)
            target.publish(staging, manifest)
    except (DataError, UsageError):
        shutil.rmtree(work)  # what is wrong would be so again: there is nothing to go on with
        raise
    shutil.rmtree(work)
    return manifest


def _identity(source: str) -> dict[str, Any]:
    """What a source is: a prepared folder, or files, by their content."""
    if _is_prepared(source):
        return {"source": source, "hash": read_manifest(Path(source))["hash"]}
    files = Source(source)
    checksums = {path.name: checksum(path) for path in files.paths}
    return {"source": source, "format": files.format, "files": checksums}


def _is_prepared(source: str) -> bool:
    return source != BUNDLED and (Path(source) / MANIFEST).is_file()


def _prepare_source(source: str, folder: Path) -> Path:
    """A source as samples: the folder it is already, or one that is made of it, once."""
    if _is_prepared(source):
        return find_data(source)
    if not (folder / MANIFEST).is_file():
        prepare(source, folder, any_emotion=True)
    return folder


def _shards(
    run: Run, folders: Sequence[Path], kind: Kind, maker: Mapping[str, Any], work: Path
) -> Iterator[Shard]:
    for number, folder in enumerate(folders):
        for split in SPLITS:
            count = read_manifest(folder)["splits"].get(split, {}).get("samples", 0)
            for start in range(0, count, TEXT_SHARD_ROWS):
                yield Shard(
                    model=str(run.model.resolve()),
                    samples=str(folder / f"{split}.parquet"),
                    start=start,
                    rows=min(TEXT_SHARD_ROWS, count - start),
                    kind=kind,
                    temperature=maker["temperature"][kind],
                    min_length=maker["min_length"],
                    file=str(work / f"{kind}-{number}-{split}-{start:010d}.parquet"),
                )


def _write(
    folder: Path,
    folders: Sequence[Path],
    shards: Mapping[Kind, Sequence[Shard]],
    maker: Mapping[str, Any],
) -> dict[str, Any]:
    """The folder's files."""
    digests, counts = {}, {}
    for kind, stream in STREAM_OF_KIND.items():
        files = [Path(shard.file) for shard in shards[kind]]
        digests[stream], counts[stream] = _join_files(files, folder / f"{stream}.parquet")
    if not any(count["samples"] for count in counts.values()):
        raise DataError(
            f"no text of the sources has {maker['min_length']} tokens: lower --min-length, or name "
            f"other sources"
        )
    manifest = {
        "hash": combine_hashes(digests),
        "format": HARVEST_KEY,
        "splits": counts,
        "tolerated": {},
        "rejected": _collect_rejects(folders, folder / REJECTS),
        HARVEST_KEY: maker,
    }
    return write_manifest(folder, manifest)


def _join_files(files: Sequence[Path], path: Path) -> tuple[str, dict[str, int]]:
    """One file of several, a piece at a time: its hash, and what it holds."""
    digest = hashlib.sha256()
    count: Counter[str] = Counter(conversations=0, samples=0)
    with ParquetWriter(path, HARVESTED) as whole:
        for file in files:
            rows = pl.read_parquet(file)
            digest.update(serialize_rows(rows))
            count.update(samples=rows.height, conversations=rows["conversation_id"].n_unique())
            whole.write(rows)
    return digest.hexdigest(), dict(count)


def _collect_rejects(folders: Sequence[Path], path: Path) -> dict[str, Any]:
    """What was set aside in all sources, listed in one file."""
    rejected = {folder: read_manifest(folder)["rejected"] for folder in folders}
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
        for piece in _pieces(folder, UNPAIRED_FILES[stream], HARVESTED.names())
    ]
    samples = pl.concat([SAMPLES.to_frame(), *(piece.select(SAMPLES.names()) for piece in kept)])
    if samples.is_empty():
        raise UsageError(
            f"{threshold}: no emotion of the {stream} in '{folder}' has a higher probability: "
            f"lower it ('attune data harvest' with another --threshold counts the texts)"
        )
    return samples


def count_unpaired(folder: Path, threshold: float) -> dict[str, Any]:
    """By stream, how many texts there are, and how many of each emotion a threshold keeps."""
    counts = {}
    for name, stream in UNPAIRED_FILES.items():
        texts, emotions = 0, Counter[str]()
        for piece in _pieces(folder, stream, ["emotion", PROBABILITY]):
            texts += piece.height
            kept = piece.filter(pl.col(PROBABILITY) > threshold)
            emotions.update(dict(kept["emotion"].value_counts().iter_rows()))
        by_count = sorted(emotions.items(), key=lambda item: (-item[1], item[0]))
        counts[name] = {"texts": texts, "kept": emotions.total(), "emotions": dict(by_count)}
    return counts


def check_harvest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, which must be a harvest."""
    again = "make one with 'attune data harvest CLASSIFIER_RUN --source PATH --out DIR'"
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"harvest={folder}: there is no harvest; {again}")
    manifest = read_manifest(folder)
    if manifest["format"] != HARVEST_KEY:
        raise UsageError(f"harvest={folder}: this is prepared data, and no harvest; {again}")
    return manifest


def _pieces(folder: Path, stream: str, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    return read_parquet_chunks(folder / f"{stream}.parquet", TEXT_SHARD_ROWS, columns)
