"""Build samples from conversations: one per listener turn, with the context before it.

The other streams use the same schema:
- an unpaired context has no response, and an unpaired response no context;
- a labelled utterance is a context of one turn, with its label as `emotion`;
- a cause sample, where a source annotates the causes of an utterance's emotion, has the context up
  to and including that utterance; `emotion` is the utterance's label, and its author has the role
  speaker, whoever spoke first.

Each distinct utterance is tokenised once, however many contexts contain it.
"""

import polars as pl

from attune.platform.data.conversations import CAUSE_STREAMS, LABELLED, LISTENER, SPEAKER, UNPAIRED

SAMPLES = pl.Schema(
    {  # type: ignore[arg-type]
        "conversation_id": pl.String,
        "turn": pl.Int64,  # of the response
        "emotion": pl.String,
        "situation": pl.String,
        "situation_tokens": pl.String,  # tokens joined by blanks, here and below
        "context": pl.List(pl.String),  # the utterances before the response, oldest first
        "context_tokens": pl.List(pl.String),
        "context_roles": pl.List(pl.String),
        "context_labels": pl.List(pl.String),  # of the 41, null where not annotated
        "context_causes": pl.List(pl.Boolean),  # holds the cause of the emotion?
        "context_evidence": pl.List(pl.List(pl.Int64)),  # the turns that cause each one's own label
        "response": pl.String,
        "response_tokens": pl.String,
        "response_label": pl.String,
        "next_turn": pl.String,  # the speaker's reply, where there is one
        "next_turn_tokens": pl.String,
    }
)

_LISTS = {
    "text": "context",
    "tokens": "context_tokens",
    "role": "context_roles",
    "label": "context_labels",
    "cause": "context_causes",
    "evidence": "context_evidence",
}

_WITHOUT_ANSWER = (UNPAIRED[0], *LABELLED.values())
_OF_ANSWERS = ("response", "response_tokens", "response_label", "next_turn", "next_turn_tokens")


def tokenize_conversations(conversations: pl.DataFrame) -> pl.DataFrame:
    """Add the columns `tokens` and `situation_tokens`; distinct texts are tokenised once."""
    # nltk takes more than a second to import, and training on prepared samples does not need it.
    from attune.platform.text.tokenizing import tokenize

    tokens = tokenize(pl.concat([conversations["text"], conversations["situation"]]))
    count = conversations.height
    return conversations.with_columns(
        tokens=tokens.head(count), situation_tokens=tokens.tail(count)
    )


def build_samples(utterances: pl.DataFrame) -> pl.DataFrame:
    """Build the samples of whole, tokenised conversations, with the column `split`."""
    ends = _attach_sample_conversations(_select_sample_ends(utterances), utterances)
    # A response ends the context before it; an unpaired context is the whole conversation.
    whole = pl.col("split").is_in(_WITHOUT_ANSWER)
    length = pl.when(whole).then(pl.col("turn") + 1).otherwise("turn")
    return ends.with_columns(
        *(pl.col(column).list.head(length) for column in _LISTS.values()),
        next_turn=_next_turn_of_sample("context"),
        next_turn_tokens=_next_turn_of_sample("context_tokens"),
    ).select("split", *SAMPLES)


def build_cause_samples(utterances: pl.DataFrame) -> pl.DataFrame:
    """Build a sample for each utterance whose causes are annotated, with the column `split`."""
    ends = utterances.filter(pl.col("evidence").is_not_null()).select(
        "conversation_id",
        "turn",
        "situation",
        "situation_tokens",
        "evidence",
        split=pl.col("split").replace_strict(CAUSE_STREAMS, default=None, return_dtype=pl.String),
        emotion="label",
        feels="role",
        **{name: pl.lit(None, dtype=kind) for name, kind in SAMPLES.items() if name in _OF_ANSWERS},
    )
    ends = ends.filter(pl.col("split").is_not_null())
    own = pl.element() == pl.element().last()
    return (
        _attach_sample_conversations(ends, utterances)
        .with_columns(pl.col(column).list.head(pl.col("turn") + 1) for column in _LISTS.values())
        .with_columns(
            context_roles=pl.col("context_roles").list.eval(
                pl.when(own).then(pl.lit(SPEAKER)).otherwise(pl.lit(LISTENER))
            ),
            context_causes=_is_among(pl.int_ranges(pl.col("turn") + 1), pl.col("evidence")),
        )
        .select("split", *SAMPLES)
    )


def extract_utterance_samples(samples: pl.DataFrame) -> pl.DataFrame:
    """Return each utterance of paired samples once.

    Columns: conversation_id, turn, role, text, tokens, label, situation_tokens. All samples of a
    conversation must be present, because its last sample contains the others' utterances.
    """
    last = samples.group_by("conversation_id", maintain_order=True).last()
    rows = last.select(
        "conversation_id",
        "situation_tokens",
        turn=pl.int_ranges(pl.col("context").list.len().cast(pl.Int64) + 2),
        role=pl.concat_list("context_roles", pl.lit(LISTENER), pl.lit(SPEAKER)),
        text=pl.concat_list("context", "response", "next_turn"),
        tokens=pl.concat_list("context_tokens", "response_tokens", "next_turn_tokens"),
        label=pl.concat_list("context_labels", "response_label", pl.lit(None, dtype=pl.String)),
    ).explode("turn", "role", "text", "tokens", "label")
    return rows.filter(pl.col("text").is_not_null())


def utterance_samples(rows: pl.DataFrame) -> pl.DataFrame:
    """Return utterances as samples: contexts of one turn, with the label as emotion."""
    known = {
        "conversation_id": pl.col("conversation_id"),
        "turn": pl.col("turn"),
        "emotion": pl.col("label"),
        **{_LISTS[name]: pl.concat_list(name) for name in ("text", "tokens", "role", "label")},
    }
    others = {
        name: pl.lit([None] if isinstance(dtype, pl.List) else None, dtype=dtype)
        for name, dtype in SAMPLES.items()
        if name not in known
    }
    return rows.select((known | others)[name].alias(name) for name in SAMPLES)


def _is_among(numbers: pl.Expr, chosen: pl.Expr) -> pl.Expr:
    """Return for each number in a list whether it is among the chosen ones of its row."""
    return pl.struct(numbers=numbers, chosen=chosen).map_elements(
        lambda row: [number in row["chosen"] for number in row["numbers"]],
        return_dtype=pl.List(pl.Boolean),
    )


def _attach_sample_conversations(ends: pl.DataFrame, utterances: pl.DataFrame) -> pl.DataFrame:
    """Return sample ends with the utterances of the whole conversation in lists."""
    whole = utterances.group_by("conversation_id", maintain_order=True).agg(
        pl.col(name).alias(column) for name, column in _LISTS.items()
    )
    return ends.join(whole, on="conversation_id", how="left", maintain_order="left")


def _select_sample_ends(utterances: pl.DataFrame) -> pl.DataFrame:
    """Return the utterances that end a sample: responses, and the ends of unpaired contexts."""
    last = pl.col("turn") == pl.col("turn").max().over("conversation_id")
    unanswered = pl.col("split").is_in(_WITHOUT_ANSWER)
    context_end = unanswered & last
    response = (pl.col("role") == LISTENER) & (
        ((pl.col("turn") > 0) & ~unanswered) | (pl.col("split") == UNPAIRED[1])
    )

    def of_response(column: str) -> pl.Expr:
        return pl.when(response).then(column)

    return utterances.filter(context_end | response).select(
        "conversation_id",
        "split",
        "turn",
        "emotion",
        "situation",
        "situation_tokens",
        response=of_response("text"),
        response_tokens=of_response("tokens"),
        response_label=of_response("label"),
    )


def _next_turn_of_sample(column: str) -> pl.Expr:
    """Return a column of the turn after the response if the speaker says it, else null."""
    following = pl.col("turn") + 1
    answered = pl.col("context_roles").list.get(following, null_on_oob=True) == SPEAKER
    return pl.when(answered).then(pl.col(column).list.get(following, null_on_oob=True))
