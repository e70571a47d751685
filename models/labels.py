"""The labels of conversations and utterances: 32 emotions, 8 response intents and neutral."""

EMOTIONS = (
    "afraid", "angry", "annoyed", "anticipating", "anxious", "apprehensive", "ashamed", "caring",
    "confident", "content", "devastated", "disappointed", "disgusted", "embarrassed", "excited",
    "faithful", "furious", "grateful", "guilty", "hopeful", "impressed", "jealous", "joyful",
    "lonely", "nostalgic", "prepared", "proud", "sad", "sentimental", "surprised", "terrified",
    "trusting",
)  # fmt: skip
"""EmpatheticDialogues' 32, in the order (and so with the numbers) of EmpatheticIntents."""

INTENTS = (
    "agreeing", "acknowledging", "encouraging", "consoling", "sympathizing", "suggesting",
    "questioning", "wishing",
)  # fmt: skip
"""What a listener does, after Welivita and Pu 2020, in their order."""

NEUTRAL = "neutral"

LABELS = (*EMOTIONS, *INTENTS, NEUTRAL)
"""The 41 labels of an utterance: numbers 0-31, 32-39 and 40."""
