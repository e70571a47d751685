"""EmpDG: multi-resolution emotions and interactive adversarial learning (Li et al. 2020).

The generator encodes the context, and with a second encoder the emotion words of the context, in
their order and preceded by `<lab>` (eq. 1-6). The emotion is predicted from the states of `<cls>`
and `<lab>` (eq. 7-9). The predicted logits e_p, linearly projected, are the decoder's first input,
and the decoder attends to both encoded sequences (eq. 10-13). Two critics (`critics.py`), one of
the response and one of its emotion words, learn to distinguish generated from gold responses given
the speaker's next turn. Their scores are the generator's adversarial loss.

There are three stages: the generator by maximum likelihood (eq. 14-15), the critics alone, then
both alternately.

Gradient from the critics to the generator: the decoder is teacher-forced, as in the paper, and a
word is sampled at each position by the Gumbel-max trick. The critics read the vector of the sampled
word. Its gradient is that of the softmax of the same perturbed logits, divided by
`gumbel_temperature`, times the word vectors (straight-through). The gradient of the critics' losses
reaches only the generated words, not the word vectors or the states of the context.

Deviations: as in `transformer.py`, and
- Eq. 15 has gamma_1 twice; here gamma_1 weighs the emotion and gamma_2 the response.
- The default weights assume that gamma_1 and gamma_2, 1 in the paper, weigh the summed likelihood
  of a response, rather than the mean per token.
- The critics are trained on samples with a next turn; the generator's likelihood stage uses all
  samples (`all_samples`).
- A tagger cannot run on sampled words. Which tokens of the vocabulary are emotion words is
  precomputed by lexicon and tagger, and the emotional critic reads the sampled tokens among them.
- The critics share the word vectors of the generator. The input of the emotional critic begins with
  `<lab>`, so that a response without emotion words is not empty.
- The adversarial loss is the critics' score, divided by their gradient norm where the norm is above
  1. With the paper's beta = 0.1 the norm rises to 30 and more, and the score would dominate the
  likelihood (docs/log.md).
- The best checkpoint of the adversarial stage has the smallest Wasserstein distance, as estimated
  by the critics normalised to a gradient norm of 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from attune.models.base import (
    FOLLOWED,
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    Count,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Stage,
    Temperature,
    Update,
    Weight,
    extend_presets,
)
from attune.models.critics import (
    Critic,
    CriticCondition,
    EmbeddedUtterance,
    gradient_penalty,
    normalise_by_gradient,
)
from attune.models.layers import Encoder
from attune.models.multitask import (
    EMOTION_PRESETS,
    EMOTION_WEIGHT_RANGE,
    SUMMED_LIKELIHOOD_WEIGHT,
    emotion_loss,
)
from attune.models.transformer import EmbeddedBatch, Transformer, TransformerConfig

SEMANTIC, EMOTIONAL = "semantic", "emotional"


@dataclass(frozen=True, kw_only=True)
class EmpdgConfig(TransformerConfig):
    """Settings of the Transformer, EmpDG's components and the weights of its loss terms."""

    emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion's cross-entropy (gamma_1 of eq. 15). Usually 0.05 to 0.5."""
    response_weight: Weight = 1.0
    """Weight of the response's negative log-likelihood (gamma_2 of eq. 15). Usually 1."""
    adversarial_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the critics' scores in the generator's loss. The paper gives them the weight of the
    likelihood summed over a response's tokens. Usually 0.01 to 0.2."""
    penalty_weight: Weight = 0.1
    """Weight of the critics' gradient penalty (beta of eq. 19). Usually 0.01 to 10."""
    critic_rate: Annotated[float, Bounds(above=0, at_most=1_000)] = 0.3
    """Learning rate of the critics' own stage, where it is constant, as a multiple of the run's.
    Usually 0.1 to 1."""
    adversarial_rate: Annotated[float, Bounds(above=0, at_most=1_000)] = 0.1
    """Learning rate of the adversarial stage, where it decays linearly to 0, as a multiple of the
    run's. The generator comes from a stage that ended at 0. Usually 0.03 to 0.3."""
    critic_steps: Count = 1
    """Updates of the critics per round of the adversarial stage. Usually 1 to 5."""
    generator_steps: Count = 5
    """Updates of the generator per round of the adversarial stage. Usually 1 to 10."""
    gumbel_temperature: Temperature = 1.0
    """Temperature of the softmax through which the gradient reaches the sampled words. Usually 0.5
    to 1."""
    all_samples: bool = True
    """Train the likelihood stage on all samples; if false, only on those with a next turn, as in
    the other stages."""
    multiresolution: bool = True
    """Encode emotion words besides the context, and train an emotional critic on them."""
    discriminators: bool = True
    """Train with critics after the likelihood stage."""


@dataclass(frozen=True, kw_only=True)
class MultiResolutionInputs(EmbeddedBatch):
    """An embedded batch with emotion words; the mask covers the context, then the emotion words."""

    emotion_words: Tensor
    """(B, E, D), `<lab>` and the emotion words of the context."""


class Empdg(Transformer):
    """A generator with a second encoder of emotion words, and critics of its responses."""

    system = "EmpDG"
    paper = "Li et al. 2020"
    Config = EmpdgConfig
    requirements = DataRequirements(
        columns=("context", "context_roles", "response", "emotion", "next_turn", "emotion_words"),
        streams=(PAIRED, FOLLOWED),
    )
    validation_metrics = (
        "nll", "emotion", "emotion_accuracy", "adversarial", "wasserstein", "wasserstein_semantic",
        "wasserstein_emotional", "penalty_semantic", "penalty_emotional",
    )  # fmt: skip
    presets: ClassVar = extend_presets(
        EMOTION_PRESETS,
        tiny={"emotion_weight": 1.0},
        small={"emotion_weight": 4.0},
        compact={"emotion_weight": 0.2, "max_epochs": 9},
    )
    ablations: ClassVar = {
        "empdg-no-multiresolution": {"multiresolution": False},
        "empdg-no-discriminators": {"discriminators": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            "emotion_weight": EMOTION_WEIGHT_RANGE,
            "response_weight": Range(low=0.3, high=3.0, scale="loguniform"),
            "adversarial_weight": Range(low=0.001, high=1.0, scale="loguniform"),
            "penalty_weight": Range(low=0.01, high=10.0, scale="loguniform"),
        },
        "schedule": {
            "critic_rate": Range(low=0.03, high=1.0, scale="loguniform"),
            "adversarial_rate": Range(low=0.01, high=1.0, scale="loguniform"),
            "critic_steps": Choice(values=(1, 2, 5)),
            "generator_steps": Choice(values=(1, 2, 5)),
            "gumbel_temperature": Range(low=0.1, high=2.0),
        },
    }
    is_emotion_word: Tensor
    """(num_tokens,), True for emotion words."""

    def __init__(self, config: EmpdgConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width, dimension = config.width, self.embedding.table.weight.shape[1]
        num_encoders = 2 if config.multiresolution else 1
        self.classifier = nn.Linear(  # W_e
            num_encoders * width, len(data_info.emotions), bias=False
        )
        self.signal = nn.Linear(len(data_info.emotions), width)
        if config.multiresolution:
            self.emotional_encoder = Encoder(config.layer_shape, config.num_layers)
            assert data_info.emotion_words is not None, "`requirements` include emotion words"
            self.register_buffer("is_emotion_word", data_info.emotion_words, persistent=False)
        if config.discriminators:
            self.critics = nn.ModuleDict({SEMANTIC: Critic(dimension, width)})
            if config.multiresolution:
                self.critics[EMOTIONAL] = Critic(dimension, width)

    @classmethod
    def stage_independent_settings(cls, config: EmpdgConfig) -> Mapping[str, tuple[str, ...]]:
        """Return the settings of critics and adversarial losses, which earlier stages do not
        have."""
        if not config.discriminators:
            return {}
        adversarial = (
            "adversarial_rate", "adversarial_weight", "critic_steps", "generator_steps",
            "gumbel_temperature",
        )  # fmt: skip
        return {"generator": ("critic_rate", "penalty_weight"), "critics": adversarial}

    def stages(self) -> list[Stage]:
        """Return the stages: the generator, the critics, then both alternately."""
        [train] = super().stages()
        generator = tuple(name for name in train.players["model"] if name != "critics")
        likelihood = replace(
            train,
            name="generator",
            players={"generator": generator},
            updates=(replace(train.updates[0], player="generator"),),
            streams=(self._empdg_likelihood_stream(),),
        )
        if not self.config.discriminators:
            return [likelihood]
        critic_update = Update(
            player="critics", losses="empdg_critic_losses", weights=self._empdg_critic_weights()
        )
        generator_update = Update(
            player="generator",
            losses="empdg_adversarial_losses",
            weights={**self.loss_weights(), "adversarial": self.config.adversarial_weight},
        )
        critics = Stage(
            name="critics",
            players={"critics": ("critics",)},
            updates=(critic_update,),
            streams=(FOLLOWED,),
            rate=self.config.critic_rate,
            schedule="constant",
        )
        adversarial = Stage(
            name="adversarial",
            players={"critics": ("critics",), "generator": generator},
            updates=(
                replace(critic_update, repeat=self.config.critic_steps),
                replace(generator_update, repeat=self.config.generator_steps),
            ),
            streams=(FOLLOWED,),
            rate=self.config.adversarial_rate,
            schedule="linear",
            metric="valid_wasserstein",
        )
        return [
            replace(likelihood, share=0.7),
            replace(critics, share=0.1),
            replace(adversarial, share=0.2),
        ]

    def _empdg_likelihood_stream(self) -> str:
        """Return the stream of the likelihood stage."""
        return PAIRED if self.config.all_samples else FOLLOWED

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of eq. 15."""
        return {"nll": self.config.response_weight, "emotion": self.config.emotion_weight}

    def _empdg_critic_weights(self) -> dict[str, float]:
        """Return the weights of eq. 19. The critics maximise the distances."""
        distances = {f"wasserstein_{name}": -1.0 for name in self.critics}
        penalties = {f"penalty_{name}": self.config.penalty_weight for name in self.critics}
        return {**distances, **penalties}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms of eq. 15: response and emotion."""
        batch = batches[self._empdg_likelihood_stream()]
        embedded = self.embed(batch)
        c = self.encode_context(embedded)
        return self._empdg_generator_losses(batch, embedded, c, self.decode(embedded, c))

    def empdg_critic_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the distance and the gradient penalty of each critic (eq. 18-19), and the sum of
        the distances by normalised critics."""
        batch = batches[FOLLOWED]
        with torch.no_grad():
            embedded = self.embed(batch)
            c = self.encode_context(embedded)
            decoded = self.decode(embedded, c)
            tokens, vectors = self._sample_words(decoded[embedded.response_mask])
        terms: Losses = {}
        distances = []
        for name, critic, condition in self._empdg_critics_with_conditions(batch, embedded, c):
            gold = self._embed_gold_response(batch, name)
            generated = self._build_critic_input(embedded.response_mask, tokens, vectors, name)
            difference, gradient_norm = critic.compare(gold, generated, condition)
            terms[f"wasserstein_{name}"] = difference.sum() / batch.samples
            terms[f"penalty_{name}"] = gradient_penalty(gradient_norm).sum() / batch.samples
            distances.append(normalise_by_gradient(difference, gradient_norm).detach())
        return {**terms, "wasserstein": torch.stack(distances).sum() / batch.samples}

    def empdg_adversarial_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the terms of eq. 15 and the negative scores of sampled responses."""
        batch = batches[FOLLOWED]
        embedded = self.embed(batch)
        c = self.encode_context(embedded)
        decoded, mask = self.decode(embedded, c), embedded.response_mask
        tokens, vectors = self._sample_words(decoded[mask])
        scores = [
            critic.normalised_score(
                self._build_critic_input(mask, tokens, vectors, name), condition
            )
            for name, critic, condition in self._empdg_critics_with_conditions(batch, embedded, c)
        ]
        return {
            **self._empdg_generator_losses(batch, embedded, c, decoded),
            "adversarial": -torch.stack(scores).sum() / batch.samples,
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Predict the emotion from the states of `<cls>` and `<lab>` (eq. 7-8)."""
        embedded = self.embed(batch)
        e_p = self.classify_emotion(embedded, self.encode_context(embedded))
        return {"emotion": e_p.log_softmax(dim=-1)}

    def embed(self, batch: Batch) -> MultiResolutionInputs:
        """Embed context, emotion words and response (eq. 1 and 4). The embedding of `<lab>` is also
        the emotion state embedding, which is added to each emotion word."""
        context, roles = self.prepare_context(batch)
        emotion_words = self.word_dropout(batch["emotion_words"])
        response, padding = batch["response"], self.data_info.specials["<pad>"]
        if not self.config.multiresolution:
            emotion_words = emotion_words[:, :0]
        e_context, e_roles, e_response, e_emotion_words = self.embedding(
            context, roles, self.shift_right(response), emotion_words
        )
        e_state = e_emotion_words[:, :1]  # <lab> is always first
        both = torch.cat([context, emotion_words], dim=1)
        return MultiResolutionInputs(
            context=self.dropout(e_context + e_roles + self.positions(context.shape[1])),
            emotion_words=self.dropout(
                e_emotion_words + e_state + self.positions(emotion_words.shape[1])
            ),
            attention_mask=(both != padding)[:, None, None, :],
            decoder_inputs=self.dropout(e_response + self.positions(e_response.shape[1])),
            response_mask=response != padding,
        )

    def encode_context(self, embedded: EmbeddedBatch) -> Tensor:
        """Return C = [C_u; C_e], the encoded context and emotion words, (B, S + E, D) (eq. 2-3 and
        5-6)."""
        assert isinstance(embedded, MultiResolutionInputs)
        length = embedded.context.shape[1]
        c_u: Tensor = self.encoder(embedded.context, embedded.attention_mask[..., :length])
        if not self.config.multiresolution:
            return c_u
        c_e = self.emotional_encoder(embedded.emotion_words, embedded.attention_mask[..., length:])
        return torch.cat([c_u, c_e], dim=1)

    def first_states(self, embedded: EmbeddedBatch, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return x_0 and w_0, the states of `<cls>` and `<lab>`, (B, D) each; x_0 for both without
        emotion words."""
        return c[:, 0], c[:, embedded.context.shape[1] if self.config.multiresolution else 0]

    def classify_emotion(self, embedded: EmbeddedBatch, c: Tensor) -> Tensor:
        """Return e_p, the logits of the emotion (B, emotions)."""
        x_0, w_0 = self.first_states(embedded, c)
        e_p: Tensor = self.classifier(
            torch.cat([w_0, x_0], dim=1) if self.config.multiresolution else x_0
        )  # eq. 7
        return e_p

    def first_decoder_input(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return y_0, the projected emotion signal e'_p, (B, 1, D)."""
        return self.embed_first_input(self.signal(self.classify_emotion(embedded, hidden)))

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the emotion, the attention of each word of the response to context and emotion
        words, and the critics' scores if the next turn is known."""
        embedded = self.embed(batch)
        c = self.encode_context(embedded)
        weights = self.decoder.attention_weights(
            self.decoder_inputs(embedded, c), c, embedded.attention_mask
        )  # (B, T, S + E)
        length = embedded.context.shape[1]
        is_real = embedded.attention_mask.flatten(1)  # (B, S + E)
        num_words = embedded.response_mask.sum(dim=1) - 1  # without <eos>
        scores = self._empdg_critic_scores(batch, embedded, c)
        explanations = []
        for row, explanation in enumerate(super().explain(batch)):
            rows, mask = weights[row, : num_words[row]], is_real[row]
            parts = {"context": (rows[:, :length], mask[:length])}
            if self.config.multiresolution:
                parts["emotion words"] = (rows[:, length:], mask[length:])
            # The first tokens, <cls> and <lab>, are not words.
            attention = {
                name: part[:, part_mask][:, 1:].tolist()
                for name, (part, part_mask) in parts.items()
            }
            row_scores = {name: values[row].item() for name, values in scores.items()}
            has_feedback = bool((batch["next_turn"][row] != self.data_info.specials["<pad>"]).any())
            explanations.append(
                replace(
                    explanation,
                    attention=attention,
                    scores=row_scores if has_feedback else None,
                )
            )
        return explanations

    def _empdg_critic_scores(
        self, batch: Batch, embedded: EmbeddedBatch, c: Tensor
    ) -> dict[str, Tensor]:
        """Return each critic's score of the responses of the batch, (B,); empty without critics or
        next turns."""
        if not self.config.discriminators or not batch["next_turn"].shape[1]:
            return {}
        response = batch["response"]
        mask = response != self.data_info.specials["<pad>"]
        tokens = response[mask]
        vectors = self._word_vectors()[tokens]
        return {
            name: critic(self._build_critic_input(mask, tokens, vectors, name), condition)
            for name, critic, condition in self._empdg_critics_with_conditions(batch, embedded, c)
        }

    def _empdg_generator_losses(
        self, batch: Batch, embedded: EmbeddedBatch, c: Tensor, decoded: Tensor
    ) -> Losses:
        """Return the terms of eq. 15 from C (B, S + E, D) and the decoder's hidden states (B, T,
        D)."""
        return {
            "nll": self.compute_nll(batch, decoded, embedded),  # eq. 14
            "emotion": emotion_loss(self.classify_emotion(embedded, c), batch),  # eq. 9
        }

    def _sample_words(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token from each hidden state (N, D); in evaluation return the most likely one.

        The results are the tokens (N,) and their vectors (N, dimension). The gradient of a vector
        is that of the mean of all word vectors, weighted by the softmax (straight-through).
        """
        logits = self.output.logits(hidden)  # (N, V)
        if self.training:  # with Gumbel noise the argmax is a sample from the softmax
            logits = logits - torch.empty_like(logits).exponential_().log()
        tokens, table = logits.argmax(dim=1), self._word_vectors()
        vectors = table[tokens]
        if logits.requires_grad:
            soft = (logits / self.config.gumbel_temperature).softmax(dim=1) @ table
            vectors = vectors + (soft - soft.detach())
        return tokens, vectors

    def _word_vectors(self) -> Tensor:
        """Return the word vectors, (V, dimension), without a gradient."""
        return self.embedding.table.weight.detach()

    def _build_critic_input(
        self, mask: Tensor, tokens: Tensor, vectors: Tensor, critic: str
    ) -> EmbeddedUtterance:
        """Return the input of a critic, from the tokens (N,) and vectors (N, dimension) of
        responses at the positions of a mask (B, T)."""
        padded = vectors.new_zeros(*mask.shape, vectors.shape[1])
        padded[mask] = vectors
        if critic == SEMANTIC:
            return EmbeddedUtterance(vectors=padded, mask=mask)
        is_emotion_word = torch.zeros_like(mask)
        is_emotion_word[mask] = self.is_emotion_word[tokens]
        return self._keep_words_after_label(padded, is_emotion_word)

    def _keep_words_after_label(self, vectors: Tensor, selected: Tensor) -> EmbeddedUtterance:
        """Return `<lab>` followed by the words (B, T, dimension) that are selected (B, T), without
        gaps."""
        label = self._word_vectors()[self.data_info.specials["<lab>"]].expand(len(vectors), 1, -1)
        vectors = torch.cat([label, vectors], dim=1)
        selected = nn.functional.pad(selected, (1, 0), value=True)
        counts = selected.sum(dim=1, keepdim=True)
        mask = torch.arange(int(counts.max()), device=counts.device) < counts
        order = (~selected).to(torch.uint8).argsort(dim=1, stable=True)[:, : mask.shape[1]]
        kept = vectors.gather(1, order[..., None].expand(-1, -1, vectors.shape[2]))
        return EmbeddedUtterance(vectors=kept * mask[..., None], mask=mask)

    def _embed_gold_response(self, batch: Batch, critic: str) -> EmbeddedUtterance:
        """Return the gold response as a critic's input."""
        column = "response" if critic == SEMANTIC else "response_emotion_words"
        return self._embed_utterance(batch[column])

    def _embed_utterance(self, tokens: Tensor) -> EmbeddedUtterance:
        """Return the word vectors of tokens (B, T)."""
        mask = tokens != self.data_info.specials["<pad>"]
        return EmbeddedUtterance(vectors=self._word_vectors()[tokens] * mask[..., None], mask=mask)

    def _empdg_critics_with_conditions(
        self, batch: Batch, embedded: EmbeddedBatch, c: Tensor
    ) -> Iterator[tuple[str, Critic, CriticCondition]]:
        """Yield the name of each critic, the critic and its condition."""
        feedback = {SEMANTIC: "next_turn", EMOTIONAL: "next_turn_emotion_words"}
        x_0, w_0 = self.first_states(embedded, c)
        context = {SEMANTIC: x_0, EMOTIONAL: w_0}
        for name, critic in self.critics.items():
            assert isinstance(critic, Critic)
            condition = CriticCondition(
                feedback=self._embed_utterance(batch[feedback[name]]),
                context=context[name].detach(),
            )
            yield name, critic, condition
