"""A bigram model that trains in seconds, for tests of the page and the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    DataInfo,
    DialogueVariant,
    Losses,
    Progress,
    Size,
    Stage,
    State,
    Update,
)
from attune.models.multitask import emotion_loss


@dataclass(frozen=True, kw_only=True)
class DummyConfig:
    """Settings of the bigram model."""

    width: Size = 32
    """Width of the word embedding."""


class Dummy(DialogueVariant):
    """Predicts the next word from the last word and the mean of the context, and the emotion from
    that mean."""

    system = "Dummy"
    paper = "none: a stand-in for tests"
    Config = DummyConfig
    presets: ClassVar = {"tiny": {}, "small": {}, "compact": {}, "paper": {}}
    zero_3 = True
    validation_metrics = ("nll", "emotion", "emotion_accuracy")

    def __init__(self, config: DummyConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.embedding = nn.Embedding(data_info.num_tokens, config.width, padding_idx=0)
        self.output = nn.Linear(config.width, data_info.num_tokens)
        self.classifier = nn.Linear(config.width, len(data_info.emotions))

    def stages(self) -> list[Stage]:
        """Return the only stage, with one player."""
        weights = {"nll": 1.0, "emotion": 1.0}
        update = Update(player="model", losses="losses", weights=weights)
        parts = ("embedding", "output", "classifier")
        return [Stage(name="train", players={"model": parts}, updates=(update,))]

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms: response and emotion."""
        batch = batches[PAIRED]
        return {
            "nll": -self.log_likelihood(batch).sum() / batch.tokens,
            "emotion": emotion_loss(self.classifier(self._dummy_context_mean(batch)), batch),
        }

    def log_likelihood(self, batch: Batch) -> Tensor:
        """Return the log-probability of each response token, (B, T)."""
        response = batch["response"]
        start = response.new_full((len(response), 1), self.data_info.specials["<sos>"])
        inputs = torch.cat([start, response[:, :-1]], dim=1)
        logits = self.output(self.embedding(inputs) + self._dummy_context_mean(batch)[:, None])
        values = logits.log_softmax(dim=-1).gather(2, response[..., None]).squeeze(2)
        return values.masked_fill(response == self.data_info.specials["<pad>"], 0.0)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the emotion."""
        return {"emotion": self.classifier(self._dummy_context_mean(batch)).log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the state: the mean of each context's word embeddings."""
        return {"mean": self._dummy_context_mean(batch)}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the logits after one more token; the state does not change."""
        logits: Tensor = self.output(self.embedding(tokens) + state["mean"])
        return logits, state

    def _dummy_context_mean(self, batch: Batch) -> Tensor:
        """Return the mean word embedding of each context, (B, D)."""
        lengths = (batch["context"] != self.data_info.specials["<pad>"]).sum(dim=1, keepdim=True)
        mean: Tensor = self.embedding(batch["context"]).sum(dim=1) / lengths
        return mean
