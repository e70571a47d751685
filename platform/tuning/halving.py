"""Asynchronous successive halving (Li et al. 2020): which trials are promoted to the next rung.

A trial is trained to a rung, which is the 1st, 3rd, 9th ... validation, and waits there. Of all
trials of a variant that reached a rung, the best third is promoted to the next one. New trials
start before any trial is promoted, unless so many have reached the rung that its best third will
hardly change.

Ray Tune's ASHA decides about a trial once, when it reaches the rung: the first trial is always
promoted, up to the last rung, and so is nearly every trial of a search that improves. Here a trial
waits and can be promoted later, because every run can be resumed from its checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REDUCTION_FACTOR = 3
"""One of this many trials is promoted; rungs are this factor apart."""
MIN_COHORT = REDUCTION_FACTOR**3
"""The number of trials that must have reached a rung before one is promoted ahead of new trials.

The best of three trials is among the best five of sixteen in only seven of ten cases, and a wrong
promotion costs as much as several first validations."""
FIRST_RUNG = 1
"""The validation that is the first rung."""


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """The progress of a trial."""

    number: int
    variant: str
    costs: Sequence[float]
    """The best value so far after each validation; lower is better."""
    rung: int
    """The validation that it is trained to."""
    ended: bool
    finished: bool
    """Whether it was trained to its end."""

    @property
    def waits(self) -> bool:
        """Whether it has reached its rung and can be promoted."""
        return not self.ended and len(self.costs) >= self.rung


def next_rung(trial: TrialProgress) -> int:
    """Return the first rung that the trial has not reached."""
    rung = trial.rung
    while rung <= len(trial.costs):
        rung *= REDUCTION_FACTOR
    return rung


def select_promotion(
    trials: Sequence[TrialProgress], min_group: int = 1, highest_first: bool = False
) -> TrialProgress | None:
    """Return a waiting trial of the best third at its rung, if `min_group` trials have reached it.

    The lowest rung comes first, because the higher ones are filled from it; `highest_first` is for
    a budget that is nearly spent.
    """
    groups = list(_group_by_rung(trials))
    for rung, group in reversed(groups) if highest_first else groups:
        for trial in group[: len(group) // REDUCTION_FACTOR] if len(group) >= min_group else ():
            if trial.waits and trial.rung == rung:
                return trial
    return None


def select_finalist(trials: Sequence[TrialProgress]) -> TrialProgress | None:
    """Return the best waiting trial of the highest rung, unless a finished trial was better there.

    It is needed because one or two trials have no best third, and one trial must be finished.
    """
    for rung, group in reversed(list(_group_by_rung(trials))):
        for trial in group:
            if trial.finished:
                break
            if trial.waits and trial.rung == rung:
                return trial
    return None


def _group_by_rung(trials: Sequence[TrialProgress]) -> Iterator[tuple[int, list[TrialProgress]]]:
    """Yield each rung, lowest first, with the trials of one variant that reached it, best first.

    Trials compete within their variant only: one that learns slowly would lose to all others.
    """
    for rung in sorted({trial.rung for trial in trials}):
        reached = [trial for trial in trials if len(trial.costs) >= rung]
        reached.sort(key=lambda trial: (trial.costs[rung - 1], trial.number))
        for variant in dict.fromkeys(trial.variant for trial in trials):
            if group := [trial for trial in reached if trial.variant == variant]:
                yield rung, group
