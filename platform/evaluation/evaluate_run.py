"""Evaluate a run on a split, or answers in a file, for the commands and for sweeps.

A dialogue run answers the split; an annotator marks its causes; a classifier labels its texts. The
answers are written as Parquet to the run's folder, and `log_result` sends the metrics to MLflow.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from attune.models import published
from attune.models.base import Annotator, DialogueVariant, TextClassifier
from attune.models.decoding import Decoding
from attune.models.published import PROFILES, Figure
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.settings import find_variant
from attune.platform.data.conversations import SPLITS
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.data.prepare import find_prepared_data
from attune.platform.enrichment.causes import CAUSE_THRESHOLD
from attune.platform.enrichment.classifier import fit_classifier_temperatures, require_classifier
from attune.platform.evaluation import (
    answers,
    bertscore,
    cause_metrics,
    embeddings,
    emotion_metrics,
    sentences,
)
from attune.platform.evaluation.evaluate import Evaluation, evaluate
from attune.platform.evaluation.profiles import select_samples
from attune.platform.runs.model import (
    check_model_labels,
    load_model,
    load_model_once,
    read_model_split,
)
from attune.platform.runs.record import Run
from attune.platform.text import encoders

TEST, DEFAULT_PROFILE = "test", "attune"
CAUSES, EMOTIONS = "marks", "emotions"
"""What a run that does not answer predicts, as it appears in file names and in MLflow."""
PUBLISHED_FORMATS = ("ed", "intents")
"""The formats of the data on which the papers report."""

Advance = Callable[[int], None]
Track = Callable[[str, str, int], Advance]
"""Shows progress: called with a unit, a description and a total, returns what advances it."""
Measure = Callable[
    [pl.Series, pl.Series, Path | None, Advance], tuple[dict[str, float | None], str]
]
"""Compares answers with references; returns metrics and the signature that defines them."""


def ignore_progress(unit: str, description: str, total: int) -> Advance:  # noqa: ARG001
    """Track nothing."""
    return lambda _: None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a dialogue run is evaluated, besides the split and its data."""

    decoding: Decoding = field(default_factory=Decoding)
    controls: Mapping[str, str] = field(default_factory=dict)
    profile: str = DEFAULT_PROFILE
    stage: str | None = None
    """An earlier stage of training whose best model answers instead of the final one."""

    def deviations(self) -> dict[str, str]:
        """Return what differs from the default, decoding aside."""
        special = dict(self.controls)
        if self.profile != DEFAULT_PROFILE:
            special["profile"] = self.profile
        if self.stage is not None:
            special["stage"] = self.stage
        return special


def evaluate_run(
    run: Run,
    split: str = TEST,
    *,
    data: str | None = None,
    conditions: Conditions | None = None,
    measures: Sequence[Measure] = (),
    threshold: float | None = None,
    track: Track = ignore_progress,
    warn: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Evaluate a run on a split of its own data or of `data`; return the JSON of the command.

    `threshold` is for annotators and classifiers, `conditions` and `measures` for the others.
    """
    folder, other_data = _find_data_folder(run, data, split, warn)
    predicted_kind = predicted_labels(run)
    if predicted_kind:
        evaluate_labels = _evaluate_causes if predicted_kind == CAUSES else _evaluate_emotions
        evaluation = evaluate_labels(run, folder, split, threshold, track)
        suffix = "".join(f"-{value[:8]}" for value in other_data.values())
        path = run.folder / "answers" / f"{split}-{predicted_kind}{suffix}.parquet"
        answers.write(evaluation.answers, path)
        return _result_to_json(run, split, None, path, evaluation.signature, evaluation.metrics)
    conditions = conditions or Conditions()
    model_folder = _find_model(run, conditions.stage)
    evaluation = evaluate_answers(model_folder, folder, split, conditions, track=track)
    name = _answers_file_name(split, conditions, other_data)
    # `answer` has tokens; under this name they are not tokenized again.
    table = evaluation.answers.with_columns(answer_tokens=pl.col("answer"))
    answers.write(table, run.folder / "answers" / name)
    more, definitions = _apply_measures(measures, table, folder, track)
    signature = f"profile:{conditions.profile} {evaluation.signature}{definitions}"
    return _result_to_json(
        run, split, conditions.decoding.method, run.folder / "answers" / name, signature,
        evaluation.metrics | more,
    )  # fmt: skip


def evaluate_answers(
    model_folder: Path,
    data: Path,
    split: str,
    conditions: Conditions | None = None,
    *,
    contexts: int | None = None,
    keep_model: bool = False,
    track: Track = ignore_progress,
) -> Evaluation:
    """Load a dialogue model, answer a split (or some `contexts` of it) and compute the metrics.

    With `keep_model` the model stays in memory for the next call.
    """
    conditions = conditions or Conditions()
    model = (load_model_once if keep_model else load_model)(model_folder)
    variant = model.variant
    assert isinstance(variant, DialogueVariant)
    samples = select_samples(conditions.profile, read_dataset_samples(data, split))
    if samples.is_empty():
        raise UsageError(f"the split '{split}' of {data} has no samples: choose another")
    if contexts is not None:
        samples = samples.sample(min(contexts, samples.height), seed=0)
    check_model_labels(variant.requirements_for(variant.config), samples, f"{data}, {split}")
    return evaluate(
        variant,
        samples,
        model.columns(samples),
        model.vocabulary,
        conditions.decoding,
        progress=track("answers", f"{model_folder.parent.name} on {split}", samples.height),
        controls=conditions.controls,
        oracle=PROFILES[conditions.profile].uses_true_labels,
    )


def evaluate_file(
    path: Path, measures: Sequence[Measure], data: str | None, track: Track = ignore_progress
) -> dict[str, Any]:
    """Score the answers in a file; BERTScore is rescaled with `data`."""
    table = answers.read(path)
    metrics, signature = answers.score(table)
    folder = find_prepared_data(data) if data else None
    more, definitions = _apply_measures(measures, table, folder, track)
    return _result_to_json(None, None, None, path, signature + definitions, metrics | more)


def log_result(
    run: Run, result: Mapping[str, Any], deviations: Mapping[str, str] | None = None
) -> None:
    """Log an evaluation to MLflow if the run is tracked."""
    from attune.platform.tracking import log_evaluation  # MLflow takes seconds to import

    if run.run_id is None:
        return
    special = (f"{key}-{value}" for key, value in (deviations or {}).items())
    decode = "-".join([result["decode"] or predicted_labels(run) or "", *special])
    log_evaluation(run, result["split"], decode, result["metrics"], Path(result["answers"]))


def predicted_labels(run: Run) -> str | None:
    """Return what a run predicts, causes or emotions; None for a dialogue model."""
    variant = find_variant(run.variant)[0]
    if issubclass(variant, Annotator):
        return CAUSES
    return EMOTIONS if issubclass(variant, TextClassifier) else None


def load_measures(
    encoder: str | None = None, vectors: Path | None = None, sentence_encoder: str | None = None
) -> list[Measure]:
    """Load the metrics that need pretrained models, so that a missing one fails before decoding."""
    measures: list[Measure] = []
    if encoder is not None:
        metric = bertscore.load(encoder)
        measures.append(
            lambda hypotheses, references, folder, advance: bertscore.score(
                metric, hypotheses.to_list(), references.to_list(), folder, advance
            )
        )
    if vectors is not None:
        embeddings.check(vectors)
        measures.append(
            lambda hypotheses, references, _, advance: embeddings.score(
                vectors, hypotheses, references, advance
            )
        )
    if sentence_encoder is not None:
        reader = encoders.load_encoder(sentence_encoder)
        measures.append(
            lambda hypotheses, references, _, advance: sentences.score(
                reader, hypotheses.to_list(), references.to_list(), advance
            )
        )
    return measures


def published_figures(
    run: Run, data: str | None, result: Mapping[str, Any]
) -> dict[str, list[Figure]]:
    """Return the figures that papers report for the same metrics, if the data are the same."""
    data_format = read_dataset_manifest(find_prepared_data(data or run.data["folder"]))["format"]
    if result["split"] != TEST or data_format not in PUBLISHED_FORMATS:
        return {}
    by_metric = {name: published.find_figures(run.variant, name) for name in result["metrics"]}
    return {name: figures for name, figures in by_metric.items() if figures}


def _find_data_folder(
    run: Run, data: str | None, split: str, warn: Callable[[str], None]
) -> tuple[Path, dict[str, str]]:
    """Return the folder to evaluate on, and its hash if the run was trained on other data."""
    if split not in SPLITS:
        raise UsageError(unknown_choice_error("split", split, SPLITS))
    folder = find_prepared_data(data or run.data["folder"])
    data_hash = read_dataset_manifest(folder)["hash"]
    is_own = data_hash == run.data["hash"]
    if data is None and not is_own:
        warn(f"note: {folder} has changed since the run was trained on it")
    return folder, {} if is_own else {"data": data_hash}


def _find_model(run: Run, stage: str | None) -> Path:
    """Return the folder of the final model, or of the best one of an earlier stage."""
    stages = run.kept_stages()
    if stage is None:
        return run.model
    if not stages:
        raise UsageError(f"'{run.name}' has no earlier stages: leave --stage out")
    if stage not in stages:
        raise UsageError(unknown_choice_error("earlier stage", stage, stages))
    return run.stage_model(stage)


def _evaluate_causes(
    run: Run, folder: Path, split: str, threshold: float | None, track: Track
) -> Evaluation:
    model = load_model(run.model)
    samples = read_model_split(model.variant, folder, split)
    advance = track("texts", f"{run.name} on {split}", samples.height)
    return cause_metrics.evaluate(
        model, samples, CAUSE_THRESHOLD if threshold is None else threshold, advance
    )


def _evaluate_emotions(
    run: Run, folder: Path, split: str, threshold: float | None, track: Track
) -> Evaluation:
    model = load_model(run.model)
    variant = require_classifier(model)
    samples = read_model_split(variant, folder, split)
    total = len(variant.trained_on) * samples.height
    return emotion_metrics.evaluate(
        model,
        samples,
        emotion_metrics.THRESHOLD if threshold is None else threshold,
        fit_classifier_temperatures(run),
        track("texts", f"{run.name} on {split}", total),
    )


def _apply_measures(
    measures: Iterable[Measure], table: pl.DataFrame, folder: Path | None, track: Track
) -> tuple[dict[str, float | None], str]:
    """Return the metrics of all measures, and what they add to the signature."""
    metrics: dict[str, float | None] = {}
    definitions = ""
    hypotheses, references = (
        functools.partial(answers.tokens, table, column) for column in ("answer", "response")
    )
    for measure in measures:
        advance = track("pairs", "comparing answers with responses", table.height)
        scores, definition = measure(hypotheses(), references(), folder, advance)
        metrics |= scores
        definitions += f" {definition}"
    return metrics, definitions


def _answers_file_name(split: str, conditions: Conditions, other_data: Mapping[str, str]) -> str:
    """Return the file name of the answers, which differs under other conditions or data."""
    decoding = conditions.decoding
    default = Decoding(method=decoding.method)
    special: dict[str, Any] = {
        key: value for key, value in asdict(decoding).items() if value != getattr(default, key)
    }
    special |= conditions.deviations() | dict(other_data)
    if not special:
        return f"{split}-{decoding.method}.parquet"
    digest = hashlib.sha256(json.dumps(special, sort_keys=True).encode()).hexdigest()
    return f"{split}-{decoding.method}-{digest[:8]}.parquet"


def _result_to_json(
    run: Run | None, split: str | None, decode: str | None, path: Path, signature: str,
    metrics: Mapping[str, float | None],
) -> dict[str, Any]:  # fmt: skip
    return {
        "run_id": None if run is None else run.run_id,
        "split": split,
        "decode": decode,
        "answers": str(path),
        "signature": signature,
        "metrics": dict(metrics),
    }
