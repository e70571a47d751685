"""What a trained classifier says of texts, with probabilities that mean what they say.

Contexts and responses have a temperature each, where a classifier learns from both, since a turn
alone tells less than a conversation. They are fitted on valid of the data that the run learned
from, once, and kept with its model.
"""

import json
from collections.abc import Callable

import numpy as np
import polars as pl
import torch

from attune.models.base import TextClassifier, Variant
from attune.models.base import TextKind as Kind
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import variants_where
from attune.platform.data.dataset_folder import read_manifest
from attune.platform.data.prepare import find_data
from attune.platform.data.samples import SAMPLES, utterance_samples
from attune.platform.enrichment import calibration
from attune.platform.enrichment.calibration import Floats, Labels
from attune.platform.runs.model import Model, load_model, read_split
from attune.platform.runs.record import Run

CALIBRATION_FILE = "calibration.json"
TOKENS_AT_A_TIME = 8192

TEXT_KINDS: tuple[Kind, ...] = ("context", "response")
Temperatures = dict[Kind, float]
Progress = Callable[[int], None]
"""Called with the number of texts that were just done."""


def is_classifier(variant: type[Variant]) -> bool:
    """Return whether a variant classifies texts."""
    return issubclass(variant, TextClassifier)


def require_classifier(model: Model) -> TextClassifier:
    """The variant of a model, which must be one that classifies texts."""
    if not isinstance(model.variant, TextClassifier):
        raise UsageError(
            f"'{model.name}' classifies no texts: name a run of "
            f"{' or '.join(variants_where(is_classifier))}"
        )
    return model.variant


@torch.no_grad()
def classify_texts(
    model: Model, samples: pl.DataFrame, kind: Kind, progress: Progress = lambda _: None
) -> Floats:
    """(N, labels) of the contexts, or of the responses, which must be there."""
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
    """The samples whose emotion is among those, and its numbers."""
    known = samples.filter(pl.col("emotion").is_in(emotions))
    numbers = {emotion: number for number, emotion in enumerate(emotions)}
    truth = known["emotion"].replace_strict(numbers, return_dtype=pl.Int64)
    return known, truth.to_numpy()


def fit_temperatures(run: Run) -> Temperatures:
    """A run's temperatures by kind of text."""
    path = run.model / CALIBRATION_FILE
    if path.is_file():
        stored: Temperatures = json.loads(path.read_text(encoding="utf-8"))["temperature"]
        return stored
    model = load_model(run.model)
    variant = require_classifier(model)
    samples, truth = with_known_emotion(_read_valid(run, variant), variant.data_info.emotions)
    if samples.is_empty():
        raise UsageError(
            f"no sample in valid of {run.data['folder']} has an emotion to calibrate '{run.name}' "
            f"on: train a classifier on data with emotions"
        )
    fitted: Temperatures = {
        kind: calibration.temperature(classify_texts(model, samples, kind), truth)
        for kind in variant.learns
    }
    content = {"temperature": fitted, "split": "valid", "samples": samples.height}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
    return fitted


def _read_valid(run: Run, variant: TextClassifier) -> pl.DataFrame:
    folder = find_data(run.data["folder"])
    if read_manifest(folder)["hash"] != run.data["hash"]:
        raise UsageError(
            f"{folder} has changed since '{run.name}' learned from it, and its probabilities are "
            f"not calibrated yet: prepare it as it was, or train a new classifier"
        )
    return read_split(variant, folder, "valid")


def add_context_labels(model: Model, samples: pl.DataFrame) -> pl.DataFrame:
    """Samples with the likeliest label of each utterance of their contexts."""
    turns = samples.select(role="context_roles", text="context", tokens="context_tokens").explode(
        "role", "text", "tokens"
    )
    names = iter(most_likely_labels(model, turns))
    counts = samples["context"].list.len()
    labels = [[next(names) for _ in range(count)] for count in counts]
    return samples.with_columns(context_labels=pl.Series(labels, dtype=SAMPLES["context_labels"]))


def most_likely_labels(model: Model, turns: pl.DataFrame) -> list[str]:
    """The likeliest label of each utterance (role, text, tokens), read by itself."""
    numbered = turns.with_columns(
        conversation_id=pl.int_range(pl.len()).cast(pl.String),
        turn=pl.lit(0, dtype=pl.Int64),
        label=pl.lit(None, dtype=pl.String),
    )
    predictions = classify_texts(model, utterance_samples(numbered), "context").argmax(axis=1)
    return [model.variant.data_info.emotions[number] for number in predictions]
