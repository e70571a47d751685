"""The interactive discriminators of EmpDG, trained as Wasserstein critics (Li et al. 2020, 4.2).

A critic scores a response, given the speaker's next turn (the feedback) and the context. An LSTM
encodes the response, convolutions of several widths with max-pooling extract its features, and a
linear layer scores them together with feedback and context (eq. 16-17). The mean score of gold
responses minus that of generated responses estimates the Wasserstein-1 distance between their
distributions, provided that the critic is 1-Lipschitz. A gradient penalty at interpolations of both
encourages this (eq. 18-19).

Deviations:
- The bias b_d of eq. 17 is left out: it cancels in eq. 19 and would never get a gradient.
- With the paper's small penalty weight, the gradient norm of a critic is far above 1 (docs/log.md).
  The generator's adversarial loss and the distance that selects the checkpoint are therefore
  divided by it.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

KERNEL_WIDTHS = (1, 3, 5)
"""Kernel widths of the convolutions, in tokens."""
EPSILON = 1e-12
"""Added before the square root of a gradient norm, which is not differentiable at 0."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedUtterance:
    """Utterances as word vectors, the input of a critic."""

    vectors: Tensor
    """(B, T, dimension of the word vectors)."""
    mask: Tensor
    """(B, T), True for real tokens; the first token is always real."""


@dataclass(frozen=True, kw_only=True)
class CriticCondition:
    """The condition under which a critic scores a response."""

    feedback: EmbeddedUtterance
    """The speaker's next turn."""
    context: Tensor
    """(B, D): x_0 for the semantic critic, w_0 for the emotional critic."""


class Critic(nn.Module):
    """D_sem or D_emo, which is trained to score gold responses higher than generated ones."""

    def __init__(self, dimension: int, width: int):
        super().__init__()
        # Word vectors have a standard deviation of 1 / sqrt(dimension). Without scaling, the LSTM's
        # states would be negligible next to the layer-normalised state of the context.
        self.scale = math.sqrt(dimension)
        self.lstm = nn.LSTM(dimension, width, batch_first=True)
        channels, remainder = divmod(width, len(KERNEL_WIDTHS))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(width, channels + (remainder if i == 0 else 0), size, padding="same")
            for i, size in enumerate(KERNEL_WIDTHS)
        )
        self.score_head = nn.Linear(width, 1, bias=False)  # W_d

    def forward(self, response: EmbeddedUtterance, condition: CriticCondition) -> Tensor:
        """Return D(d), the score of each response (B,)."""
        return self._score_states(
            self._encode_words(response),
            response.mask,
            self._encode_feedback(condition.feedback),
            condition.context,
        )

    def compare(
        self, gold: EmbeddedUtterance, generated: EmbeddedUtterance, condition: CriticCondition
    ) -> tuple[Tensor, Tensor]:
        """Return D(d^P) - D(d^N), and the gradient norm at an interpolation of d^P and d^N, (B,)
        each."""
        gold, generated = _pad_to_longer(gold, generated), _pad_to_longer(generated, gold)
        d_p, d_n = self._encode_words(gold), self._encode_words(generated)  # (B, T, D)
        d_f = self._encode_feedback(condition.feedback)
        difference = self._score_states(
            d_p, gold.mask, d_f, condition.context
        ) - self._score_states(d_n, generated.mask, d_f, condition.context)
        alpha = torch.rand_like(d_p[:, :1, :1]) if self.training else 0.5
        interpolated = alpha * d_n + (1 - alpha) * d_p  # eq. 18
        gradient_norm = self._compute_gradient_norm(
            interpolated,
            gold.mask | generated.mask,
            d_f,
            condition.context,
            create_graph=self.training,
        )
        return difference, gradient_norm

    def normalised_score(self, response: EmbeddedUtterance, condition: CriticCondition) -> Tensor:
        """Return D(d), divided by the gradient norm at d if the norm is above 1, (B,)."""
        states, d_f = self._encode_words(response), self._encode_feedback(condition.feedback)
        score = self._score_states(states, response.mask, d_f, condition.context)
        gradient_norm = self._compute_gradient_norm(states, response.mask, d_f, condition.context)
        return normalise_by_gradient(score, gradient_norm)

    def _compute_gradient_norm(
        self, states: Tensor, mask: Tensor, d_f: Tensor, context: Tensor,
        *, create_graph: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the norm of the gradient of the score with respect to the LSTM's states, (B,)."""
        with torch.enable_grad():  # evaluation disables gradients
            states = states.detach().requires_grad_()
            score = self._score_states(states, mask, d_f, context)
            [gradient] = torch.autograd.grad(score.sum(), states, create_graph=create_graph)
        gradient = gradient * mask[..., None]  # padding is not part of the response
        return (gradient.flatten(1).square().sum(dim=1) + EPSILON).sqrt()

    def _encode_words(self, utterance: EmbeddedUtterance) -> Tensor:
        """Return the LSTM's states (B, T, D), zero for padding."""
        states, _ = self.lstm(self.scale * utterance.vectors)
        return cast("Tensor", states) * utterance.mask[..., None]

    def _encode_feedback(self, utterance: EmbeddedUtterance) -> Tensor:
        """Return the LSTM's state after the last real token, (B, D)."""
        states, _ = self.lstm(self.scale * utterance.vectors)
        last = utterance.mask.sum(dim=1) - 1
        return cast("Tensor", states)[torch.arange(len(last), device=last.device), last]

    def _score_states(self, states: Tensor, mask: Tensor, d_f: Tensor, context: Tensor) -> Tensor:
        """Return the scores (B,) of responses with these LSTM states (B, T, D)."""
        channels = states.transpose(1, 2)  # (B, D, T)
        # ReLU is never negative, so zeros exclude padding from the maximum.
        features = [
            (convolution(channels).relu() * mask[:, None]).amax(dim=2)
            for convolution in self.convolutions
        ]  # eq. 16
        combined = torch.cat(features, dim=1) + d_f + context
        score: Tensor = self.score_head(combined.relu())  # eq. 17
        return score.squeeze(1)


def normalise_by_gradient(scores: Tensor, gradient_norm: Tensor) -> Tensor:
    """Divide a critic's scores, or differences of scores, by its gradient norm if that is above 1.

    The critic then behaves as if it were 1-Lipschitz, and its distances remain comparable while it
    is trained.
    """
    return scores / gradient_norm.detach().clamp(min=1)


def gradient_penalty(gradient_norm: Tensor) -> Tensor:
    """Return the unweighted penalty of eq. 19 for each sample."""
    return (gradient_norm - 1).square()


def _pad_to_longer(utterance: EmbeddedUtterance, other: EmbeddedUtterance) -> EmbeddedUtterance:
    """Pad an utterance to the length of another if the other is longer."""
    missing = max(other.mask.shape[1] - utterance.mask.shape[1], 0)
    if not missing:
        return utterance
    return EmbeddedUtterance(
        vectors=nn.functional.pad(utterance.vectors, (0, 0, 0, missing)),
        mask=nn.functional.pad(utterance.mask, (0, missing)),
    )
