"""Evaluation profiles: which samples of a split are answered."""

import polars as pl

from attune.models.published import PROFILES
from attune.platform.core.errors import UsageError, unknown_choice_error


def select_samples(profile: str, samples: pl.DataFrame) -> pl.DataFrame:
    """Return the samples of a split that a profile answers, in order."""
    if profile not in PROFILES:
        raise UsageError(unknown_choice_error("profile", profile, PROFILES))
    if PROFILES[profile].drops_last_turns:
        return without_last_turns(samples)
    return samples


def without_last_turns(samples: pl.DataFrame) -> pl.DataFrame:
    """Return the samples without each conversation's last listener turn and the last conversation.

    Adjacent samples with the same situation count as one conversation, as in the public code.
    """
    begins = (pl.col("situation") != pl.col("situation").shift(1)).fill_null(True)
    numbered = samples.with_columns(whole=begins.cum_sum())
    last = pl.int_range(pl.len()).reverse().over("whole") == 0
    final = pl.col("whole") == pl.col("whole").max()
    return numbered.filter(~last & ~final).drop("whole")
