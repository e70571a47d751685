"""Answer conversations with a trained model, and explain the answers."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from attune.models.base import Batch, DialogueVariant, Explanation
from attune.models.decoding import Decoding, decode, stream
from attune.platform.batching.encoding import PADDING, Columns
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.settings import find_variant, override_settings
from attune.platform.data.conversations import LISTENER, SPEAKER
from attune.platform.data.samples import SAMPLES
from attune.platform.enrichment.classifier import add_context_labels
from attune.platform.runs.model import load_model
from attune.platform.runs.record import Run
from attune.platform.text.detokenizing import detokenize
from attune.platform.text.tokenizing import tokenize, tokenize_few
from attune.platform.text.vocabulary import END

FEW_TEXTS = 64
"""Maximum number of texts that are tokenized without polars, whose calls are slow for few texts."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer, its explanation and the time it took."""

    text: str
    seconds: float
    explanation: Explanation


class Responder:
    """Generates and explains answers with the model in a folder.

    A conversation is a list of turns: speaker, listener, speaker ...; the last is the speaker's.
    """

    def __init__(self, folder: Path):
        self.model = load_model(folder)
        if not isinstance(self.model.variant, DialogueVariant):
            raise UsageError(f"'{self.model.name}' does not answer: it is a classifier")
        self.variant = self.model.variant
        labeller = self.model.labeller
        self.labeller = None if labeller is None else load_model(labeller)

    def respond(
        self,
        conversations: Sequence[Sequence[str]],
        decoding: Decoding = Decoding(),  # noqa: B008
        controls: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """Return the answer to each conversation; all conversations are decoded as one batch."""
        started = time.perf_counter()
        batch = self._batch(conversations)
        self._check(controls)
        responses = decode(self.variant, batch, decoding, controls)
        explanations = self._explain(batch, responses)
        seconds = (time.perf_counter() - started) / max(len(conversations), 1)
        return [
            Answer(text=self._text(tokens), seconds=seconds, explanation=explanation)
            for tokens, explanation in zip(responses, explanations, strict=True)
        ]

    def respond_with_scores(self, samples: pl.DataFrame) -> list[dict[str, Any]]:
        """Return answers to samples, with the critics' scores of them and of the true responses.

        The scores are empty if the model has no critics or the sample has no next turn.
        """
        batch = _make_batch(self.model.columns(samples))
        answers = decode(self.variant, batch, Decoding())
        people = [row[row != PADDING].tolist()[:-1] for row in batch["response"]]  # without <eos>
        answer_explanations, person_explanations = (
            self._explain(batch, answers),
            self._explain(batch, people),
        )
        return [
            {
                "context": row["context"],
                "response": row["response"],
                "next_turn": row["next_turn"],
                "answer": self._text(answer),
                "scores": dict(answer_explanation.scores or {}),
                "person_scores": dict(person_explanation.scores or {}),
            }
            for row, answer, answer_explanation, person_explanation in zip(
                samples.iter_rows(named=True),
                answers,
                answer_explanations,
                person_explanations,
                strict=True,
            )
        ]

    def stream(
        self,
        conversation: Sequence[str],
        decoding: Decoding = Decoding(),  # noqa: B008
        controls: Mapping[str, str] | None = None,
    ) -> Iterator[str]:
        """Yield the partial answer after each token."""
        self._check(controls)
        tokens: list[int] = []
        for token in stream(self.variant, self._batch([conversation]), decoding, controls):
            tokens.append(token)
            yield self._text(tokens)

    def follow(
        self,
        conversation: Sequence[str],
        decoding: Decoding = Decoding(),  # noqa: B008
        controls: Mapping[str, str] | None = None,
    ) -> Iterator[Answer]:
        """Yield an empty answer that explains the conversation, then partial and complete answers.

        `seconds` counts the time in the model, not the time until the next token is requested.
        """
        started = time.perf_counter()
        self._check(controls)
        batch = self._batch([conversation])
        [explanation] = self._explain(batch, [[]])
        token_stream = stream(self.variant, batch, decoding, controls)
        tokens: list[int] = []
        seconds = 0.0
        while True:
            seconds += time.perf_counter() - started
            yield Answer(text=self._text(tokens), seconds=seconds, explanation=explanation)
            started = time.perf_counter()
            token = next(token_stream, None)
            if token is None:
                break
            tokens.append(token)
        [explanation] = self._explain(batch, [tokens])
        seconds += time.perf_counter() - started
        yield Answer(text=self._text(tokens), seconds=seconds, explanation=explanation)

    @torch.no_grad()
    def _explain(self, batch: Batch, answers: Sequence[Sequence[int]]) -> list[Explanation]:
        """Return the explanation of each answer, with the words that its values refer to."""
        end = self.variant.data_info.specials[END]
        responses = [torch.tensor([*answer, end]) for answer in answers]
        padded = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True, padding_value=PADDING)
        answered = dataclasses.replace(batch, tensors={**batch.tensors, "response": padded})
        return [
            self._add_words(explanation, batch, row, answers[row])
            for row, explanation in enumerate(self.variant.explain(answered))
        ]

    def _add_words(
        self, explanation: Explanation, batch: Batch, row: int, answer: Sequence[int]
    ) -> Explanation:
        """Return an explanation with the words that its values refer to."""
        if explanation.by_word or explanation.attention:
            words = self._words(batch["context"][row])
            explanation = dataclasses.replace(explanation, words=words)
        if explanation.attention:
            explanation = dataclasses.replace(
                explanation,
                emotion_words=self._words(batch["emotion_words"][row]),
                answer_words=self.model.vocabulary.decode(answer),
            )
        if explanation.imagined_tokens is not None:
            imagined = self._text(explanation.imagined_tokens)
            explanation = dataclasses.replace(explanation, imagined=imagined)
        return explanation

    def _words(self, tokens: torch.Tensor) -> list[str]:
        """Return the words after `<cls>` or `<lab>`, without padding."""
        return self.model.vocabulary.decode_each(
            tokens[1 : int((tokens != PADDING).sum())].tolist()
        )

    def _batch(self, conversations: Sequence[Sequence[str]]) -> Batch:
        for number, turns in enumerate(conversations, start=1):
            if len(turns) % 2 == 0 or not all(turn.strip() for turn in turns):
                raise UsageError(
                    f"conversation {number} has {len(turns)} turns: they alternate speaker, "
                    f"listener, speaker; the last is the speaker's, and none is empty"
                )
        frame = pl.DataFrame({"context": conversations}, schema={"context": SAMPLES["context"]})
        texts = frame.explode("context")["context"]
        counts = frame["context"].list.len()
        tokens = iter(tokenize_few(texts) if len(texts) <= FEW_TEXTS else tokenize(texts))
        roles = (SPEAKER, LISTENER)
        samples = SAMPLES.to_frame(eager=True).clear(len(conversations))
        samples = samples.with_columns(
            frame["context"],
            context_tokens=pl.Series([[next(tokens) for _ in range(n)] for n in counts]),
            context_roles=pl.Series([[roles[turn % 2] for turn in range(n)] for n in counts]),
        )
        if self.labeller is not None:
            samples = add_context_labels(self.labeller, samples)
        return _make_batch(self.model.columns(samples))

    def _check(self, controls: Mapping[str, str] | None) -> None:
        known = self.variant.controls_for(self.variant.config)
        check_controls(self.model.name, known, controls or {})

    def _text(self, tokens: Sequence[int]) -> str:
        return detokenize(self.model.vocabulary.decode(tokens))


def _make_batch(columns: Columns) -> Batch:
    """Return all samples as one batch in their original order; the stream sorts them by length."""
    [batch] = Stream(columns, size=len(columns["index"]), shuffle=False).epoch()
    order = batch["index"].argsort()
    rows = {name: tensor[order] for name, tensor in batch.tensors.items()}
    return Batch(tensors=rows, samples=batch.samples, tokens=batch.tokens)


def run_controls(run: Run) -> Mapping[str, Sequence[str]]:
    """Return the controls of a run's variant and their possible values."""
    variant = find_variant(run.variant)[0]
    if not issubclass(variant, DialogueVariant):
        return {}
    return variant.controls_for(override_settings(variant.Config(), run.config))


def check_controls(
    model_name: str, known: Mapping[str, Sequence[str]], controls: Mapping[str, str]
) -> None:
    """Raise UsageError if a control or its value is unknown to the model."""
    for name, value in controls.items():
        if not known:
            raise UsageError(f"control '{name}': {model_name} has no controls")
        if name not in known:
            raise UsageError(unknown_choice_error("control", name, known))
        if value not in known[name]:
            raise UsageError(unknown_choice_error(f"value of {name}", value, known[name]))
