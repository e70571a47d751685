"""Dual-Emp: forward and backward dialogue models with an emotion consensus (Shen et al. 2021).

A forward model generates a response to a context. A backward model, with its own weights, generates
a context for a response (eq. 1-2). Both share a discrete latent variable z with K states, the
emotion consensus of context and response. The posteriors q(z | c) and q(z | y) are computed from
the hidden state of `<cls>` (eq. 3). The embedding of the state, E[z], predicts the emotion
(eq. 4-5). It is also the decoder's first input, and each decoder layer attends to it in addition to
the source (eq. 6-9).

Pairs train both directions under both posteriors (eq. 10-13). An unpaired context is reconstructed:
the forward model samples a response, and the backward model reconstructs the context from this
response and the consensus (eq. 14-16). The likelihood of the reconstruction is the reward of the
forward model. Unpaired responses are treated likewise, with the directions exchanged (eq. 17-19).
Answers need the forward model only.

Deviations: as in `transformer.py`, and
- The default weights assume that alpha, beta and gamma, 1 in the paper, weigh the summed likelihood
  of a text, rather than the mean per token.
- The reward of eq. 16 is the probability of some forty tokens, which underflows to 0. Here it is
  the mean log-probability per token, minus the mean reward of the other samples of the batch
  (`reward_baseline`).
- Eq. 7 attends to a single vector, whose attention weight is always 1: only its value and output
  projections remain.
- The emotion is predicted from all states, weighted by q(z). With a single sampled state, texts
  that share a state early in training would continue to share it.
- Alpha of eq. 13 weighs the emotion loss under both posteriors.
- Both directions share the token embeddings; each has its own output layer unless `tied`.
- A context sampled by the backward model is not divided into turns: all of its tokens have the
  speaker's role.
- Unpaired text is used from the first step: `paired_share` is 0.
- Perplexity and answers use the most likely state.
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
    Count,
    DataFilters,
    DataInfo,
    DataRequirements,
    Explanation,
    Losses,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Stage,
    State,
    Temperature,
    Weight,
    extend_presets,
)
from attune.models.decoding import sample_categorical
from attune.models.latents import kl_weight
from attune.models.layers import Decoder, DecoderLayer, Encoder, FeedForward, LayerShape
from attune.models.multitask import EMOTION_PRESETS, EMOTION_WEIGHT_RANGE, SUMMED_LIKELIHOOD_WEIGHT
from attune.models.output_layer import OutputLayer
from attune.models.transformer import (
    Transformer,
    TransformerConfig,
    replace_first_input,
    score_tokens,
)

SPEAKER, LISTENER = "<speaker>", "<listener>"
EMOTION_LOSS_WEIGHTS = ("emotion_weight", "context_emotion_weight", "response_emotion_weight")
INITIAL_EMOTION_LOGIT = 5.0
"""Initial logit of the emotion that a state is assigned to, relative to the others."""


@dataclass(frozen=True, kw_only=True)
class DualEmpConfig(TransformerConfig):
    """The Transformer's settings, Dual-Emp's components and the weights of its loss terms."""

    num_states: Count = 32
    """K: number of states of the latent consensus. Usually 8 to 64."""
    emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion loss on pairs (alpha of eq. 13). Usually 0.05 to 0.5."""
    context_emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion loss on unpaired contexts (beta of eq. 18). Usually 0.05 to 0.5."""
    response_emotion_weight: Weight = SUMMED_LIKELIHOOD_WEIGHT
    """Weight of the emotion loss on unpaired responses (gamma of eq. 19). Usually 0.05 to 0.5."""
    divergence_weight: Weight = 1.0
    """Weight of the KL divergence of the posteriors from the uniform prior, after annealing.
    Usually 0.1 to 1."""
    policy_weight: Weight = 1.0
    """Weight of the policy-gradient loss of sampled texts. Usually 0.1 to 1."""
    annealing_share: Share = 0.3
    """Share of the training in which the KL weight rises from 0; 0 uses the full weight from the
    first step. Usually 0.1 to 0.3."""
    expectation: Literal["gumbel", "exact", "mean"] = "gumbel"
    """How the expectation over the consensus is computed: from one sampled state (straight-through
    Gumbel-softmax), exactly over all K states, or at the mean of their embeddings."""
    gumbel_temperature: Temperature = 1.0
    """Temperature of the Gumbel-softmax gradient; lower values approach a one-hot state. Usually
    0.5 to 1."""
    reward_baseline: Literal["batch", "none"] = "batch"
    """Baseline of the reward: the mean reward of the batch's other samples, or none."""
    paired_share: Share = 0.0
    """Share of the training on pairs only, before unpaired texts are added. Usually 0 to 0.5."""
    unpaired_every: Count = 1
    """Use unpaired texts every this many steps. A small set of unpaired texts needs a higher value:
    otherwise each text is seen more often than any pair, and the model repeats it."""
    sampled_response_tokens: Count = 30
    """Maximum number of tokens of a response sampled for an unpaired context. Usually 20 to 40."""
    sampled_context_tokens: Count = 40
    """Maximum number of tokens of a context sampled for a response. Usually 30 to 80."""
    harvest: str = ""
    """Folder of `attune data harvest` with unpaired contexts and responses. By default those of the
    data itself, which the bundled corpus has."""
    harvest_threshold: Share = 0.6
    """Minimum probability of an unpaired text's emotion under the classifier (s in the paper).
    Usually 0.5 to 0.9."""
    dual: bool = True
    """Train a backward model; if false, only q(z | c) and the forward model remain."""
    unpaired: bool = True
    """Train on unpaired texts as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unpaired and not self.dual:
            raise ValueError(
                "unpaired=true needs dual=true: the backward model reconstructs contexts"
            )


class ConsensusDecoderLayer(DecoderLayer):
    """A decoder layer with attention to the source and to the consensus (eq. 6-8)."""

    def __init__(self, shape: LayerShape):
        super().__init__(shape)
        width, depth = shape.width, shape.key_depth
        self.consensus = nn.Sequential(  # value and output projections of eq. 7
            nn.Linear(width, depth, bias=False), nn.Linear(depth, width, bias=False)
        )
        self.feed_forward_norm = nn.LayerNorm(2 * width)
        self.feed_forward = FeedForward(shape, input_width=2 * width)

    def project_kv(self, source: Tensor, condition: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the keys and values of the source, and C_Z, (B, 1, D), from E[z], (B, D)."""
        assert condition is not None
        return (*super().project_kv(source), self.consensus(condition)[:, None])

    def _apply_feed_forward(self, hidden: Tensor, source: tuple[Tensor, ...]) -> Tensor:
        inputs = torch.cat([hidden, source[-1].expand_as(hidden)], dim=-1)  # [C_H; C_Z]
        return super()._apply_feed_forward(inputs, source)


class Direction(nn.Module):
    """An encoder of one text, the posterior of the consensus, and a decoder of the other text."""

    def __init__(self, encoder: Encoder, decoder: Decoder, output: OutputLayer, num_states: int):
        super().__init__()
        width = encoder.norm.weight.shape[0]
        self.encoder, self.decoder, self.output = encoder, decoder, output
        # Not ReLU: it discards so much of what distinguishes emotions at first that the posterior
        # stays uniform for epochs (docs/log.md).
        self.posterior = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_states)
        )


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """Contexts or responses as token ids."""

    tokens: Tensor
    """(B, S), with `<cls>` and without `<eos>`."""
    roles: Tensor
    """(B, S), the role of each token."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedText:
    """A text as input of the encoder, and as inputs and targets of the decoder."""

    source: Tensor
    """(B, S, D), embeddings of token, role and position."""
    attention_mask: Tensor
    """(B, 1, 1, S), True for tokens of the source."""
    decoder_inputs: Tensor
    """(B, T, D), embeddings of token and position; E[z] replaces the first."""
    targets: Tensor
    """(B, T), tokens and `<eos>`."""
    target_mask: Tensor
    """(B, T), True for targets."""


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """A text encoded by one direction."""

    hidden: Tensor
    """(B, S, D)."""
    attention_mask: Tensor
    """(B, 1, 1, S)."""
    log_posterior: Tensor
    """(B, K), log q(z | text)."""


@dataclass(frozen=True, kw_only=True)
class ConsensusSamples:
    """The states of an expectation over the consensus: R rows, one or K per text."""

    embeddings: Tensor
    """(R, D), E[z]."""
    rows: Tensor
    """(R,), the index of each row's text."""
    weights: Tensor
    """(R,), the weight of each row in the expectation."""


class DualEmp(Transformer):
    """A forward and a backward model with a shared emotion consensus."""

    system = "Dual-Emp"
    paper = "Shen et al. 2021"
    Config = DualEmpConfig
    requirements = replace(
        Transformer.requirements,
        filters=DataFilters(harvest="harvest", harvest_threshold="harvest_threshold"),
    )
    validation_metrics = (
        "nll", "back", "nll_by_response", "back_by_response", "divergence_context",
        "divergence_response", "emotion_context", "emotion_response", "emotion_accuracy",
    )  # fmt: skip
    presets: ClassVar = extend_presets(
        EMOTION_PRESETS,
        tiny=dict.fromkeys(EMOTION_LOSS_WEIGHTS, 1.0),
        small={**dict.fromkeys(EMOTION_LOSS_WEIGHTS, 1.0), "emotion_weight": 4.0},
        compact=dict.fromkeys(EMOTION_LOSS_WEIGHTS, 0.2),
    )
    ablations: ClassVar = {
        "dual-emp-paired": {"unpaired": False},
        "sing-emp-paired": {"unpaired": False, "dual": False},
    }
    search_spaces: ClassVar[SearchSpaces] = {
        **Transformer.search_spaces,
        "thresholds": {"harvest_threshold": Choice(values=(0.50, 0.55, 0.60, 0.65, 0.70))},
        "loss-weights": {
            **dict.fromkeys(EMOTION_LOSS_WEIGHTS, EMOTION_WEIGHT_RANGE),
            "divergence_weight": Range(low=0.1, high=10.0, scale="loguniform"),
            "policy_weight": Range(low=0.1, high=10.0, scale="loguniform"),
        },
        "consensus": {
            "num_states": Choice(values=(8, 16, 32, 64)),
            "expectation": Choice(values=("gumbel", "exact", "mean")),
            "gumbel_temperature": Range(low=0.1, high=2.0),
        },
        "schedule": {
            "annealing_share": Choice(values=(0.0, 0.1, 0.3, 0.6)),
            "paired_share": Choice(values=(0.0, 0.2, 0.5)),
            "unpaired_every": Choice(values=(1, 4, 16, 64)),
        },
    }  # fmt: skip

    def __init__(self, config: DualEmpConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.states = nn.Embedding(config.num_states, config.width)  # E_z
        self.emotions = nn.Linear(config.width, len(data_info.emotions), bias=False)  # W_e
        self._init_states_by_emotion()

    @torch.no_grad()
    def _init_states_by_emotion(self) -> None:
        """Assign the emotions to the states in turn.

        If all states predicted similar emotions, the posterior would have no reason to prefer one.
        """
        num_emotions, width = self.emotions.weight.shape
        nn.init.normal_(self.emotions.weight, std=width**-0.5)
        nn.init.normal_(self.states.weight, std=0.1 * width**-0.5)
        self.states.weight += self.emotions.weight[
            torch.arange(len(self.states.weight)) % num_emotions
        ]
        self.emotions.weight *= INITIAL_EMOTION_LOGIT

    def build_layers(self, config: TransformerConfig) -> None:
        """Build both directions, each with its own encoder, decoder and output layer."""
        assert isinstance(config, DualEmpConfig)
        self.forward_model = self._build_direction(config)
        if config.dual:
            self.backward_model = self._build_direction(config)

    def _build_direction(self, config: DualEmpConfig) -> Direction:
        """Return a forward or a backward model."""
        return Direction(
            Encoder(config.layer_shape, config.num_layers),
            Decoder(config.layer_shape, [ConsensusDecoderLayer] * config.num_layers),
            OutputLayer(self.embedding, config.width, tied=config.tied),
            config.num_states,
        )

    @classmethod
    def requirements_for(cls, config: DualEmpConfig) -> DataRequirements:
        """Return the requirements, with the streams of unpaired text if it is used."""
        return replace(cls.requirements, streams=_list_streams(config))

    def stages(self) -> list[Stage]:
        """Return one stage on all streams."""
        [train] = super().stages()
        return [replace(train, streams=_list_streams(self.config))]

    def loss_weights(self) -> dict[str, float]:
        """Return the weights of eq. 11-13 and 18-20; the terms include KL annealing."""
        config: DualEmpConfig = self.config
        weights = {"nll": 1.0}
        emotions = {"context": config.emotion_weight}
        texts = ["context"]
        if config.dual:
            weights |= {"nll_by_response": 1.0, "back": 1.0, "back_by_response": 1.0}
            emotions["response"] = config.emotion_weight
            texts.append("response")
        if config.unpaired:
            for name in (CONTEXTS, RESPONSES):
                weights |= {f"reconstruction_{name}": 1.0, f"policy_{name}": config.policy_weight}
            emotions[CONTEXTS] = config.context_emotion_weight
            emotions[RESPONSES] = config.response_emotion_weight
            texts += [CONTEXTS, RESPONSES]
        weights |= {f"emotion_{name}": weight for name, weight in emotions.items()}
        return weights | {f"divergence_{name}": config.divergence_weight for name in texts}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the unweighted terms of eq. 20."""
        terms = self._paired_losses(batches[PAIRED], progress)
        if self.training and self._uses_unpaired(progress):
            terms |= self._unpaired_losses(batches[CONTEXTS], CONTEXTS, progress)
            terms |= self._unpaired_losses(batches[RESPONSES], RESPONSES, progress)
        return terms

    def _uses_unpaired(self, progress: Progress) -> bool:
        """Return whether a step uses unpaired text: the last of every `unpaired_every` steps."""
        config: DualEmpConfig = self.config
        is_due = (progress.step + 1) % config.unpaired_every == 0
        return config.unpaired and progress.fraction >= config.paired_share and is_due

    def _paired_losses(self, batch: Batch, progress: Progress) -> Losses:
        """Return the terms of eq. 11-13."""
        context, response = self._embed_texts(self._context_text(batch), self._response_text(batch))
        encoded = self._encode_text(self.forward_model, context)
        z_context = self._expand_consensus(encoded.log_posterior)
        per_token = _token_weights(batch)
        nll, _ = self._text_nll(self.forward_model, encoded, response, z_context, per_token)
        terms = {
            "nll": nll,
            **self._posterior_losses(encoded, batch, "context", per_token, progress),
        }
        if not self.config.dual:
            return terms
        encoded_response = self._encode_text(self.backward_model, response)
        z_response = self._expand_consensus(encoded_response.log_posterior)
        forward = self.forward_model, encoded, response
        backward = self.backward_model, encoded_response, context
        terms["nll_by_response"], _ = self._text_nll(*forward, z_response, per_token)
        terms["back"], _ = self._text_nll(*backward, z_context, per_token)
        terms["back_by_response"], _ = self._text_nll(*backward, z_response, per_token)
        posterior_losses = self._posterior_losses(
            encoded_response, batch, "response", per_token, progress
        )
        return {**terms, **posterior_losses}

    def _unpaired_losses(self, batch: Batch, stream: str, progress: Progress) -> Losses:
        """Return the terms of eq. 14-19, for which the missing counterpart of each text is
        sampled."""
        config: DualEmpConfig = self.config
        if stream == CONTEXTS:
            sampler, reconstructor = self.forward_model, self.backward_model
            tokens, role = self._context_text(batch), LISTENER
            max_tokens = config.sampled_response_tokens
        else:
            sampler, reconstructor = self.backward_model, self.forward_model
            tokens, role = self._response_text(batch), SPEAKER
            max_tokens = config.sampled_context_tokens
        # Step 1: infer the consensus of the text and sample a counterpart.
        [text] = self._embed_texts(tokens)
        encoded = self._encode_text(sampler, text)
        z = self._sample_consensus(encoded.log_posterior)
        samples = self._generate_text(sampler, encoded, z.embeddings, max_tokens, greedy=False)
        # Step 2: reconstruct the text from the counterpart and the consensus.
        [counterpart] = self._embed_texts(self._prepend_cls(samples, role))
        per_token = _token_weights(batch)
        reconstruction, losses = self._text_nll(
            reconstructor, self._encode_text(reconstructor, counterpart), text, z, per_token
        )
        # Step 3: the log-likelihood of the reconstruction is the reward of the sampler.
        advantage = self._compute_advantage(-losses)
        padding = self.data_info.specials["<pad>"]
        actions = _mask_forced_eos(counterpart, samples, max_tokens, padding)
        policy, _ = self._text_nll(
            sampler, encoded, actions, z, per_token * advantage, smoothed=False
        )
        return {
            f"reconstruction_{stream}": reconstruction,
            f"policy_{stream}": policy,
            **self._posterior_losses(encoded, batch, stream, per_token, progress),
        }

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities of the emotions under q(z | c)."""
        [context] = self._embed_texts(self._context_text(batch))
        encoded = self._encode_text(self.forward_model, context)
        return {"emotion": self._emotion_log_probs(encoded.log_posterior)}

    def log_likelihood(self, batch: Batch) -> Tensor:
        """Return log p(y_t | y_<t, c, z) at the most likely z, 0 for padding: (B, T)."""
        context, response = self._embed_texts(self._context_text(batch), self._response_text(batch))
        encoded = self._encode_text(self.forward_model, context)
        z = self._sample_consensus(encoded.log_posterior)
        hidden = self._decode_text(self.forward_model, encoded, response, z)
        output = self.forward_model.output
        return score_tokens(output, hidden, response.targets, response.target_mask)

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the forward decoder's state before the first token."""
        [context] = self._embed_texts(self._context_text(batch))
        encoded = self._encode_text(self.forward_model, context)
        z = self._sample_consensus(encoded.log_posterior)
        return self._init_decoder_state(self.forward_model, encoded, z.embeddings)

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one more token with the forward model."""
        return self._decode_next_token(self.forward_model, tokens, state)

    def explain(self, batch: Batch) -> list[Explanation]:
        """Explain by the emotion, q(z | c) of each state, named by its most likely emotion, and the
        context that the backward model generates for the answer."""
        [context] = self._embed_texts(self._context_text(batch))
        probs = self._encode_text(self.forward_model, context).log_posterior.exp()
        most_likely = self._state_emotion_log_probs().argmax(dim=1)
        emotions = [self.data_info.emotions[index] for index in most_likely]
        names = [f"{number} {emotion}" for number, emotion in enumerate(emotions, start=1)]
        imagined = self._generate_contexts(batch) if self.config.dual else [None] * len(batch)
        return [
            replace(
                explanation,
                consensus=dict(zip(names, row.tolist(), strict=True)),
                imagined_tokens=tokens,
            )
            for explanation, row, tokens in zip(
                super().explain(batch), probs, imagined, strict=True
            )
        ]

    def _generate_contexts(self, batch: Batch) -> list[list[int] | None]:
        """Return the context that the backward model generates greedily for each response, None for
        empty responses."""
        [response] = self._embed_texts(self._response_text(batch))
        encoded = self._encode_text(self.backward_model, response)
        z = self._sample_consensus(encoded.log_posterior).embeddings
        max_tokens = self.config.sampled_context_tokens
        contexts = self._generate_text(self.backward_model, encoded, z, max_tokens, greedy=True)
        is_empty = (response.target_mask.sum(dim=1) == 1).tolist()  # only <eos>
        padding = self.data_info.specials["<pad>"]
        rows = zip(contexts, is_empty, strict=True)
        return [None if empty else row[row != padding].tolist() for row, empty in rows]

    def _context_text(self, batch: Batch) -> TokenizedText:
        """Return the contexts of a batch."""
        return TokenizedText(tokens=batch["context"], roles=batch["context_roles"])

    def _response_text(self, batch: Batch) -> TokenizedText:
        """Return the responses of a batch."""
        specials, response = self.data_info.specials, batch["response"]
        is_eos = response == specials["<eos>"]
        return self._prepend_cls(response.masked_fill(is_eos, specials["<pad>"])[:, :-1], LISTENER)

    def _prepend_cls(self, tokens: Tensor, role: str) -> TokenizedText:
        """Return texts with `<cls>`, from tokens (B, S - 1) of a single role."""
        specials = self.data_info.specials
        is_padding = tokens == specials["<pad>"]
        roles = torch.full_like(tokens, specials[role]).masked_fill(is_padding, specials["<pad>"])
        cls = tokens.new_full((len(tokens), 1), specials["<cls>"])
        return TokenizedText(
            tokens=torch.cat([cls, tokens], dim=1), roles=torch.cat([cls, roles], dim=1)
        )

    def _embed_texts(self, *texts: TokenizedText) -> list[EmbeddedText]:
        """Embed texts with a single lookup in the table."""
        specials = self.data_info.specials
        lookups, all_targets = [], []
        for text in texts:
            inputs = self.word_dropout(text.tokens)
            targets = F.pad(text.tokens[:, 1:], (0, 1), value=specials["<pad>"])
            length = (targets != specials["<pad>"]).sum(dim=1, keepdim=True)
            targets = targets.scatter(1, length, specials["<eos>"])
            lookups += [inputs, text.roles, self.shift_right(targets)]
            all_targets.append(targets)
        embeddings = iter(self.embedding(*lookups))
        embedded = []
        for text, targets in zip(texts, all_targets, strict=True):
            e_tokens, e_roles, e_inputs = next(embeddings), next(embeddings), next(embeddings)
            embedded.append(
                EmbeddedText(
                    source=self.dropout(e_tokens + e_roles + self.positions(e_tokens.shape[1])),
                    attention_mask=(text.tokens != specials["<pad>"])[:, None, None, :],
                    decoder_inputs=self.dropout(e_inputs + self.positions(e_inputs.shape[1])),
                    targets=targets,
                    target_mask=targets != specials["<pad>"],
                )
            )
        return embedded

    def _encode_text(self, direction: Direction, text: EmbeddedText) -> EncodedText:
        """Return the hidden states (eq. 2) and the posterior of the consensus (eq. 3)."""
        hidden = direction.encoder(text.source, text.attention_mask)
        log_posterior = direction.posterior(hidden[:, 0]).log_softmax(dim=-1)
        return EncodedText(
            hidden=hidden, attention_mask=text.attention_mask, log_posterior=log_posterior
        )

    def _expand_consensus(self, log_posterior: Tensor) -> ConsensusSamples:
        """Return the states of the expectation of a likelihood: all K if it is exact, else one."""
        if self.config.expectation != "exact" or not self.training:
            return self._sample_consensus(log_posterior)
        num_texts, num_states = log_posterior.shape
        return ConsensusSamples(
            embeddings=self.states.weight.repeat(num_texts, 1),
            rows=torch.arange(num_texts, device=log_posterior.device).repeat_interleave(num_states),
            weights=log_posterior.exp().flatten(),
        )

    def _sample_consensus(self, log_posterior: Tensor) -> ConsensusSamples:
        """Return one state per text, sampled in training and the most likely otherwise; with the
        expectation `mean`, the mean of all states."""
        if self.config.expectation == "mean":
            z = log_posterior.exp()
        elif self.training:
            z = F.gumbel_softmax(log_posterior, tau=self.config.gumbel_temperature, hard=True)
        else:
            z = F.one_hot(log_posterior.argmax(dim=1), log_posterior.shape[1])
            z = z.to(log_posterior.dtype)
        rows = torch.arange(len(z), device=z.device)
        weights = log_posterior.new_ones(len(rows))
        return ConsensusSamples(embeddings=z @ self.states.weight, rows=rows, weights=weights)

    def _posterior_losses(
        self, encoded: EncodedText, batch: Batch, name: str, weights: Tensor, progress: Progress
    ) -> Losses:
        """Return the emotion loss (eq. 5) and the KL divergence of a posterior from the prior.

        The divergence is weighted like a token of the likelihood. With the weight of the emotion it
        would cancel the emotion loss: being certain of one of 32 balanced emotions reduces the loss
        by log 32, and being certain of one of 32 states increases the divergence by log 32.
        """
        q_z, num_states = encoded.log_posterior.exp(), self.config.num_states
        kl = (q_z * encoded.log_posterior).sum(dim=1) + math.log(num_states)  # p(z) = 1 / K
        log_probs = self._emotion_log_probs(encoded.log_posterior)
        emotion_loss = F.nll_loss(log_probs, batch["emotion"], ignore_index=-1, reduction="sum")
        weight = kl_weight(self.config.annealing_share, progress, training=self.training)
        return {
            f"emotion_{name}": emotion_loss / batch.samples,
            f"divergence_{name}": weight * (kl * weights).sum(),
        }

    def _emotion_log_probs(self, log_posterior: Tensor) -> Tensor:
        """Return log p_e under a posterior, (B, emotions) (eq. 4)."""
        if self.config.expectation == "mean":
            logits: Tensor = self.emotions(log_posterior.exp() @ self.states.weight)
            return logits.log_softmax(dim=-1)
        return (log_posterior[:, :, None] + self._state_emotion_log_probs()).logsumexp(dim=1)

    def _state_emotion_log_probs(self) -> Tensor:
        """Return log p_e of each state, (K, emotions) (eq. 4)."""
        logits: Tensor = self.emotions(self.states.weight)
        return logits.log_softmax(dim=-1)

    def _text_nll(
        self, direction: Direction, encoded: EncodedText, text: EmbeddedText, z: ConsensusSamples,
        token_weights: Tensor, smoothed: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the summed NLL of texts, whose tokens have a weight per sample (B,), and the mean
        NLL per token of each row, (R,)."""
        hidden = self._decode_text(direction, encoded, text, z)
        mask = text.target_mask[z.rows]
        row_weights = token_weights[z.rows] * z.weights.detach()
        weights = row_weights[:, None].expand(mask.shape)[mask]
        smoothing = self.config.label_smoothing if smoothed and self.training else 0.0
        total, token_nll = direction.output.losses(
            hidden[mask], text.targets[z.rows][mask], smoothing, weights
        )
        sums = token_nll.new_zeros(mask.shape).masked_scatter(mask, token_nll).sum(dim=1)
        if z.weights.requires_grad:  # the exact expectation has a gradient with respect to q(z)
            expectation = (z.weights * (token_weights[z.rows] * sums)).sum()
            total = total + expectation - expectation.detach()
        return total, sums / mask.sum(dim=1)

    def _decode_text(
        self, direction: Direction, encoded: EncodedText, text: EmbeddedText, z: ConsensusSamples
    ) -> Tensor:
        """Return the decoder's hidden states (R, T, D), teacher-forced (eq. 6-8)."""
        first_input = self.embed_first_input(z.embeddings)
        inputs = replace_first_input(text.decoder_inputs[z.rows], first_input)
        hidden: Tensor = direction.decoder(
            inputs, encoded.hidden[z.rows], encoded.attention_mask[z.rows], z.embeddings
        )
        return hidden

    @torch.no_grad()
    def _generate_text(
        self, direction: Direction, encoded: EncodedText, z: Tensor, max_tokens: int, *,
        greedy: bool,
    ) -> Tensor:  # fmt: skip
        """Return texts (B, T) that a direction generates by sampling or greedily, padded, without
        `<eos>`."""
        specials = self.data_info.specials
        forbidden = [number for name, number in specials.items() if name != "<eos>"]
        state = self._init_decoder_state(direction, encoded, z)
        newest = torch.full_like(
            encoded.attention_mask[:, 0, 0, 0], specials["<sos>"], dtype=torch.long
        )
        is_open = torch.ones_like(newest, dtype=torch.bool)
        tokens: list[Tensor] = []
        while len(tokens) < max_tokens:
            logits, state = self._decode_next_token(direction, newest, state)
            logits[:, forbidden] = -torch.inf
            if greedy:
                newest = logits.argmax(dim=1)
            else:
                probs = logits.float().softmax(dim=1)
                newest = sample_categorical(probs, torch.rand_like(probs[:, 0]))
            is_open = is_open & (newest != specials["<eos>"])
            if not bool(is_open.any()):
                break
            tokens.append(newest.masked_fill(~is_open, specials["<pad>"]))
        return torch.stack(tokens, dim=1) if tokens else newest[:, None][:, :0]

    def _init_decoder_state(self, direction: Direction, encoded: EncodedText, z: Tensor) -> State:
        """Return the decoder's state before the first token, with E[z] (B, D) as first input."""
        state = direction.decoder.init_state(encoded.hidden, encoded.attention_mask, z)
        return {**state, "first_input": self.embed_first_input(z)}

    def _decode_next_token(
        self, direction: Direction, tokens: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Decode one more token with a direction."""
        embedded = (
            self.embed_next(tokens, state["length"]) if state["length"] else state["first_input"]
        )
        hidden, state = direction.decoder.step(embedded, state)
        return direction.output.logits(hidden), state

    def _compute_advantage(self, rewards: Tensor) -> Tensor:
        """Return rewards (B,), each minus the mean reward of the other samples of the batch."""
        if self.config.reward_baseline == "none" or len(rewards) == 1:
            return rewards
        baseline = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - baseline


def _list_streams(config: DualEmpConfig) -> tuple[str, ...]:
    """Return the names of the data streams."""
    return (PAIRED, CONTEXTS, RESPONSES) if config.unpaired else (PAIRED,)


def _mask_forced_eos(
    text: EmbeddedText, samples: Tensor, max_tokens: int, padding: int
) -> EmbeddedText:
    """Mask the `<eos>` of texts that were cut off at the length limit: it was not sampled, so the
    reward does not apply to it."""
    if samples.shape[1] < max_tokens:
        return text
    target_mask = text.target_mask.clone()
    target_mask[:, max_tokens] &= samples[:, -1] == padding
    return replace(text, target_mask=target_mask)


def _token_weights(batch: Batch) -> Tensor:
    """Return the weight of the tokens of each sample, (B,), the same in both directions and for
    paired and unpaired text."""
    return torch.full_like(batch["emotion"], 1 / batch.tokens, dtype=torch.float32)
