"""HTML of conversations and answers. All text passes through `escape`: what a model or a person
says is never markup."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from attune.models.base import Explanation
from attune.platform.runs.record import Run
from attune.platform.serving.responder import Answer
from attune.ui.conversation import Conversation

SHOWN_EMOTIONS = 5

State = Literal["empty", "waiting", "answering", "done", "failed"]
"""Of a pane; scripts that drive the page wait for it."""


def conversation(turns: Conversation) -> str:
    """The turns so far, the speaker's to the left."""
    if not turns:
        hint = "Nothing said yet. Type what the speaker says, or pick an example."
        return f'<div class="conversation"><p class="quiet">{hint}</p></div>'
    said = []
    for place, turn in enumerate(turns):
        role = ("speaker", "listener")[place % 2]
        who = f"{role} · {turn.by}" if turn.by else role
        said.append(
            f'<div class="turn {role}"><span class="who">{escape(who)}</span>'
            f"<p>{escape(turn.text)}</p></div>"
        )
    return f'<div class="conversation" role="log" aria-label="Conversation">{"".join(said)}</div>'


def empty(run: Run) -> str:
    """A pane that has not been asked."""
    return _pane(run, "empty", '<p class="quiet">No answer yet.</p>')


def waiting(run: Run) -> str:
    """A pane whose model is being loaded."""
    return _pane(run, "waiting", '<p class="quiet">Thinking …</p>')


def answer(run: Run, made: Answer, *, done: bool) -> str:
    """An answer, as far as it goes, and what the model reads in the conversation."""
    if made.text or not done:
        text = f'<p class="answer">{escape(made.text)}</p>'
    else:
        text = '<p class="answer quiet">(it says nothing)</p>'
    seconds = f'<p class="quiet seconds">{made.seconds:.2f} s</p>' if done else ""
    return _pane(run, "done" if done else "answering", text + reasons(made.explanation) + seconds)


def problem(run_name: str, message: str) -> str:
    """A pane that could not answer."""
    return (
        f'<div class="pane" data-state="failed" role="alert"><h3>{escape(run_name)}</h3>'
        f'<p class="problem">{escape(message)}</p></div>'
    )


def reasons(explanation: Explanation) -> str:
    """What the model reads in the conversation, and why it answers as it does."""
    read, title = explanation.emotion, "Emotion it reads in the conversation"
    if explanation.response_label:
        read, title = explanation.response_label, "Emotion or intent it answers with"
    if not read:
        return '<p class="quiet">This variant does not predict an emotion.</p>'
    more = ""
    if explanation.groups:
        more += _bars("Taken as", explanation.groups)
    if explanation.listeners:
        more += _bars("Listeners heard", explanation.listeners)
    if explanation.consensus:
        more += _bars("States it may agree on", explanation.consensus)
    if explanation.imagined:
        more += f"<h4>What it would be an answer to</h4><p>{escape(explanation.imagined)}</p>"
    for group, shares in (explanation.response_emotion or {}).items():
        more += _bars(f"The answer's emotion, if {group}", shares)
    if explanation.word_labels:
        more += _passages("What it takes each turn for", explanation)
    for name, values in (explanation.by_word or {}).items():
        more += _shaded(name, explanation.words or (), values)
    if explanation.emotion_words is not None:
        more += _listed("Emotion words found", explanation.emotion_words)
    for name, rows in (explanation.attention or {}).items():
        words = explanation.words if name == "context" else explanation.emotion_words
        more += _heat_map(f"Attention to the {name}", explanation.answer_words or (), words, rows)
    if more:
        more = f'<details class="why"><summary>Why</summary>{more}</details>'
    return _bars(title, read, titled=read is not explanation.emotion) + more


def _bars(title: str, shares: Mapping[str, float], *, titled: bool = True) -> str:
    """The largest shares as bars."""
    likeliest = sorted(shares, key=shares.__getitem__, reverse=True)[:SHOWN_EMOTIONS]
    bars = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="track">'
        f'<span class="bar" style="width:{shares[name]:.1%}"></span></span>'
        f'<span class="share">{shares[name]:.0%}</span></li>'
        for name in likeliest
    )
    heading = f"<h4>{escape(title)}</h4>" if titled else ""
    return f'{heading}<ul class="emotions" aria-label="{escape(title)}">{bars}</ul>'


def _shaded(title: str, words: Sequence[str], values: Sequence[float]) -> str:
    """The context's words on a ground as dark as their numbers are high among each other."""
    least, most = min(values, default=0.0), max(values, default=0.0)
    marks = " ".join(
        f'<mark style="--strength:{(value - least) / ((most - least) or 1):.0%}" '
        f'title="{value:.3f}">{escape(word)}</mark>'
        for word, value in zip(words, values, strict=True)
    )
    extent = f"{least:.2f} to {most:.2f}"
    return (
        f'<h4>{escape(title)} <span class="quiet">{extent}</span></h4><p class="shaded">{marks}</p>'
    )


def _passages(title: str, explanation: Explanation) -> str:
    """The words of each turn behind the turn's label."""
    labelled = zip(explanation.word_labels or (), explanation.words or (), strict=True)
    turns = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(' '.join(word for _, word in told))}</dd>"
        for label, told in itertools.groupby(labelled, key=operator.itemgetter(0))
        if label
    )
    return f'<h4>{escape(title)}</h4><dl class="turns">{turns}</dl>'


def _listed(title: str, words: Sequence[str]) -> str:
    shown = escape(", ".join(words)) or '<span class="quiet">none</span>'
    return f"<h4>{escape(title)}</h4><p>{shown}</p>"


def _heat_map(
    title: str, answer: Sequence[str], words: Sequence[str] | None, rows: Sequence[Sequence[float]]
) -> str:
    """What each word of the answer, a row, looks at: the darker, the more."""
    if not words or not rows:
        return ""
    most = max((value for row in rows for value in row), default=0.0) or 1.0
    head = "".join(f'<th scope="col"><span>{escape(word)}</span></th>' for word in words)
    body = "".join(
        f'<tr><th scope="row">{escape(said)}</th>'
        + "".join(
            f'<td style="--strength:{value / most:.0%}" title="{escape(word)}: {value:.3f}"></td>'
            for word, value in zip(words, row, strict=True)
        )
        + "</tr>"
        for said, row in zip(answer, rows, strict=True)
    )
    return (
        f"<h4>{escape(title)}</h4>"
        f'<div class="heat"><table aria-label="{escape(title)}"><tr><td></td>{head}</tr>{body}'
        f"</table></div>"
    )


def _pane(run: Run, state: State, content: str) -> str:
    return (
        f'<div class="pane" data-state="{state}" role="group" '
        f'aria-label="Answer of {escape(run.name)}">'
        f'<h3>{escape(run.name)}</h3><span class="variant">{escape(run.variant)}</span>'
        f"{content}</div>"
    )
