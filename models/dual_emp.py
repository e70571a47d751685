"""Dual-Emp: two directions of a dialogue that agree on an emotion (Shen et al. 2021).

A forward model says a response to a context, a backward model of its own weights a context to a
response (eq. 1-2). Between them stands the consensus, one of K states that either can be asked for:
q(z | c) and q(z | y) are read off the state of `<cls>` (eq. 3), its vector tells the emotion (eq.
4-5), stands at the decoders' first place and is attended to beside the source (eq. 6-9).

Pairs teach both directions under both posteriors (eq. 10-13). A context without a response teaches
by what is said to it: from the sampled response and the consensus the backward model must tell the
context again (eq. 14-16), and the forward model learns to say what it can be told from; responses
without a context likewise (eq. 17-19). An answer needs the forward model alone.

Deviations: as in `transformer.py`, and
- Likelihoods are means over a text's tokens and not sums, so that a context of sixty words does not
  count four times as much as a response of fifteen; their bounds' divergences are divided likewise.
- Eq. 16's reward is a probability of some forty words, which is 0 in any float; ours is its
  logarithm, a token's mean. What the other samples of the batch get on average is subtracted from
  it (`reward_baseline`), and the sampled text's likelihood is a token's mean, too.
- Eq. 7 attends to a single vector, which gets all of every word's attention: of its queries, keys
  and values the values remain.
- The emotion is that of all states, each counted with its share of q(z): texts whose drawn states
  are the same early on would keep sharing them.
- Eq. 13's alpha weighs the emotion's loss under both posteriors, each of which tells it.
- Directions share word vectors, and each has an output layer of its own unless `tied`.
- A context that the backward model imagines has no turns: all of it is the speaker's.
- Unpaired texts are learned from at once: `paired_steps` is 0.
- Perplexity is taken, and answers are made, at the likeliest state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attune.models.base import (
    CONTEXTS,
    PAIRED,
    RESPONSES,
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
)
from attune.models.decoding import sample_categorical
from attune.models.latents import annealing_weight
from attune.models.layers import Decoder, DecoderLayer, Encoder, FeedForward
from attune.models.multitask import SMALL
from attune.models.output_layer import OutputLayer
from attune.models.transformer import Transformer, TransformerConfig, drop_words

SPEAKER, LISTENER = "<speaker>", "<listener>"
SURE = 5.0
"""How far the logit of a state's own emotion is above the others' at first."""


@dataclass(frozen=True, kw_only=True)
class DualEmpConfig(TransformerConfig):
    """The Transformer's, which of the ideas are in, and how they are weighed."""

    num_states: int = 32
    """K: the states of the consensus."""
    emotion_weight: float = 1.0
    """Alpha of eq. 13: of the emotion's loss on pairs."""
    context_emotion_weight: float = 1.0
    """Beta of eq. 18: of the emotion's loss on unpaired contexts."""
    response_emotion_weight: float = 1.0
    """Gamma of eq. 19: of the emotion's loss on unpaired responses."""
    divergence_weight: float = 1.0
    """Of the posteriors' divergence from the uniform prior, once it has risen."""
    policy_weight: float = 1.0
    """Of what sampled texts learn from their reward, beside the reconstruction's likelihood."""
    annealing_steps: int = 10_000
    """Steps in which the divergence's weight rises from 0; 0 weighs it fully from the first on."""
    expectation: Literal["gumbel", "exact", "mean"] = "gumbel"
    """How likelihoods are averaged over the consensus: by a state drawn for each sample (Gumbel's
    trick, straight-through), over all K states, or with the mean of their vectors."""
    gumbel_temperature: float = 1.0
    """How soft the gradient takes the states that were drawn: towards 0 as one state each."""
    reward_baseline: Literal["batch", "none"] = "batch"
    """What is subtracted from a reward: the mean of the batch's others, or nothing."""
    paired_steps: int = 0
    """Steps of pairs alone before unpaired texts join."""
    unpaired_every: int = 1
    """Unpaired texts join every so many steps: where they are few, each would be seen more often
    than any pair, and come to be the answer to everything."""
    sampled_response_tokens: int = 30
    """Longest response that is sampled to an unpaired context."""
    sampled_context_tokens: int = 40
    """Longest context that is imagined for a response."""
    harvest: str = ""
    """Folder of `attune data harvest` with unpaired contexts and responses; without one, the data's
    own are taken, which the bundled corpus has."""
    harvest_threshold: float = 0.6
    """s: how sure the classifier must have been of an unpaired text's emotion."""
    dual: bool = True
    """Have a backward model; without, only q(z | c) and the forward direction remain."""
    unpaired: bool = True
    """Learn from unpaired texts, too."""

    def __post_init__(self) -> None:
        if self.unpaired and not self.dual:
            raise ValueError("unpaired=true needs dual=true: who tells the context again?")
        if not self.gumbel_temperature > 0:
            raise ValueError(
                f"gumbel_temperature={self.gumbel_temperature}: more than 0 is expected"
            )
        if self.unpaired_every < 1:
            raise ValueError(f"unpaired_every={self.unpaired_every}: at least 1 is expected")


class ConsensusDecoderLayer(DecoderLayer):
    """A decoder layer that attends to the source and to the consensus (eq. 6-8)."""

    def __init__(
        self, width: int, num_heads: int, key_depth: int, filter_width: int, dropout: float,
        activation: type[nn.Module] = nn.ReLU,
    ):  # fmt: skip
        super().__init__(width, num_heads, key_depth, filter_width, dropout, activation)
        self.consensus = nn.Sequential(  # the values of eq. 7, and out of its heads
            nn.Linear(width, key_depth, bias=False), nn.Linear(key_depth, width, bias=False)
        )
        self.feed_forward_norm = nn.LayerNorm(2 * width)
        self.feed_forward = FeedForward(
            width, filter_width, dropout, input_width=2 * width, activation=activation
        )

    def project_kv(self, source: Tensor, condition: Tensor | None = None) -> tuple[Tensor, ...]:
        """Keys and values of the source, and what is made of the consensus's vector (B, D)."""
        assert condition is not None
        return (*super().project_kv(source), self.consensus(condition)[:, None])

    def _apply_feed_forward(self, hidden: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        both = torch.cat([hidden, source[-1].expand_as(hidden)], dim=-1)  # [C_H; C_Z]
        return super()._apply_feed_forward(both, source)


class Direction(nn.Module):
    """What reads a text, infers the consensus from it, and says the other text."""

    def __init__(self, encoder: Encoder, decoder: Decoder, output: OutputLayer, num_states: int):
        super().__init__()
        width = encoder.norm.weight.shape[0]
        self.encoder, self.decoder, self.output = encoder, decoder, output
        # Not ReLU, which leaves so little of what tells emotions apart at first that the posterior
        # stays even for epochs (docs/log.md).
        self.posterior = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_states)
        )


@dataclass(frozen=True, kw_only=True)
class Text:
    """Contexts or responses, to be read and to be told."""

    tokens: Tensor
    """(B, S) behind `<cls>`, without `<eos>`."""
    roles: Tensor
    """(B, S)."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A text as word vectors, and as what a decoder has to say."""

    source: Tensor
    """(B, S, D) with positions and roles."""
    mask: Tensor
    """(B, 1, 1, S)."""
    given: Tensor
    """(B, T, D) what a decoder is given to say it; the consensus takes the first place."""
    said: Tensor
    """(B, T) its words and `<eos>`."""
    real: Tensor
    """(B, T)."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a direction makes of a text."""

    source: Tensor
    """(B, S, D)."""
    mask: Tensor
    """(B, 1, 1, S)."""
    posterior: Tensor
    """(B, K) log q(z | text)."""


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """The states that an expectation is taken over, one or several a sample."""

    vectors: Tensor
    """(R, D) E[z]."""
    rows: Tensor
    """(R,) whose."""
    shares: Tensor
    """(R,) how much each counts."""


class DualEmp(Transformer):
    """A response to a context, a context to a response, and the emotion they agree on."""

    system = "Dual-Emp"
    paper = "Shen et al. 2021"
    Config = DualEmpConfig
    presets: ClassVar = {
        **Transformer.presets,
        "tiny": {**Transformer.presets["tiny"], "annealing_steps": 100},
        "small": {
            **Transformer.presets["small"],
            **SMALL,
            "emotion_weight": 4.0,
            "annealing_steps": 300,
        },
    }
    ablations: ClassVar = {
        "dual-emp-paired": {"unpaired": False},
        "sing-emp-paired": {"unpaired": False, "dual": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "thresholds": {"harvest_threshold": Choice(values=(0.50, 0.55, 0.60, 0.65, 0.70))},
        "loss-weights": {
            name: Range(low=0.1, high=10.0, scale="loguniform")
            for name in (
                "emotion_weight", "context_emotion_weight", "response_emotion_weight",
                "divergence_weight", "policy_weight",
            )
        },
        "consensus": {
            "num_states": Choice(values=(8, 16, 32, 64)),
            "expectation": Choice(values=("gumbel", "exact", "mean")),
            "gumbel_temperature": Range(low=0.1, high=2.0),
        },
        "schedule": {
            "annealing_steps": Choice(values=(0, 1_000, 3_000, 10_000)),
            "paired_steps": Choice(values=(0, 1_000, 3_000)),
            "unpaired_every": Choice(values=(1, 4, 16, 64)),
        },
    }  # fmt: skip

    def __init__(self, config: DualEmpConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        del self.encoder, self.decoder, self.output  # each direction has its own
        self.forth = self._direction()
        if config.dual:
            self.back = self._direction()
        self.states = nn.Embedding(config.num_states, config.width)  # E_z
        self.emotions = nn.Linear(config.width, len(data_info.emotions), bias=False)  # W_e
        self._let_states_stand_for_emotions()

    @torch.no_grad()
    def _let_states_stand_for_emotions(self) -> None:
        """Begin with an emotion for each state, several states for one where there are more.

        Where all states say much the same of emotions, a posterior has nothing to choose by.
        """
        count, width = self.emotions.weight.shape
        nn.init.normal_(self.emotions.weight, std=width**-0.5)
        nn.init.normal_(self.states.weight, std=0.1 * width**-0.5)
        self.states.weight += self.emotions.weight[torch.arange(len(self.states.weight)) % count]
        self.emotions.weight *= SURE

    def _direction(self) -> Direction:
        config: DualEmpConfig = self.config
        shape = (config.width, config.num_layers, config.num_heads, config.key_depth)
        rest = (config.filter_width, config.dropout)
        return Direction(
            Encoder(*shape, *rest),
            Decoder(*shape, *rest, layer=ConsensusDecoderLayer),
            OutputLayer(self.embedding, config.width, tied=config.tied),
            config.num_states,
        )

    @classmethod
    def requirements_for(cls, config: DualEmpConfig) -> DataRequirements:
        """Unpaired texts where it learns from them."""
        return replace(cls.requirements, streams=_streams(config))

    def stages(self) -> list[Stage]:
        """One stage, pairs and unpaired texts together."""
        [train] = super().stages()
        return [replace(train, streams=_streams(self.config))]

    def loss_weights(self) -> dict[str, float]:
        """Eq. 11-13 and 18-20; the divergence's terms have risen by themselves."""
        config: DualEmpConfig = self.config
        weights = {"nll": 1.0}
        emotions = {"context": config.emotion_weight}
        divergences = ["context"]
        if config.dual:
            weights |= {"nll_by_response": 1.0, "back": 1.0, "back_by_response": 1.0}
            emotions["response"] = config.emotion_weight
            divergences.append("response")
        if config.unpaired:
            for name in (CONTEXTS, RESPONSES):
                weights |= {f"told_again_{name}": 1.0, f"policy_{name}": config.policy_weight}
            emotions[CONTEXTS] = config.context_emotion_weight
            emotions[RESPONSES] = config.response_emotion_weight
            divergences += [CONTEXTS, RESPONSES]
        weights |= {f"emotion_{name}": weight for name, weight in emotions.items()}
        return weights | {f"divergence_{name}": config.divergence_weight for name in divergences}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """The terms of eq. 20."""
        terms = self._of_pairs(batches[PAIRED], progress)
        if self.training and self._takes_unpaired(progress.step):
            terms |= self._of_unpaired(batches[CONTEXTS], CONTEXTS, progress)
            terms |= self._of_unpaired(batches[RESPONSES], RESPONSES, progress)
        return terms

    def _takes_unpaired(self, step: int) -> bool:
        """The last of `unpaired_every` steps does, as the last of `log_every` is logged."""
        config: DualEmpConfig = self.config
        due = (step + 1) % config.unpaired_every == 0
        return config.unpaired and step >= config.paired_steps and due

    def _of_pairs(self, batch: Batch, progress: Progress) -> Losses:
        """Eq. 11-13."""
        context, response = self._heard(self._context(batch), self._response(batch))
        about = self._read(self.forth, context)
        state = self._expected(about.posterior)
        of_tokens = torch.full_like(batch["emotion"], 1 / batch.tokens, dtype=torch.float32)
        nll, _ = self._told(self.forth, about, response, state, of_tokens)
        terms = {"nll": nll, **self._inferred(about, batch, "context", of_tokens, progress)}
        if not self.config.dual:
            return terms
        answered = self._read(self.back, response)
        other = self._expected(answered.posterior)
        even = _evenly(context, batch)
        terms["nll_by_response"], _ = self._told(self.forth, about, response, other, of_tokens)
        terms["back"], _ = self._told(self.back, answered, context, state, even)
        terms["back_by_response"], _ = self._told(self.back, answered, context, other, even)
        return {**terms, **self._inferred(answered, batch, "response", of_tokens, progress)}

    def _of_unpaired(self, batch: Batch, stream: str, progress: Progress) -> Losses:
        """Eq. 14-19: say something to what was heard, and tell from that what was heard."""
        config: DualEmpConfig = self.config
        if stream == CONTEXTS:
            there, back = self.forth, self.back
            text, role, longest = self._context(batch), LISTENER, config.sampled_response_tokens
        else:
            there, back = self.back, self.forth
            text, role, longest = self._response(batch), SPEAKER, config.sampled_context_tokens
        [heard] = self._heard(text)
        read = self._read(there, heard)
        state = self._drawn(read.posterior)
        sampled = self._said(there, read, state.vectors, longest, greedily=False)
        [said] = self._heard(self._text(sampled, role))
        even = _evenly(heard, batch)
        again, losses = self._told(back, self._read(back, said), heard, state, even)
        advantage = self._advantage(-losses)
        chosen = _as_drawn(said, sampled, longest, self.data_info.specials["<pad>"])
        counts = _evenly(chosen, batch) * advantage
        policy, _ = self._told(there, read, chosen, state, counts, smoothed=False)
        return {
            f"told_again_{stream}": again,
            f"policy_{stream}": policy,
            **self._inferred(read, batch, stream, even, progress),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The emotion from q(z | c)."""
        [context] = self._heard(self._context(batch))
        return {"emotion": self._log_emotions(self._read(self.forth, context).posterior)}

    def log_likelihood(self, batch: Batch) -> Tensor:
        """(B, T)."""
        context, response = self._heard(self._context(batch), self._response(batch))
        about = self._read(self.forth, context)
        hidden = self._decoded(self.forth, about, response, self._drawn(about.posterior))
        values, real = hidden.new_zeros(response.real.shape), response.real
        values[real] = self.forth.output.log_likelihood(hidden[real], response.said[real])
        return values

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """The context, with the consensus beside it and in the first place."""
        [context] = self._heard(self._context(batch))
        about = self._read(self.forth, context)
        return self._begun(self.forth, about, self._drawn(about.posterior).vectors)

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """One more token of a response."""
        return self._next(self.forth, tokens, state)

    def explain(self, batch: Batch) -> list[Explanation]:
        """The emotion, the states of the consensus by the emotion each stands for, and what context
        the backward model would imagine for the answer."""
        [context] = self._heard(self._context(batch))
        shares = self._read(self.forth, context).posterior.exp()
        emotions = [self.data_info.emotions[n] for n in self._emotions_of_states().argmax(dim=1)]
        names = [f"{number + 1} {emotion}" for number, emotion in enumerate(emotions)]
        imagined = self._imagined(batch) if self.config.dual else [None] * len(batch)
        return [
            replace(
                explanation,
                consensus=dict(zip(names, row.tolist(), strict=True)),
                imagined_tokens=tokens,
            )
            for explanation, row, tokens in zip(
                super().explain(batch), shares, imagined, strict=True
            )
        ]

    def _imagined(self, batch: Batch) -> list[list[int] | None]:
        """The likeliest context of each response, None where nothing has been said."""
        [response] = self._heard(self._response(batch))
        answered = self._read(self.back, response)
        vectors = self._drawn(answered.posterior).vectors
        longest = self.config.sampled_context_tokens
        said = self._said(self.back, answered, vectors, longest, greedily=True)
        empty = (response.real.sum(dim=1) == 1).tolist()  # nothing but <eos>
        padding = self.data_info.specials["<pad>"]
        rows = zip(said, empty, strict=True)
        return [None if nothing else row[row != padding].tolist() for row, nothing in rows]

    def _context(self, batch: Batch) -> Text:
        return Text(tokens=batch["context"], roles=batch["context_roles"])

    def _response(self, batch: Batch) -> Text:
        specials, response = self.data_info.specials, batch["response"]
        ended = response == specials["<eos>"]
        return self._text(response.masked_fill(ended, specials["<pad>"])[:, :-1], LISTENER)

    def _text(self, words: Tensor, role: str) -> Text:
        """(B, S - 1) words, all of one role, behind `<cls>`."""
        specials = self.data_info.specials
        there = words != specials["<pad>"]
        roles = torch.full_like(words, specials[role]).masked_fill(~there, specials["<pad>"])
        first = words.new_full((len(words), 1), specials["<cls>"])
        return Text(tokens=torch.cat([first, words], dim=1), roles=torch.cat([first, roles], dim=1))

    def _heard(self, *texts: Text) -> list[Heard]:
        """All word vectors are looked up at once."""
        specials = self.data_info.specials
        lookups, all_said = [], []
        for text in texts:
            read = text.tokens
            if self.training and self.config.word_dropout:
                read = drop_words(read, self.config.word_dropout, self.data_info)
            said = F.pad(text.tokens[:, 1:], (0, 1), value=specials["<pad>"])
            length = (said != specials["<pad>"]).sum(dim=1, keepdim=True)
            said = said.scatter(1, length, specials["<eos>"])
            lookups += [read, text.roles, self.shift_right(said)]
            all_said.append(said)
        vectors = iter(self.embedding(*lookups))
        heard = []
        for text, said in zip(texts, all_said, strict=True):
            words, speakers, given = next(vectors), next(vectors), next(vectors)
            heard.append(
                Heard(
                    source=self.dropout(words + speakers + self.positions(words.shape[1])),
                    mask=(text.tokens != specials["<pad>"])[:, None, None, :],
                    given=self.dropout(given + self.positions(given.shape[1])),
                    said=said,
                    real=said != specials["<pad>"],
                )
            )
        return heard

    def _read(self, direction: Direction, heard: Heard) -> Read:
        """Eq. 2-3."""
        source = direction.encoder(heard.source, heard.mask)
        posterior = direction.posterior(source[:, 0]).log_softmax(dim=-1)
        return Read(source=source, mask=heard.mask, posterior=posterior)

    def _expected(self, posterior: Tensor) -> Consensus:
        """The states that the likelihood's expectation is taken over."""
        if self.config.expectation != "exact" or not self.training:
            return self._drawn(posterior)
        rows, states = posterior.shape
        return Consensus(
            vectors=self.states.weight.repeat(rows, 1),
            rows=torch.arange(rows, device=posterior.device).repeat_interleave(states),
            shares=posterior.exp().flatten(),
        )

    def _drawn(self, posterior: Tensor) -> Consensus:
        """One state a sample: drawn in training, the likeliest otherwise; or all states' mean."""
        if self.config.expectation == "mean":
            chosen = posterior.exp()
        elif self.training:
            chosen = F.gumbel_softmax(posterior, tau=self.config.gumbel_temperature, hard=True)
        else:
            chosen = F.one_hot(posterior.argmax(dim=1), posterior.shape[1]).to(posterior.dtype)
        rows = torch.arange(len(posterior), device=posterior.device)
        shares = posterior.new_ones(len(rows))
        return Consensus(vectors=chosen @ self.states.weight, rows=rows, shares=shares)

    def _inferred(
        self, read: Read, batch: Batch, name: str, counts: Tensor, progress: Progress
    ) -> Losses:
        """What a posterior should be: of the true emotion (eq. 5), and near its prior.

        The divergence is divided by a text's length (`counts`) as the likelihoods are. Weighed
        fully beside the emotion's loss it would leave nothing to be learned: log 32 is what knowing
        one of 32 even emotions saves, and what it costs to be certain of one of 32 states.
        """
        shares, states = read.posterior.exp(), self.config.num_states
        divergence = (shares * read.posterior).sum(dim=1) + math.log(states)  # from 1 / K
        emotions = self._log_emotions(read.posterior)
        missed = F.nll_loss(emotions, batch["emotion"], ignore_index=-1, reduction="sum")
        weight = annealing_weight(self.config.annealing_steps, progress) if self.training else 1.0
        return {
            f"emotion_{name}": missed / batch.samples,
            f"divergence_{name}": weight * (divergence * counts).sum(),
        }

    def _log_emotions(self, posterior: Tensor) -> Tensor:
        """(B, emotions) log p_e (eq. 4) under a posterior."""
        if self.config.expectation == "mean":
            emotions: Tensor = self.emotions(posterior.exp() @ self.states.weight)
            return emotions.log_softmax(dim=-1)
        return (posterior[:, :, None] + self._emotions_of_states()).logsumexp(dim=1)

    def _emotions_of_states(self) -> Tensor:
        """(K, emotions) log p_e of each state."""
        emotions: Tensor = self.emotions(self.states.weight)
        return emotions.log_softmax(dim=-1)

    def _told(
        self, direction: Direction, read: Read, text: Heard, consensus: Consensus, counts: Tensor,
        smoothed: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The loss of saying a text, where each token of a sample counts as `counts` (B,) says; and
        (R,) the mean of a token, to look at."""
        rows, shares = consensus.rows, consensus.shares
        hidden = self._decoded(direction, read, text, consensus)
        real = text.real[rows]
        weights = (counts[rows] * shares.detach())[:, None].expand(real.shape)[real]
        smoothing = self.config.label_smoothing if smoothed and self.training else 0.0
        total, each = direction.output.losses(
            hidden[real], text.said[rows][real], smoothing, weights
        )
        sums = each.new_zeros(real.shape).masked_scatter(real, each).sum(dim=1)
        if shares.requires_grad:  # of an exact expectation: they learn from what each state brings
            brought = (shares * (counts[rows] * sums)).sum()
            total = total + brought - brought.detach()
        return total, sums / real.sum(dim=1)

    def _decoded(
        self, direction: Direction, read: Read, text: Heard, consensus: Consensus
    ) -> Tensor:
        """(R, T, D), eq. 6-8."""
        vectors, rows = consensus.vectors, consensus.rows
        given = torch.cat([self._first(vectors), text.given[rows, 1:]], dim=1)
        hidden: Tensor = direction.decoder(given, read.source[rows], read.mask[rows], vectors)
        return hidden

    def _first(self, vectors: Tensor) -> Tensor:
        """(R, 1, D) the consensus where `<sos>` would stand."""
        return vectors[:, None] + self.positions(1)

    @torch.no_grad()
    def _said(
        self, direction: Direction, read: Read, vectors: Tensor, longest: int, *, greedily: bool
    ) -> Tensor:
        """(B, T) words that a direction says, drawn one after another or the likeliest, padded."""
        specials = self.data_info.specials
        forbidden = [number for name, number in specials.items() if name != "<eos>"]
        state = self._begun(direction, read, vectors)
        newest = torch.full_like(read.mask[:, 0, 0, 0], specials["<sos>"], dtype=torch.long)
        going = torch.ones_like(newest, dtype=torch.bool)
        said: list[Tensor] = []
        while len(said) < longest:
            logits, state = self._next(direction, newest, state)
            logits[:, forbidden] = -torch.inf
            if greedily:
                newest = logits.argmax(dim=1)
            else:
                shares = logits.float().softmax(dim=1)
                newest = sample_categorical(shares, torch.rand_like(shares[:, 0]))
            going = going & (newest != specials["<eos>"])
            if not bool(going.any()):
                break
            said.append(newest.masked_fill(~going, specials["<pad>"]))
        return torch.stack(said, dim=1) if said else newest[:, None][:, :0]

    def _begun(self, direction: Direction, read: Read, vectors: Tensor) -> State:
        state = direction.decoder.init_state(read.source, read.mask, vectors)
        return {**state, "first_input": self._first(vectors)}

    def _next(self, direction: Direction, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        embedded = (
            self.embed_next(tokens, state["length"]) if state["length"] else state["first_input"]
        )
        hidden, state = direction.decoder.step(embedded, state)
        return direction.output.logits(hidden), state

    def _advantage(self, rewards: Tensor) -> Tensor:
        """(B,) rewards without what the batch's other samples get, which tells nothing of these."""
        if self.config.reward_baseline == "none" or len(rewards) == 1:
            return rewards
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - others


def _streams(config: DualEmpConfig) -> tuple[str, ...]:
    return (PAIRED, CONTEXTS, RESPONSES) if config.unpaired else (PAIRED,)


def _as_drawn(said: Heard, sampled: Tensor, longest: int, padding: int) -> Heard:
    """Without the `<eos>` of texts that were cut off: nobody chose it, so that no reward is its."""
    if sampled.shape[1] < longest:
        return said
    real = said.real.clone()
    real[:, longest] &= sampled[:, -1] == padding
    return replace(said, real=real)


def _evenly(text: Heard, batch: Batch) -> Tensor:
    """(B,) what a token counts where each sample's mean does."""
    return 1 / (text.real.sum(dim=1) * batch.samples)
