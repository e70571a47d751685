"""Classify texts with a trained classifier, and calibrate its probabilities.

A classifier of contexts and responses has a temperature for each, because a single turn is harder
to classify than a conversation. The temperatures are fitted once, on valid of the run's data, and
stored with its model.
"""

import json

import numpy as np
import polars as pl
import torch

from attune.models.base import TextClassifier, Variant
from attune.models.base import TextKind as Kind
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError
from attune.platform.core.files import write_atomically
from attune.platform.core.settings import variants_where
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.data.prepare import find_prepared_data
from attune.platform.data.samples import SAMPLES, utterance_samples
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Floats, Labels
from attune.platform.runs.model import Model, load_model, read_model_split
from attune.platform.runs.record import Run
from attune.platform.services.tasks import Progress

CALIBRATION_FILE = "calibration.json"
TOKENS_AT_A_TIME = 8192

TEXT_KINDS: tuple[Kind, ...] = ("context", "response")
Temperatures = dict[Kind, float]


def is_classifier(variant: type[Variant]) -> bool:
    """Return whether a variant classifies texts."""
    return issubclass(variant, TextClassifier)


def require_classifier(model: Model) -> TextClassifier:
    """Return the variant of a model, which must classify texts."""
    if not isinstance(model.variant, TextClassifier):
        raise UsageError(
            f"'{model.name}' does not classify texts: name a run of "
            f"{' or '.join(variants_where(is_classifier))}"
        )
    return model.variant


@torch.no_grad()
def classify_texts(
    model: Model, samples: pl.DataFrame, kind: Kind, progress: Progress = lambda _: None
) -> Floats:
    """Return the log-probabilities (N, labels) of the contexts or of the responses."""
    variant = require_classifier(model).eval()
    predict = variant.predict if kind == "context" else variant.predict_response
    columns = model.columns(samples)
    read = {name: columns[name] for name in (kind, f"{kind}_subwords", "index")}
    log_probs = np.empty((samples.height, len(variant.data_info.emotions)))
    for batch in Stream(read, size=TOKENS_AT_A_TIME, by="tokens", shuffle=False).epoch():
        log_probs[batch["index"].numpy()] = predict(batch)["emotion"].numpy()
        progress(len(batch))
    return log_probs


def with_known_emotion(
    samples: pl.DataFrame, emotions: tuple[str, ...]
) -> tuple[pl.DataFrame, Labels]:
    """Return the samples whose emotion is one of `emotions`, with the indices of their emotions."""
    known = samples.filter(pl.col("emotion").is_in(emotions))
    numbers = {emotion: number for number, emotion in enumerate(emotions)}
    truth = known["emotion"].replace_strict(numbers, return_dtype=pl.Int64)
    return known, truth.to_numpy()


def fit_classifier_temperatures(run: Run) -> Temperatures:
    """Return a run's temperatures by kind of text: the stored ones, or new ones from valid."""
    path = run.model / CALIBRATION_FILE
    if path.is_file():
        stored: Temperatures = json.loads(path.read_text(encoding="utf-8"))["temperature"]
        return stored
    model = load_model(run.model)
    variant = require_classifier(model)
    samples, truth = with_known_emotion(
        _read_valid_for_classifier(run, variant), variant.data_info.emotions
    )
    if samples.is_empty():
        raise UsageError(
            f"'{run.name}' cannot be calibrated: no sample in valid of {run.data['folder']} has "
            f"one of its emotions; train a classifier on data with emotions"
        )
    fitted: Temperatures = {
        kind: calibration.temperature(classify_texts(model, samples, kind), truth)
        for kind in variant.trained_on
    }
    content = {"temperature": fitted, "split": "valid", "samples": samples.height}
    with write_atomically(path) as new:
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return fitted


def _read_valid_for_classifier(run: Run, variant: TextClassifier) -> pl.DataFrame:
    """Return the valid samples of a run's data, which must not have changed since its training."""
    folder = find_prepared_data(run.data["folder"])
    if read_dataset_manifest(folder)["hash"] != run.data["hash"]:
        raise UsageError(
            f"'{run.name}' is not calibrated yet, and {folder} has changed since its training: "
            f"restore the data, or train a new classifier"
        )
    return read_model_split(variant, folder, "valid")


def add_context_labels(model: Model, samples: pl.DataFrame) -> pl.DataFrame:
    """Return samples with the most likely label of each utterance of their contexts."""
    turns = samples.select(role="context_roles", text="context", tokens="context_tokens").explode(
        "role", "text", "tokens"
    )
    names = iter(most_likely_labels(model, turns))
    counts = samples["context"].list.len()
    labels = [[next(names) for _ in range(count)] for count in counts]
    return samples.with_columns(context_labels=pl.Series(labels, dtype=SAMPLES["context_labels"]))


def most_likely_labels(model: Model, turns: pl.DataFrame) -> list[str]:
    """Return the most likely label of each utterance (role, text, tokens) by itself."""
    numbered = turns.with_columns(
        conversation_id=pl.int_range(pl.len()).cast(pl.String),
        turn=pl.lit(0, dtype=pl.Int64),
        label=pl.lit(None, dtype=pl.String),
    )
    predictions = classify_texts(model, utterance_samples(numbered), "context").argmax(axis=1)
    return [model.variant.data_info.emotions[number] for number in predictions]
