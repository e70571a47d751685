"""Conversations to begin with, drawn from what a run was tested on."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import bundled
from attune.platform.data.conversations import LISTENER, SPEAKER
from attune.platform.data.dataset_folder import read_samples
from attune.platform.data.prepare import find_data
from attune.platform.runs.record import Run


@dataclass(frozen=True, kw_only=True)
class Example:
    """The turns before a listener's answer; the last is the speaker's."""

    turns: tuple[str, ...]
    emotion: str | None = None


def draw(run: Run | None, number: int, count: int) -> list[Example]:
    """`count` conversations of different emotions; the same number draws the same ones."""
    by_emotion = _of_run(run)
    chance = random.Random(number)
    emotions = sorted(by_emotion, key=str)
    chosen = chance.sample(emotions, min(count, len(emotions)))
    drawn = [chance.choice(by_emotion[emotion]) for emotion in chosen]
    if len(drawn) < count:  # fewer emotions than asked for: fill up with what is left
        rest = [one for emotion in emotions for one in by_emotion[emotion] if one not in drawn]
        drawn += chance.sample(rest, min(count - len(drawn), len(rest)))
    return drawn


def _of_run(run: Run | None) -> dict[str | None, list[Example]]:
    """The test split of the run's data, or of the bundled corpus where that is gone."""
    if run is not None:
        try:
            found = _of_folder(Path(run.data["folder"]))
        except (DataError, UsageError):
            found = {}
        if found:
            return found
    return _of_folder(find_data(bundled.NAME))


@functools.lru_cache(maxsize=4)
def _of_folder(folder: Path) -> dict[str | None, list[Example]]:
    samples = read_samples(folder, "test").select("context", "context_roles", "emotion")
    found: dict[str | None, list[Example]] = {}
    for turns, roles, emotion in samples.iter_rows():
        if _alternate(roles):
            example = Example(turns=tuple(turns), emotion=emotion)
            found.setdefault(emotion, []).append(example)
    return found


def _alternate(roles: Sequence[str]) -> bool:
    """Speaker, listener, speaker: what a model is asked with here."""
    expected = [(SPEAKER, LISTENER)[turn % 2] for turn in range(len(roles))]
    return len(roles) % 2 == 1 and list(roles) == expected
