"""`attune data select`: keep the emotional dialogues of a corpus with labelled utterances.

The emotionality of an utterance is the sum of the probabilities of the 32 emotions; that of a
dialogue is the mean over its utterances (Xie and Pu 2021). The dialogues with the highest
emotionality, or all above a threshold, become a prepared folder.
"""

import shutil
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.core.errors import UsageError
from attune.platform.core.settings import Threshold, labels_utterances, variants_where
from attune.platform.curation.curate import Size
from attune.platform.data.conversations import SPLITS
from attune.platform.data.dataset_folder import (
    LEXICON,
    TOKENS,
    StreamWriter,
    check_folder_is_not_source,
    combine_dataset_hashes,
    find_existing_dataset,
    publish_dataset_folder,
    read_dataset_manifest,
    write_dataset_manifest,
)
from attune.platform.data.files import ParquetWriter, read_parquet_chunks
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.samples import SAMPLES, extract_utterance_samples
from attune.platform.data.token_counts import TokenCounts
from attune.platform.enrichment.labels import (
    LABEL_SCHEMA,
    LABEL_SHARD_ROWS,
    LABELS_FILE,
    LABELS_KEY,
    PROBABILITIES,
    read_chunks_to_label,
)
from attune.platform.services.tasks import Progress

SELECTION_KEY = "selection"


def read_emotionality(folder: Path) -> pl.DataFrame:
    """Return (conversation_id, split, emotionality, utterances, label) of each dialogue.

    The label is the most likely one of the last utterance. The most emotional dialogues come
    first, ties in alphabetical order.
    """
    labels = _filter_label_names(folder)
    emotions = [number for number, label in enumerate(labels) if label in EMOTIONS]
    distributions = pl.scan_parquet(folder / LABELS_FILE)
    emotional = pl.col(PROBABILITIES).list.gather(emotions).list.sum()
    likeliest = pl.col(PROBABILITIES).list.arg_max()
    return (
        distributions.select(
            "conversation_id", "split", "turn", emotionality=emotional, number=likeliest
        )
        .group_by("conversation_id", "split")
        .agg(
            pl.col("emotionality").cast(pl.Float64).mean(),
            utterances=pl.len(),
            label=pl.col("number").sort_by("turn").last(),
        )
        .with_columns(
            label=pl.col("label").replace_strict(dict(enumerate(labels)), return_dtype=pl.String)
        )
        .sort(["emotionality", "conversation_id"], descending=[True, False])
        .collect()
    )


def filtered_label_distribution(dialogs: pl.DataFrame, labels: list[str]) -> dict[str, float]:
    """Return the share of each label among the last utterances of dialogues, in the order of the
    labels (Figure 2 of Xie and Pu 2021)."""
    counts = Counter(dict(dialogs["label"].value_counts().iter_rows()))
    return {label: counts[label] / max(dialogs.height, 1) for label in labels}


def keep_emotional(samples: pl.DataFrame, folder: Path, threshold: Threshold) -> pl.DataFrame:
    """Return the samples of those dialogues of a folder whose emotionality reaches a threshold."""
    enough = read_emotionality(folder).filter(pl.col("emotionality") >= threshold.value)
    kept = samples.join(enough, on="conversation_id", how="semi", maintain_order="left")
    if kept.is_empty():
        raise UsageError(
            f"{threshold}: no dialogue of train in '{folder}' is that emotional; lower it"
        )
    return kept


def filter_dialogues(
    data: Path,
    out: Path,
    *,
    top: int | None = None,
    threshold: float | None = None,
    rest: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """Write the most emotional dialogues of `data`, or the `rest`, to `out`.

    Returns the manifest, and the selected rows of `read_emotionality`. If `out` is already the
    result, nothing is written.
    """
    if (top is None) == (threshold is None):
        raise UsageError("give either --top N or --threshold T, not both")
    manifest = read_dataset_manifest(data)
    provenance = {"data": manifest["hash"], "top": top, "threshold": threshold, "rest": rest}
    check_folder_is_not_source(out, data)
    selected = _filter_rows(read_emotionality(data), top, threshold, rest)
    if (existing := find_existing_dataset(out, SELECTION_KEY, provenance)) is not None:
        return existing, selected
    total(sum(manifest["splits"][split]["samples"] for split in SPLITS))
    write = partial(_write_filtered_folder, data, manifest, selected, provenance, progress)
    return publish_dataset_folder(out, write), selected


def _filter_rows(
    dialogs: pl.DataFrame, top: int | None, threshold: float | None, rest: bool
) -> pl.DataFrame:
    """Return the rows of the dialogues to keep; raise an error if there are none."""
    enough = pl.lit(True) if threshold is None else pl.col("emotionality") >= threshold
    selected = dialogs.filter(enough).head(top or dialogs.height)
    if selected.is_empty():
        highest = dialogs["emotionality"].to_numpy().max()
        raise UsageError(
            f"--threshold {threshold}: no dialogue is that emotional; the highest emotionality is "
            f"{highest:.3f}"
        )
    if not rest:
        return selected
    others = dialogs.join(selected, on="conversation_id", how="anti", maintain_order="left")
    if others.is_empty():
        raise UsageError("--rest: no dialogue is left; all of them are selected")
    return others


def _write_filtered_folder(
    data: Path,
    manifest: Mapping[str, Any],
    selected: pl.DataFrame,
    provenance: Mapping[str, Any],
    progress: Progress,
    folder: Path,
) -> dict[str, Any]:
    """Write the folder with the selected dialogues and return its manifest."""
    tokens, size = TokenCounts(), Size()
    hashes, splits = {}, {}
    for split in SPLITS:
        with StreamWriter(folder / f"{split}.parquet", SAMPLES) as writer:
            for chunk in read_chunks_to_label(data, split):
                rows = _keep_filtered_rows(chunk, selected)
                turns = extract_utterance_samples(rows)
                tokens.add(turns.with_columns(split=pl.lit(split)))
                for texts in turns.group_by("conversation_id").agg("text")["text"]:
                    size.add(texts.to_list())
                writer.write(rows)
                progress(chunk.height)
        hashes[split], splits[split] = writer.hash, writer.counts
    with ParquetWriter(folder / LABELS_FILE, LABEL_SCHEMA) as label_writer:
        for chunk in read_parquet_chunks(data / LABELS_FILE, LABEL_SHARD_ROWS):
            label_writer.write(_keep_filtered_rows(chunk, selected))
    tokens.frame().write_parquet(folder / TOKENS)
    if (data / LEXICON).is_file():
        shutil.copyfile(data / LEXICON, folder / LEXICON)
    return write_dataset_manifest(
        folder,
        {
            "hash": combine_dataset_hashes(hashes),
            "format": manifest["format"],
            "tokenizer": manifest["tokenizer"],
            "splits": splits,
            "tolerated": {},
            "rejected": {"rows": 0, "file": None, "reasons": {}},
            LABELS_KEY: manifest[LABELS_KEY],
            SELECTION_KEY: provenance,
            "statistics": size.statistics(),
        },
    )


def _keep_filtered_rows(rows: pl.DataFrame, selected: pl.DataFrame) -> pl.DataFrame:
    return rows.join(selected, on="conversation_id", how="semi", maintain_order="left")


def _filter_label_names(folder: Path) -> list[str]:
    """Return the labels of a folder's utterances, in the order of their probabilities."""
    manifest_entry = read_dataset_manifest(folder).get(LABELS_KEY)
    if manifest_entry is None:
        able = " or ".join(variants_where(labels_utterances))
        raise UsageError(
            f"'{folder}' has no labels of utterances: add them with 'attune annotate emotions RUN "
            f"--data {folder}', where RUN is a run of {able}"
        )
    labels: list[str] = manifest_entry["labels"]
    return labels
