"""`attune data select`: the emotional dialogs of a corpus whose utterances are labelled.

The emotionality of an utterance is the sum of the probabilities of the 32 emotions; that of a
dialog is the mean over its utterances (Xie and Pu 2021). The most emotional so many, or all from a
threshold on, make a prepared folder of their own.
"""

import hashlib
import shutil
from collections import Counter
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
    OutputFolder,
    combine_hashes,
    find_existing,
    read_manifest,
    serialize_rows,
    write_manifest,
)
from attune.platform.data.files import ParquetWriter, read_parquet_chunks
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.samples import SAMPLES, extract_utterances
from attune.platform.data.token_counts import TokenCounts
from attune.platform.enrichment.labels import (
    LABEL_SCHEMA,
    LABEL_SHARD_ROWS,
    LABELS_FILE,
    LABELS_KEY,
    PROBABILITIES,
    Progress,
    read_sample_chunks,
)

SELECTION_KEY = "selection"


def read_emotionality(folder: Path) -> pl.DataFrame:
    """(conversation_id, split, emotionality, utterances, label) of each dialog, most emotional
    first, ties by the alphabet; the label is the likeliest of the last utterance."""
    labels = _labels(folder)
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


def label_distribution(dialogs: pl.DataFrame, labels: list[str]) -> dict[str, float]:
    """The share of each label among the last utterances of dialogs, in the order of the labels
    (Figure 2 of MEED2's paper)."""
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


def select_dialogues(
    data: Path,
    out: Path,
    *,
    top: int | None = None,
    threshold: float | None = None,
    rest: bool = False,
    total: Progress = lambda _: None,
    progress: Progress = lambda _: None,
) -> tuple[dict[str, Any], pl.DataFrame]:
    """Make `out`: the most emotional dialogs of `data`, or the `rest`; its manifest, and what was
    chosen."""
    if (top is None) == (threshold is None):
        raise UsageError("give either --top N or --threshold T, and not both")
    manifest = read_manifest(data)
    maker = {"data": manifest["hash"], "top": top, "threshold": threshold, "rest": rest}
    target = OutputFolder(out, overwrite=False)
    if out.resolve() == data.resolve():
        raise UsageError(f"--out '{out}' is the data itself: name another folder")
    dialogs = read_emotionality(data)
    least = pl.lit(True) if threshold is None else pl.col("emotionality") >= threshold
    chosen = dialogs.filter(least).head(top or dialogs.height)
    if chosen.is_empty():
        most = f"the most emotional dialog has {dialogs['emotionality'].to_numpy().max():.3f}"
        raise UsageError(f"--threshold {threshold} leaves nothing: {most}")
    if rest:
        chosen = dialogs.join(chosen, on="conversation_id", how="anti", maintain_order="left")
        if chosen.is_empty():
            raise UsageError("--rest leaves nothing: all dialogs are as emotional")
    if (there := find_existing(out, SELECTION_KEY, maker)) is not None:
        return there, chosen
    total(sum(manifest["splits"][split]["samples"] for split in SPLITS))
    with target.temporary_folder() as staging:
        written = _write(data, staging, manifest, chosen, maker, progress)
        target.publish(staging, written)
    return written, chosen


def _write(
    data: Path,
    folder: Path,
    manifest: dict[str, Any],
    chosen: pl.DataFrame,
    maker: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """The folder's files."""
    tokens, size = TokenCounts(), Size()
    hashes, splits = {}, {}
    for split in SPLITS:
        digest, count = hashlib.sha256(), Counter(conversations=0, samples=0)
        with ParquetWriter(folder / f"{split}.parquet", SAMPLES) as writer:
            for piece in read_sample_chunks(data, split):
                rows = piece.join(chosen, on="conversation_id", how="semi", maintain_order="left")
                turns = extract_utterances(rows)
                tokens.add(turns.with_columns(split=pl.lit(split)))
                for texts in turns.group_by("conversation_id").agg("text")["text"]:
                    size.add(texts.to_list())
                digest.update(serialize_rows(rows))
                writer.write(rows)
                samples, conversations = rows.height, rows["conversation_id"].n_unique()
                count.update(samples=samples, conversations=conversations)
                progress(piece.height)
        hashes[split], splits[split] = digest.hexdigest(), dict(count)
    with ParquetWriter(folder / LABELS_FILE, LABEL_SCHEMA) as writer:
        for piece in read_parquet_chunks(data / LABELS_FILE, LABEL_SHARD_ROWS):
            writer.write(
                piece.join(chosen, on="conversation_id", how="semi", maintain_order="left")
            )
    tokens.frame().write_parquet(folder / TOKENS)
    if (data / LEXICON).is_file():
        shutil.copyfile(data / LEXICON, folder / LEXICON)
    return write_manifest(
        folder,
        {
            "hash": combine_hashes(hashes),
            "format": manifest["format"],
            "tokenizer": manifest["tokenizer"],
            "splits": splits,
            "tolerated": {},
            "rejected": {"rows": 0, "file": None, "reasons": {}},
            LABELS_KEY: manifest[LABELS_KEY],
            SELECTION_KEY: maker,
            "statistics": size.statistics(),
        },
    )


def _labels(folder: Path) -> list[str]:
    labelling = read_manifest(folder).get(LABELS_KEY)
    if labelling is None:
        raise UsageError(
            f"'{folder}' has no labels of utterances: add them with 'attune annotate emotions RUN "
            f"--data {folder}', RUN being a run of {' or '.join(variants_where(labels_utterances))}"
        )
    labels: list[str] = labelling["labels"]
    return labels
