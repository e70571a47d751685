"""Calibration of a classifier: the expected calibration error, and temperature scaling.

A threshold on probabilities is only useful if they are calibrated. For the expected calibration
error (Guo et al. 2017), samples are divided into 15 bins of equal width by the probability of their
most likely label; the error is the mean over samples of |accuracy - mean probability| of their bin.
Temperature scaling divides the logits by the number that maximises the likelihood of held-out
labels. It does not change the order of labels, hence not the accuracy.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BINS = 15
SIGNATURE = f"calibration_error:top-label,{BINS}-equal-bins"
_COLDEST, _HOTTEST = 1e-2, 1e2
"""Bounds of the temperature, which has no finite optimum if all labels are right, or all wrong."""
_HALVINGS = 50

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Count, confidence and accuracy of each bin; NaN in bins without samples."""

    count: Labels
    confidence: Floats
    accuracy: Floats

    @property
    def error(self) -> float:
        """The expected calibration error."""
        distance = np.abs(self.accuracy - self.confidence)
        return float(np.nansum(distance * self.count) / self.count.sum())


def reliability(log_probabilities: Floats, truth: Labels) -> Reliability:
    """Return the reliability of log-probabilities (N, labels), given the true labels."""
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
    """Return the temperature that maximises the likelihood of the true labels.

    With b = 1 / temperature, it minimises the mean of log sum_k exp(b l_k) - b l_true. That is
    convex in b, so the root of its slope, the mean of E_b[l] - l_true, is found by bisection.
    """
    own = log_probabilities[np.arange(len(truth)), truth]
    low, high = np.log(_COLDEST), np.log(_HOTTEST)  # of the temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        expected = (
            np.exp(apply_calibration_temperature(log_probabilities, float(np.exp(middle))))
            * log_probabilities
        )
        if (expected.sum(axis=1) - own).mean() > 0:  # b is too large: raise the temperature
            low = middle
        else:
            high = middle
    return float(np.exp((low + high) / 2))


def apply_calibration_temperature(log_probabilities: Floats, temperature: float) -> Floats:
    """Return log-probabilities at another temperature."""
    logits = log_probabilities / temperature
    logits = logits - logits.max(axis=1, keepdims=True)
    scaled: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return scaled
