"""HTML of conversations and answers.

All text passes through `escape`: text of a model or a person is never markup.
"""

import itertools
import operator
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from attune.models.base import Explanation
from attune.platform.runs.record import Run
from attune.platform.serving.responder import Answer
from attune.ui.conversation import Conversation

MAX_EMOTIONS = 5

State = Literal["empty", "waiting", "answering", "done", "failed"]
"""The state of a pane; scripts that drive the page wait for it."""


def render_conversation(turns: Conversation) -> str:
    """Render the turns, the speaker's on the left."""
    if not turns:
        hint = "No conversation yet. Type the speaker's turn, or pick an example."
        return f'<div class="conversation"><p class="quiet">{hint}</p></div>'
    blocks = []
    for place, turn in enumerate(turns):
        role = ("speaker", "listener")[place % 2]
        author = f"{role} · {turn.by}" if turn.by else role
        blocks.append(
            f'<div class="turn {role}"><span class="who">{escape(author)}</span>'
            f"<p>{escape(turn.text)}</p></div>"
        )
    return f'<div class="conversation" role="log" aria-label="Conversation">{"".join(blocks)}</div>'


def render_empty(run: Run) -> str:
    """Render a pane without an answer."""
    return _render_pane(run, "empty", '<p class="quiet">No answer yet.</p>')


def render_waiting(run: Run) -> str:
    """Render a pane whose model is being loaded."""
    return _render_pane(run, "waiting", '<p class="quiet">Loading the model …</p>')


def render_answer(run: Run, output: Answer, *, done: bool) -> str:
    """Render an answer, complete or partial, and the model's explanation."""
    if output.text or not done:
        text = f'<p class="answer">{escape(output.text)}</p>'
    else:
        text = '<p class="answer quiet">(empty answer)</p>'
    seconds = f'<p class="quiet seconds">{output.seconds:.2f} s</p>' if done else ""
    return _render_pane(
        run,
        "done" if done else "answering",
        text + render_explanation(output.explanation) + seconds,
    )


def render_problem(run_name: str, message: str) -> str:
    """Render a pane that could not answer."""
    return (
        f'<div class="pane" data-state="failed" role="alert"><h3>{escape(run_name)}</h3>'
        f'<p class="problem">{escape(message)}</p></div>'
    )


def render_explanation(explanation: Explanation) -> str:
    """Render the predicted emotions and, folded away, the rest of an explanation."""
    probs, title = explanation.emotion, "Emotion of the conversation"
    if explanation.response_label:
        probs, title = explanation.response_label, "Emotion or intent of the answer"
    if not probs:
        return '<p class="quiet">This variant does not predict an emotion.</p>'
    details = ""
    if explanation.groups:
        details += _render_bars("Emotion group", explanation.groups)
    if explanation.listeners:
        details += _render_bars("Listener weights", explanation.listeners)
    if explanation.consensus:
        details += _render_bars("Consensus emotion", explanation.consensus)
    if explanation.imagined:
        details += (
            f"<h4>Context reconstructed from the answer</h4><p>{escape(explanation.imagined)}</p>"
        )
    for group, shares in (explanation.response_emotion or {}).items():
        details += _render_bars(f"Emotion of the answer, {group} group", shares)
    if explanation.word_labels:
        details += _render_labelled_turns("Predicted label of each turn", explanation)
    for name, values in (explanation.by_word or {}).items():
        details += _render_shaded_words(name, explanation.words or (), values)
    if explanation.emotion_words is not None:
        details += _render_word_list("Emotion words", explanation.emotion_words)
    for name, rows in (explanation.attention or {}).items():
        words = explanation.words if name == "context" else explanation.emotion_words
        details += _render_heat_map(
            f"Attention to the {name}", explanation.answer_words or (), words, rows
        )
    if details:
        details = f'<details class="why"><summary>Why</summary>{details}</details>'
    return _render_bars(title, probs, with_heading=probs is not explanation.emotion) + details


def _render_bars(title: str, shares: Mapping[str, float], *, with_heading: bool = True) -> str:
    """Render the largest shares as bars."""
    likeliest = sorted(shares, key=shares.__getitem__, reverse=True)[:MAX_EMOTIONS]
    bars = "".join(
        f'<li><span class="name">{escape(name)}</span><span class="track">'
        f'<span class="bar" style="width:{shares[name]:.1%}"></span></span>'
        f'<span class="share">{shares[name]:.0%}</span></li>'
        for name in likeliest
    )
    heading = f"<h4>{escape(title)}</h4>" if with_heading else ""
    return f'{heading}<ul class="emotions" aria-label="{escape(title)}">{bars}</ul>'


def _render_shaded_words(title: str, words: Sequence[str], values: Sequence[float]) -> str:
    """Render the context's words, each shaded by its value between the least and the largest."""
    minimum, maximum = min(values, default=0.0), max(values, default=0.0)
    marks = " ".join(
        f'<mark style="--strength:{(value - minimum) / ((maximum - minimum) or 1):.0%}" '
        f'title="{value:.3f}">{escape(word)}</mark>'
        for word, value in zip(words, values, strict=True)
    )
    value_range = f"{minimum:.2f} to {maximum:.2f}"
    heading = f'<h4>{escape(title)} <span class="quiet">{value_range}</span></h4>'
    return f'{heading}<p class="shaded">{marks}</p>'


def _render_labelled_turns(title: str, explanation: Explanation) -> str:
    """Render each turn's label and words."""
    labelled = zip(explanation.word_labels or (), explanation.words or (), strict=True)
    turns = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(' '.join(word for _, word in pairs))}</dd>"
        for label, pairs in itertools.groupby(labelled, key=operator.itemgetter(0))
        if label
    )
    return f'<h4>{escape(title)}</h4><dl class="turns">{turns}</dl>'


def _render_word_list(title: str, words: Sequence[str]) -> str:
    content = escape(", ".join(words)) or '<span class="quiet">none</span>'
    return f"<h4>{escape(title)}</h4><p>{content}</p>"


def _render_heat_map(
    title: str, answer: Sequence[str], words: Sequence[str] | None, rows: Sequence[Sequence[float]]
) -> str:
    """Render attention weights: a row for each word of the answer; darker is higher."""
    if not words or not rows:
        return ""
    maximum = max((value for row in rows for value in row), default=0.0) or 1.0
    head = "".join(f'<th scope="col"><span>{escape(word)}</span></th>' for word in words)
    body = "".join(
        f'<tr><th scope="row">{escape(answer_word)}</th>'
        + "".join(
            f'<td style="--strength:{value / maximum:.0%}" '
            f'title="{escape(word)}: {value:.3f}"></td>'
            for word, value in zip(words, row, strict=True)
        )
        + "</tr>"
        for answer_word, row in zip(answer, rows, strict=True)
    )
    return (
        f"<h4>{escape(title)}</h4>"
        f'<div class="heat"><table aria-label="{escape(title)}"><tr><td></td>{head}</tr>{body}'
        f"</table></div>"
    )


def _render_pane(run: Run, state: State, content: str) -> str:
    return (
        f'<div class="pane" data-state="{state}" role="group" '
        f'aria-label="Answer of {escape(run.name)}">'
        f'<h3>{escape(run.name)}</h3><span class="variant">{escape(run.variant)}</span>'
        f"{content}</div>"
    )
