"""What a prepared folder holds, as plain data for a terminal, a page or a script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.platform.data.conversations import LABELLED, SPLITS
from attune.platform.data.dataset_folder import (
    TOKENS,
    read_manifest,
    read_samples,
    summarize_rejects,
)

PERCENTILES = (10, 50, 90, 99)


def inspect(folder: Path, *, samples: int = 3, seed: int = 0) -> dict[str, Any]:
    """Counts, samples by emotion, length percentiles, unknown tokens and a few samples."""
    manifest = read_manifest(folder)
    splits = {split: _samples(folder, split, manifest["splits"]) for split in SPLITS}
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
        "emotions": _emotions(splits),
        "lengths": _lengths(shown),
        "vocabulary": {
            "types": len(known),
            "unknown_share": {s: _unknown_share(splits[s], known) for s in ("valid", "test")},
        },
        "samples": shown.sample(min(samples, shown.height), seed=seed).to_dicts(),
    }


def _samples(folder: Path, split: str, streams: Mapping[str, Any]) -> pl.DataFrame:
    """Of a source of labelled utterances these, of any other the pairs."""
    return read_samples(folder, LABELLED[split] if LABELLED[split] in streams else split)


def _emotions(splits: dict[str, pl.DataFrame]) -> dict[str, dict[str, int]]:
    counts = {
        split: dict(frame["emotion"].drop_nulls().value_counts().iter_rows())
        for split, frame in splits.items()
    }
    names = sorted({name for count in counts.values() for name in count})
    return {name: {split: counts[split].get(name, 0) for split in splits} for name in names}


def _lengths(samples: pl.DataFrame) -> dict[str, dict[str, float]]:
    measured = samples.select(
        **{
            "turns of context": pl.col("context").list.len(),
            "tokens of context": pl.col("context_tokens").list.join(" ").str.split(" ").list.len(),
            "tokens of response": pl.col("response_tokens").str.split(" ").list.len(),
        }
    )
    known = (column.drop_nulls() for column in measured)
    return {column.name: _spread(column.to_numpy()) for column in known if len(column)}


def _spread(lengths: npt.NDArray[np.uint32]) -> dict[str, float]:
    percentiles = {
        f"{p} %": float(np.percentile(lengths, p, method="nearest")) for p in PERCENTILES
    }
    return {**percentiles, "longest": float(lengths.max())}


def _unknown_share(samples: pl.DataFrame, known: pl.Series) -> float | None:
    tokens = samples["response_tokens"].drop_nulls().str.split(" ").explode()
    if tokens.is_empty():
        return None
    return 1 - float(tokens.is_in(known.implode()).sum()) / len(tokens)
