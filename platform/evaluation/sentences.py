"""Sentence-embedding similarity of answers and responses.

It is the cosine of the mean hidden states of an encoder's last layer over all subwords, including
[CLS] and [SEP], as in the training of sentence encoders; averaged over all pairs. An empty answer
or response scores 0. Values of different encoders are not comparable: Xie and Pu 2021 use
Sentence-BERT.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attune.platform.evaluation.bertscore import checksum
from attune.platform.text.encoders import TextEncoder

NAME = "sentence_similarity"
PAIRS_AT_A_TIME = 64

Progress = Callable[[int], None]
"""Called with the number of pairs processed since the last call."""


def score(
    encoder: TextEncoder,
    answers: Sequence[str],
    references: Sequence[str],
    progress: Progress = lambda _: None,
) -> tuple[dict[str, float | None], str]:
    """Return the mean over all answers and its signature."""
    values = similarities(encoder, answers, references, progress)
    name = f"{encoder.name}@{checksum(encoder.name)[:8]}"
    signature = f"sentence.encoder:{name} sentence.pooling:mean sentence.text:tokens"
    return {NAME: float(values.mean()) if len(values) else None}, signature


@torch.no_grad()
def similarities(
    encoder: TextEncoder,
    answers: Sequence[str],
    references: Sequence[str],
    progress: Progress = lambda _: None,
) -> Tensor:
    """Return the cosine of each answer with its response, (N,)."""
    hypothesis_ids, reference_ids = encoder.subwords(answers), encoder.subwords(references)
    order = sorted(
        range(len(hypothesis_ids)),
        key=lambda row: len(hypothesis_ids[row]) + len(reference_ids[row]),
    )
    values = torch.zeros(len(hypothesis_ids), dtype=torch.float64)
    for start in range(0, len(order), PAIRS_AT_A_TIME):
        rows = order[start : start + PAIRS_AT_A_TIME]
        own, other = (
            _embed_texts(encoder, [text[row] for row in rows])
            for text in (hypothesis_ids, reference_ids)
        )
        values[rows] = (own * other).sum(dim=1).double()
        progress(len(rows))
    return values


def _embed_texts(encoder: TextEncoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return unit vectors, (B, width); 0 for a text without subwords."""
    room = encoder.max_length - 2
    rows = [torch.tensor([encoder.cls_token, *text[:room], encoder.separator]) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(rows, True)
    there = (padded > 0)[:, :, None]
    mean = (encoder.module(padded) * there).sum(dim=1) / there.sum(dim=1)
    spoken = torch.tensor([len(text) > 0 for text in texts])[:, None]
    return torch.nn.functional.normalize(mean, dim=1) * spoken
