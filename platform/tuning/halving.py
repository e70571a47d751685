"""Asynchronous successive halving (Li et al. 2020): who may go on.

A trial is trained to a rung, which is the 1st, 3rd, 9th ... look at valid, and waits there. Of all
trials of a variant that came to a rung the best third may go on to the next one. New trials begin
before anybody goes on, unless so many have come to a rung that its best third is hardly going to
change.

Ray Tune's scheduler of that name decides at once and for good: who comes first to a rung always
goes on, to the end, and a later trial that a search has learned to make better than those before it
nearly always does. Here a trial waits, and is taken up when it turns out to be good, since any run
goes on from its checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REDUCTION_FACTOR = 3
"""One of so many goes on; rungs are as many times apart."""
MIN_COHORT = REDUCTION_FACTOR**3
"""So many must have come to a rung before somebody goes on while others could still begin. Of three
the best is among the best five of sixteen in seven of ten cases only; who was let on in vain
costs as much as several first looks."""
FIRST_RUNG = 1
"""The look that is the first rung."""


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """A trial, as far as it came."""

    number: int
    variant: str
    costs: Sequence[float]
    """After each look the best so far; less is better."""
    rung: int
    """The look that it may be trained to."""
    ended: bool
    finished: bool
    """It came to its own end."""

    @property
    def waits(self) -> bool:
        """Whether it has come to its rung, and could go on."""
        return not self.ended and len(self.costs) >= self.rung


def next_rung(trial: TrialProgress) -> int:
    """The next rung; it may have come past some already."""
    rung = trial.rung
    while rung <= len(trial.costs):
        rung *= REDUCTION_FACTOR
    return rung


def select_promotion(
    trials: Sequence[TrialProgress], min_group: int = 1, highest_first: bool = False
) -> TrialProgress | None:
    """Who waits among the best third that came to its rung, which at least so many have. The lowest
    rung comes first, since the higher ones are filled from it, unless there is little time."""
    groups = list(_group_by_rung(trials))
    for rung, group in reversed(groups) if highest_first else groups:
        for trial in group[: len(group) // REDUCTION_FACTOR] if len(group) >= min_group else ():
            if trial.waits and trial.rung == rung:
                return trial
    return None


def select_finalist(trials: Sequence[TrialProgress]) -> TrialProgress | None:
    """The best of the highest rung that is better than whoever has finished of its variant was
    there: two trials have no best third, and somebody must come to the end."""
    for rung, group in reversed(list(_group_by_rung(trials))):
        for trial in group:
            if trial.finished:
                break
            if trial.waits and trial.rung == rung:
                return trial
    return None


def _group_by_rung(trials: Sequence[TrialProgress]) -> Iterator[tuple[int, list[TrialProgress]]]:
    """For each rung, the lowest first, those of each variant that came to it, the best first. A
    variant is held against itself: one that learns slowly would never come to its best beside
    others."""
    for rung in sorted({trial.rung for trial in trials}):
        came = [trial for trial in trials if len(trial.costs) >= rung]
        came.sort(key=lambda trial: (trial.costs[rung - 1], trial.number))
        for variant in dict.fromkeys(trial.variant for trial in trials):
            if group := [trial for trial in came if trial.variant == variant]:
                yield rung, group
