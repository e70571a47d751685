"""Summarise a prepared folder (`attune data inspect`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.platform.data.conversations import LABELLED, SPLITS
from attune.platform.data.dataset_folder import (
    TOKENS,
    read_dataset_manifest,
    read_dataset_samples,
    summarize_rejects,
)

PERCENTILES = (10, 50, 90, 99)


def inspect(folder: Path, *, samples: int = 3, seed: int = 0) -> dict[str, Any]:
    """Return counts, emotions, length percentiles, the share of unknown tokens and some samples."""
    manifest = read_dataset_manifest(folder)
    splits = {split: _read_inspected_samples(folder, split, manifest["splits"]) for split in SPLITS}
    known = pl.read_parquet(folder / TOKENS).filter(pl.col("train") > 0)["token"]
    train = splits["train"]
    shown = train if train.height else pl.concat(splits.values())
    return {
        "folder": str(folder),
        "hash": manifest["hash"],
        "format": manifest["format"],
        "splits": manifest["splits"],
        "tolerated": manifest["tolerated"],
        "rejected": summarize_rejects(folder, manifest),
        "emotions": _count_inspected_emotions(splits),
        "lengths": _inspect_lengths(shown),
        "vocabulary": {
            "types": len(known),
            "unknown_share": {
                s: _inspect_unknown_tokens(splits[s], known) for s in ("valid", "test")
            },
        },
        "samples": shown.sample(min(samples, shown.height), seed=seed).to_dicts(),
    }


def _read_inspected_samples(folder: Path, split: str, streams: Mapping[str, Any]) -> pl.DataFrame:
    """Return the labelled utterances of a split if the folder has some, else its pairs."""
    return read_dataset_samples(folder, LABELLED[split] if LABELLED[split] in streams else split)


def _count_inspected_emotions(splits: dict[str, pl.DataFrame]) -> dict[str, dict[str, int]]:
    """Return by emotion the number of samples in each split."""
    counts = {
        split: dict(frame["emotion"].drop_nulls().value_counts().iter_rows())
        for split, frame in splits.items()
    }
    names = sorted({name for count in counts.values() for name in count})
    return {name: {split: counts[split].get(name, 0) for split in splits} for name in names}


def _inspect_lengths(samples: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Return percentiles of the lengths of contexts and responses."""
    measured = samples.select(
        **{
            "turns of context": pl.col("context").list.len(),
            "tokens of context": pl.col("context_tokens").list.join(" ").str.split(" ").list.len(),
            "tokens of response": pl.col("response_tokens").str.split(" ").list.len(),
        }
    )
    known = (column.drop_nulls() for column in measured)
    return {column.name: _inspect_percentiles(column.to_numpy()) for column in known if len(column)}


def _inspect_percentiles(lengths: npt.NDArray[np.uint32]) -> dict[str, float]:
    percentiles = {
        f"{p} %": float(np.percentile(lengths, p, method="nearest")) for p in PERCENTILES
    }
    return {**percentiles, "longest": float(lengths.max())}


def _inspect_unknown_tokens(samples: pl.DataFrame, known: pl.Series) -> float | None:
    """Return the share of the responses' tokens that do not occur in train."""
    tokens = samples["response_tokens"].drop_nulls().str.split(" ").explode()
    if tokens.is_empty():
        return None
    return 1 - float(tokens.is_in(known.implode()).sum()) / len(tokens)
