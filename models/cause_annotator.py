"""Cause annotator: labels the utterances of a context that contain the cause of its emotion.

A pretrained encoder reads the name of the emotion and the whole context as one text, so that each
utterance is encoded together with the emotion and all other utterances. The encoder's states are
averaged over the name of the emotion and over each utterance. Embeddings of the role and of the
distance from the end are added, and a small Transformer over these vectors gives, for each
utterance, the probability that it contains the cause; several utterances may contain it. The
emotion is read as a word, so that a model trained on the seven emotions of RECCON can label the 32
of EmpatheticDialogues. The context ends with a turn of the person who has the emotion, who has the
role of the speaker here even if the other person spoke first.

Deviations: this system is not published. Gao et al. 2021 label causes with a RoBERTa fine-tuned on
RECCON, which classifies one utterance at a time and reads the whole conversation. Here all
utterances are classified at once, from the context of a sample only: later turns would contain
information that a dialogue model does not have.
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

NUM_DISTANCES = 16
"""Distances from the end of the context that have their own embedding; larger ones share the
last."""
UNKNOWN, CAUSE = 0, 2
"""Values of the column `causes`; 1 is no cause."""


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
    """A pretrained encoder of emotion and context, and a binary classifier of each utterance."""

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
        encoder_width, width = int(self.encoder.width), config.width  # type: ignore[arg-type]
        self.project = nn.Linear(encoder_width, width)
        self.roles = nn.Embedding(3, width)
        self.distances = nn.Embedding(NUM_DISTANCES, width)
        shape = LayerShape(
            width=width,
            num_heads=config.num_heads,
            key_depth=width,
            filter_width=config.filter_width,
            dropout=config.dropout,
        )
        self.context_encoder = Encoder(shape, config.num_layers)
        self.output = nn.Linear(width, 1)

    def stages(self) -> list[Stage]:
        """Return one stage, which trains all layers; the pretrained encoder only if `tuned`."""
        tuned = ("encoder",) if self.config.tuned else ()
        parts = (*tuned, "project", "roles", "distances", "context_encoder", "output")
        update = Update(player="model", losses="losses", weights={"cause": 1.0})
        return [Stage(name="train", players={"model": parts}, updates=(update,))]

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the cross-entropy, summed over the utterances of a context so that utterances of
        long and short contexts weigh the same, and the accuracy."""
        batch = batches[PAIRED]
        logits = self.score_causes(batch)
        is_known = (batch["causes"] != UNKNOWN).to(logits)
        is_cause = (batch["causes"] == CAUSE).to(logits)
        loss = F.binary_cross_entropy_with_logits(logits, is_cause, is_known, reduction="sum")
        is_correct = ((logits > 0) == (is_cause > 0)) * is_known
        accuracy = is_correct.sum(dim=1) / is_known.sum(dim=1).clamp(min=1.0)
        return {"cause": loss / batch.samples, "accuracy": accuracy.sum() / batch.samples}

    def predict_causes(self, batch: Batch) -> Tensor:
        """Return the probability that each utterance contains the cause, (B, U), 0 for padding."""
        is_padding = batch["turn_roles"] == 0
        return self.score_causes(batch).sigmoid().masked_fill(is_padding, 0.0)

    def score_causes(self, batch: Batch) -> Tensor:
        """Return a logit for each utterance, (B, U), above 0 if it is predicted to contain the
        cause."""
        roles = F.pad(batch["turn_roles"], (1, 0))  # (B, 1 + U), 0 for the emotion
        num_turns = (batch["turn_roles"] > 0).sum(dim=1, keepdim=True)  # (B, 1)
        # The emotion has the index -1, before all turns; turns from num_turns on are padding.
        index = torch.arange(-1, batch["turn_roles"].shape[1], device=num_turns.device)
        distance = (num_turns - 1 - index).clamp(0, NUM_DISTANCES - 1)
        hidden = self.project(self.pool_for_causes(batch))
        hidden = hidden + self.roles(roles) + self.distances(distance)  # (B, 1 + U, D)
        is_real = index < num_turns  # (B, 1 + U)
        hidden = self.context_encoder(hidden, is_real[:, None, None, :])
        logits: Tensor = self.output(hidden[:, 1:]).squeeze(-1)
        return logits

    def pool_for_causes(self, batch: Batch) -> Tensor:
        """Return the mean state of the emotion and of each utterance, (B, 1 + U, width of the
        encoder); 0 for utterances that were cut off because the context is too long."""
        states = self.encoder(batch["subwords"])  # (B, T, E)
        count = batch["turn_roles"].shape[1] + 1
        membership = F.one_hot(batch["subword_turns"], count + 1)[:, :, 1:]  # (B, T, 1 + U)
        membership = membership.to(states)
        sums = membership.transpose(1, 2) @ states
        means: Tensor = sums / membership.sum(dim=1)[:, :, None].clamp(min=1.0)
        return means
