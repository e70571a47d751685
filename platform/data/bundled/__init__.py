"""The corpus that comes with Attune: our own, so that everything runs with no download.

A deterministic generator combines hand-written material (`material/`, a file an emotion) into some
two thousand conversations with everything any variant needs: emotions, situations, cause marks,
one of the 41 labels an utterance, next turns, unpaired contexts and responses, and a lexicon.
"""

from attune.platform.data.bundled.generator import lexicon, read
from attune.platform.data.conversations import SPLITS, UNPAIRED
from attune.platform.data.labels import EMOTIONS as EMOTION_LABELS

NAME = "bundled"
STREAMS = (*SPLITS, *UNPAIRED)

__all__ = ["EMOTION_LABELS", "NAME", "STREAMS", "lexicon", "read"]
