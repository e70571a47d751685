"""The labels of the data sets; the 41 that models know by name are theirs."""

from attune.models.labels import EMOTIONS, INTENTS, LABELS, NEUTRAL

__all__ = ["EMOTIONS", "INTENTS", "LABELS", "MELD_LABELS", "NEUTRAL", "RECCON_LABELS"]

RECCON_LABELS = (
    "anger", "disgust", "excited", "fear", "happiness", "sadness", "surprise", NEUTRAL,
)  # fmt: skip
"""What RECCON's DailyDialog part labels utterances with."""

MELD_LABELS = ("anger", "disgust", "fear", "joy", "sadness", "surprise", NEUTRAL)
"""What MELD labels utterances with."""
