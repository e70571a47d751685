"""Turn classifier: a linear SVM predicts whether two adjacent lines have the same speaker.

After Lison and Meena 2016. Subtitles do not say who speaks, so the classifier is trained on lines
with known speakers, such as MELD's. Its features are the pause between two lines, their
punctuation, lengths, pronouns and words. It is stored as JSON, a weight per feature, and measured
on held-out episodes.

Lines of OPUS are sentences, while those of MELD are whole turns, whose speaker nearly always
changes. Turns are therefore split into sentences first (`--lines utterances` keeps them whole). The
times inside a turn are then unknown; an unknown pause counts as the mean of the known ones, so
that it does not reveal the speaker.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.files import write_atomically
from attune.platform.curation.cleaning import spelling
from attune.platform.curation.subtitles import Line
from attune.platform.data.conversations import (
    SPLITS,
    Checker,
    conversation_split_by_hash,
    separate_rejected_conversations,
    whole_conversations,
)
from attune.platform.data.sources import AUTO, Source

PUBLISHED = 0.7669
"""The accuracy that Xie and Pu 2021 report, on film lines with known speakers."""
SENTENCES, UTTERANCES = "sentences", "utterances"
LONGEST_GAP = 5.0
_FORMAT = "attune-turns-1"
_REGULARIZATION = (0.003, 0.01, 0.03, 0.1, 0.3)
_MIN_COUNT = 2
"""Minimum count of a feature in train."""
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|\d+")
_PRONOUNS = {
    word: person
    for person, words in {
        "i": "i me my mine myself i'm i've i'll i'd",
        "you": "you your yours yourself you're you've you'll you'd",
        "we": "we us our ours we're we've we'll let's",
        "they": "he she they him her them his their he's she's they're",
    }.items()
    for word in words.split()
}

Pair = tuple[Line, Line]


def features(first: Line, second: Line, usual_gap: float) -> dict[str, float]:
    """Return the features of two adjacent lines by name."""
    one, two = _WORD.findall(first.text.lower()), _WORD.findall(second.text.lower())
    end, begin = _classify_line_end(first.text), _classify_line_start(second.text)
    gap = gap_between_lines(first, second)
    values: dict[str, float] = {
        "gap": usual_gap if gap is None else _compress_gap_of_turns(gap),
        "length 1": math.log1p(len(one)) / 3,
        "length 2": math.log1p(len(two)) / 3,
        "shared": len(set(one) & set(two)) / (1 + min(len(one), len(two))),
    }
    last, head = (one[-1] if one else ""), (two[0] if two else "")
    indicators = [
        f"end {end}", f"begin {begin}", f"end 2 {_classify_line_end(second.text)}",
        f"ends {end} {begin}",
        f"questions {end == '?'} {second.text.endswith('?')}",
        f"last {last}", f"head {head}", f"head 1 {one[0] if one else ''}", f"answer {end} {head}",
        f"pair {last} {head}", f"heads {' '.join(two[:2])}",
        f"tail {two[-1] if two else ''}",
        *(f"people {p} {q}" for p in _find_turn_persons(one) for q in _find_turn_persons(two)),
        *(f"1 {word}" for word in set(one)), *(f"2 {word}" for word in set(two)),
    ]  # fmt: skip
    values.update(dict.fromkeys(indicators, 1.0))
    return values


def gap_between_lines(first: Line, second: Line) -> float | None:
    """Return the seconds between two lines, or None if a time is unknown."""
    if first.end is None or second.start is None:
        return None
    return second.start - first.end


def _compress_gap_of_turns(gap: float) -> float:
    """Return the logarithm of a pause, which is limited to `LONGEST_GAP`."""
    return math.log1p(min(max(gap, 0.0), LONGEST_GAP))


def _classify_line_end(text: str) -> str:
    """Return the last punctuation mark of a line, or `letter`."""
    if text.endswith("..."):
        return "..."
    last = text.rstrip("\"'")[-1:]
    return "letter" if last.isalnum() else last


def _classify_line_start(text: str) -> str:
    """Return the first character class of a line: a mark, `digit`, `lower` or `upper`."""
    first = text.lstrip("\"'")[:1]
    if not first.isalpha():
        return "digit" if first.isdigit() else first
    return "lower" if first.islower() else "upper"


def _find_turn_persons(words: Sequence[str]) -> list[str]:
    """Return the grammatical persons of the pronouns among some words."""
    return sorted({_PRONOUNS[word] for word in words if word in _PRONOUNS}) or ["none"]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The trained turn classifier."""

    weights: dict[str, float]
    bias: float
    usual_gap: float
    lines: str
    """The lines that it was trained on: SENTENCES or UTTERANCES."""
    report: dict[str, Any]

    def changes(self, first: Line, second: Line) -> bool:
        """Return whether the second line has another speaker."""
        weights = self.weights
        values = features(first, second, self.usual_gap).items()
        return self.bias + sum(weights.get(name, 0.0) * value for name, value in values) > 0

    def save(self, path: Path) -> None:
        """Write the classifier as JSON, for `load_turns_model`."""
        content = {"format": _FORMAT, **vars(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as new:
            new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_turns_model(path: Path) -> Turns:
    """Read the classifier that `attune data turns` wrote."""
    hint = "create one with 'attune data turns --source PATH --out FILE'"
    if not path.is_file():
        raise UsageError(f"--turns {path}: no such file; {hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Turns(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not a turn classifier ({error}): {hint}") from error


@dataclass(frozen=True, kw_only=True)
class LabelledPairs:
    """Pairs of adjacent lines, and whether the speaker changes between them."""

    pairs: list[Pair]
    changes: list[bool]


def train(source: str, form: str = AUTO, lines: str = SENTENCES, seed: int = 0) -> Turns:
    """Train a classifier on lines with known speakers and measure it on held-out episodes.

    Episodes, or conversations if a source has none, are split by a hash of their names; valid
    selects the regularisation.
    """
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.svm import LinearSVC

    if lines not in (SENTENCES, UTTERANCES):
        raise UsageError(f"--lines: expected {SENTENCES} or {UTTERANCES}, got '{lines}'")
    known = _read_turn_pairs(source, form, lines)
    gaps = [gap_between_lines(*pair) for pair in known["train"].pairs]
    times = [_compress_gap_of_turns(gap) for gap in gaps if gap is not None]
    usual_gap = round(sum(times) / len(times), 6) if times else 0.0
    shown = [features(*pair, usual_gap) for pair in known["train"].pairs]
    common = Counter(name for one in shown for name in one)
    shown = [{n: v for n, v in one.items() if common[n] >= _MIN_COUNT} for one in shown]
    table = DictVectorizer()
    inputs = table.fit_transform(shown)
    for part in ("indices", "indptr"):  # liblinear accepts no wider integers
        setattr(inputs, part, getattr(inputs, part).astype("int32"))
    tried = []
    for strength in _REGULARIZATION:
        machine = LinearSVC(C=strength, random_state=seed, max_iter=5000)
        machine.fit(inputs, known["train"].changes)
        weights = zip(table.get_feature_names_out(), machine.coef_[0], strict=True)
        classifier = Turns(
            weights={str(name): round(float(w), 6) for name, w in weights if abs(w) > 1e-6},
            bias=round(float(machine.intercept_[0]), 6),
            usual_gap=usual_gap,
            lines=lines,
            report={"strength": strength},
        )
        right = scores(_predict_turn_changes(classifier, known["valid"]), known["valid"])[
            "accuracy"
        ]
        tried.append((right, -strength, classifier))
    _, _, best = max(tried, key=lambda one: one[:2])
    best.report.update(_report_turn_scores(best, known))
    return best


def scores(predictions: Sequence[bool], known: LabelledPairs) -> dict[str, float]:
    """Return accuracy, balanced accuracy and the F1 of "same", for which lines are merged."""
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

    truth = known.changes
    return {
        "accuracy": float(accuracy_score(truth, predictions)),
        "balanced_accuracy": float(balanced_accuracy_score(truth, predictions)),
        "f1_same": float(f1_score(truth, predictions, pos_label=False, zero_division=0.0)),
    }


def _predict_turn_changes(turns: Turns, known: LabelledPairs) -> list[bool]:
    return [turns.changes(*pair) for pair in known.pairs]


def _report_turn_scores(turns: Turns, known: dict[str, LabelledPairs]) -> dict[str, Any]:
    """Return the scores on test, next to those of always predicting a change."""
    test = known["test"]
    return {
        "pairs": {split: len(one.pairs) for split, one in known.items()},
        **scores(_predict_turn_changes(turns, test), test),
        "always_changed": scores([True] * len(test.pairs), test),
        "published": PUBLISHED,
    }


def _read_turn_pairs(source: str, form: str, lines: str) -> dict[str, LabelledPairs]:
    """Return by split the pairs of adjacent lines whose speakers are known."""
    files = Source(source, form)
    splits = {split: LabelledPairs(pairs=[], changes=[]) for split in SPLITS}
    checker = Checker(files.reader.EMOTION_LABELS, any_emotion=True)
    for frame in whole_conversations(files.read(Counter())):
        usable, _ = separate_rejected_conversations(checker.check(frame))
        spoken = usable.filter(pl.col("speaker").is_not_null())
        for conversation in spoken.partition_by("conversation_id", maintain_order=True):
            episode = conversation["episode"][0] or conversation["conversation_id"][0]
            known = splits[conversation_split_by_hash(episode)]
            for (line, speaker), (other, another) in pairwise(
                _split_turns_into_lines(conversation, lines)
            ):
                known.pairs.append((line, other))
                known.changes.append(speaker != another)
    for split, one in splits.items():
        if len(set(one.changes)) < 2:
            raise UsageError(
                f"'{source}' has too few lines with known speakers for {split}: add conversations "
                f"whose utterances have a 'speaker' (docs/curating.md)"
            )
    return splits


def _split_turns_into_lines(conversation: pl.DataFrame, lines: str) -> Iterable[tuple[Line, str]]:
    """Yield the lines of a conversation with their speakers."""
    from attune.platform.text.tokenizing import punkt_sentences

    for text, start, end, speaker in conversation.select(
        "text", "start", "end", "speaker"
    ).iter_rows():
        plain = spelling(text)
        parts = punkt_sentences(plain) if lines == SENTENCES else [plain]
        for number, part in enumerate(parts):
            line = Line(
                text=part,
                start=start if number == 0 else None,
                end=end if number == len(parts) - 1 else None,
            )
            yield line, speaker
