"""The conversation on the page: alternating turns, the speaker's first."""

from dataclasses import dataclass

from attune.platform.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One utterance."""

    text: str
    by: str | None = None
    """The run whose answer it is; None for text typed by a person or taken from a corpus."""


Conversation = tuple[Turn, ...]


def texts(conversation: Conversation) -> list[str]:
    """Return the text of each turn: the context for a model."""
    return [turn.text for turn in conversation]


def awaits_answer(conversation: Conversation) -> bool:
    """Return whether the last turn is the speaker's."""
    return len(conversation) % 2 == 1


def add_speaker_turn(
    conversation: Conversation, text: str, answer: Turn | None = None
) -> Conversation:
    """Return the conversation with the speaker's next turn.

    If the last turn is the speaker's too, `answer` becomes the listener's turn between them; None
    means that there are several answers to choose from, which is an error.
    """
    if not text.strip():
        raise UsageError("Type the speaker's turn first.")
    if awaits_answer(conversation):
        if answer is None:
            raise UsageError("Choose the answer to continue with first, or undo your last turn.")
        conversation = set_listener_turn(conversation, answer)
    return (*conversation, Turn(text=text.strip()))


def set_listener_turn(conversation: Conversation, answer: Turn) -> Conversation:
    """Return the conversation with this answer as the last turn, replacing another answer."""
    if not conversation or not answer.text:
        raise UsageError("There is no answer yet to continue with.")
    context = conversation if awaits_answer(conversation) else conversation[:-1]
    return (*context, answer)


def remove_last_turn(conversation: Conversation) -> tuple[Conversation, Turn]:
    """Return the conversation without its last turn, and that turn."""
    if not conversation:
        raise UsageError("There is nothing to undo.")
    return conversation[:-1], conversation[-1]
