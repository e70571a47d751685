"""The schema of conversations, which every reader returns: one row per utterance; row checks.

Readers do not raise for a bad row: they set its `problem`. `Checker.check` adds the checks that are
the same for all formats, and `separate_rejected_conversations` rejects whole conversations, because
one that lost a turn would give samples with a wrong context. A problem reads "kind: details" or
"kind 'name': details", so that rejects can be counted by kind.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl

from attune.platform.core.errors import unknown_choice_error
from attune.platform.data.files import LONGEST_RAW, RAW_LENGTH
from attune.platform.data.labels import EMOTIONS

SPEAKER, LISTENER = "speaker", "listener"
SPLITS = ("train", "valid", "test")
UNPAIRED = ("unpaired_contexts", "unpaired_responses")
CAUSE_STREAMS = {split: f"cause_{split}" for split in SPLITS}
"""By split, the stream of utterances annotated with an emotion and its causes."""
LABELLED = {split: f"labelled_{split}" for split in SPLITS}
"""By split, the stream of utterances that stand alone, each a context, with one of the 41 labels as
its emotion."""

CONVERSATIONS = pl.Schema(
    {  # type: ignore[arg-type]
        "conversation_id": pl.String,
        "split": pl.String,  # one of SPLITS; null: to be drawn from the id
        "turn": pl.Int64,  # 0, 1, 2 ... within the conversation
        "role": pl.String,  # SPEAKER (who feels) or LISTENER (who answers)
        "text": pl.String,
        "emotion": pl.String,  # of the conversation
        "situation": pl.String,  # of the conversation
        "label": pl.String,  # of the utterance: one of the 41, or the data set's own
        "cause": pl.Boolean,  # does this utterance hold the cause of the conversation's emotion?
        "evidence": pl.List(pl.Int64),  # the turns that cause *this* utterance's emotion (RECCON)
        "speaker": pl.String,  # who says it, where known
        "start": pl.Float64,  # seconds, where the source has a clock
        "end": pl.Float64,
        "episode": pl.String,  # what must not be divided between splits, where known
        "file": pl.String,  # where the row stands, for messages
        "row": pl.Int64,
        "problem": pl.String,  # why it cannot be used; null: nothing wrong so far
        "raw": pl.String,  # what a row held that could not be read
    }
)

_OF_THE_CONVERSATION = ("emotion", "situation", "split")


def conversations(columns: object) -> pl.DataFrame:
    """Return rows or columns as a frame with the schema of conversations; missing columns are
    null."""
    frame = pl.DataFrame(columns, infer_schema_length=None)  # type: ignore[arg-type]
    if frame.is_empty():
        return CONVERSATIONS.to_frame()
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in CONVERSATIONS.items()
    ).with_columns(raw=shorten_column("raw"))


def shorten_column(name: str) -> pl.Expr:
    """Return a column of texts in the length that rejected rows are shown with."""
    text = pl.col(name)
    length = text.str.len_chars()
    short = pl.format("{} ... ({} characters)", text.str.slice(0, RAW_LENGTH), length)
    return pl.when(length > LONGEST_RAW).then(short).otherwise(text)


def whole_conversations(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the same rows in frames of whole conversations, with one frame in memory."""
    held: pl.DataFrame | None = None
    for frame in frames:
        frame = frame if held is None else pl.concat([held, frame])
        last = frame["conversation_id"].drop_nulls()
        if last.is_empty():  # no conversation to keep together
            yield frame
            held = None
            continue
        # A row without an id, which could not be read, stays with the rows before it.
        start = frame.select((pl.col("conversation_id") == last[-1]).arg_max()).item()
        if start:
            yield frame.head(start)
        held = frame.slice(start)
    if held is not None and held.height:
        yield held


IN_REJECTED_CONVERSATION = "belongs to a rejected conversation"


class Checker:
    """Checks the rows of a source, frame by frame, and detects repeated conversations."""

    def __init__(
        self,
        emotions: Iterable[str] = EMOTIONS,
        *,
        splits: Iterable[str] = SPLITS,
        any_emotion: bool = False,
    ):
        self.emotions = frozenset(emotions)
        self.any_emotion = any_emotion
        self.splits = frozenset(splits)
        self._seen: set[int] = set()  # hashes, which need less memory than names

    def check(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the frame with the `problem` of each row that cannot be used, and its `block`."""
        # A row that could not be read belongs to the conversation before and after it.
        name = pl.col("conversation_id")
        inside = name.is_null() & (name.forward_fill() == name.backward_fill())
        frame = frame.with_columns(
            conversation_id=pl.when(inside).then(name.forward_fill()).otherwise(name)
        )
        frame = frame.with_columns(block=_number_conversations(frame))
        frame = frame.with_columns(again=self._is_repeated_conversation(frame))
        names = {
            e: unknown_choice_error("emotion", e, self.emotions)
            for e in self._unknown_conversation_emotions(frame)
        }
        expected = pl.col("turn").is_not_null().cum_sum().over("block").cast(pl.Int64) - 1
        problems = [
            (pl.col("conversation_id").is_null(), pl.lit("no conversation id")),
            (
                pl.col("again"),
                pl.format(
                    "occurs again: conversation '{}'; keep its rows together, or rename it",
                    "conversation_id",
                ),
            ),
            (
                ~pl.col("role").is_in([SPEAKER, LISTENER]).fill_null(False),
                pl.format(
                    "unknown role '{}': choose speaker or listener", pl.col("role").fill_null("")
                ),
            ),
            (pl.col("text").str.strip_chars().fill_null("") == "", pl.lit("empty text")),
            (
                pl.col("turn").ne_missing(expected),
                pl.format(
                    "wrong turn: {} where {} was expected (turns count 0, 1, 2 ...)",
                    pl.col("turn").cast(pl.String).fill_null("none"),
                    expected,
                ),
            ),
            (
                ~pl.col("split").is_in(list(self.splits)).fill_null(True),
                pl.format("unknown split '{}': choose train, valid or test", "split"),
            ),
            (
                pl.col("emotion").is_in(list(names)).fill_null(False),
                pl.col("emotion").replace_strict(names, default=None, return_dtype=pl.String),
            ),
            *(
                (
                    pl.col(name).ne_missing(
                        pl.col(name).filter(pl.col("problem").is_null()).first().over("block")
                    ),
                    pl.lit(f"the {name} changes within the conversation"),
                )
                for name in _OF_THE_CONVERSATION
            ),
        ]
        problem = pl.col("problem")
        for wrong, words in problems:
            problem = pl.when(problem.is_null() & wrong).then(words).otherwise(problem)
        return frame.with_columns(problem=problem).drop("again")

    def _unknown_conversation_emotions(self, frame: pl.DataFrame) -> list[str]:
        if self.any_emotion:
            return []
        present = frame["emotion"].drop_nulls().unique()
        return sorted(set(present) - self.emotions)

    def _is_repeated_conversation(self, frame: pl.DataFrame) -> pl.Series:
        """Return which rows belong to a conversation that has already ended."""
        blocks = frame.group_by("block", maintain_order=True).agg(
            pl.col("conversation_id").first(), pl.len()
        )
        again = []
        for name in blocks["conversation_id"]:
            key = hash(name)
            again.append(name is not None and key in self._seen)
            if name is not None:
                self._seen.add(key)
        return pl.Series("again", np.repeat(np.array(again, dtype=bool), blocks["len"]))


def conversation_split_by_hash(name: str) -> str:
    """Return train, valid or test (80 / 10 / 10) by a hash of a name."""
    percentile = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100
    return "train" if percentile < 80 else "valid" if percentile < 90 else "test"


def _number_conversations(frame: pl.DataFrame) -> pl.Series:
    """Number the conversations of a frame; a new id, or turn 0 again, starts one."""
    name, turn = pl.col("conversation_id"), pl.col("turn")
    begins = name.ne_missing(name.shift()) | (turn == 0).fill_null(False)
    return frame.select(begins.cum_sum()).to_series()


def conversation_problem_kind(problem: str) -> str:
    """Return the kind of a problem: `unknown emotion` for `unknown emotion 'happi': ...`."""
    return re.split(r"[:'(]", problem, maxsplit=1)[0].strip()


def separate_rejected_conversations(checked: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split a checked frame into usable conversations and rejected rows with their problems."""
    first_bad_row = pl.col("row").filter(pl.col("problem").is_not_null()).first().over("block")
    problem = pl.coalesce(
        "problem",
        pl.when(first_bad_row.is_not_null() & pl.col("conversation_id").is_not_null()).then(
            pl.format(
                IN_REJECTED_CONVERSATION + ": '{}', see row {}", "conversation_id", first_bad_row
            )
        ),
    )
    marked = checked.with_columns(problem=problem).drop("block")
    good = pl.col("problem").is_null()
    return marked.filter(good), marked.filter(~good)
