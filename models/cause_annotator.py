"""Which utterances hold the cause of an emotion? Marks for the data of cause-aware models.

A pretrained encoder reads the emotion's word and the whole context as one text, so that every
utterance is seen with the emotion and with all others. The means of its states over the emotion's
word and over each utterance, with who speaks and how long ago, pass through a small Transformer;
each utterance then gets the probability that it holds the cause, so that several may. The emotion
is a word and no number: what is learned from RECCON's seven serves EmpatheticDialogues' 32. The
context ends with the turn of who feels, who is called the speaker here whoever spoke first.

Deviations: this is no published system. Gao et al. 2021 mark causes with a RoBERTa fine-tuned on
RECCON that is asked about one utterance at a time and sees the whole conversation; here all are
marked at once, and from a sample's own context only, since later turns would leak.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Annotator,
    Batch,
    Batches,
    Bounds,
    Choice,
    Count,
    DataInfo,
    DataRequirements,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Size,
    Stage,
    Update,
)
from attune.models.layers import Encoder, LayerShape

NUM_PLACES = 16
"""Utterances that lie further back than this are told apart by what they say alone."""
UNKNOWN, CAUSE = 0, 2
"""Numbers in the column `causes`."""


@dataclass(frozen=True, kw_only=True)
class CauseAnnotatorConfig:
    """The pretrained encoder, and the Transformer over its encoded utterances."""

    encoder: str = "minilm"
    """Pretrained encoder: `minilm`, or the folder of a Hugging Face encoder."""
    tuned: bool = True
    """Fine-tune the encoder; if false, only the layers above it are trained."""
    width: Size = 128
    """Width of the Transformer over utterances. Usually 64 to 256."""
    num_layers: Annotated[int, Bounds(at_least=0, at_most=1_000)] = 1
    """Number of its layers; 0 classifies each utterance by itself. Usually 0 to 2."""
    num_heads: Count = 4
    """Number of its attention heads; must divide width."""
    filter_width: Size = 256
    """Width of the hidden layer in its feed-forward blocks. Usually 2 to 4 times width."""
    dropout: Share = 0.1
    """Its dropout rate in training. Usually 0 to 0.4."""

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width: expected a multiple of num_heads={self.num_heads}, got {self.width}"
            )


class CauseAnnotator(Annotator):
    """A pretrained encoder over emotion and context, and a mark for each utterance."""

    system = "Cause annotator"
    paper = "ours, for the data of Gao et al. 2021"
    Config = CauseAnnotatorConfig
    requirements = DataRequirements(
        columns=("subwords", "subword_turns", "turn_roles", "causes"), encoder="encoder"
    )
    validation_metrics = ("cause", "accuracy")
    presets: ClassVar = {
        "tiny": {"width": 32, "num_heads": 2, "filter_width": 32, "learning_rate": 1e-3},
        "small": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_share": 0.05,
            "batch_size": 16,
            "max_epochs": 4,
            "patience": 2,
        },
        "compact": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_share": 0.05,
            "dropout_decay_share": 1 / 3,
            "batch_size": 16,
            "max_epochs": 6,
        },
        "paper": {
            "learning_rate": 5e-5,
            "schedule": "linear",
            "warmup_steps": 100,
            "batch_size": 16,
            "max_epochs": 12,
        },
    }
    search_spaces: ClassVar[SearchSpaces] = {
        "architecture": {
            "tuned": Choice(values=(True, False)),
            "num_layers": Choice(values=(0, 1, 2)),
            "dropout": Range(low=0.0, high=0.4),
        }
    }

    def __init__(self, config: CauseAnnotatorConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.encoder = data_info.encoders["encoder"]
        states, width = int(self.encoder.width), config.width  # type: ignore[arg-type]
        self.project = nn.Linear(states, width)
        self.roles = nn.Embedding(3, width)
        self.places = nn.Embedding(NUM_PLACES, width)
        shape = LayerShape(
            width=width,
            num_heads=config.num_heads,
            key_depth=width,
            filter_width=config.filter_width,
            dropout=config.dropout,
        )
        self.reader = Encoder(shape, config.num_layers)
        self.output = nn.Linear(width, 1)

    def stages(self) -> list[Stage]:
        """One stage; the encoder learns with the rest, or rests."""
        tuned = ("encoder",) if self.config.tuned else ()
        parts = (*tuned, "project", "roles", "places", "reader", "output")
        update = Update(player="model", losses="losses", weights={"cause": 1.0})
        return [Stage(name="train", players={"model": parts}, updates=(update,))]

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The cross-entropy of each context's marks, summed, and the share of them that is right.

        A sum, so that an utterance counts alike in long contexts and in short ones.
        """
        batch = batches[PAIRED]
        logits = self.logits(batch)
        known = (batch["causes"] != UNKNOWN).to(logits)
        truth = (batch["causes"] == CAUSE).to(logits)
        loss = F.binary_cross_entropy_with_logits(logits, truth, known, reduction="sum")
        right = ((logits > 0) == (truth > 0)) * known
        accuracy = right.sum(dim=1) / known.sum(dim=1).clamp(min=1.0)
        return {"cause": loss / batch.samples, "accuracy": accuracy.sum() / batch.samples}

    def marks(self, batch: Batch) -> Tensor:
        """(B, U) probabilities; the batch's own marks are not looked at."""
        there = batch["turn_roles"] > 0
        return self.logits(batch).sigmoid().masked_fill(~there, 0.0)

    def logits(self, batch: Batch) -> Tensor:
        """(B, U), above 0 where an utterance rather holds the cause."""
        parts = self.parts(batch)
        roles = F.pad(batch["turn_roles"], (1, 0))  # (B, 1 + U), 0 for the emotion's word
        turns = (batch["turn_roles"] > 0).sum(dim=1, keepdim=True)  # (B, 1)
        # The emotion's word stands farther back than all, at -1; what is behind the last is padding
        # and masked.
        number = torch.arange(-1, batch["turn_roles"].shape[1], device=turns.device)
        ago = (turns - 1 - number).clamp(0, NUM_PLACES - 1)
        hidden = self.project(parts) + self.roles(roles) + self.places(ago)  # (B, 1 + U, D)
        there = number < turns  # (B, 1 + U)
        hidden = self.reader(hidden, there[:, None, None, :])
        logits: Tensor = self.output(hidden[:, 1:]).squeeze(-1)
        return logits

    def parts(self, batch: Batch) -> Tensor:
        """(B, 1 + U, width of the encoder): the mean state of the emotion's word and of each
        utterance; 0 for one that was too far back to be read."""
        states = self.encoder(batch["subwords"])  # (B, T, E)
        count = batch["turn_roles"].shape[1] + 1
        belongs = F.one_hot(batch["subword_turns"], count + 1)[:, :, 1:].to(states)  # (B, T, 1 + U)
        sums = belongs.transpose(1, 2) @ states
        means: Tensor = sums / belongs.sum(dim=1)[:, :, None].clamp(min=1.0)
        return means
