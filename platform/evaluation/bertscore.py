"""BERTScore (Zhang et al. 2020): subwords of answer and reference matched by hidden states.

Each subword of an answer is matched with the nearest one of its reference, by the cosine of their
hidden states in one layer. The mean of these cosines is the precision, and the mean over the
reference's subwords is the recall. There is no idf weighting; [CLS] and [SEP] can be matched but
are not counted, as in the paper's code. An empty answer or reference scores 0. Rescaled scores are
(score - baseline) / (1 - baseline), where the baseline is the score of random pairs of training
responses.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attune.platform.core.errors import UsageError
from attune.platform.core.home import home
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.text import encoders
from attune.platform.text.encoders import TextEncoder

NAMES = ("precision", "recall", "f1")
PAIRS_AT_A_TIME = 64
BASELINE_PAIRS = 2000

Progress = Callable[[int], None]
"""Called with the number of pairs processed since the last call."""
Baseline = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BertScore:
    """An encoder and the layer whose states are compared."""

    encoder: TextEncoder
    layer: int

    @torch.no_grad()
    def pairs(
        self,
        answers: Sequence[str],
        references: Sequence[str],
        progress: Progress = lambda _: None,
    ) -> Tensor:
        """Return precision, recall and F1 of each answer, (N, 3)."""
        hypothesis_ids, reference_ids = (
            self.encoder.subwords(answers),
            self.encoder.subwords(references),
        )
        order = sorted(
            range(len(hypothesis_ids)),
            key=lambda row: len(hypothesis_ids[row]) + len(reference_ids[row]),
        )
        scores = torch.zeros(len(hypothesis_ids), len(NAMES), dtype=torch.float64)
        for start in range(0, len(order), PAIRS_AT_A_TIME):
            rows = order[start : start + PAIRS_AT_A_TIME]
            scores[rows] = self._score_batch(
                [hypothesis_ids[row] for row in rows], [reference_ids[row] for row in rows]
            )
            progress(len(rows))
        return scores

    def baseline(self, folder: Path) -> Baseline | None:
        """Return the score of random pairs of a prepared folder's training responses, or None.

        It is computed once per folder and stored.
        """
        definition = {
            "data": read_dataset_manifest(folder)["hash"],
            "encoder": self.encoder.name,
            "weights": checksum(self.encoder.name),
            "layer": self.layer,
            "pairs": BASELINE_PAIRS,
        }
        digest = hashlib.sha256(json.dumps(definition).encode()).hexdigest()[:16]
        kept = home() / "bertscore" / f"{digest}.json"
        if kept.is_file():
            return tuple(json.loads(kept.read_text(encoding="utf-8"))["baseline"])
        responses = (
            read_dataset_samples(folder, "train")["response_tokens"].drop_nulls().unique().sort()
        )
        if len(responses) < 2:
            return None
        draw = np.random.default_rng(0)
        one = draw.integers(len(responses), size=BASELINE_PAIRS)
        other = (one + draw.integers(1, len(responses), size=BASELINE_PAIRS)) % len(responses)
        scores = self.pairs(responses[one].to_list(), responses[other].to_list())
        baseline_scores = scores.mean(dim=0).tolist()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({**definition, "baseline": baseline_scores}), encoding="utf-8")
        return tuple(baseline_scores)

    def signature(self, baseline: Baseline | None) -> str:
        """Return the definition in one line."""
        rescaling = "none"
        if baseline is not None:
            values = ",".join(f"{value:.4f}" for value in baseline)
            rescaling = f"{BASELINE_PAIRS}-random-train-pairs({values})"
        return (
            f"bertscore.encoder:{self.encoder.name}@{checksum(self.encoder.name)[:8]} "
            f"bertscore.layer:{self.layer} bertscore.idf:no bertscore.text:tokens "
            f"bertscore.baseline:{rescaling}"
        )

    def _score_batch(
        self, hypothesis_ids: list[list[int]], reference_ids: list[list[int]]
    ) -> Tensor:
        own, own_counts = self._hidden_states(hypothesis_ids)  # (B, T, D), (B, T)
        other, other_counts = self._hidden_states(reference_ids)  # (B, S, D), (B, S)
        cosines = own @ other.transpose(1, 2)  # (B, T, S), 0 at paddings
        there = own.any(dim=2)[:, :, None] & other.any(dim=2)[:, None, :]
        cosines = cosines.masked_fill(~there, -1.0)
        precision = _mean_best_cosine(cosines.amax(dim=2), own_counts)
        recall = _mean_best_cosine(cosines.amax(dim=1), other_counts)
        empty = (own_counts.sum(dim=1) == 0) | (other_counts.sum(dim=1) == 0)
        total = precision + recall
        f1 = torch.where(total == 0, 0.0, 2 * precision * recall / total)
        scores = torch.stack([precision, recall, f1], dim=1)
        return scores.masked_fill(empty[:, None], 0.0).double()

    def _hidden_states(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return normalized hidden states, 0 at padding, and a mask of the counted subwords."""
        room = self.encoder.max_length - 2
        rows = [[self.encoder.cls_token, *text[:room], self.encoder.separator] for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True)
        states = torch.nn.functional.normalize(self.encoder.module(padded, self.layer), dim=-1)
        place = torch.arange(padded.shape[1])
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        counts = ((place > 0) & (place < lengths - 1)).to(states)
        return states * (padded > 0)[:, :, None], counts


def _mean_best_cosine(cosines: Tensor, counts: Tensor) -> Tensor:
    return (cosines * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1.0)


def load(text: str) -> BertScore:
    """Load `minilm` or the encoder in a folder; `:LAYER` selects a layer."""
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit():
        name, number = text, ""
    encoder = encoders.load_encoder(name)
    layers = encoder.module.num_layers
    layer = int(number) if number else layers
    if not 0 <= layer <= layers:
        raise UsageError(f"--bertscore {text}: layers of '{name}' are 0 to {layers}")
    return BertScore(encoder=encoder, layer=layer)


def checksum(name: str) -> str:
    """Return a hash of an encoder's weights, because the content of a folder may change."""
    whole = hashlib.sha256()
    for path in sorted(encoders.find_encoder(name).iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def score(
    metric: BertScore,
    answers: Sequence[str],
    references: Sequence[str],
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> tuple[dict[str, float | None], str]:
    """Return the means over all answers, rescaled if there are training responses, and their
    signature."""
    means = metric.pairs(answers, references, progress).mean(dim=0).tolist()
    baseline = None if folder is None else metric.baseline(folder)
    metrics: dict[str, float | None] = {
        f"bertscore_{name}": value for name, value in zip(NAMES, means, strict=True)
    }
    for place, name in enumerate(NAMES):
        metrics[f"bertscore_{name}_rescaled"] = (
            None if baseline is None else (means[place] - baseline[place]) / (1 - baseline[place])
        )
    return metrics, metric.signature(baseline)
