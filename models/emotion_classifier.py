"""Which of the 32 emotions does a text tell? Labels for text that has none.

A pretrained encoder reads a context, or a response alone, as one text; the mean of its states gives
the emotion. It learns from both, each with the emotion of its conversation, since both are to be
labelled: Dual-Emp learns from contexts and responses that belong to no pair.

Deviations: this is no published system. Shen et al. 2021 label the unpaired text of Dual-Emp with
the classifier of Rashkin et al. 2019, which we do not have, and take its probabilities as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Between,
    Choice,
    Facts,
    Losses,
    Needs,
    Progress,
    SearchSpaces,
    Stage,
    TextClassifier,
    Update,
)
from attune.models.multitask import emotion_loss


@dataclass(frozen=True, kw_only=True)
class EmotionClassifierConfig:
    """The encoder, and what it learns from."""

    encoder: str = "minilm"
    """The pretrained encoder: `minilm`, or the folder of any other in the form of Hugging Face."""
    tuned: bool = True
    """Whether the encoder learns too; else only what stands on it."""
    dropout: float = 0.1
    """Share of the text's mean state that is dropped in training."""
    response_weight: float = 1.0
    """Weight of the responses' cross-entropy beside the contexts'."""


class EmotionClassifier(TextClassifier):
    """A pretrained encoder, and an emotion for the mean of its states."""

    system = "Emotion classifier"
    paper = "ours, for the unpaired data of Shen et al. 2021"
    Config = EmotionClassifierConfig
    needs = Needs(columns=("context_subwords", "response_subwords", "emotion"), encoder="encoder")
    presets: ClassVar = {
        "tiny": {"learning_rate": 1e-3},
        "small": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_steps": 50,
            "max_epochs": 4,
        },
        "paper": {
            "learning_rate": 5e-5,
            "schedule": "linear",
            "warmup_steps": 200,
            "max_epochs": 4,
        },
    }
    search_spaces: ClassVar[SearchSpaces] = {
        "architecture": {
            "tuned": Choice(values=(True, False)),
            "dropout": Between(low=0.0, high=0.4),
        },
        "loss-weights": {"response_weight": Between(low=0.1, high=3.0, scale="loguniform")},
    }

    def __init__(self, config: EmotionClassifierConfig, facts: Facts):
        super().__init__(config, facts)
        self.encoder = facts.encoders["encoder"]
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(int(self.encoder.width), len(facts.emotions))  # type: ignore[arg-type]

    def stages(self) -> list[Stage]:
        """One stage; the encoder learns with the rest, or rests.

        The best is the most accurate: what its likelihood loses by overconfidence is given back by
        the temperature that is fitted afterwards.
        """
        parts = ("encoder", "output") if self.config.tuned else ("output",)
        weights = {"context": 1.0, "response": self.config.response_weight}
        update = Update(player="model", losses="losses", weights=weights)
        return [
            Stage(
                name="train",
                players={"model": parts},
                updates=(update,),
                metric="valid_emotion_accuracy",
            )
        ]

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The cross-entropy of contexts, and of responses."""
        batch = batches[PAIRED]
        return {
            "context": emotion_loss(self.logits(batch["context_subwords"]), batch),
            "response": emotion_loss(self.logits(batch["response_subwords"]), batch),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion of contexts."""
        return {"emotion": self.logits(batch["context_subwords"]).log_softmax(dim=-1)}

    def predict_response(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion of responses."""
        return {"emotion": self.logits(batch["response_subwords"]).log_softmax(dim=-1)}

    def logits(self, subwords: Tensor) -> Tensor:
        """(B, T) -> (B, emotions)."""
        there = (subwords > 0)[:, :, None]
        states = self.encoder(subwords)  # (B, T, width of the encoder)
        mean = (states * there).sum(dim=1) / there.sum(dim=1)
        logits: Tensor = self.output(self.dropout(mean))
        return logits
