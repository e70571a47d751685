"""Words that carry feeling: the NRC lexicons, or our own small one for the bundled corpus."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from attune.platform.core.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """Emotional words, and how pleasant and how arousing they are where that is known."""

    words: frozenset[str]
    """What counts as an emotion word (EmpDG)."""
    valence_arousal: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Both from 0 to 1 (the emotion-cause lexicon gate and MK-EDG use them)."""

    def __contains__(self, word: str) -> bool:
        return word in self.words

    def intensity(self, word: str) -> float:
        """How strongly a word is felt: |valence - 1/2| + arousal; 0 where neither is known."""
        if word not in self.valence_arousal:
            return 0.0
        valence, arousal = self.valence_arousal[word]
        return abs(valence - 0.5) + arousal

    def save(self, path: Path) -> None:
        """Write it as our own JSON, which `load` reads back; sorted, so always the same bytes."""
        content = {
            "words": sorted(self.words),
            "valence_arousal": {w: list(va) for w, va in sorted(self.valence_arousal.items())},
        }
        path.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, words: Path, valence_arousal: Path | None = None) -> "Lexicon":
        """From our JSON, or from NRC's files.

        Words: the word-level file (`word<tab>emotion<tab>0|1`), a JSON whose first element lists
        them, or a word a line; all words in it count, as in EmpDG, whatever their marks. Valence
        and arousal: NRC-VAD (`word<tab>valence<tab>arousal<tab>dominance`, with or without header).
        """
        content = _read_words(_check_exists(words))
        if isinstance(content, dict):
            pairs = {w: (float(v), float(a)) for w, (v, a) in content["valence_arousal"].items()}
            lexicon = cls(words=frozenset(content["words"]), valence_arousal=pairs)
        else:
            lexicon = cls(words=content)
        return lexicon if valence_arousal is None else lexicon.with_valence_arousal(valence_arousal)

    def with_valence_arousal(self, path: Path) -> "Lexicon":
        """The same words with NRC-VAD's valence and arousal."""
        return replace(self, valence_arousal=_valence_arousal(_check_exists(path)))


def _check_exists(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"no such lexicon file: '{path}'")
    return path


def _read_words(path: Path) -> frozenset[str] | dict[str, dict[str, tuple[float, float]]]:
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
        raise DataError(f"{path}: row 1: no word in it")
    return words


def _valence_arousal(path: Path) -> dict[str, tuple[float, float]]:
    pairs = {}
    for row, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("\t")
        try:
            valence, arousal = float(fields[1]), float(fields[2])
        except (IndexError, ValueError):
            if row == 1:
                continue  # a header
            raise DataError(
                f"{path}, row {row}: 'word<tab>valence<tab>arousal<tab>dominance' is expected"
            ) from None
        pairs[fields[0]] = (valence, arousal)
    return pairs
