"""The accuracy and the calibration of a classifier of emotions.

The metrics of contexts have plain names. Those of responses, if the classifier is trained on them,
start with `response_`. `kept` metrics are of the texts whose probability is above the threshold.
"""

from collections.abc import Callable

import numpy as np
import polars as pl

from attune.platform.core.errors import UsageError
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Labels
from attune.platform.enrichment.classifier import (
    Temperatures,
    classify_texts,
    require_classifier,
    with_known_emotion,
)
from attune.platform.evaluation import metrics
from attune.platform.evaluation.evaluate import Evaluation, predictions
from attune.platform.evaluation.metrics import Floats
from attune.platform.runs.model import Model

THRESHOLD = 0.6
"""The threshold above which Shen et al. 2021 keep unpaired text."""


def evaluate(
    model: Model,
    samples: pl.DataFrame,
    threshold: float,
    temperatures: Temperatures,
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Evaluate a classifier on the texts of samples, for each kind that it is trained on."""
    variant = require_classifier(model)
    emotions = variant.data_info.emotions
    known, truth = with_known_emotion(samples, emotions)
    if known.is_empty():
        raise UsageError("none of these samples has an emotion: choose data with emotions")
    metrics_by_name: dict[str, float | None] = {}
    table = known.select("conversation_id", "turn", "emotion", "context", "response")
    for kind in variant.trained_on:
        raw = classify_texts(model, known, kind, progress)
        calibrated = calibration.apply_calibration_temperature(raw, temperatures[kind])
        before = "" if kind == "context" else f"{kind}_"
        own = {**scores(calibrated, truth, threshold), "temperature": temperatures[kind]}
        own["calibration_error_uncalibrated"] = calibration.reliability(raw, truth).error
        metrics_by_name |= {f"{before}{name}": value for name, value in own.items()}
        table = table.with_columns(
            pl.Series(f"{before}predicted_emotion", [emotions[n] for n in raw.argmax(axis=1)]),
            pl.Series(f"{before}probability", np.exp(calibrated.max(axis=1))),
        )
    metrics_by_name["parameters"] = sum(p.numel() for p in model.variant.parameters())
    signature = f"{calibration.SIGNATURE} threshold:{threshold} samples:{known.height}"
    return Evaluation(metrics=metrics_by_name, answers=table, signature=signature)


def predict_emotions(model: Model, samples: pl.DataFrame) -> pl.DataFrame:
    """Return `emotion` and `predicted_emotion` of the samples that have an emotion."""
    emotions = model.variant.data_info.emotions
    known, _ = with_known_emotion(samples, emotions)
    log_probs = predictions(model.variant, model.columns(known)).get("emotion")
    if log_probs is None:
        raise UsageError(f"'{model.name}' predicts no emotion: name a run that does")
    names = pl.Series(
        "predicted_emotion", [emotions[number] for number in log_probs.argmax(axis=1)]
    )
    return known.select("emotion").with_columns(names)


def by_emotion(predicted: pl.DataFrame) -> pl.DataFrame:
    """Return `emotion`, `samples` and `accuracy`, in alphabetical order."""
    right = (pl.col("emotion") == pl.col("predicted_emotion")).fill_null(False)
    return (
        predicted.drop_nulls("emotion")
        .group_by("emotion")
        .agg(samples=pl.len(), accuracy=right.mean())
        .sort("emotion")
    )


def scores(log_probabilities: Floats, truth: Labels, threshold: float) -> dict[str, float | None]:
    """Return accuracies, calibration errors, and the metrics of what a threshold keeps."""
    accuracy = metrics.accuracy_at(log_probabilities, truth)
    kept = np.exp(log_probabilities.max(axis=1)) > threshold
    right = log_probabilities.argmax(axis=1) == truth
    return {
        "emotion_accuracy": accuracy[1],
        "emotion_accuracy_top2": accuracy[2],
        "emotion_accuracy_top5": accuracy[5],
        **metrics.weighted_scores(log_probabilities, truth),
        "calibration_error": calibration.reliability(log_probabilities, truth).error,
        "kept_share": float(kept.mean()),
        "kept_accuracy": float(right[kept].mean()) if kept.any() else None,
    }
