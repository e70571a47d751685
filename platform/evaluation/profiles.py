"""Whose samples and definitions an evaluation follows."""

import polars as pl

from attune.models.published import PROFILES
from attune.platform.core.errors import UsageError, unknown_choice


def select_samples(profile: str, samples: pl.DataFrame) -> pl.DataFrame:
    """The samples of a split that a profile answers, in their order."""
    if profile not in PROFILES:
        raise UsageError(unknown_choice("profile", profile, PROFILES))
    if PROFILES[profile].drops_last_turns:
        return without_last_turns(samples)
    return samples


def without_last_turns(samples: pl.DataFrame) -> pl.DataFrame:
    """Without the last listener turn of each conversation, and without the last conversation.

    Neighbours with the same situation count as one conversation, which is how the public code
    joins them.
    """
    begins = (pl.col("situation") != pl.col("situation").shift(1)).fill_null(True)
    numbered = samples.with_columns(whole=begins.cum_sum())
    last = pl.int_range(pl.len()).reverse().over("whole") == 0
    final = pl.col("whole") == pl.col("whole").max()
    return numbered.filter(~last & ~final).drop("whole")
