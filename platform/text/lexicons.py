"""Emotion lexicons: the NRC lexicons, or the small one of the bundled corpus."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from attune.platform.core.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """Emotion words, and the valence and arousal of words if known."""

    words: frozenset[str]
    """The emotion words (EmpDG)."""
    valence_arousal: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Both from 0 to 1 (for the lexicon gate of the emotion-cause paper)."""

    def __contains__(self, word: str) -> bool:
        return word in self.words

    def emotional_intensity(self, word: str) -> float:
        """Return the emotional intensity of a word: |valence - 1/2| + arousal, 0 if unknown."""
        if word not in self.valence_arousal:
            return 0.0
        valence, arousal = self.valence_arousal[word]
        return abs(valence - 0.5) + arousal

    def save(self, path: Path) -> None:
        """Write the lexicon as JSON for `load`; sorted, so that the bytes are reproducible."""
        content = {
            "words": sorted(self.words),
            "valence_arousal": {w: list(va) for w, va in sorted(self.valence_arousal.items())},
        }
        path.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, words: Path, valence_arousal: Path | None = None) -> "Lexicon":
        """Load a lexicon from the JSON of `save`, or from NRC's files.

        Words: the word-level file (`word<tab>emotion<tab>0|1`), a JSON whose first element lists
        them, or one word per line. All words of the file count, as in EmpDG, whatever their
        values. Valence and arousal: NRC-VAD (`word<tab>valence<tab>arousal<tab>dominance`, with or
        without header).
        """
        content = _read_lexicon_words(_check_lexicon_exists(words))
        if isinstance(content, dict):
            pairs = {w: (float(v), float(a)) for w, (v, a) in content["valence_arousal"].items()}
            lexicon = cls(words=frozenset(content["words"]), valence_arousal=pairs)
        else:
            lexicon = cls(words=content)
        return lexicon if valence_arousal is None else lexicon.with_valence_arousal(valence_arousal)

    def with_valence_arousal(self, path: Path) -> "Lexicon":
        """Return the lexicon with valence and arousal from NRC-VAD."""
        return replace(self, valence_arousal=_read_valence_arousal(_check_lexicon_exists(path)))


def _check_lexicon_exists(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"no such lexicon file: '{path}'")
    return path


def _read_lexicon_words(path: Path) -> frozenset[str] | dict[str, dict[str, tuple[float, float]]]:
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not readable as JSON: {error}") from error
        if isinstance(content, dict) and {"words", "valence_arousal"} <= set(content):
            return content
        if isinstance(content, list) and content and isinstance(content[0], list):
            return frozenset(map(str, content[0]))
        raise DataError(f"{path}: the first element must be a list of words")
    lines = path.read_text(encoding="utf-8").splitlines()
    words = frozenset(line.split("\t")[0].strip() for line in lines if line.strip())
    if not words:
        raise DataError(f"{path}, row 1: expected a word, but the file has none")
    return words


def _read_valence_arousal(path: Path) -> dict[str, tuple[float, float]]:
    pairs = {}
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        try:
            valence, arousal = float(fields[1]), float(fields[2])
        except (IndexError, ValueError):
            if row == 1:
                continue  # a header
            raise DataError(
                f"{path}, row {row}: expected 'word<tab>valence<tab>arousal<tab>dominance', got "
                f"'{line[:80]}'"
            ) from None
        pairs[fields[0]] = (valence, arousal)
    return pairs
