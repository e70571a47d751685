"""The labels of conversations and utterances: 32 emotions, 8 response intents and neutral."""

EMOTIONS = (
    "afraid", "angry", "annoyed", "anticipating", "anxious", "apprehensive", "ashamed", "caring",
    "confident", "content", "devastated", "disappointed", "disgusted", "embarrassed", "excited",
    "faithful", "furious", "grateful", "guilty", "hopeful", "impressed", "jealous", "joyful",
    "lonely", "nostalgic", "prepared", "proud", "sad", "sentimental", "surprised", "terrified",
    "trusting",
)  # fmt: skip
"""The 32 emotions of EmpatheticDialogues, in the order of EmpatheticIntents."""

INTENTS = (
    "agreeing", "acknowledging", "encouraging", "consoling", "sympathizing", "suggesting",
    "questioning", "wishing",
)  # fmt: skip
"""The intents of a listener, in the order of Welivita and Pu 2020."""

NEUTRAL = "neutral"

LABELS = (*EMOTIONS, *INTENTS, NEUTRAL)
"""The 41 labels of an utterance: emotions are 0 to 31, intents 32 to 39, neutral is 40."""
