"""Approximate randomization: whether two systems differ significantly on the same samples.

Under the null hypothesis, the answers to a conversation can be exchanged between the systems. The
p-value is the share of random exchanges with at least the observed difference (Noreen 1989). Whole
conversations are exchanged, because their turns depend on each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
from sacrebleu.metrics.bleu import BLEU

from attune.platform.core.errors import DataError
from attune.platform.evaluation.answers import tokens

TRIALS = 2000
KEYS = ("conversation_id", "turn")
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of a set that is computed from sums over its samples."""

    columns: tuple[str, ...]
    """The columns of answers that it needs."""
    counts: Callable[[pl.DataFrame], Sums]
    """Returns the summands of each sample, (samples, summands)."""
    value: Callable[[Sums], float]
    """Returns the metric from the sums."""


def p_value(ours: pl.DataFrame, theirs: pl.DataFrame, metric: str, seed: int = 0) -> float | None:
    """Return the p-value of the difference between two tables of answers.

    It is None if they lack columns of the metric. Answers to different samples are a DataError.
    """
    definition = METRICS.get(metric)
    if definition is None or not all(
        _has_columns(each, definition.columns) for each in (ours, theirs)
    ):
        return None
    ours, theirs = ours.sort(KEYS), theirs.sort(KEYS)
    if not ours.select(KEYS).equals(theirs.select(KEYS)):
        raise DataError("the two files of answers are not to the same samples: evaluate both anew")
    conversations = ours["conversation_id"].rle_id().to_numpy()
    first, second = (
        _by_conversation(definition.counts(each), conversations) for each in (ours, theirs)
    )
    return randomisation_test(first, second, definition.value, seed)


def _has_columns(answers: pl.DataFrame, columns: tuple[str, ...]) -> bool:
    return all(name in answers and answers[name].count() for name in columns)


def randomisation_test(
    first: Sums, second: Sums, value: Callable[[Sums], float], seed: int = 0, trials: int = TRIALS
) -> float:
    """Return the two-sided p-value of `value(first) - value(second)`; rows are exchanged."""
    seen = abs(value(first.sum(axis=0)) - value(second.sum(axis=0)))
    random = np.random.default_rng(seed)
    total, at_least = first.sum(axis=0) + second.sum(axis=0), 0
    for _ in range(trials):
        kept = random.integers(0, 2, size=(len(first), 1)).astype(bool)
        mixed = np.where(kept, first, second).sum(axis=0)
        # The same sums in another order may differ in the last digit.
        at_least += abs(value(mixed) - value(total - mixed)) >= seen * (1 - 1e-9)
    return (at_least + 1) / (trials + 1)


def _by_conversation(counts: Sums, conversations: npt.NDArray[np.uint32]) -> Sums:
    summed = np.zeros((int(conversations.max()) + 1, counts.shape[1]))
    np.add.at(summed, conversations, counts)
    return summed


def _sum_likelihoods(answers: pl.DataFrame) -> Sums:
    lengths = tokens(answers, "response").str.count_matches(r"\S+") + 1  # 1 for <eos>
    return np.column_stack([answers["log_likelihood"].to_numpy(), lengths.to_numpy()])


def _count_correct(answers: pl.DataFrame) -> Sums:
    labelled = answers["emotion"].is_not_null()
    right = (answers["emotion"] == answers["predicted_emotion"]).fill_null(False)
    return np.column_stack([right.to_numpy(), labelled.to_numpy()]).astype(np.float64)


def _n_grams(answers: pl.DataFrame) -> Sums:
    # The order is effective for the score of one sentence only, which is not looked at.
    metric = BLEU(tokenize="none", lowercase=True, force=True, effective_order=True)
    pairs = zip(tokens(answers, "answer"), tokens(answers, "response"), strict=True)
    scores = [metric.sentence_score(answer, [response]) for answer, response in pairs]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], np.float64)


def _bleu_from_sums(sums: Sums) -> float:
    numbers = [int(number) for number in sums]
    answer_length, reference_length = numbers[8:]
    bleu = BLEU.compute_bleu(
        numbers[:4], numbers[4:8], answer_length, reference_length, smooth_method="none"
    )
    return float(bleu.score)


METRICS = {
    "perplexity": Metric(
        columns=("log_likelihood",),
        counts=_sum_likelihoods,
        value=lambda sums: float(np.exp(-sums[0] / sums[1])),
    ),
    "emotion_accuracy": Metric(
        columns=("emotion", "predicted_emotion"),
        counts=_count_correct,
        value=lambda sums: float(sums[0] / sums[1]) if sums[1] else 0.0,
    ),
    "bleu": Metric(columns=("answer", "response"), counts=_n_grams, value=_bleu_from_sums),
}
"""The metrics that can be tested."""
