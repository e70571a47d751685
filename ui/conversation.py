"""What is said on the page: speaker and listener in turn, begun by the speaker."""

from dataclasses import dataclass

from attune.platform.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One utterance."""

    text: str
    by: str | None = None
    """The run whose answer it is; None where a person or a corpus said it."""


Conversation = tuple[Turn, ...]


def texts(conversation: Conversation) -> list[str]:
    """What a model is asked with."""
    return [turn.text for turn in conversation]


def awaits_answer(conversation: Conversation) -> bool:
    """Whether the speaker had the last word."""
    return len(conversation) % 2 == 1


def say(conversation: Conversation, text: str, answer: Turn | None = None) -> Conversation:
    """The conversation with the speaker's next turn.

    Where the last one was not answered yet, the answer becomes the listener's turn; None says that
    there are several to choose from.
    """
    if not text.strip():
        raise UsageError("Type what the speaker says first.")
    if awaits_answer(conversation):
        if answer is None:
            raise UsageError(
                "Choose first whose answer the conversation goes on with, or undo your last turn."
            )
        conversation = go_on(conversation, answer)
    return (*conversation, Turn(text=text.strip()))


def go_on(conversation: Conversation, answer: Turn) -> Conversation:
    """The conversation with this answer as the listener's turn, in place of one chosen before."""
    if not conversation or not answer.text:
        raise UsageError("There is no answer yet to go on with.")
    asked = conversation if awaits_answer(conversation) else conversation[:-1]
    return (*asked, answer)


def undo(conversation: Conversation) -> tuple[Conversation, Turn]:
    """The conversation without its last turn, and that turn."""
    if not conversation:
        raise UsageError("There is nothing to undo.")
    return conversation[:-1], conversation[-1]
