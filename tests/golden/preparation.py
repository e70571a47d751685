"""The text under `corpus/`, prepared by the project's own code into the folders variants read.

The text was drawn once from the bundled corpus and does not change when that does:

dialogues/      64 conversations in train, valid and test with emotions, causes and utterance
                labels, and unpaired contexts and responses; one JSON object a line in the format
                of users' own dialogues, whose `split` may here name an unpaired stream
lexicon.json    emotion words with valence and arousal
reccon/         the emotions of single utterances with their causes, in RECCON's format
intents/        single utterances with their labels, in EmpatheticIntents' format
"""

from collections import Counter
from pathlib import Path
from unittest import mock

import polars as pl

from attune.platform.data import bundled
from attune.platform.data.labels import EMOTIONS, RECCON_LABELS
from attune.platform.data.prepare import prepare
from attune.platform.data.readers import dialogues
from attune.platform.text.lexicons import Lexicon
from attune.platform.text.vocabulary import Vocabulary
from tests.encoders import write_tiny_encoder

CORPUS = Path(__file__).parent / "corpus"
DIALOGUES, RECCON, INTENTS, ENCODER = "dialogues", "reccon", "intents", "encoder"


def prepare_corpus(folder: Path) -> None:
    """Prepare the three sources and an encoder, each into a folder below `folder`."""
    # Only the bundled reader has unpaired streams and a lexicon, so it reads our files instead.
    with mock.patch.multiple(bundled, read=_read_dialogues, lexicon=_lexicon):
        prepare(bundled.NAME, folder / DIALOGUES, strict=True)
    for source in (RECCON, INTENTS):
        prepare(str(CORPUS / source), folder / source, form=source, strict=True)
    counts = pl.read_parquet(folder / DIALOGUES / "tokens.parquet")
    vocabulary = Vocabulary.build(counts, always=(*EMOTIONS, *RECCON_LABELS))
    write_tiny_encoder(folder / ENCODER, vocabulary.tokens)


def _read_dialogues():
    for path in sorted((CORPUS / DIALOGUES).iterdir()):
        yield from dialogues.read(path, Counter())


def _lexicon() -> Lexicon:
    return Lexicon.load(CORPUS / "lexicon.json")
