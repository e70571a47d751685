"""Multi-TRS and EmoPrepend-1: Transformers that predict the emotion (Rashkin et al. 2019).

Multi-TRS adds a linear classifier of the conversation's emotion on the state of `<cls>`, and its
cross-entropy to the loss. EmoPrepend-1 first trains a classifier on the contexts, freezes it, and
prepends the name of the most likely emotion to the context, in training and at test time.

Deviations: as in `transformer.py`. EmoPrepend-1's classifier is a separate Transformer encoder; the
paper used fastText.
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
    Weight,
    extend_presets,
)
from attune.models.layers import Encoder, Positions
from attune.models.transformer import Transformer, TransformerConfig, build_word_embedding

SUMMED_LIKELIHOOD_WEIGHT = 0.069
"""Weight of a term per sample that equals weight 1 next to the summed likelihood of a response:
1 / L, where L is the mean length of a response, 14.55 tokens on EmpatheticDialogues. The likelihood
term is a mean per token here and a sum in the papers."""
EMOTION_WEIGHT_RANGE = Range(low=0.01, high=1.0, scale="loguniform")
"""Search range of the weight of an emotion loss, a term per sample."""


@dataclass(frozen=True, kw_only=True)
class MultitaskConfig(TransformerConfig):
    """Settings of the Transformer, and the weight of the emotion loss."""

    emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion's cross-entropy; the response's has weight 1. Usually 0.05 to 0.5."""


EMOTION_PRESETS = extend_presets(
    Transformer.presets,
    small={
        "num_heads": 4,
        "learning_rate": 2e-3,
        "schedule": "linear",
        "warmup_share": 0.08,
        "max_epochs": 6,
    },
)
"""The Transformer's presets for systems that also learn emotions: `small` learns them from the
bundled corpus (docs/log.md)."""


def emotion_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of the emotions, divided by `batch.samples`; samples without an
    emotion add 0."""
    total = F.cross_entropy(logits, batch["emotion"], ignore_index=-1, reduction="sum")
    return total / batch.samples


@torch.no_grad()
def run_frozen(module: nn.Module, *inputs: Tensor) -> Any:
    """Return the output of a frozen module, without dropout while other modules are trained."""
    was_training = module.training
    output = module.eval()(*inputs)
    module.train(was_training)
    return output


class MultiTransformer(Transformer):
    """Multi-TRS: the encoder is shared by the decoder and an emotion classifier."""

    system = "Multi-TRS"
    paper = "Rashkin et al. 2019"
    Config = MultitaskConfig
    validation_metrics: ClassVar[tuple[str, ...]] = ("nll", "emotion", "emotion_accuracy")
    presets: ClassVar = extend_presets(
        EMOTION_PRESETS,
        tiny={"emotion_weight": 1.0},
        small={"emotion_weight": 4.0},
        compact={"emotion_weight": 0.2},
    )
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {"emotion_weight": EMOTION_WEIGHT_RANGE},
    }

    def __init__(self, config: MultitaskConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.classifier = nn.Linear(config.width, len(data_info.emotions))

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of response and emotion."""
        return {"nll": 1.0, "emotion": self.config.emotion_weight}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms: response and emotion."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)  # (B, S, D)
        return {
            "nll": self.compute_nll(batch, self.decode(embedded, hidden), embedded),
            "emotion": emotion_loss(self.classifier(hidden[:, 0]), batch),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the emotion from the state of `<cls>`."""
        hidden = self.encode_context(self.embed(batch))
        return {"emotion": self.classifier(hidden[:, 0]).log_softmax(dim=-1)}


class ContextEmotionClassifier(nn.Module):
    """A Transformer encoder with a linear layer on the state of `<cls>`."""

    def __init__(self, config: TransformerConfig, data_info: DataInfo):
        super().__init__()
        self.embedding = build_word_embedding(config, data_info)
        self.positions = Positions(config.width)
        self.encoder = Encoder(config.layer_shape, config.num_layers)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.width, len(data_info.emotions))
        self.padding = data_info.specials["<pad>"]

    def forward(self, context: Tensor, roles: Tensor) -> Tensor:
        """Return the logits (B, emotions) from the tokens and roles of a context, (B, S) each."""
        e_context, e_roles = self.embedding(context, roles)
        embedded = self.dropout(e_context + e_roles + self.positions(context.shape[1]))
        hidden = self.encoder(embedded, (context != self.padding)[:, None, None, :])
        logits: Tensor = self.output(hidden[:, 0])
        return logits


class EmoPrepend(Transformer):
    """EmoPrepend-1: the name of the predicted emotion is prepended to the context."""

    system = "EmoPrepend-1"
    paper = "Rashkin et al. 2019"
    validation_metrics = ("nll", "emotion", "emotion_accuracy")
    presets: ClassVar = {
        **Transformer.presets,
        "compact": {**Transformer.presets["compact"], "max_epochs": 8},
    }
    emotion_tokens: Tensor
    """(emotions,) token id of each emotion's name."""

    def __init__(self, config: TransformerConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.emotion_classifier = ContextEmotionClassifier(config, data_info)
        self.register_buffer(
            "emotion_tokens", torch.tensor(data_info.emotion_tokens), persistent=False
        )

    @classmethod
    def stage_independent_settings(cls, config: TransformerConfig) -> Mapping[str, tuple[str, ...]]:
        """Return the settings of the decoder: the classifier's stage has no responses."""
        return {"classifier": ("label_smoothing",)}

    def stages(self) -> list[Stage]:
        """Return the stages: the classifier, then the dialogue model with the classifier frozen."""
        [train] = super().stages()
        parts = tuple(name for name in train.players["model"] if name != "emotion_classifier")
        classifier_update = Update(
            player="classifier", losses="multitask_classifier_losses", weights={"emotion": 1.0}
        )
        return [
            Stage(
                name="classifier",
                players={"classifier": ("emotion_classifier",)},
                updates=(classifier_update,),
                share=0.25,
                metric="valid_emotion_accuracy",
            ),
            replace(train, players={"model": parts}, share=0.75),
        ]

    def multitask_classifier_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the cross-entropy of the classifier."""
        batch = batches[PAIRED]
        logits = self.emotion_classifier(batch["context"], batch["context_roles"])
        return {"emotion": emotion_loss(logits, batch)}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the emotion with the classifier."""
        logits = self.emotion_classifier(batch["context"], batch["context_roles"])
        return {"emotion": logits.log_softmax(dim=-1)}

    def prepare_context(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens and roles of the context, preceded by the name of the predicted
        emotion."""
        logits = run_frozen(self.emotion_classifier, batch["context"], batch["context_roles"])
        context, roles = super().prepare_context(batch)
        emotion_token = self.emotion_tokens[logits.argmax(dim=-1)][:, None]
        return torch.cat([emotion_token, context], dim=1), torch.cat([roles[:, :1], roles], dim=1)
