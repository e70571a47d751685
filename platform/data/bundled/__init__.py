"""The bundled corpus: written for Attune, so that everything runs without a download.

A deterministic generator combines hand-written material (`material/`, one file per emotion) into
3,304 conversations with everything that variants require: emotions, situations, cause labels, one
of the 41 labels per utterance, next turns, unpaired contexts and responses, and a lexicon.
"""

from attune.platform.data.bundled.generator import lexicon, read
from attune.platform.data.conversations import SPLITS, UNPAIRED
from attune.platform.data.labels import EMOTIONS as EMOTION_LABELS

NAME = "bundled"
STREAMS = (*SPLITS, *UNPAIRED)

__all__ = ["EMOTION_LABELS", "NAME", "STREAMS", "lexicon", "read"]
