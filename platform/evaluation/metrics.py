"""The metrics of answers, by our definitions; those of papers are profiles.

Accuracies, distinct-n and shares are fractions; BLEU is between 0 and 100.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sacrebleu.metrics.bleu import BLEU

Floats = npt.NDArray[np.float64]


def perplexity(log_likelihood: Floats, num_tokens: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return perplexities from each response's summed log-likelihood and length with `<eos>`.

    `perplexity` gives every token the same weight. `perplexity_sample_mean` is the exponential of
    the mean over samples, about a tenth lower; the papers' public code prints it, because it tests
    with a batch size of one.
    """
    return {
        "perplexity": math.exp(-log_likelihood.sum() / num_tokens.sum()),
        "perplexity_sample_mean": math.exp(-(log_likelihood / num_tokens).mean()),
    }


def accuracy_at(
    log_probabilities: Floats, truth: npt.NDArray[np.int64], places: Sequence[int] = (1, 2, 5)
) -> dict[int, float]:
    """Return, for each k, the share of samples whose true label is among the k most likely."""
    likeliest = np.argsort(-log_probabilities, axis=1, kind="stable")
    return {k: float((likeliest[:, :k] == truth[:, None]).any(axis=1).mean()) for k in places}


def weighted_scores(log_probabilities: Floats, truth: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return precision, recall and F1 of the most likely labels, weighted by true frequency.

    A label that is never predicted has precision 0.
    """
    from sklearn.metrics import precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, log_probabilities.argmax(axis=1), average="weighted", zero_division=0.0
    )
    return {"weighted_precision": precision, "weighted_recall": recall, "weighted_f1": f1}


def bleu(answers: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return unsmoothed corpus BLEU-4 on our tokens with one reference, and its signature.

    The same formula as Moses' multi-bleu, which MoEL and MIME used, and EmpDG's in Python.
    """
    metric = BLEU(tokenize="none", smooth_method="none", lowercase=True, force=True)
    score = metric.corpus_score(list(answers), [list(references)])
    return float(score.score), str(metric.get_signature())


def distinct(answers: Sequence[Sequence[str]], n: int) -> float:
    """Return the share of distinct n-grams in the whole set, which falls as the set grows."""
    grams = [tuple(answer[i : i + n]) for answer in answers for i in range(len(answer) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0
