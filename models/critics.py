"""The interactive critics of EmpDG (Li et al. 2020, section 4.2).

A critic tells what a person answered from what the generator says, knowing what the speaker says
next (the feedback). It reads a response with an LSTM, looks for patterns of several widths in its
states, and scores what it found beside the feedback and the context (eq. 16-17). Its mean score of
people's responses less that of generated ones estimates the Wasserstein-1 distance between the two
(eq. 19), as long as it is 1-Lipschitz, which a penalty on the slope of its score sees to (eq. 18).

The b_d of eq. 17 is left out: it cancels in eq. 19 and could never learn. With the paper's small
weight of the penalty a critic is far steeper than 1 (docs/log.md): what the generator hears of it,
and the distance by which a model is chosen, are divided by its steepness.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

WIDTHS = (1, 3, 5)
"""Of the patterns, in tokens."""
EPSILON = 1e-12
"""Where the slope is exactly 0 its norm has no derivative."""


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """An utterance as a critic reads it."""

    words: Tensor
    """(B, T, dimension of the word vectors)."""
    real: Tensor
    """(B, T) where it is; the first token always is."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a critic knows beside the response."""

    feedback: Spoken
    context: Tensor
    """(B, D)."""


class Critic(nn.Module):
    """Scores responses; what a person says should get more than what a generator says."""

    def __init__(self, dimension: int, width: int):
        super().__init__()
        # Word vectors have a spread of 1 / sqrt(dimension): beside the context's normalised state
        # what is read of them would hardly be seen.
        self.scale = math.sqrt(dimension)
        self.reader = nn.LSTM(dimension, width, batch_first=True)
        share, rest = divmod(width, len(WIDTHS))
        self.patterns = nn.ModuleList(
            nn.Conv1d(width, share + (rest if number == 0 else 0), size, padding="same")
            for number, size in enumerate(WIDTHS)
        )
        self.verdict = nn.Linear(width, 1, bias=False)

    def forward(self, said: Spoken, around: Surroundings) -> Tensor:
        """(B,) the score of a response."""
        return self._score(self._read(said), said.real, self._last(around.feedback), around.context)

    def compare(
        self, person: Spoken, generated: Spoken, around: Surroundings
    ) -> tuple[Tensor, Tensor]:
        """(B,) each: how much more a person's response gets, and how steep the score is between
        the two (eq. 18-19)."""
        person, generated = _as_long(person, generated), _as_long(generated, person)
        states, others = self._read(person), self._read(generated)
        feedback = self._last(around.feedback)
        more = self._score(states, person.real, feedback, around.context) - self._score(
            others, generated.real, feedback, around.context
        )
        share = torch.rand_like(states[:, :1, :1]) if self.training else 0.5
        between, real = share * others + (1 - share) * states, person.real | generated.real
        steepness = self._steepness(between, real, feedback, around.context, learn=self.training)
        return more, steepness

    def judged(self, said: Spoken, around: Surroundings) -> Tensor:
        """(B,) the score of a response, by the critic's own steepness there where it is above 1."""
        states, feedback = self._read(said), self._last(around.feedback)
        score = self._score(states, said.real, feedback, around.context)
        return gentle(score, self._steepness(states, said.real, feedback, around.context))

    def _steepness(
        self, states: Tensor, real: Tensor, feedback: Tensor, context: Tensor,
        *, learn: bool = False,
    ) -> Tensor:  # fmt: skip
        """(B,) the norm of the slope of the score at some states of the reader."""
        with torch.enable_grad():  # the slope is wanted where nothing is to be learned, too
            states = states.detach().requires_grad_()
            score = self._score(states, real, feedback, context)
            [slope] = torch.autograd.grad(score.sum(), states, create_graph=learn)
        slope = slope * real[..., None]  # places beyond the end are no part of the response
        return (slope.flatten(1).square().sum(dim=1) + EPSILON).sqrt()

    def _read(self, said: Spoken) -> Tensor:
        """(B, T, D), nothing where there is no token."""
        states, _ = self.reader(self.scale * said.words)
        return cast("Tensor", states) * said.real[..., None]

    def _last(self, said: Spoken) -> Tensor:
        """(B, D) the state after the last token."""
        states, _ = self.reader(self.scale * said.words)
        last = said.real.sum(dim=1) - 1
        return cast("Tensor", states)[torch.arange(len(last), device=last.device), last]

    def _score(self, states: Tensor, real: Tensor, feedback: Tensor, context: Tensor) -> Tensor:
        channels = states.transpose(1, 2)  # (B, D, T)
        # What lies beyond the end counts as no pattern: with ReLU 0 is the least.
        found = [
            (pattern(channels).relu() * real[:, None]).amax(dim=2) for pattern in self.patterns
        ]  # eq. 16
        joined = torch.cat(found, dim=1) + feedback + context
        verdict: Tensor = self.verdict(joined.relu())  # eq. 17
        return verdict.squeeze(1)


def gentle(scores: Tensor, steepness: Tensor) -> Tensor:
    """Scores, or their differences, of a critic as steep as this, as one of steepness 1 would give
    them: then they are distances, and comparable while critics learn."""
    return scores / steepness.detach().clamp(min=1)


def penalty(steepness: Tensor) -> Tensor:
    """Eq. 18."""
    return (steepness - 1).square()


def _as_long(said: Spoken, other: Spoken) -> Spoken:
    """An utterance with as many places as the longer of the two."""
    missing = max(other.real.shape[1] - said.real.shape[1], 0)
    if not missing:
        return said
    return Spoken(
        words=nn.functional.pad(said.words, (0, 0, 0, missing)),
        real=nn.functional.pad(said.real, (0, missing)),
    )
