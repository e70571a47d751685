"""Labels of answers: how well they are predicted, and whether they can be controlled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.models.base import DialogueVariant, Variant
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import labels_utterances, variants_where
from attune.platform.data.conversations import LISTENER
from attune.platform.data.labels import LABELS
from attune.platform.enrichment.classifier import most_likely_labels
from attune.platform.evaluation import metrics
from attune.platform.evaluation.evaluate import answer, predictions
from attune.platform.runs.model import Model, load_model
from attune.platform.runs.record import Run
from attune.platform.text.detokenizing import detokenize

LABEL, RESPONSE_LABEL = "label", "response_label"


@dataclass(frozen=True, kw_only=True)
class ControlResult:
    """A label and the share of answers that are classified as having it."""

    label: str
    asked: float
    """The share when the label is requested."""
    unasked: float
    """The share when the model chooses the label itself, on the same contexts: the baseline."""


def _takes_label(variant: type[Variant]) -> bool:
    return issubclass(variant, DialogueVariant) and LABEL in variant.controls


def controllability(
    model: Model,
    samples: pl.DataFrame,
    labels: Sequence[str],
    decoding: Decoding,
    progress: Callable[[int], None] = lambda _: None,
) -> list[ControlResult]:
    """Return the result for each label, as classified by the model's utterance classifier."""
    variant = model.variant
    if not isinstance(variant, DialogueVariant) or LABEL not in variant.controls_for(
        variant.config
    ):
        able = " or ".join(variants_where(_takes_label))
        raise UsageError(f"'{model.name}' cannot be asked for a label: name a run of {able}")
    if model.labeller is None:
        raise UsageError(
            f"the run of '{model.name}' has no classifier of its own to tell what its answers are: "
            f"train it with --set labeller=RUN, RUN being a run of "
            f"{' or '.join(variants_where(labels_utterances))}"
        )
    labeller, columns = load_model(model.labeller), model.columns(samples)

    def label_answers(controls: dict[str, str] | None) -> pl.Series:
        token_ids = answer(variant, columns, decoding, progress, controls)
        words = [model.vocabulary.decode(tokens) for tokens in token_ids]
        utterances = pl.DataFrame(
            {
                "role": [LISTENER] * len(words),
                "text": [detokenize(each) for each in words],
                "tokens": [" ".join(each) for each in words],
            }
        )
        return pl.Series(most_likely_labels(labeller, utterances))

    unasked = label_answers(None)
    return [
        ControlResult(
            label=label,
            asked=_label_share(label_answers({LABEL: label}), label),
            unasked=_label_share(unasked, label),
        )
        for label in labels
    ]


def measure_label_predictions(run: Run, samples: pl.DataFrame) -> dict[str, float]:
    """Return how well a run predicts the labels of responses."""
    model = load_model(run.model)
    columns = model.columns(samples)
    log_probs = predictions(model.variant, columns).get(RESPONSE_LABEL)
    if log_probs is None:
        raise UsageError(f"'{run.name}' predicts no label of its answer: name a run of meed2")
    return _scores(log_probs, _to_class_ids(columns[RESPONSE_LABEL]))


def measure_random_guesses(samples: pl.DataFrame, seed: int = 0) -> dict[str, float]:
    """Return the scores of uniformly random predictions."""
    truth = samples["response_label"].replace_strict(
        {label: number for number, label in enumerate(LABELS)}, default=-1, return_dtype=pl.Int64
    )
    log_probs = np.random.default_rng(seed).random((samples.height, len(LABELS)))
    return _scores(log_probs, truth.to_numpy())


def _to_class_ids(column: Any) -> npt.NDArray[np.int64]:
    assert isinstance(column, np.ndarray)
    return column


def _scores(log_probs: metrics.Floats, truth: npt.NDArray[np.int64]) -> dict[str, float]:
    labelled = truth >= 0
    if not labelled.any():
        raise UsageError(
            "no response of these data has a label: add them with 'attune annotate emotions'"
        )
    log_probs, truth = log_probs[labelled], truth[labelled]
    return {
        "accuracy": metrics.accuracy_at(log_probs, truth)[1],
        **metrics.weighted_scores(log_probs, truth),
    }


def _label_share(labels: pl.Series, label: str) -> float:
    return float((labels == label).to_numpy().mean())
