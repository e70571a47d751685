"""Classifiers of emotions and intents, which label text for the dialogue systems.

A linear layer on the mean of a pretrained encoder's states predicts the label.
`emotion-classifier` predicts the 32 emotions. It is trained on contexts and on responses, each with
the emotion of its conversation, because Dual-Emp's unpaired text consists of both.
`intent-classifier` predicts the 41 emotions and intents of single utterances (Welivita and Pu
2020), with which MEED2's corpora are labelled.

Deviations: Shen et al. 2021 label unpaired text with the classifier of Rashkin et al. 2019, which
is not available, and use its probabilities uncalibrated. Xie and Pu 2021 fine-tune RoBERTa; here
`encoder` is MiniLM by default.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    DataRequirements,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Stage,
    TextClassifier,
    TextKind,
    Update,
    Weight,
)
from attune.models.multitask import emotion_loss


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """The pretrained encoder and its fine-tuning."""

    encoder: str = "minilm"
    """Pretrained encoder: `minilm`, or the folder of a Hugging Face encoder."""
    tuned: bool = True
    """Fine-tune the encoder; if false, only the classification layer is trained."""
    dropout: Share = 0.1
    """Dropout rate of the encoded text in training. Usually 0 to 0.4."""


@dataclass(frozen=True, kw_only=True)
class EmotionClassifierConfig(ClassifierConfig):
    """The encoder's settings and the weight of responses."""

    response_weight: Weight = 1.0
    """Weight of the responses' cross-entropy; the contexts' has weight 1. Usually 0 to 2."""


class IntentClassifier(TextClassifier):
    """A linear layer on the mean of a pretrained encoder's states."""

    system = "Intent classifier"
    paper = "Welivita and Pu 2020, as Xie and Pu 2021 use it"
    Config = ClassifierConfig
    requirements = DataRequirements(
        columns=("context_subwords", "response_subwords", "emotion"),
        encoder="encoder",
        labels="utterances",
    )
    trained_on: ClassVar[tuple[TextKind, ...]] = ("context",)
    validation_metrics: ClassVar[tuple[str, ...]] = ("context", "emotion_accuracy")
    presets: ClassVar = {
        "tiny": {"learning_rate": 1e-3},
        "small": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_share": 0.06,
            "max_epochs": 4,
        },
        "compact": {
            "learning_rate": 1e-4,
            "schedule": "linear",
            "warmup_share": 0.06,
            "dropout_decay_share": 1 / 3,
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
            "dropout": Range(low=0.0, high=0.4),
        },
    }

    def __init__(self, config: ClassifierConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.encoder = data_info.encoders["encoder"]
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(int(self.encoder.width), len(data_info.emotions))  # type: ignore[arg-type]

    def stages(self) -> list[Stage]:
        """Return one stage; it trains the pretrained encoder only if `tuned`.

        The best checkpoint is the most accurate one: overconfidence, which raises the loss, is
        corrected afterwards by a fitted temperature.
        """
        parts = ("encoder", "output") if self.config.tuned else ("output",)
        update = Update(player="model", losses="losses", weights=self.loss_weights())
        return [
            Stage(
                name="train",
                players={"model": parts},
                updates=(update,),
                metric="valid_emotion_accuracy",
            )
        ]

    def loss_weights(self) -> dict[str, float]:
        """Return the weight of contexts."""
        return {"context": 1.0}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the cross-entropy of each kind of text that it is trained on."""
        batch = batches[PAIRED]
        return {
            kind: emotion_loss(self.classify_text(batch[f"{kind}_subwords"]), batch)
            for kind in self.trained_on
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the label of contexts."""
        return {"emotion": self.classify_text(batch["context_subwords"]).log_softmax(dim=-1)}

    def predict_response(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the label of responses."""
        return {"emotion": self.classify_text(batch["response_subwords"]).log_softmax(dim=-1)}

    def classify_text(self, subwords: Tensor) -> Tensor:
        """Return the logits (B, labels) of texts (B, T)."""
        is_real = (subwords > 0)[:, :, None]
        states = self.encoder(subwords)  # (B, T, width of the encoder)
        mean = (states * is_real).sum(dim=1) / is_real.sum(dim=1)
        logits: Tensor = self.output(self.dropout(mean))
        return logits


class EmotionClassifier(IntentClassifier):
    """The same for the emotions of conversations, trained on contexts and on responses."""

    system = "Emotion classifier"
    validation_metrics = ("context", "response", "emotion_accuracy")
    paper = "ours, for the unpaired data of Shen et al. 2021"
    Config = EmotionClassifierConfig
    requirements = DataRequirements(
        columns=IntentClassifier.requirements.columns, encoder="encoder"
    )
    trained_on = ("context", "response")
    search_spaces: ClassVar[SearchSpaces] = {
        **IntentClassifier.search_spaces,
        "loss-weights": {"response_weight": Range(low=0.1, high=3.0, scale="loguniform")},
    }

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of contexts and responses."""
        return {"context": 1.0, "response": self.config.response_weight}
