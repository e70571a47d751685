"""The interactive discriminators of EmpDG, trained as Wasserstein critics (Li et al. 2020, 4.2).

A critic scores a response, given the speaker's next turn (the feedback) and the context. An LSTM
encodes the response, convolutions of several widths with max-pooling extract its features, and a
linear layer scores them together with the feedback and the context (eq. 16-17). The mean score of
gold responses minus that of generated ones estimates the Wasserstein-1 distance between the two
distributions (eq. 19), provided that the critic is 1-Lipschitz, which a gradient penalty encourages
(eq. 18).

Deviations:
- The b_d of eq. 17 is left out: it cancels in eq. 19, so it would never get a gradient.
- With the paper's small penalty weight the gradient norm of a critic is far above 1 (docs/log.md).
  The generator's adversarial loss and the distance that selects the checkpoint are therefore
  divided by it.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

KERNEL_WIDTHS = (1, 3, 5)
"""Widths of the convolutions, in tokens."""
EPSILON = 1e-12
"""Added under the square root of the gradient norm, which has no derivative at 0."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedUtterance:
    """An utterance as word vectors, the input of a critic."""

    vectors: Tensor
    """(B, T, dimension of the word vectors)."""
    mask: Tensor
    """(B, T), True at real tokens; the first token is always real."""


@dataclass(frozen=True, kw_only=True)
class CriticCondition:
    """What a critic is conditioned on besides the response."""

    feedback: EmbeddedUtterance
    """The speaker's next turn."""
    context: Tensor
    """(B, D), x_0 for the semantic and w_0 for the emotional critic."""


class Critic(nn.Module):
    """D_sem or D_emo: scores responses, gold ones higher than generated ones."""

    def __init__(self, dimension: int, width: int):
        super().__init__()
        # Word vectors have a standard deviation of 1 / sqrt(dimension): without scaling, the LSTM's
        # states would be negligible beside the layer-normalised context state.
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
        return self._score(
            self._encode(response),
            response.mask,
            self._last_state(condition.feedback),
            condition.context,
        )

    def compare(
        self, gold: EmbeddedUtterance, generated: EmbeddedUtterance, condition: CriticCondition
    ) -> tuple[Tensor, Tensor]:
        """Return D(d^P) - D(d^N) and the gradient norm at an interpolation of both, (B,) each."""
        gold, generated = _pad_to_longer(gold, generated), _pad_to_longer(generated, gold)
        d_p, d_n = self._encode(gold), self._encode(generated)  # (B, T, D)
        d_f = self._last_state(condition.feedback)
        difference = self._score(d_p, gold.mask, d_f, condition.context) - self._score(
            d_n, generated.mask, d_f, condition.context
        )
        alpha = torch.rand_like(d_p[:, :1, :1]) if self.training else 0.5
        interpolated = alpha * d_n + (1 - alpha) * d_p  # eq. 18
        gradient_norm = self._gradient_norm(
            interpolated,
            gold.mask | generated.mask,
            d_f,
            condition.context,
            create_graph=self.training,
        )
        return difference, gradient_norm

    def normalised_score(self, response: EmbeddedUtterance, condition: CriticCondition) -> Tensor:
        """Return D(d), divided by the critic's gradient norm there where that is above 1, (B,)."""
        states, d_f = self._encode(response), self._last_state(condition.feedback)
        score = self._score(states, response.mask, d_f, condition.context)
        gradient_norm = self._gradient_norm(states, response.mask, d_f, condition.context)
        return normalise_by_gradient(score, gradient_norm)

    def _gradient_norm(
        self, states: Tensor, mask: Tensor, d_f: Tensor, context: Tensor,
        *, create_graph: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the norm of the score's gradient with respect to the LSTM's states, (B,)."""
        with torch.enable_grad():  # also needed in evaluation, where gradients are disabled
            states = states.detach().requires_grad_()
            score = self._score(states, mask, d_f, context)
            [gradient] = torch.autograd.grad(score.sum(), states, create_graph=create_graph)
        gradient = gradient * mask[..., None]  # padding is not part of the response
        return (gradient.flatten(1).square().sum(dim=1) + EPSILON).sqrt()

    def _encode(self, utterance: EmbeddedUtterance) -> Tensor:
        """Return the LSTM's states (B, T, D), zero at padding."""
        states, _ = self.lstm(self.scale * utterance.vectors)
        return cast("Tensor", states) * utterance.mask[..., None]

    def _last_state(self, utterance: EmbeddedUtterance) -> Tensor:
        """Return the LSTM's state after the last real token, (B, D)."""
        states, _ = self.lstm(self.scale * utterance.vectors)
        last = utterance.mask.sum(dim=1) - 1
        return cast("Tensor", states)[torch.arange(len(last), device=last.device), last]

    def _score(self, states: Tensor, mask: Tensor, d_f: Tensor, context: Tensor) -> Tensor:
        channels = states.transpose(1, 2)  # (B, D, T)
        # Zeroing padding excludes it from the maximum, since ReLU's least value is 0.
        features = [
            (convolution(channels).relu() * mask[:, None]).amax(dim=2)
            for convolution in self.convolutions
        ]  # eq. 16
        combined = torch.cat(features, dim=1) + d_f + context
        score: Tensor = self.score_head(combined.relu())  # eq. 17
        return score.squeeze(1)


def normalise_by_gradient(scores: Tensor, gradient_norm: Tensor) -> Tensor:
    """Divide a critic's scores, or differences of them, by its gradient norm where that is above 1.

    The results are those of a 1-Lipschitz critic: distances that remain comparable while the critic
    is trained.
    """
    return scores / gradient_norm.detach().clamp(min=1)


def gradient_penalty(gradient_norm: Tensor) -> Tensor:
    """Return the penalty of eq. 19 for each sample, unweighted."""
    return (gradient_norm - 1).square()


def _pad_to_longer(utterance: EmbeddedUtterance, other: EmbeddedUtterance) -> EmbeddedUtterance:
    """Pad an utterance to the length of another one where that is longer."""
    missing = max(other.mask.shape[1] - utterance.mask.shape[1], 0)
    if not missing:
        return utterance
    return EmbeddedUtterance(
        vectors=nn.functional.pad(utterance.vectors, (0, 0, 0, missing)),
        mask=nn.functional.pad(utterance.mask, (0, missing)),
    )
