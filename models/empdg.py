"""EmpDG: multi-resolution emotions and interactive adversarial learning (Li et al. 2020).

Beside the context the generator reads its emotion words alone, in the order of the text, behind
`<lab>`, with an encoder of their own (eq. 1-6). The emotion is predicted from both first tokens
(eq. 7-9); what is predicted is a signal that stands at the decoder's first place, and the decoder
attends to both contexts (eq. 10-13). Two critics (`critics.py`), one of what is said and one of the
emotion words in it, learn to tell its responses from people's by what the speaker says next, and
teach it to be taken for a person.

Three stages: the generator by likelihood (eq. 14-15), the critics alone, then both in turn.

How the critics reach the generator: in their stages the decoder is given the true words so far, as
the paper says, and at each place a word is drawn by the Gumbel-max trick. The critics read the
vector of the word that was drawn; the gradient passes through the softmax of the same drawn scores,
divided by `gumbel_temperature`, times the word vectors (straight-through). Word vectors and the
context's states are not moved by what critics say of them, only what is said is.

Deviations: as in `transformer.py`, and
- eq. 15 writes gamma_1 twice; ours weighs the emotion with gamma_1 and the response with gamma_2.
- Critics learn from the samples that the speaker really answers; the generator's likelihood stage
  takes all (`all_samples`).
- On generated words no tagger can run: emotion words there are those that the lexicon and the
  tagger mark in the vocabulary, and the emotional critic reads the drawn words that are marked.
- Critics read the generator's word vectors. The emotional one reads `<lab>` first, so that a
  response without emotion words can be read.
- The generator hears a critic's score divided by the critic's steepness, where that is above 1:
  with the paper's beta = 0.1 it rises to 30 and more, and would drown the likelihood (docs/log.md).
- The best of the adversarial stage is the model that the critics, at steepness 1, tell least from
  people.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from attune.models.base import (
    FOLLOWED,
    PAIRED,
    Batch,
    Batches,
    Choice,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Stage,
    State,
    Update,
)
from attune.models.critics import Critic, Spoken, Surroundings, gentle, penalty
from attune.models.layers import Encoder
from attune.models.multitask import SMALL, emotion_loss
from attune.models.transformer import Embedded, Transformer, TransformerConfig, with_unknowns

SEMANTIC, EMOTIONAL = "semantic", "emotional"


@dataclass(frozen=True, kw_only=True)
class EmpdgConfig(TransformerConfig):
    """The Transformer's, which of the ideas are in, and how they are weighed."""

    emotion_weight: float = 1.0
    """Gamma_1 of eq. 15: of the emotion's cross-entropy."""
    response_weight: float = 1.0
    """Gamma_2 of eq. 15: of the response's likelihood."""
    adversarial_weight: float = 0.05
    """Of what the critics say in the generator's loss. The paper sums likelihood over the tokens of
    a response, of which there are about twenty, and weighs a score of it as much; ours is a mean
    over tokens."""
    penalty_weight: float = 0.1
    """Beta of eq. 19: of the critics' gradient penalty."""
    critic_steps: int = 1
    """Updates of the critics in a round of the adversarial stage."""
    generator_steps: int = 5
    """Updates of the generator in it."""
    gumbel_temperature: float = 1.0
    """How soft the gradient takes the words that were drawn: towards 0 as one word each."""
    all_samples: bool = True
    """Learn likelihood from all samples; otherwise from those that the speaker answers, as the
    other stages do."""
    multiresolution: bool = True
    """Read emotion words beside the context, and let an emotional critic read them too."""
    discriminators: bool = True
    """Learn from critics after likelihood."""

    def __post_init__(self) -> None:
        for name in ("critic_steps", "generator_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is expected")
        if not self.gumbel_temperature > 0:
            raise ValueError(
                f"gumbel_temperature={self.gumbel_temperature}: more than 0 is expected"
            )


@dataclass(frozen=True, kw_only=True)
class Felt(Embedded):
    """A batch as word vectors; the mask spans both contexts, one behind the other."""

    emotional: Tensor
    """(B, E, D) `<lab>` and the emotion words."""


@dataclass(frozen=True, kw_only=True)
class Understood:
    """Both contexts as the decoder sees them."""

    source: Tensor
    """(B, S + E, D)."""
    semantic: Tensor
    """(B, D) the state of `<cls>`."""
    emotional: Tensor
    """(B, D) the state of `<lab>`."""
    emotion: Tensor
    """(B, emotions) logits, e_p."""


class Empdg(Transformer):
    """A generator that reads emotion words, and critics that read what it says."""

    system = "EmpDG"
    paper = "Li et al. 2020"
    Config = EmpdgConfig
    requirements = DataRequirements(
        columns=("context", "context_roles", "response", "emotion", "next_turn", "emotion_words"),
        streams=(PAIRED, FOLLOWED),
    )
    presets: ClassVar = {
        **Transformer.presets,
        "small": {**Transformer.presets["small"], **SMALL, "emotion_weight": 4.0},
    }
    ablations: ClassVar = {
        "empdg-no-multiresolution": {"multiresolution": False},
        "empdg-no-discriminators": {"discriminators": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "loss-weights": {
            "emotion_weight": Range(low=0.1, high=10.0, scale="loguniform"),
            "response_weight": Range(low=0.1, high=10.0, scale="loguniform"),
            "adversarial_weight": Range(low=0.001, high=1.0, scale="loguniform"),
            "penalty_weight": Range(low=0.01, high=10.0, scale="loguniform"),
        },
        "schedule": {
            "critic_steps": Choice(values=(1, 2, 5)),
            "generator_steps": Choice(values=(1, 2, 5)),
            "gumbel_temperature": Range(low=0.1, high=2.0),
        },
    }
    marked: Tensor

    def __init__(self, config: EmpdgConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        width, dimension = config.width, self.embedding.table.weight.shape[1]
        contexts = 2 if config.multiresolution else 1
        self.classifier = nn.Linear(contexts * width, len(data_info.emotions), bias=False)  # W_e
        self.signal = nn.Linear(len(data_info.emotions), width)
        if config.multiresolution:
            self.emotional_encoder = Encoder(
                width, config.num_layers, config.num_heads, config.key_depth, config.filter_width,
                config.dropout,
            )  # fmt: skip
            assert data_info.emotion_words is not None, (
                "emotion words are asked for in `requirements`"
            )
            self.register_buffer("marked", data_info.emotion_words, persistent=False)
        if config.discriminators:
            self.critics = nn.ModuleDict({SEMANTIC: Critic(dimension, width)})
            if config.multiresolution:
                self.critics[EMOTIONAL] = Critic(dimension, width)

    @classmethod
    def stage_independent_settings(cls, config: EmpdgConfig) -> Mapping[str, tuple[str, ...]]:
        """Critics come after likelihood, and are listened to last."""
        if not config.discriminators:
            return {}
        heard = ("adversarial_weight", "critic_steps", "generator_steps", "gumbel_temperature")
        return {"generator": ("penalty_weight",), "critics": heard}

    def stages(self) -> list[Stage]:
        """The generator, the critics, then both in turn."""
        [train] = super().stages()
        generator = tuple(name for name in train.players["model"] if name != "critics")
        likelihood = replace(
            train,
            name="generator",
            players={"generator": generator},
            updates=(replace(train.updates[0], player="generator"),),
            streams=(self._stream(),),
        )
        if not self.config.discriminators:
            return [likelihood]
        criticise = Update(player="critics", losses="critic_losses", weights=self._critic_weights())
        persuade = Update(
            player="generator",
            losses="adversarial_losses",
            weights={**self.loss_weights(), "adversarial": self.config.adversarial_weight},
        )
        critics = Stage(
            name="critics",
            players={"critics": ("critics",)},
            updates=(criticise,),
            streams=(FOLLOWED,),
        )
        adversarial = Stage(
            name="adversarial",
            players={"critics": ("critics",), "generator": generator},
            updates=(
                replace(criticise, repeat=self.config.critic_steps),
                replace(persuade, repeat=self.config.generator_steps),
            ),
            streams=(FOLLOWED,),
            metric="valid_wasserstein",
        )
        return [
            replace(likelihood, share=0.7),
            replace(critics, share=0.1),
            replace(adversarial, share=0.2),
        ]

    def _stream(self) -> str:
        return PAIRED if self.config.all_samples else FOLLOWED

    def loss_weights(self) -> dict[str, float]:
        """Eq. 15."""
        return {"nll": self.config.response_weight, "emotion": self.config.emotion_weight}

    def _critic_weights(self) -> dict[str, float]:
        """Eq. 19: critics want the distance large."""
        distances = {f"wasserstein_{name}": -1.0 for name in self.critics}
        penalties = {f"penalty_{name}": self.config.penalty_weight for name in self.critics}
        return {**distances, **penalties}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Response and emotion (eq. 14-15)."""
        batch = batches[self._stream()]
        words = self.embedded(batch)
        understood = self.understood(words)
        return self._likelihood(batch, words, understood, self._decoded(words, understood))

    def critic_losses(self, batches: Batches, progress: Progress) -> Losses:
        """What each critic makes of people's and of generated responses (eq. 18-19)."""
        batch = batches[FOLLOWED]
        with torch.no_grad():
            words = self.embedded(batch)
            understood = self.understood(words)
            drawn, vectors = self._drawn(self._decoded(words, understood)[words.real])
        terms: Losses = {}
        distances = []
        for name, critic, around in self._critics(batch, understood):
            person = self._person(batch, name)
            generated = self._generated(words.real, drawn, vectors, name)
            more, steepness = critic.compare(person, generated, around)
            terms[f"wasserstein_{name}"] = more.sum() / batch.samples
            terms[f"penalty_{name}"] = penalty(steepness).sum() / batch.samples
            distances.append(gentle(more, steepness).detach())
        return {**terms, "wasserstein": torch.stack(distances).sum() / batch.samples}

    def adversarial_losses(self, batches: Batches, progress: Progress) -> Losses:
        """Likelihood, and what the critics say of what the generator would say."""
        batch = batches[FOLLOWED]
        words = self.embedded(batch)
        understood = self.understood(words)
        hidden = self._decoded(words, understood)
        drawn, vectors = self._drawn(hidden[words.real])
        scores = [
            critic.judged(self._generated(words.real, drawn, vectors, name), around)
            for name, critic, around in self._critics(batch, understood)
        ]
        return {
            **self._likelihood(batch, words, understood, hidden),
            "adversarial": -torch.stack(scores).sum() / batch.samples,
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion from both first tokens."""
        return {"emotion": self.understood(self.embedded(batch)).emotion.log_softmax(dim=-1)}

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Both contexts, and the signal for the first place."""
        words = self.embedded(batch)
        understood = self.understood(words)
        state = self.decoder.begin(understood.source, words.mask)
        return {**state, "first": self._signal(understood)}

    def embedded(self, batch: Batch) -> Felt:
        """Eq. 1 and 4; what tells emotion words from the context is the vector of `<lab>`."""
        context, roles = self.context(batch)
        found = batch["emotion_words"]
        if self.training and self.config.word_dropout:
            found = with_unknowns(found, self.config.word_dropout, self.data_info)
        response, padding = batch["response"], self.data_info.specials["<pad>"]
        if not self.config.multiresolution:
            found = found[:, :0]
        words, speakers, given, felt = self.embedding(context, roles, self.given(response), found)
        both = torch.cat([context, found], dim=1)
        return Felt(
            context=self.dropout(words + speakers + self.positions(context.shape[1])),
            emotional=self.dropout(felt + felt[:, :1] + self.positions(found.shape[1])),
            mask=(both != padding)[:, None, None, :],
            response=self.dropout(given + self.positions(given.shape[1])),
            real=response != padding,
        )

    def understood(self, words: Felt) -> Understood:
        """Eq. 2-3 and 5-8."""
        length = words.context.shape[1]
        semantic = self.encoder(words.context, words.mask[..., :length])
        if not self.config.multiresolution:
            first = semantic[:, 0]
            emotion = self.classifier(first)
            return Understood(source=semantic, semantic=first, emotional=first, emotion=emotion)
        emotional = self.emotional_encoder(words.emotional, words.mask[..., length:])
        first, second = semantic[:, 0], emotional[:, 0]
        return Understood(
            source=torch.cat([semantic, emotional], dim=1),
            semantic=first,
            emotional=second,
            emotion=self.classifier(torch.cat([second, first], dim=1)),
        )

    def log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T)."""
        words = self.embedded(batch)
        hidden, real = self._decoded(words, self.understood(words)), words.real
        values = hidden.new_zeros(real.shape)
        values[real] = self.output.log_likelihood(hidden[real], batch["response"][real])
        return values

    def explain(self, batch: Batch) -> list[Explanation]:
        """The emotion, what each word of the answer looks at in both contexts, and what the critics
        give it where the next turn is known."""
        words = self.embedded(batch)
        understood = self.understood(words)
        looks = self.decoder.looks(self._given(words, understood), understood.source, words.mask)
        length = words.context.shape[1]
        found = words.mask.flatten(1)  # (B, S + E)
        answered = words.real.sum(dim=1) - 1  # without <eos>
        scores = self._scores(batch, understood)
        explanations = []
        for row, explanation in enumerate(super().explain(batch)):
            rows, there = looks[row, : answered[row]], found[row]
            parts = {"context": (rows[:, :length], there[:length])}
            if self.config.multiresolution:
                parts["emotion words"] = (rows[:, length:], there[length:])
            # What is said of <cls> and <lab> is of no word.
            attention = {name: part[:, is_][:, 1:].tolist() for name, (part, is_) in parts.items()}
            given = {name: values[row].item() for name, values in scores.items()}
            known = bool((batch["next_turn"][row] != self.data_info.specials["<pad>"]).any())
            explanations.append(
                replace(explanation, attention=attention, scores=given if known else None)
            )
        return explanations

    def _scores(self, batch: Batch, understood: Understood) -> dict[str, Tensor]:
        """(B,) what each critic gives the response of the batch; nothing where no turn follows."""
        if not self.config.discriminators or not batch["next_turn"].shape[1]:
            return {}
        response = batch["response"]
        real = response != self.data_info.specials["<pad>"]
        drawn = response[real]
        vectors = self._word_vectors()[drawn]
        return {
            name: critic(self._generated(real, drawn, vectors, name), around)
            for name, critic, around in self._critics(batch, understood)
        }

    def _signal(self, understood: Understood) -> Tensor:
        """(B, 1, D) what the decoder is given first."""
        signal: Tensor = self.signal(understood.emotion)
        return signal[:, None] + self.positions(1)

    def _decoded(self, words: Felt, understood: Understood) -> Tensor:
        """(B, T, D), eq. 10-12."""
        hidden: Tensor = self.decoder(self._given(words, understood), understood.source, words.mask)
        return hidden

    def _given(self, words: Felt, understood: Understood) -> Tensor:
        """(B, T, D) what the decoder is given: the signal, then the response so far."""
        return torch.cat([self._signal(understood), words.response[:, 1:]], dim=1)

    def _likelihood(
        self, batch: Batch, words: Felt, understood: Understood, hidden: Tensor
    ) -> Losses:
        return {
            "nll": self.nll(batch, hidden, words),
            "emotion": emotion_loss(understood.emotion, batch),
        }

    def _drawn(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D) -> (N,) words drawn from what is predicted, the likeliest ones outside training,
        and their vectors (N, dimension), through which a gradient reaches the prediction."""
        scores = self.output.logits(hidden)  # (N, V)
        if self.training:  # Gumbel's noise: the largest sum is a sample of the softmax
            scores = scores - torch.empty_like(scores).exponential_().log()
        drawn, table = scores.argmax(dim=1), self._word_vectors()
        vectors = table[drawn]
        if scores.requires_grad:
            soft = (scores / self.config.gumbel_temperature).softmax(dim=1) @ table
            vectors = vectors + (soft - soft.detach())
        return drawn, vectors

    def _word_vectors(self) -> Tensor:
        return self.embedding.table.weight.detach()

    def _generated(self, real: Tensor, drawn: Tensor, vectors: Tensor, critic: str) -> Spoken:
        """Drawn words (N,) at the real places (B, T), as a critic reads them."""
        words = vectors.new_zeros(*real.shape, vectors.shape[1])
        words[real] = vectors
        if critic == SEMANTIC:
            return Spoken(words=words, real=real)
        chosen = torch.zeros_like(real)
        chosen[real] = self.marked[drawn]
        return self._behind_label(words, chosen)

    def _behind_label(self, words: Tensor, chosen: Tensor) -> Spoken:
        """The chosen words (B, T, dimension), moved together behind `<lab>`."""
        label = self._word_vectors()[self.data_info.specials["<lab>"]].expand(len(words), 1, -1)
        words = torch.cat([label, words], dim=1)
        chosen = nn.functional.pad(chosen, (1, 0), value=True)
        counts = chosen.sum(dim=1, keepdim=True)
        real = torch.arange(int(counts.max()), device=counts.device) < counts
        order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, : real.shape[1]]
        kept = words.gather(1, order[..., None].expand(-1, -1, words.shape[2]))
        return Spoken(words=kept * real[..., None], real=real)

    def _person(self, batch: Batch, critic: str) -> Spoken:
        return self._spoken(batch["response" if critic == SEMANTIC else "response_emotion_words"])

    def _spoken(self, tokens: Tensor) -> Spoken:
        real = tokens != self.data_info.specials["<pad>"]
        return Spoken(words=self._word_vectors()[tokens] * real[..., None], real=real)

    def _critics(
        self, batch: Batch, understood: Understood
    ) -> Iterator[tuple[str, Critic, Surroundings]]:
        """Each critic with what it knows beside a response."""
        feedback = {SEMANTIC: "next_turn", EMOTIONAL: "next_turn_emotion_words"}
        context = {SEMANTIC: understood.semantic, EMOTIONAL: understood.emotional}
        for name, critic in self.critics.items():
            assert isinstance(critic, Critic)
            around = Surroundings(
                feedback=self._spoken(batch[feedback[name]]), context=context[name].detach()
            )
            yield name, critic, around
