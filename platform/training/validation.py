"""Validation: a stage's loss terms, perplexity and accuracies on the valid split."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attune.models.base import (
    FOLLOWED,
    PAIRED,
    Batch,
    DialogueVariant,
    Progress,
    Stage,
    Variant,
)
from attune.platform.batching.encoding import Columns, Ragged, encoded_with_next_turn
from attune.platform.batching.streams import Stream
from attune.platform.runs.model import Model
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.updates import seed_update, update_loss

VALID_TOKENS = 8192  # in a validation batch


@torch.no_grad()
def compute_validation_metrics(
    variant: Variant,
    stage: Stage,
    columns: Columns,
    group: ProcessGroup,
    tokens_per_word: float = 1.0,
) -> dict[str, float]:
    """Return a stage's loss terms, perplexity and accuracies on valid; workers share the batches.

    Loss terms are means over the samples that the stage trains on, the other metrics are over all
    samples. Perplexity
    is reported from the first stage that trains the decoder. It is per word, so that models with
    subwords can be compared with models with words.
    """
    was_training, reports_perplexity = variant.training, _trains_decoder(variant, stage)
    variant.eval()
    sums = _MetricSums()
    loss_columns = encoded_with_next_turn(columns) if stage.streams[0] == FOLLOWED else columns
    for batch in _iterate_valid_batches(loss_columns, group):
        seed_update(int(batch["index"][0]))
        for update in stage.updates:
            terms = getattr(variant, update.losses)(
                dict.fromkeys((PAIRED, stage.streams[0]), batch), Progress(fraction=1.0)
            )
            for name, term in terms.items():
                sums.add(f"valid_{name}", term)
            sums.add("valid_loss", update_loss(update, terms))
    # If the loss terms are means over all samples, one of them is the negative log-likelihood.
    likelihood = f"valid_{getattr(variant, 'likelihood_term', None)}"
    likelihood_known = loss_columns is columns and likelihood in sums.values
    for batch in _iterate_valid_batches(columns, group):
        if reports_perplexity and not likelihood_known:
            assert isinstance(variant, DialogueVariant)
            sums.add("log_likelihood", variant.log_likelihood(batch).sum() / batch.tokens)
        for name, predicted in variant.predict(batch).items():
            correct = predicted.argmax(dim=-1) == batch[name]
            labelled = float((np.asarray(columns[name]) >= 0).sum())
            sums.add(f"valid_{name}_accuracy", correct.sum() / max(labelled, 1.0))
    variant.train(was_training)
    metrics = sums.reduce(group)
    if reports_perplexity:
        nll = metrics[likelihood] if likelihood_known else -metrics.pop("log_likelihood")
        metrics["valid_perplexity"] = math.exp(min(nll * tokens_per_word, 700.0))
    return metrics


def _trains_decoder(variant: Variant, stage: Stage) -> bool:
    """Return whether a stage, or one before it, trains the likelihood of responses."""
    if not isinstance(variant, DialogueVariant):
        return False
    stages = variant.stages()
    stages_so_far = stages[: [each.name for each in stages].index(stage.name) + 1]
    trained_terms = {
        name for each in stages_so_far for update in each.updates for name in update.weights
    }
    return variant.likelihood_term is None or variant.likelihood_term in trained_terms


class _MetricSums:
    """Metrics by name, summed over batches and workers."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        before = self.values.get(name, torch.zeros((), dtype=torch.float64))
        self.values[name] = before + value.double().cpu()

    def reduce(self, group: ProcessGroup) -> dict[str, float]:
        names = sorted(self.values)
        values = torch.stack([self.values[name] for name in names])
        together = group.mean(values) * group.world_size
        return dict(zip(names, together.tolist(), strict=True))


def _iterate_valid_batches(columns: Columns, group: ProcessGroup) -> Iterator[Batch]:
    """Yield this worker's batches of a split. Their divisors are the counts of the whole split, so
    that the quotients of all batches add up to the mean of the split."""
    stream = Stream(
        columns, size=VALID_TOKENS, by="tokens", shuffle=False,
        rank=group.rank, world_size=group.world_size,
    )  # fmt: skip
    samples, tokens = len(stream.response_lengths), float(stream.response_lengths.sum())
    for part in stream.epoch():
        batch = dataclasses.replace(part, samples=float(samples), tokens=tokens)
        yield batch.to(group.device)


def valid_tokens_per_word(model: Model, columns: Columns) -> float:
    """Return the tokens per word of the responses, `<eos>` counted as a word; 1 without any."""
    responses = columns.get("response")
    if not isinstance(responses, Ragged) or not len(responses.values):
        return 1.0
    return len(responses.values) / model.vocabulary.count_words(responses.values)
