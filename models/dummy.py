"""A model that learns in a moment what word follows what, for tests of the page and the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    DataInfo,
    DialogueVariant,
    Losses,
    Progress,
    Stage,
    State,
    Update,
)


@dataclass(frozen=True, kw_only=True)
class DummyConfig:
    """Next to nothing."""

    width: int = 32
    """Width of the word table."""


class Dummy(DialogueVariant):
    """The next word from the last word and the mean of the context; the emotion from the mean."""

    system = "Dummy"
    paper = "none: a stand-in for tests"
    Config = DummyConfig
    presets: ClassVar = {"tiny": {}, "small": {}, "paper": {}}
    zero_3 = True

    def __init__(self, config: DummyConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.words = nn.Embedding(data_info.num_tokens, config.width, padding_idx=0)
        self.output = nn.Linear(config.width, data_info.num_tokens)
        self.emotions = nn.Linear(config.width, len(data_info.emotions))

    def stages(self) -> list[Stage]:
        """One stage, one player."""
        weights = {"nll": 1.0, "emotion": 1.0}
        update = Update(player="model", losses="losses", weights=weights)
        parts = ("words", "output", "emotions")
        return [Stage(name="train", players={"model": parts}, updates=(update,))]

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Response and emotion."""
        batch = batches[PAIRED]
        emotion = F.cross_entropy(
            self.emotions(self._mean(batch)), batch["emotion"], ignore_index=-1, reduction="sum"
        )
        return {
            "nll": -self.log_likelihood(batch).sum() / batch.tokens,
            "emotion": emotion / batch.samples,
        }

    def log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T)."""
        response = batch["response"]
        start = response.new_full((len(response), 1), self.data_info.specials["<sos>"])
        given = torch.cat([start, response[:, :-1]], dim=1)
        logits = self.output(self.words(given) + self._mean(batch)[:, None])
        chosen = logits.log_softmax(dim=-1).gather(2, response[..., None]).squeeze(2)
        return chosen.masked_fill(response == self.data_info.specials["<pad>"], 0.0)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion."""
        return {"emotion": self.emotions(self._mean(batch)).log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The mean is all there is."""
        return {"mean": self._mean(batch)}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One more token."""
        logits: Tensor = self.output(self.words(tokens) + state["mean"])
        return logits, state

    def _mean(self, batch: Batch) -> Tensor:
        real = (batch["context"] != self.data_info.specials["<pad>"]).sum(dim=1, keepdim=True)
        mean: Tensor = self.words(batch["context"]).sum(dim=1) / real
        return mean
