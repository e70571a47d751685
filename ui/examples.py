"""Example conversations, drawn from the test split of a run's data."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import bundled
from attune.platform.data.conversations import LISTENER, SPEAKER
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.prepare import find_prepared_data
from attune.platform.runs.record import Run


@dataclass(frozen=True, kw_only=True)
class Example:
    """The turns before a listener's answer; the last is the speaker's."""

    turns: tuple[str, ...]
    emotion: str | None = None


def draw(run: Run | None, number: int, count: int) -> list[Example]:
    """Draw `count` conversations of different emotions; `number` is the random seed."""
    by_emotion = _read_run_examples(run)
    rng = random.Random(number)
    emotions = sorted(by_emotion, key=str)
    sampled_emotions = rng.sample(emotions, min(count, len(emotions)))
    draws = [rng.choice(by_emotion[emotion]) for emotion in sampled_emotions]
    if len(draws) < count:  # fewer emotions than examples: several of one emotion
        examples = itertools.chain.from_iterable(by_emotion[emotion] for emotion in emotions)
        rest = [example for example in examples if example not in draws]
        draws += rng.sample(rest, min(count - len(draws), len(rest)))
    return draws


def _read_run_examples(run: Run | None) -> dict[str | None, list[Example]]:
    """Return the test split of the run's data, or of the bundled corpus if that is missing."""
    if run is not None:
        try:
            by_emotion = _read_examples(Path(run.data["folder"]))
        except (DataError, UsageError):
            by_emotion = {}
        if by_emotion:
            return by_emotion
    return _read_examples(find_prepared_data(bundled.NAME))


@functools.lru_cache(maxsize=4)
def _read_examples(folder: Path) -> dict[str | None, list[Example]]:
    samples = read_dataset_samples(folder, "test").select("context", "context_roles", "emotion")
    by_emotion: dict[str | None, list[Example]] = {}
    for turns, roles, emotion in samples.iter_rows():
        if _is_alternating(roles):
            example = Example(turns=tuple(turns), emotion=emotion)
            by_emotion.setdefault(emotion, []).append(example)
    return by_emotion


def _is_alternating(roles: Sequence[str]) -> bool:
    """Return whether speaker and listener alternate and the speaker is first and last."""
    expected = [(SPEAKER, LISTENER)[turn % 2] for turn in range(len(roles))]
    return len(roles) % 2 == 1 and list(roles) == expected
