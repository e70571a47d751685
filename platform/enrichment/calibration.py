"""Do probabilities mean what they say? The calibration error, and the temperature that lessens it.

A threshold on probabilities (keep what is surer than 0.6) means little where a classifier says 0.9
and is right half of the time. The expected calibration error (Guo et al. 2017) tells how far off it
is: samples are put into 15 bins of equal width by the probability of their likeliest label; the
error is the mean over samples of |share that is right - mean probability| of their bin. Temperature
scaling divides the logits by the one number that makes held-out labels likeliest. It changes no
order of labels, so no accuracy.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BINS = 15
SIGNATURE = f"calibration_error:top-label,{BINS}-equal-bins"
_COLDEST, _HOTTEST = 1e-2, 1e2
"""Between which a temperature is looked for: labels that are all right, or all wrong, have none."""
_HALVINGS = 50

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """What is said and what is true, by bin; NaN in bins without samples."""

    count: Labels
    confidence: Floats
    accuracy: Floats

    @property
    def error(self) -> float:
        """The expected calibration error."""
        distance = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(distance * self.count) / self.count.sum())


def reliability(log_probabilities: Floats, truth: Labels) -> Reliability:
    """Of (N, labels) and the true labels."""
    confidence = np.exp(log_probabilities.max(axis=1))
    right = log_probabilities.argmax(axis=1) == truth
    number = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(number, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return Reliability(
            count=count,
            confidence=np.bincount(number, confidence, BINS) / count,
            accuracy=np.bincount(number, right, BINS) / count,
        )


def temperature(log_probabilities: Floats, truth: Labels) -> float:
    """The temperature under which the true labels are likeliest.

    With b = 1 / temperature the mean of log sum_k exp(b l_k) - b l_true is to be least. It is
    convex in b, and its slope, the mean of E_b[l] - l_true, is halved down to 0.
    """
    own = log_probabilities[np.arange(len(truth)), truth]
    low, high = np.log(_COLDEST), np.log(_HOTTEST)  # of the temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        expected = (
            np.exp(apply_temperature(log_probabilities, float(np.exp(middle)))) * log_probabilities
        )
        if (expected.sum(axis=1) - own).mean() > 0:  # a larger b is worse: hotter
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))


def apply_temperature(log_probabilities: Floats, temperature: float) -> Floats:
    """The log-probabilities at another temperature."""
    logits = log_probabilities / temperature
    logits = logits - logits.max(axis=1, keepdims=True)
    apply_temperature: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return apply_temperature
