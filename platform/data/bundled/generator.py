"""Generate the conversations of the bundled corpus from its material, deterministically.

The splits are by material: a situation with its causes, questions, answers and replies belongs to
one split, which depends on its position in the file, and so does each frame of a listener's general
answers. Only expressions of feelings (`feelings`, `names`) and closing words are shared by the
splits. The random generator of a conversation is seeded by emotion and situation, so that editing
one situation does not change the others.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import polars as pl
import yaml

from attune.platform.data.conversations import LISTENER, SPEAKER, SPLITS, UNPAIRED, conversations
from attune.platform.data.labels import EMOTIONS, NEUTRAL
from attune.platform.text.lexicons import Lexicon

T = TypeVar("T")

# The split of each of the 32 situations of an emotion, and of each ten frames of a listener.
SITUATION_SPLITS = (
    *("train", "train", "train", "valid", "train", UNPAIRED[0], "train", "test"),
    *("train", "train", "train", "valid", "train", UNPAIRED[1], "train", "test"),
) * 2
FRAME_SPLITS = ("train", "train", "train", "valid", "test") * 2
CONVERSATIONS_OF_A_SITUATION = {"train": 2, "valid": 2, "test": 2, UNPAIRED[0]: 3, UNPAIRED[1]: 4}

# Each situation also occurs once with each similar emotion: what makes one person afraid makes
# another terrified. Otherwise the events alone would determine the emotion, and models would
# memorise situations instead of expressions of feelings.
NEIGHBOURS = (
    ("afraid", "terrified"), ("anxious", "apprehensive"), ("angry", "furious", "annoyed"),
    ("sad", "devastated", "lonely"), ("ashamed", "guilty", "embarrassed"),
    ("joyful", "excited", "content"), ("hopeful", "anticipating"),
    ("proud", "confident", "prepared"), ("grateful", "trusting", "faithful"),
    ("caring", "sentimental", "nostalgic"), ("surprised", "impressed"),
    ("disappointed", "jealous"), ("disgusted", "annoyed"),
)  # fmt: skip

NAMES_IT = 0.15  # how often a speaker names the emotion
FEELING = 0.65  # how often a sentence about the feeling follows what is said
GOES_ON = 0.6  # how often the speaker has the last word and the listener says goodbye


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """One turn with its annotations."""

    role: str
    text: str
    label: str
    cause: bool = False


def read() -> Iterator[pl.DataFrame]:
    """Yield the conversations of the corpus (schema in `data/conversations.py`)."""
    rows: list[dict[str, object]] = []
    for emotion in EMOTIONS:
        for place, situation in enumerate(_load_material(emotion)["situations"]):
            for number, (speaker_emotion, turns) in enumerate(
                _generate_conversations(emotion, place)
            ):
                row = {
                    "conversation_id": f"{emotion}-{place:02d}-{number}",
                    "split": SITUATION_SPLITS[place],
                    "emotion": speaker_emotion,
                    "situation": situation["summary"],
                    "file": f"{emotion}.yaml",
                    "row": place + 1,
                }
                rows.extend({**row, "turn": t, **vars(u)} for t, u in enumerate(turns))
    yield conversations(rows)


def lexicon() -> Lexicon:
    """Return the emotion words of the material; the values of repeated words are averaged."""
    values: dict[str, list[tuple[float, float]]] = {}
    for emotion in EMOTIONS:
        for word, pair in _load_material(emotion)["lexicon"].items():
            values.setdefault(word, []).append(tuple(pair))
    means = {
        word: (
            round(sum(valence for valence, _ in pairs) / len(pairs), 4),
            round(sum(arousal for _, arousal in pairs) / len(pairs), 4),
        )
        for word, pairs in values.items()
    }
    return Lexicon(words=frozenset(means), valence_arousal=means)


def _generate_conversations(emotion: str, place: int) -> list[tuple[str, list[Utterance]]]:
    """Return distinct conversations about one situation, each with the speaker's emotion."""
    split = SITUATION_SPLITS[place]
    draw = random.Random(f"{emotion} {place}")
    speaker_emotions = [emotion] * CONVERSATIONS_OF_A_SITUATION[split]
    if split in SPLITS:
        speaker_emotions += _emotions_with_similar_material(emotion)
    conversations: list[tuple[str, list[Utterance]]] = []
    for speaker_emotion in speaker_emotions:
        candidate = _generate_conversation(emotion, place, speaker_emotion, draw)
        while any(candidate == other for _, other in conversations):
            candidate = _generate_conversation(emotion, place, speaker_emotion, draw)
        conversations.append((speaker_emotion, candidate))
    return conversations


def _emotions_with_similar_material(emotion: str) -> list[str]:
    return [one for group in NEIGHBOURS if emotion in group for one in group if one != emotion]


def _generate_conversation(
    emotion: str, place: int, speaker_emotion: str, draw: random.Random
) -> list[Utterance]:
    # A speaker whose emotion is not the situation's own one always expresses it.
    feeling = FEELING if speaker_emotion == emotion else 1.0
    writer = _Writer(
        _load_material(emotion)["situations"][place], place, speaker_emotion, feeling, draw
    )
    make = {UNPAIRED[0]: writer.compose_context, UNPAIRED[1]: writer.compose_response}
    return make.get(SITUATION_SPLITS[place], writer.compose_conversation)()


class _Writer:
    """Writes a conversation about one situation."""

    def __init__(
        self, situation: dict[str, Any], place: int, emotion: str, feeling: float,
        draw: random.Random,
    ):  # fmt: skip
        material = _load_material(emotion)
        # The unpaired streams are training data, so they use the frames of train.
        split = SITUATION_SPLITS[place]
        split = split if split in FRAME_SPLITS else "train"
        tone = next(t for t, emotions in _load_frames()["tones"].items() if emotion in emotions)
        self.situation, self.emotion, self.feeling, self.draw = situation, emotion, feeling, draw
        self.feelings, self.names = material["feelings"], material["names"]
        self.closings = material["closings"]
        self.openers = _material_of_split(_load_frames()["openers"], split)
        self.acknowledgements = _material_of_split(_load_frames()["acknowledgements"][tone], split)
        self.farewells = _material_of_split(_load_frames()["farewells"][tone], split)
        self.used_feelings: list[str] = []  # feelings already expressed in this conversation

    def compose_conversation(self) -> list[Utterance]:
        """Return a conversation of one of four shapes, with or without a goodbye."""
        shapes = (
            self._compose_cause_opening,
            self._compose_cause_opening,
            self._compose_hook_opening,
            self._compose_acknowledgement,
            self._compose_hook_and_question,
        )
        turns = self.draw.choice(shapes)()
        goes_on = self.draw.random() < GOES_ON
        turns.append(self._compose_reply(last=not goes_on))
        if goes_on:
            closing = self.draw.choice(self.closings)
            turns.append(Utterance(role=SPEAKER, text=closing["text"], label=closing["label"]))
            turns.append(self._fill_frame(self.farewells))
        return turns

    def compose_context(self) -> list[Utterance]:
        """Return an unpaired context."""
        shapes = (
            self._compose_cause_opening,
            self._compose_hook_opening,
            self._compose_acknowledgement,
            self._compose_hook_and_question,
        )
        return self.draw.choice(shapes)()

    def compose_response(self) -> list[Utterance]:
        """Return an unpaired response."""
        makers = (
            self._compose_reply,
            self._compose_question,
            lambda: self._fill_frame(self.acknowledgements),
        )
        return [self.draw.choice(makers)()]

    def _compose_cause_opening(self) -> list[Utterance]:
        return [self._compose_cause(), *self._compose_question_and_answer()]

    def _compose_hook_opening(self) -> list[Utterance]:
        return [*self._compose_opening(), self._compose_cause()]

    def _compose_hook_and_question(self) -> list[Utterance]:
        return [
            *self._compose_opening(),
            self._compose_cause(),
            *self._compose_question_and_answer(),
        ]

    def _compose_acknowledgement(self) -> list[Utterance]:
        how = self._compose_feeling_phrase()
        return [
            self._compose_cause(feeling=False),
            self._fill_frame(self.acknowledgements),
            Utterance(role=SPEAKER, text=how, label=self.emotion),
        ]

    def _compose_opening(self) -> list[Utterance]:
        opener = self.draw.choice(self.openers)
        return [
            self._maybe_compose_feeling(self.situation["hook"]),
            Utterance(role=LISTENER, text=opener, label="questioning"),
        ]

    def _compose_cause(self, feeling: bool = True) -> Utterance:
        text = self.draw.choice(self.situation["causes"])
        if feeling and self.draw.random() < self.feeling:
            text = f"{text} {self._compose_feeling_phrase()}"
        return Utterance(role=SPEAKER, text=text, label=self.emotion, cause=True)

    def _compose_question_and_answer(self) -> list[Utterance]:
        asked = self.draw.choice(self.situation["asked"])
        return [
            Utterance(role=LISTENER, text=asked["question"], label="questioning"),
            self._maybe_compose_feeling(asked["answer"]),
        ]

    def _maybe_compose_feeling(self, text: str) -> Utterance:
        if self.draw.random() < self.feeling:
            return Utterance(
                role=SPEAKER, text=f"{text} {self._compose_feeling_phrase()}", label=self.emotion
            )
        return Utterance(role=SPEAKER, text=text, label=NEUTRAL)

    def _compose_question(self) -> Utterance:
        asked = self.draw.choice(self.situation["asked"])
        return Utterance(role=LISTENER, text=asked["question"], label="questioning")

    def _compose_reply(self, last: bool = True) -> Utterance:
        # A question requires an answer, so it is only used at the end.
        replies = [r for r in self.situation["replies"] if last or r["intent"] != "questioning"]
        reply = self.draw.choice(replies)
        return Utterance(role=LISTENER, text=reply["text"], label=reply["intent"])

    def _fill_frame(self, frames: Sequence[dict[str, str]]) -> Utterance:
        frame = self.draw.choice(frames)
        text = frame["text"].format(topic=self.situation["topic"])
        return Utterance(role=LISTENER, text=text[0].upper() + text[1:], label=frame["intent"])

    def _compose_feeling_phrase(self) -> str:
        names = self.draw.random() < NAMES_IT and not set(self.names) & set(self.used_feelings)
        sentences = self.names if names else self.feelings
        sentence = self.draw.choice([s for s in sentences if s not in self.used_feelings])
        self.used_feelings.append(sentence)
        return str(sentence)


def _material_of_split(frames: Sequence[T], split: str) -> list[T]:
    return [frame for frame, of in zip(frames, FRAME_SPLITS, strict=True) if of == split]


@functools.cache
def _load_material(name: str) -> dict[str, Any]:
    folder = resources.files("attune.platform.data.bundled").joinpath("material")
    content: dict[str, Any] = yaml.load(
        folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader
    )
    return content


def _load_frames() -> dict[str, Any]:
    return _load_material("listener_frames")
