"""Encode samples as columns of integers: token ids, roles, emotions and labels."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from attune.models.base import CONTEXTS, RESPONSES
from attune.models.labels import LABELS
from attune.platform.core.errors import DataError, unknown_choice_error
from attune.platform.data.conversations import LISTENER, SPEAKER
from attune.platform.text.encoders import TextEncoder
from attune.platform.text.vocabulary import (
    CONTEXT,
    END,
    LABEL,
    LISTENER_TOKEN,
    PAD,
    SEPARATOR,
    SPEAKER_TOKEN,
    SPECIALS,
    Vocabulary,
)

PADDING = SPECIALS.index(PAD)
_LABELS = {label: number for number, label in enumerate(LABELS, start=1)}
_NO_LABEL = len(LABELS) + 1  # not 0, which is padding
IntArray = npt.NDArray[np.int64]


class Ragged:
    """Rows of different lengths in one array."""

    def __init__(self, values: IntArray, lengths: IntArray):
        self.values = values
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        """Return rows of integers as one array."""
        values = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
        return cls(values, np.array([len(row) for row in rows], dtype=np.int64))

    @classmethod
    def from_lists(cls, lists: pl.Series) -> "Ragged":
        """Return a polars column of lists as one array."""
        array = lists.rechunk().to_arrow()
        values = array.flatten().to_numpy(zero_copy_only=False)
        return cls(values.astype(np.int64), array.value_lengths().to_numpy().astype(np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: IntArray) -> "Ragged":
        """Return some of the rows without copying the values."""
        taken = Ragged(self.values, self.lengths[rows])
        taken.starts = self.starts[rows]
        return taken

    def pad(self, rows: IntArray) -> torch.Tensor:
        """Return rows as a tensor (rows, length of the longest), padded with `<pad>`."""
        lengths = self.lengths[rows]
        width = int(lengths.max(initial=0))
        columns = np.arange(width)
        inside = columns < lengths[:, None]  # (B, T)
        table = np.full((len(rows), width), PADDING, dtype=np.int64)
        table[inside] = self.values[(self.starts[rows, None] + columns)[inside]]
        return torch.from_numpy(table)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a context is laid out as one sequence."""

    separators: bool = False
    """Add `<sep>` after each utterance (emotion cause); the other papers only concatenate them."""
    max_context: int | None = None
    """Maximum number of tokens without `<cls>`; longer contexts lose their beginning."""


Columns = Mapping[str, Ragged | IntArray]


def encode(
    samples: pl.DataFrame,
    vocabulary: Vocabulary,
    *,
    layout: Layout = Layout(),  # noqa: B008
    emotions: Iterable[str] = (),
    emotion_words: Callable[[pl.Series], pl.Series] | None = None,
    causes: bool = False,
    labels: bool = False,
) -> dict[str, Ragged | IntArray]:
    """Encode samples as columns of integers.

    context           <cls> and the tokens of all utterances
    context_roles     aligned with context: <cls>, then the role token of each token's author
    context_turns     aligned with context: 0 for <cls>, then 1, 2 ... for each utterance
    response          tokens and <eos>; next_turn likewise, empty if there is none
    emotion           index in `emotions`, -1 if unknown
    index             row in `samples`

    With `emotion_words`, a function that finds emotion words:

    emotion_words     <lab> and the emotion words of the context; response_emotion_words and
                      next_turn_emotion_words likewise, the latter empty if there is no next turn

    With `causes`:

    context_causes    aligned with context: 1 for <cls> and the tokens of utterances that are causes
                      of the emotion, 0 for other tokens, -1 if unknown

    With `labels`, from `LABELS`:

    context_labels    aligned with context: the label of the utterance, counted from 1; one more
                      number stands for <cls> and for utterances without a label
    response_label    index of the response's label, -1 if unknown
    """
    numbers_of_emotions = {emotion: number for number, emotion in enumerate(emotions)}

    def encode_utterance_values(column: str, dtype: type[pl.DataType]) -> pl.Expr:
        """Return a column of utterances, or a null for each utterance."""
        nothing = pl.lit(None, dtype=dtype).repeat_by(pl.col("context_tokens").list.len())
        return pl.coalesce(column, nothing)

    utterances = samples.select(
        pl.int_range(pl.len()).alias("row"),
        tokens="context_tokens",
        role="context_roles",
        cause=encode_utterance_values("context_causes", pl.Boolean),
        label=encode_utterance_values("context_labels", pl.String),
    ).explode("tokens", "role", "cause", "label")
    numbers = utterances.with_columns(
        number=vocabulary.encode(utterances["tokens"]),
        turn=pl.int_range(1, pl.len() + 1).over("row"),
        role=pl.col("role").replace_strict(
            {
                SPEAKER: vocabulary.numbers[SPEAKER_TOKEN],
                LISTENER: vocabulary.numbers[LISTENER_TOKEN],
            },
            return_dtype=pl.Int32,
        ),
        cause=pl.col("cause").cast(pl.Int32).fill_null(-1),
        label=pl.col("label").replace_strict(_LABELS, default=_NO_LABEL, return_dtype=pl.Int32),
    )
    if layout.separators:
        separator = pl.lit([vocabulary.numbers[SEPARATOR]], dtype=pl.List(pl.Int32))
        numbers = numbers.with_columns(number=pl.col("number").list.concat(separator))
    words = (
        numbers.select("row", "number", "turn", "role", "cause", "label")
        .filter(pl.col("number").list.len() > 0)
        .explode("number")
        .group_by("row", maintain_order=True)
        .agg("number", "turn", "role", "cause", "label")
    )
    words = samples.select(pl.int_range(pl.len()).alias("row")).join(
        words, on="row", how="left", maintain_order="left"
    )

    def sequence(column: str, first: int) -> Ragged:
        lists = pl.col(column).fill_null(pl.lit([], dtype=words.schema[column]))
        if layout.max_context is not None:
            lists = lists.list.tail(layout.max_context)
        front = pl.lit([first], dtype=words.schema[column])
        return Ragged.from_lists(words.select(front.list.concat(lists)).to_series())

    def encode_response(column: str) -> Ragged:
        end = pl.lit([vocabulary.numbers[END]], dtype=pl.List(pl.Int32))
        lists = pl.DataFrame({"number": vocabulary.encode(samples[column])}).select(
            pl.when(samples[column].is_not_null())
            .then(pl.col("number").list.concat(end))
            .otherwise("number")
        )
        return Ragged.from_lists(lists.to_series())

    context = vocabulary.numbers[CONTEXT]
    columns = (
        {} if emotion_words is None else _encode_emotion_words(samples, vocabulary, emotion_words)
    )
    if causes:
        columns["context_causes"] = sequence("cause", 1)
    if labels:
        columns["context_labels"] = sequence("label", _NO_LABEL)
        columns["response_label"] = (
            samples["response_label"]
            .replace_strict(_LABELS, default=0, return_dtype=pl.Int64)
            .to_numpy()
            - 1
        )
    return {
        **columns,
        "context": sequence("number", context),
        "context_roles": sequence("role", context),
        "context_turns": sequence("turn", 0),
        "response": encode_response("response_tokens"),
        "next_turn": encode_response("next_turn_tokens"),
        "emotion": _encode_emotions(samples["emotion"], numbers_of_emotions),
        "index": np.arange(samples.height),
    }


def encode_for_pretrained(
    encoder: TextEncoder, samples: pl.DataFrame
) -> dict[str, Ragged | IntArray]:
    """Encode samples for a pretrained encoder that reads the emotion as a word.

    subwords          [CLS] emotion [SEP], then each utterance and [SEP], counted from 1
    subword_turns     aligned with subwords: 1 for the emotion, then 2, 3 ... for each utterance
    turn_roles        per utterance: 1 for the speaker, 2 for the listener
    causes            per utterance: 1 for no cause, 2 for a cause, 0 if unknown

    Contexts longer than the encoder allows lose their oldest subwords, but no entry of turn_roles.
    """
    texts = pl.concat([samples["context"].explode(), samples["emotion"]]).drop_nulls().unique()
    numbers = dict(zip(texts, encoder.subwords(texts.to_list()), strict=True))
    subwords, turns = [], []
    for context, emotion in samples.select("context", "emotion").iter_rows():
        front = [encoder.cls_token, *numbers.get(emotion, []), encoder.separator]
        utterances = [[*numbers[text], encoder.separator] for text in context]
        room = encoder.max_length - len(front)
        subwords.append(front + list(itertools.chain.from_iterable(utterances))[-room:])
        of_turn = [turn for turn, part in enumerate(utterances, start=2) for _ in part]
        turns.append([1] * len(front) + of_turn[-room:])
    roles = pl.col("context_roles").list.eval(
        pl.element().replace_strict({SPEAKER: 1, LISTENER: 2}, return_dtype=pl.Int64)
    )
    marks = pl.col("context_causes").list.eval((pl.element().cast(pl.Int64) + 1).fill_null(0))
    unknown_marks = roles.list.eval(pl.element() * 0)
    return {
        "subwords": Ragged.from_rows(subwords),
        "subword_turns": Ragged.from_rows(turns),
        "turn_roles": Ragged.from_lists(samples.select(roles).to_series()),
        "causes": Ragged.from_lists(samples.select(marks.fill_null(unknown_marks)).to_series()),
    }


def encode_as_subwords(encoder: TextEncoder, samples: pl.DataFrame) -> dict[str, Ragged | IntArray]:
    """Return the texts as subwords of a pretrained encoder; a missing text has none.

    context_subwords      [CLS], then each utterance and [SEP], counted from 1
    response_subwords     [CLS] response [SEP]

    Texts longer than the encoder allows lose their oldest subwords.
    """
    contexts = samples["context"].to_list()
    responses = [[] if text is None else [text] for text in samples["response"]]
    texts = list(dict.fromkeys(itertools.chain.from_iterable((*contexts, *responses))))
    numbers = dict(zip(texts, encoder.subwords(texts), strict=True))

    def join_texts(texts: Sequence[str]) -> list[int]:
        subwords = [number for text in texts for number in (*numbers[text], encoder.separator)]
        return [encoder.cls_token, *subwords[1 - encoder.max_length :]] if texts else []

    return {
        "context_subwords": Ragged.from_rows([join_texts(context) for context in contexts]),
        "response_subwords": Ragged.from_rows([join_texts(response) for response in responses]),
    }


def encoded_with_next_turn(columns: Columns) -> Columns:
    """Return the samples with a next turn."""
    replies = columns["next_turn"]
    assert isinstance(replies, Ragged)
    rows = np.flatnonzero(replies.lengths)
    return {name: column[rows] for name, column in columns.items()}


UNPAIRED_COLUMNS = {
    CONTEXTS: ("index", "context", "context_roles", "emotion"),
    RESPONSES: ("index", "response", "emotion"),
}


def encoded_unpaired_columns(columns: Columns, stream: str) -> Columns:
    """Return the columns of unpaired contexts or responses; the other side is not in the batch."""
    return {name: columns[name] for name in UNPAIRED_COLUMNS[stream]}


def _encode_emotion_words(
    samples: pl.DataFrame, vocabulary: Vocabulary, find: Callable[[pl.Series], pl.Series]
) -> dict[str, Ragged | IntArray]:
    """Encode the emotion words of the context, the response and the next turn."""
    turns = samples.select(pl.int_range(pl.len()).alias("row"), text="context_tokens").explode(
        "text"
    )
    context = (
        turns.with_columns(text=find(turns["text"]).fill_null(""))
        .group_by("row", maintain_order=True)
        .agg(pl.col("text").str.join(" "))["text"]
    )
    label = pl.lit([vocabulary.numbers[LABEL]], dtype=pl.List(pl.Int32))

    def encode_labelled(words: pl.Series) -> Ragged:
        numbers = pl.DataFrame({"number": vocabulary.encode(words)}).select(
            pl.when(words.is_not_null()).then(label.list.concat("number")).otherwise("number")
        )
        return Ragged.from_lists(numbers.to_series())

    return {
        "emotion_words": encode_labelled(context),
        "response_emotion_words": encode_labelled(find(samples["response_tokens"])),
        "next_turn_emotion_words": encode_labelled(find(samples["next_turn_tokens"])),
    }


def _encode_emotions(emotions: pl.Series, labels: Mapping[str, int]) -> IntArray:
    """Return the indices of emotions, -1 if unknown; an emotion outside the labels is an error."""
    strange = sorted(set(emotions.drop_nulls().unique()) - set(labels)) if labels else []
    if strange:
        raise DataError(
            f"{unknown_choice_error('emotion', strange[0], labels)} (in the prepared data)"
        )
    if not labels:
        return np.full(len(emotions), -1)
    numbers = emotions.replace_strict(labels, default=None, return_dtype=pl.Int64).fill_null(-1)
    return numbers.to_numpy().astype(np.int64)
