"""Same speaker or not? A linear SVM over two neighbouring lines, after Lison and Meena 2016.

Subtitles do not say who speaks. The classifier learns from lines whose speakers are known, such as
MELD's, by the time between two lines, their punctuation, lengths, pronouns and words. It is kept as
a file of weights by the name of what they weigh, which anybody can read. Whether it is right is
measured on episodes that it has not seen.

Lines of OPUS are sentences; those of MELD are whole turns mostly, which would teach that nearly
every line has another speaker. So turns are cut into sentences first (`--lines utterances` leaves
them whole). Times inside a turn are not known then; what is not known counts as the mean of the
times that are, so that a missing time does not tell who speaks.
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
from attune.platform.curation.cleaning import spelling
from attune.platform.curation.subtitles import Line
from attune.platform.data.conversations import (
    SPLITS,
    Checker,
    separate_rejects,
    split_by_hash,
    whole_conversations,
)
from attune.platform.data.sources import AUTO, Source

PUBLISHED = 0.7669
"""The accuracy that Xie and Pu 2021 report, on lines of films whose speakers were known."""
SENTENCES, UTTERANCES = "sentences", "utterances"
LONGEST_GAP = 5.0
_FORMAT = "attune-turns-1"
_REGULARIZATION = (0.003, 0.01, 0.03, 0.1, 0.3)
_MIN_COUNT = 2
"""How often something must occur to be weighed."""
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
    """What two neighbouring lines show, by name."""
    one, two = _WORD.findall(first.text.lower()), _WORD.findall(second.text.lower())
    end, begin = _end(first.text), _begin(second.text)
    gap = gap_between(first, second)
    values: dict[str, float] = {
        "gap": usual_gap if gap is None else _compress_gap(gap),
        "length 1": math.log1p(len(one)) / 3,
        "length 2": math.log1p(len(two)) / 3,
        "shared": len(set(one) & set(two)) / (1 + min(len(one), len(two))),
    }
    last, head = (one[-1] if one else ""), (two[0] if two else "")
    indicators = [
        f"end {end}", f"begin {begin}", f"end 2 {_end(second.text)}", f"ends {end} {begin}",
        f"questions {end == '?'} {second.text.endswith('?')}",
        f"last {last}", f"head {head}", f"head 1 {one[0] if one else ''}", f"answer {end} {head}",
        f"pair {last} {head}", f"heads {' '.join(two[:2])}",
        f"tail {two[-1] if two else ''}",
        *(f"people {p} {q}" for p in _people(one) for q in _people(two)),
        *(f"1 {word}" for word in set(one)), *(f"2 {word}" for word in set(two)),
    ]  # fmt: skip
    values.update(dict.fromkeys(indicators, 1.0))
    return values


def gap_between(first: Line, second: Line) -> float | None:
    """Seconds from the end of a line to the start of the next, where both are known."""
    if first.end is None or second.start is None:
        return None
    return second.start - first.end


def _compress_gap(gap: float) -> float:
    return math.log1p(min(max(gap, 0.0), LONGEST_GAP))


def _end(text: str) -> str:
    if text.endswith("..."):
        return "..."
    last = text.rstrip("\"'")[-1:]
    return "letter" if last.isalnum() else last


def _begin(text: str) -> str:
    first = text.lstrip("\"'")[:1]
    if not first.isalpha():
        return "digit" if first.isdigit() else first
    return "lower" if first.islower() else "upper"


def _people(words: Sequence[str]) -> list[str]:
    return sorted({_PRONOUNS[word] for word in words if word in _PRONOUNS}) or ["none"]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The trained classifier."""

    weights: dict[str, float]
    bias: float
    usual_gap: float
    lines: str
    """What it learned from: SENTENCES or UTTERANCES."""
    report: dict[str, Any]

    def changes(self, first: Line, second: Line) -> bool:
        """Whether the second line has another speaker."""
        weights = self.weights
        values = features(first, second, self.usual_gap).items()
        return self.bias + sum(weights.get(name, 0.0) * value for name, value in values) > 0

    def save(self, path: Path) -> None:
        """Write it where `load` finds it."""
        content = {"format": _FORMAT, **vars(self)}
        new = path.with_name(f"{path.name}.new")
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def load_turns_model(path: Path) -> Turns:
    """Read the model that `attune data turns` wrote."""
    again = "make one with 'attune data turns --source PATH --out FILE'"
    if not path.is_file():
        raise UsageError(f"--turns {path}: there is no such file; {again}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Turns(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not a classifier of turns ({error}): {again}") from error


@dataclass(frozen=True, kw_only=True)
class LabelledPairs:
    """Pairs of neighbouring lines, and whether the speaker changes between them."""

    pairs: list[Pair]
    changes: list[bool]


def train(source: str, form: str = AUTO, lines: str = SENTENCES, seed: int = 0) -> Turns:
    """A classifier learned from lines with known speakers, measured on episodes held out.

    Episodes (conversations, where a source has none) go to train, valid and test by their names;
    valid chooses how strongly weights are held down.
    """
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.svm import LinearSVC

    if lines not in (SENTENCES, UTTERANCES):
        raise UsageError(f"--lines {lines}: choose {SENTENCES} or {UTTERANCES}")
    known = _read_pairs(source, form, lines)
    gaps = [gap_between(*pair) for pair in known["train"].pairs]
    times = [_compress_gap(gap) for gap in gaps if gap is not None]
    usual_gap = round(sum(times) / len(times), 6) if times else 0.0
    shown = [features(*pair, usual_gap) for pair in known["train"].pairs]
    common = Counter(name for one in shown for name in one)
    shown = [{n: v for n, v in one.items() if common[n] >= _MIN_COUNT} for one in shown]
    table = DictVectorizer()
    inputs = table.fit_transform(shown)
    for part in ("indices", "indptr"):  # liblinear takes no wider numbers
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
        right = scores(_predict(classifier, known["valid"]), known["valid"])["accuracy"]
        tried.append((right, -strength, classifier))
    _, _, best = max(tried, key=lambda one: one[:2])
    best.report.update(_report(best, known))
    return best


def scores(predictions: Sequence[bool], known: LabelledPairs) -> dict[str, float]:
    """Accuracy, its mean over changed and same, and the F1 of same, where lines are joined."""
    from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

    truth = known.changes
    return {
        "accuracy": float(accuracy_score(truth, predictions)),
        "balanced_accuracy": float(balanced_accuracy_score(truth, predictions)),
        "f1_same": float(f1_score(truth, predictions, pos_label=False, zero_division=0.0)),
    }


def _predict(turns: Turns, known: LabelledPairs) -> list[bool]:
    return [turns.changes(*pair) for pair in known.pairs]


def _report(turns: Turns, known: dict[str, LabelledPairs]) -> dict[str, Any]:
    test = known["test"]
    return {
        "pairs": {split: len(one.pairs) for split, one in known.items()},
        **scores(_predict(turns, test), test),
        "always_changed": scores([True] * len(test.pairs), test),
        "published": PUBLISHED,
    }


def _read_pairs(source: str, form: str, lines: str) -> dict[str, LabelledPairs]:
    files = Source(source, form)
    splits = {split: LabelledPairs(pairs=[], changes=[]) for split in SPLITS}
    checker = Checker(files.reader.EMOTION_LABELS, any_emotion=True)
    for frame in whole_conversations(files.read(Counter())):
        usable, _ = separate_rejects(checker.check(frame))
        spoken = usable.filter(pl.col("speaker").is_not_null())
        for conversation in spoken.partition_by("conversation_id", maintain_order=True):
            episode = conversation["episode"][0] or conversation["conversation_id"][0]
            known = splits[split_by_hash(episode)]
            for (line, speaker), (other, another) in pairwise(
                _split_into_lines(conversation, lines)
            ):
                known.pairs.append((line, other))
                known.changes.append(speaker != another)
    for split, one in splits.items():
        if len(set(one.changes)) < 2:
            raise UsageError(
                f"'{source}' has too few lines with known speakers for {split}: give conversations "
                f"whose utterances have a 'speaker' (docs/curating.md)"
            )
    return splits


def _split_into_lines(conversation: pl.DataFrame, lines: str) -> Iterable[tuple[Line, str]]:
    from attune.platform.text.tokenizing import sentences

    for text, start, end, speaker in conversation.select(
        "text", "start", "end", "speaker"
    ).iter_rows():
        plain = spelling(text)
        parts = sentences(plain) if lines == SENTENCES else [plain]
        for number, part in enumerate(parts):
            line = Line(
                text=part,
                start=start if number == 0 else None,
                end=end if number == len(parts) - 1 else None,
            )
            yield line, speaker
