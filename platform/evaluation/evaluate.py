"""Compute a model's metrics and answers on a split, in batches."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from attune.models.base import Batch, DialogueVariant, Variant
from attune.models.decoding import Decoding, decode
from attune.platform.batching.encoding import Columns, Ragged
from attune.platform.batching.streams import Stream
from attune.platform.evaluation import metrics
from attune.platform.text.vocabulary import UNKNOWN, Vocabulary

TOKENS_AT_A_TIME = 8192
ANSWERS_AT_A_TIME = 128


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics and the answers of a model on a split."""

    metrics: dict[str, float | None]
    answers: pl.DataFrame
    """One row per sample, in the order of the split."""
    signature: str
    """The decoding settings and BLEU's signature."""


def score(variant: Variant, columns: Columns, oracle: bool = False) -> dict[str, Any]:
    """Return, for each row, the response's summed log-likelihood and what the variant predicts.

    With `oracle`, the log-likelihood is computed with the true labels.
    """

    def score_batch(batch: Batch) -> dict[str, Tensor]:
        if not isinstance(variant, DialogueVariant):
            return variant.predict(batch)
        likelihood = variant.oracle_log_likelihood if oracle else variant.log_likelihood
        return {
            "log_likelihood": likelihood(batch).double().sum(dim=1),
            **variant.predict(batch),
        }

    return _compute_by_row(variant, columns, score_batch)


def predictions(variant: Variant, columns: Columns) -> dict[str, Any]:
    """Return what the variant predicts for each row."""
    return _compute_by_row(variant, columns, variant.predict)


@torch.no_grad()
def _compute_by_row(
    variant: Variant, columns: Columns, compute: Callable[[Batch], dict[str, Tensor]]
) -> dict[str, Any]:
    trained = variant.training
    variant.eval()
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    stream = Stream(columns, size=TOKENS_AT_A_TIME, by="tokens", shuffle=False)
    for batch in stream.epoch():
        for name, tensor in {"index": batch["index"], **compute(batch)}.items():
            parts.setdefault(name, []).append(tensor.cpu().numpy())
    variant.train(trained)
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    order = np.argsort(joined.pop("index"))
    return {name: array[order] for name, array in joined.items()}


def answer(
    variant: DialogueVariant,
    columns: Columns,
    decoding: Decoding,
    progress: Callable[[int], None] = lambda _: None,
    controls: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Return the tokens of the answer to each row."""
    trained = variant.training
    variant.eval()
    contexts = columns["context"]
    assert isinstance(contexts, Ragged)
    answers: dict[int, list[int]] = {}
    stream = Stream(columns, size=ANSWERS_AT_A_TIME, shuffle=False, by_context=True)
    for batch in stream.epoch():
        token_ids = decode(variant, batch, decoding, controls)
        answers.update(zip(batch["index"].tolist(), token_ids, strict=True))
        progress(len(batch))
    variant.train(trained)
    return [answers[row] for row in range(len(contexts))]


def evaluate(
    variant: DialogueVariant,
    samples: pl.DataFrame,
    columns: Columns,
    vocabulary: Vocabulary,
    decoding: Decoding = Decoding(),  # noqa: B008
    progress: Callable[[int], None] = lambda _: None,
    controls: Mapping[str, str] | None = None,
    oracle: bool = False,
) -> Evaluation:
    """Return perplexity, emotion accuracy, BLEU and distinct-n, with all answers.

    `controls` apply to the answers only. With `oracle`, perplexity is computed with the true
    labels.
    """
    responses, emotions = columns["response"], columns["emotion"]
    assert isinstance(responses, Ragged)
    assert not isinstance(emotions, Ragged)
    scores = score(variant, columns, oracle)
    token_ids = answer(variant, columns, decoding, progress, controls)
    answers = [vocabulary.decode(tokens) for tokens in token_ids]
    texts = [" ".join(tokens) for tokens in answers]
    references = samples["response_tokens"].to_list()
    bleu, signature = metrics.bleu(texts, references)
    # Per word and <eos>, also for models of subwords: otherwise models could not be compared.
    words = samples["response_tokens"].str.count_matches(r"\S+").to_numpy().astype(np.int64)
    unknown = (responses.values == vocabulary.token_id(UNKNOWN)).sum()
    results: dict[str, float | None] = {
        **metrics.perplexity(scores["log_likelihood"], words + 1),
        "unknown_share": float(unknown / words.sum()),
        **_emotion_accuracy(scores.get("emotion"), emotions),
        **_label_scores(scores.get("response_label"), columns.get("response_label")),
        "bleu": bleu,
        "distinct_1": metrics.distinct(answers, 1),
        "distinct_2": metrics.distinct(answers, 2),
        "different_answers": len(set(texts)),
        "parameters": sum(parameter.numel() for parameter in variant.parameters()),
    }
    table = samples.select(
        "conversation_id", "turn", "emotion", "context", "response", "response_tokens"
    ).with_columns(
        answer=pl.Series(texts, dtype=pl.String),
        log_likelihood=pl.Series(scores["log_likelihood"]),
        predicted_emotion=_predicted_names(scores.get("emotion"), variant.data_info.emotions),
    )
    chosen = {**asdict(decoding), **(controls or {})}
    settings = " ".join(f"{key}:{value}" for key, value in chosen.items())
    return Evaluation(metrics=results, answers=table, signature=f"{settings} {signature}")


def _emotion_accuracy(
    log_probabilities: metrics.Floats | None, truth: np.ndarray[Any, Any]
) -> dict[str, float | None]:
    names = {1: "emotion_accuracy", 2: "emotion_accuracy_top2", 5: "emotion_accuracy_top5"}
    labelled = truth >= 0
    if log_probabilities is None or not labelled.any():
        return dict.fromkeys(names.values())
    accuracies = metrics.accuracy_at(log_probabilities[labelled], truth[labelled])
    return {name: accuracies[k] for k, name in names.items()}


def _label_scores(log_probabilities: metrics.Floats | None, truth: Any) -> dict[str, float | None]:
    """Return the scores of the response's label, if the variant predicts it."""
    if log_probabilities is None:
        return {}
    labelled = truth >= 0
    log_probs, true = log_probabilities[labelled], truth[labelled]
    return {
        "response_label_accuracy": metrics.accuracy_at(log_probs, true)[1],
        **{f"response_label_{n}": v for n, v in metrics.weighted_scores(log_probs, true).items()},
    }


def _predicted_names(
    log_probabilities: metrics.Floats | None, emotions: tuple[str, ...]
) -> pl.Expr:
    if log_probabilities is None:
        return pl.lit(None, dtype=pl.String)
    return pl.lit(pl.Series([emotions[n] for n in log_probabilities.argmax(axis=1)]))
