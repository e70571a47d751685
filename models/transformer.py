"""Transformer: the sequence-to-sequence baseline of all papers (Vaswani et al. 2017).

An encoder reads `<cls>` and the context, a decoder generates the response. The input of the encoder
is the sum of the embeddings of a token, its position and its role (speaker or listener). Roles are
tokens of the vocabulary and share its embedding, as in the papers' public code.

Deviations: layer normalisation precedes each sublayer. The feed-forward has linear layers only; the
papers' public code has convolutions, which the papers do not mention. Dropout has an effect where
its rate is above 0 (in the public code it has none).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from attune.models.base import (
    PAIRED,
    Batch,
    Batches,
    Bounds,
    Choice,
    Count,
    DataInfo,
    DialogueVariant,
    Losses,
    Presets,
    Progress,
    Range,
    SearchSpaces,
    Share,
    Size,
    Stage,
    State,
    Update,
)
from attune.models.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    LayerShape,
    Positions,
    WordEmbedding,
)
from attune.models.output_layer import OutputLayer


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of the layers, and regularisation."""

    width: Size = 300
    """Width of embeddings and hidden states. 300 fits GloVe's vectors; usually 128 to 512."""
    embedding_width: Annotated[int | None, Bounds(at_least=1, at_most=65_536)] = None
    """Width of the embedding table if no word vectors are set; `none` is the model's width. Usually
    none, or 32 to 128."""
    num_layers: Count = 1
    """Number of layers of the encoder, and of the decoder. Usually 1 to 6."""
    num_heads: Count = 2
    """Number of attention heads; must divide key_depth. Usually 2 to 8."""
    key_depth: Size = 40
    """Total width of queries, keys and values over all heads. Usually the same as width."""
    filter_width: Size = 50
    """Width of the hidden layer in feed-forward blocks. Usually 2 to 4 times width."""
    dropout: Share = 0.0
    """Dropout rate of activations in training. Usually 0 to 0.4."""
    word_dropout: Share = 0.0
    """Share of context words replaced by `<unk>` in training, so that the model learns an embedding
    for the unknown words of new contexts. Usually 0 to 0.4."""
    tied: bool = False
    """Use the word embedding as the output layer as well."""
    label_smoothing: Share = 0.0
    """Share of the target's probability that is spread over all words. Usually 0 to 0.1."""

    def __post_init__(self) -> None:
        if self.key_depth % self.num_heads:
            raise ValueError(
                f"key_depth: expected a multiple of num_heads={self.num_heads}, "
                f"got {self.key_depth}"
            )

    @property
    def layer_shape(self) -> LayerShape:
        """The sizes of encoder and decoder layers."""
        return LayerShape(
            width=self.width,
            num_heads=self.num_heads,
            key_depth=self.key_depth,
            filter_width=self.filter_width,
            dropout=self.dropout,
        )


def build_word_embedding(config: TransformerConfig, data_info: DataInfo) -> WordEmbedding:
    """Return a word embedding of the configured width, or of the data's word vectors."""
    return WordEmbedding(
        data_info.num_tokens,
        config.width,
        table_width=config.embedding_width,
        vectors=data_info.word_vectors,
    )


class WordDropout(nn.Dropout):
    """Replace a share of the words, drawn at random, by `<unk>` in training."""

    def __init__(self, share: float, data_info: DataInfo):
        super().__init__(share)
        self.num_specials, self.unknown = len(data_info.specials), data_info.specials["<unk>"]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens, some of them replaced."""
        if not (self.training and self.p):
            return tokens
        words = tokens >= self.num_specials  # the special tokens come first
        drawn = torch.rand(tokens.shape, device=tokens.device) < self.p
        return tokens.masked_fill(words & drawn, self.unknown)


def is_word(tokens: Tensor, data_info: DataInfo) -> Tensor:
    """Return which tokens are words: all but the special tokens, and `<unk>`."""
    return (tokens >= len(data_info.specials)) | (tokens == data_info.specials["<unk>"])


def replace_first_input(decoder_inputs: Tensor, first_input: Tensor) -> Tensor:
    """Return the decoder's inputs (B, T, D) with another first one, (B, 1, D)."""
    return torch.cat([first_input, decoder_inputs[:, 1:]], dim=1)


def score_tokens(output: OutputLayer, hidden: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probability of each target (B, T), from the hidden states (B, T, D) that
    predict it; 0 where the mask is False."""
    log_likelihood = hidden.new_zeros(mask.shape)
    log_likelihood[mask] = output.log_likelihood(hidden[mask], targets[mask])
    return log_likelihood


@dataclass(frozen=True, kw_only=True)
class EmbeddedBatch:
    """The embedded inputs of encoder and decoder."""

    context: Tensor
    """(B, S, D), embeddings of token, role and position."""
    attention_mask: Tensor
    """(B, 1, 1, S), True for tokens of the context, False for padding."""
    decoder_inputs: Tensor
    """(B, T, D), embeddings of token and position of the response, shifted right by one."""
    response_mask: Tensor
    """(B, T), True for tokens of the response, False for padding."""


class Transformer(DialogueVariant):
    """An encoder and a decoder, trained by the likelihood of the response."""

    system = "Transformer"
    paper = "Vaswani et al. 2017"
    Config = TransformerConfig
    likelihood_term = "nll"
    validation_metrics: ClassVar[tuple[str, ...]] = ("nll",)
    presets: ClassVar[Presets] = {
        "tiny": {"width": 32, "key_depth": 32, "filter_width": 64, "tied": True},
        "small": {
            "width": 128,
            "key_depth": 128,
            "filter_width": 256,
            "dropout": 0.2,
            "word_dropout": 0.4,
            "tied": True,
        },
        # Converges on EmpatheticDialogues (docs/results.md).
        "compact": {
            "width": 256,
            "embedding_width": 100,
            "num_layers": 1,
            "num_heads": 4,
            "key_depth": 256,
            "filter_width": 512,
            "dropout": 0.2,
            "word_dropout": 0.1,
            "tied": True,
            "batch_size": 32,
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup_share": 0.04,
            "dropout_decay_share": 1 / 3,
            "max_epochs": 6,
        },
        # The papers' settings, and those of their public code where the papers give none: Noam with
        # factor 1 and 8,000 warm-up steps (a peak of 6.5e-4), no clipping, validation every 2,000
        # steps.
        "paper": {
            "batch_size": 16,
            "learning_rate": 6.5e-4,
            "schedule": "noam",
            "warmup_steps": 8000,
            "adam_beta2": 0.98,
            "adam_epsilon": 1e-9,
            "weight_decay": 0.0,
            "gradient_clipping": 0.0,
            "evaluate_every": 2000,
            "patience": 3,
        },
    }
    search_spaces: ClassVar[SearchSpaces] = {
        "architecture": {
            "num_layers": Choice(values=(1, 2, 4)),
            "tied": Choice(values=(False, True)),
            "dropout": Range(low=0.0, high=0.4),
            "word_dropout": Range(low=0.0, high=0.4),
        },
        "loss": {"label_smoothing": Range(low=0.0, high=0.2)},
    }

    def __init__(self, config: TransformerConfig, data_info: DataInfo):
        super().__init__(config, data_info)
        self.embedding = build_word_embedding(config, data_info)
        self.positions = Positions(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.word_dropout = WordDropout(config.word_dropout, data_info)
        self.build_layers(config)

    def build_layers(self, config: TransformerConfig) -> None:
        """Build encoder, decoder and output layer."""
        self.encoder = Encoder(config.layer_shape, config.num_layers)
        self.decoder = Decoder(config.layer_shape, self.decoder_layer_types(config))
        self.output = OutputLayer(self.embedding, config.width, tied=config.tied)

    def decoder_layer_types(self, config: TransformerConfig) -> list[type[DecoderLayer]]:
        """Return the type of each decoder layer, lowest first."""
        return [DecoderLayer] * config.num_layers

    def stages(self) -> list[Stage]:
        """Return one stage with one player.

        Perplexity selects the checkpoint, as in the papers' public code. The total loss would not
        do: the emotions overfit long before the responses are learned, and totals with different
        weights are not comparable.
        """
        parts = tuple(name for name, part in self.named_children() if list(part.parameters()))
        update = Update(player="model", losses="losses", weights=self.loss_weights())
        players = {"model": parts}
        return [Stage(name="train", players=players, updates=(update,), metric="valid_perplexity")]

    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each term of `losses`."""
        return {"nll": 1.0}

    def losses(self, batches: Batches, progress: Progress) -> Losses:
        """Return the negative log-likelihood of the responses."""
        batch = batches[PAIRED]
        embedded = self.embed(batch)
        decoded = self.decode(embedded, self.encode_context(embedded))
        return {"nll": self.compute_nll(batch, decoded, embedded)}

    def log_likelihood(self, batch: Batch) -> Tensor:
        """Return the log-probability of each response token, (B, T)."""
        embedded = self.embed(batch)
        decoded = self.decode(embedded, self.encode_context(embedded))
        return score_tokens(self.output, decoded, batch["response"], embedded.response_mask)

    def encode(self, batch: Batch, controls: Mapping[str, str] | None = None) -> State:
        """Return the decoder's state: the keys and values of the context, and the first input."""
        embedded = self.embed(batch)
        hidden = self.encode_context(embedded)
        state = self.decoder.init_state(hidden, embedded.attention_mask)
        return {**state, "first_input": self.first_decoder_input(embedded, hidden)}

    def next_logits(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Decode one more token."""
        embedded = state.get("first_input") if not state["length"] else None
        if embedded is None:
            embedded = self.embed_next(tokens, state["length"])
        decoded, state = self.decoder.step(embedded, state)
        return self.output.logits(decoded), state

    def embed(self, batch: Batch) -> EmbeddedBatch:
        """Return the inputs of encoder and decoder."""
        context, roles = self.prepare_context(batch)
        response = batch["response"]
        e_context, e_roles, e_response = self.embedding(context, roles, self.shift_right(response))
        padding = self.data_info.specials["<pad>"]
        return EmbeddedBatch(
            context=self.dropout(e_context + e_roles + self.positions(context.shape[1])),
            attention_mask=(context != padding)[:, None, None, :],
            decoder_inputs=self.dropout(e_response + self.positions(e_response.shape[1])),
            response_mask=response != padding,
        )

    def prepare_context(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the tokens that the encoder reads, and their roles, (B, S) each."""
        return self.word_dropout(batch["context"]), batch["context_roles"]

    def shift_right(self, response: Tensor) -> Tensor:
        """Return the decoder's input tokens (B, T): `<sos>`, then the response without its last
        token."""
        start = response.new_full((len(response), 1), self.data_info.specials["<sos>"])
        return torch.cat([start, response], dim=1)[:, : response.shape[1]]

    def embed_next(self, tokens: Tensor, position: int) -> Tensor:
        """Return the decoder's input (B, 1, D) of tokens (B,) at a position."""
        [e_tokens] = self.embedding(tokens[:, None])
        embedded: Tensor = e_tokens + self.positions(1, position)
        return embedded

    def encode_context(self, embedded: EmbeddedBatch) -> Tensor:
        """Return the hidden states of the context, (B, S, D)."""
        hidden: Tensor = self.encoder(embedded.context, embedded.attention_mask)
        return hidden

    def decode(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return the decoder's hidden states (B, T, D), teacher-forced."""
        inputs = self.decoder_inputs(embedded, hidden)
        decoded: Tensor = self.decoder(inputs, hidden, embedded.attention_mask)
        return decoded

    def decoder_inputs(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor:
        """Return the decoder's inputs (B, T, D): the first one, then the response's tokens."""
        first_input = self.first_decoder_input(embedded, hidden)
        if first_input is None:
            return embedded.decoder_inputs
        return replace_first_input(embedded.decoder_inputs, first_input)

    def first_decoder_input(self, embedded: EmbeddedBatch, hidden: Tensor) -> Tensor | None:
        """Return the decoder's first input, (B, 1, D), or None for `<sos>`.

        A subclass overrides this to condition the decoder on a vector computed from the context.
        """
        return None

    def embed_first_input(self, vectors: Tensor) -> Tensor:
        """Return vectors (B, D) as the decoder's first input, (B, 1, D)."""
        return vectors[:, None] + self.positions(1)

    def select_words(self, values: Tensor, embedded: EmbeddedBatch) -> list[list[float]]:
        """Return the values of each context's words, from values at all positions (B, S), without
        `<cls>` and padding."""
        lengths = embedded.attention_mask.flatten(1).sum(dim=1).tolist()
        rows = zip(values.tolist(), lengths, strict=True)
        return [row[1:length] for row, length in rows]

    def compute_nll(self, batch: Batch, decoded: Tensor, embedded: EmbeddedBatch) -> Tensor:
        """Return the negative log-likelihood of the responses, divided by `batch.tokens`, from the
        decoder's hidden states (B, T, D)."""
        smoothing = self.config.label_smoothing if self.training else 0.0
        mask = embedded.response_mask
        total = self.output.loss_sum(decoded[mask], batch["response"][mask], smoothing)
        return total / batch.tokens
