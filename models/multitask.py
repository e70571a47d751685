"""Multi-TRS and EmoPrepend-1: the Transformer that also knows the emotion (Rashkin et al. 2019).

Multi-TRS adds a linear layer on the state of `<cls>` that predicts the conversation's emotion, and
its cross-entropy. EmoPrepend-1 first trains a classifier on the same contexts, freezes it, and puts
the *word* of the one most likely emotion in front of the encoder's input, in training and test
alike.

Deviations: as in `transformer.py`. EmoPrepend-1's classifier is a Transformer encoder of its own,
where the data-set paper used fastText.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    DataInfo,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Stage,
    Update,
)
from attune.models.layers import Encoder, Positions, WordEmbedding
from attune.models.transformer import Transformer, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class MultitaskConfig(TransformerConfig):
    """The Transformer's, and how much the emotion counts."""

    emotion_weight: float = 1.0
    """Weight of the emotion's cross-entropy beside the response's."""


SMALL = {
    "num_heads": 4,
    "learning_rate": 2e-3,
    "schedule": "linear",
    "warmup_steps": 100,
    "max_epochs": 6,
}
"""What preset `small` has for systems that learn emotions from the bundled corpus (docs/log.md)."""


def emotion_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy of the global batch's emotions; samples without one do not count."""
    total = F.cross_entropy(logits, batch["emotion"], ignore_index=-1, reduction="sum")
    return total / batch.samples


@torch.no_grad()
def run_frozen(part: nn.Module, *given: Tensor) -> Any:
    """What a frozen part makes of it: it must not drop anything out while the rest is trained."""
    trained = part.training
    made = part.eval()(*given)
    part.train(trained)
    return made


class MultiTransformer(Transformer):
    """Multi-TRS: one encoder for both tasks."""

    system = "Multi-TRS"
    paper = "Rashkin et al. 2019"
    Config = MultitaskConfig
    presets: ClassVar = {
        **Transformer.presets,
        "small": {
            **Transformer.presets["small"],
            **SMALL,
            "emotion_weight": 4.0,
        },
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {"emotion_weight": Range(low=0.1, high=10.0, scale="loguniform")},
    }

    def __init__(self, config: MultitaskConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.classifier = nn.Linear(config.width, len(data_info.emotions))

    def loss_weights(self) -> dict[str, float]:
        """Response and emotion."""
        return {"nll": 1.0, "emotion": self.config.emotion_weight}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Both from one reading of the context."""
        batch = batches[PAIRED]
        words = self.embed(batch)
        source = self.encode_context(words)
        return {
            "nll": self.compute_nll(batch, self.decode(words, source), words),
            "emotion": emotion_loss(self.classifier(source[:, 0]), batch),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion from the state of `<cls>`."""
        source = self.encode_context(self.embed(batch))
        return {"emotion": self.classifier(source[:, 0]).log_softmax(dim=-1)}


class EmotionReader(nn.Module):
    """An encoder whose `<cls>` state tells the emotion."""

    def __init__(self, config: TransformerConfig, data_info: DataInfo):
        super().__init__()
        shape = (config.width, config.num_layers, config.num_heads, config.key_depth)
        self.embedding = WordEmbedding(
            data_info.num_tokens, config.width, vectors=data_info.word_vectors
        )
        self.positions = Positions(config.width)
        self.encoder = Encoder(*shape, config.filter_width, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.labels = nn.Linear(config.width, len(data_info.emotions))
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor) -> Tensor:
        """(B, S) -> (B, emotions) logits."""
        words, speakers = self.embedding(context, roles)
        embedded = self.dropout(words + speakers + self.positions(context.shape[1]))
        states = self.encoder(embedded, (context != self.padding)[:, None, None, :])
        logits: Tensor = self.labels(states[:, 0])
        return logits


class EmoPrepend(Transformer):
    """EmoPrepend-1: the predicted emotion's word stands in front of the context."""

    system = "EmoPrepend-1"
    paper = "Rashkin et al. 2019"
    emotion_tokens: Tensor

    def __init__(self, config: TransformerConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.reader = EmotionReader(config, data_info)
        self.register_buffer(
            "emotion_tokens", torch.tensor(data_info.emotion_tokens), persistent=False
        )

    @classmethod
    def stage_independent_settings(cls, config: TransformerConfig) -> Mapping[str, tuple[str, ...]]:
        """The classifier says nothing."""
        return {"classifier": ("label_smoothing",)}

    def stages(self) -> list[Stage]:
        """The classifier, then the dialogue model while the classifier rests."""
        [train] = super().stages()
        parts = tuple(name for name in train.players["model"] if name != "reader")
        read = Update(player="reader", losses="reader_losses", weights={"emotion": 1.0})
        return [
            Stage(
                name="classifier",
                players={"reader": ("reader",)},
                updates=(read,),
                share=0.25,
                metric="valid_emotion_accuracy",
            ),
            replace(train, players={"model": parts}, share=0.75),
        ]

    def reader_losses(self, batches: Batches, progress: Progress) -> Losses:
        """The classifier's cross-entropy."""
        batch = batches[PAIRED]
        logits = self.reader(batch["context"], batch["context_roles"])
        return {"emotion": emotion_loss(logits, batch)}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """What the classifier says."""
        logits = self.reader(batch["context"], batch["context_roles"])
        return {"emotion": logits.log_softmax(dim=-1)}

    def prepare_context(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The context behind the word of the predicted emotion."""
        logits = run_frozen(self.reader, batch["context"], batch["context_roles"])
        context, roles = super().prepare_context(batch)
        word = self.emotion_tokens[logits.argmax(dim=-1)][:, None]
        return torch.cat([word, context], dim=1), torch.cat([roles[:, :1], roles], dim=1)
