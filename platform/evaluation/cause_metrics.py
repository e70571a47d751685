"""The quality of marked causes, compared with the data's marks and with two simple rules.

Utterances are counted over all samples. `cause` metrics are those of the class of causes,
`macro_f1` is the mean of its F1 and the F1 of the other utterances, and `agreement` is the share of
utterances that have the same mark.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import polars as pl

from attune.platform.data.conversations import SPEAKER
from attune.platform.enrichment.causes import CAUSES_COLUMN, MARKS, cause_probabilities
from attune.platform.evaluation.evaluate import Evaluation
from attune.platform.runs.model import Model

Marks = npt.NDArray[np.bool_]


def evaluate(
    model: Model,
    samples: pl.DataFrame,
    threshold: float,
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Evaluate the marks of a model, and of the rules, on samples whose causes are known."""
    probabilities = cause_probabilities(model, samples, progress)
    truth = _flatten_marks(samples[CAUSES_COLUMN])
    speaks = samples["context_roles"].list.eval(pl.element() == SPEAKER)
    turn = pl.int_range(pl.len())
    last = speaks.list.eval(pl.element() & (turn == turn.filter(pl.element()).last()))
    metrics: dict[str, float | None] = {
        **scores(_flatten_marks(probabilities.list.eval(pl.element() >= threshold)), truth)
    }
    for rule, marks in (("every_speaker_turn", speaks), ("last_speaker_turn", last)):
        metrics |= {f"{rule}_{name}": v for name, v in scores(_flatten_marks(marks), truth).items()}
    metrics["parameters"] = sum(p.numel() for p in model.variant.parameters())
    table = samples.select(
        "conversation_id", "turn", "emotion", "context", "context_roles", CAUSES_COLUMN
    ).with_columns(probabilities.alias(MARKS))
    return Evaluation(
        metrics=metrics, answers=table, signature=f"threshold:{threshold} samples:{samples.height}"
    )


def scores(marks: Marks, truth: Marks) -> dict[str, float]:
    """Return precision, recall and F1 of causes, macro F1, and agreement."""
    precision, recall, cause = _f1(marks, truth)
    return {
        "cause_precision": precision,
        "cause_recall": recall,
        "cause_f1": cause,
        "macro_f1": (cause + _f1(~marks, ~truth)[2]) / 2,
        "agreement": float((marks == truth).mean()),
    }


def _f1(marks: Marks, truth: Marks) -> tuple[float, float, float]:
    right = float((marks & truth).sum())
    precision = right / max(float(marks.sum()), 1.0)
    recall = right / max(float(truth.sum()), 1.0)
    total = float(marks.sum() + truth.sum())
    return precision, recall, 2 * right / total if total else 0.0


def _flatten_marks(lists: pl.Series) -> Marks:
    return lists.explode().to_numpy().astype(np.bool_)
