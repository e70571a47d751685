"""How a run is trained: the settings that all variants share, by the names of `--set`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attune.models.base import Choice, Range
from attune.platform.core.errors import UsageError, unknown_choice
from attune.platform.core.settings import apply_overrides, find_variant


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Data, optimizer, schedule, and when to validate, save and stop."""

    batch_size: int = 32
    """Samples (or tokens, see batch_by) of a batch, all workers together."""
    batch_by: Literal["samples", "tokens"] = "samples"
    """What batch_size counts."""
    accumulation: int = 1
    """Parts that a batch is computed in, one after another, to save memory; changes no result."""
    learning_rate: float = 1e-3
    """The highest rate, whatever the schedule."""
    schedule: Literal["constant", "noam", "linear", "cosine"] = "constant"
    """Decay of the rate after the warm-up: none, 1 / sqrt(step), linearly, or by cosine, to 0."""
    warmup_steps: int = 0
    """Updates in which the rate rises from 0."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_epsilon: float = 1e-8
    """Added to Adam's denominator."""
    weight_decay: float = 0.01
    """Decoupled weight decay (AdamW); with 0 it is Adam."""
    gradient_clipping: float = 1.0
    """Largest norm of a player's gradient; 0 does not clip."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Number format of training. `auto` selects bf16 where the machine computes it natively (GPUs,
    and CPUs with `avx512_bf16` or `amx_bf16`), else fp32."""
    deepspeed: str | None = None
    """Settings of DeepSpeed for where it is trained: `one-cpu`, `one-gpu`, `one-gpu-offload`,
    `eight-gpus-zero-1`, `eight-gpus-zero-2`, `many-nodes`, or a JSON file (docs/operations.md); its
    ZeRO stage counts where --zero is not given."""
    loss_scale: Literal["mean", "public"] = "mean"
    """`public` sums token terms over the batch, as the papers' code does, and so weighs the
    emotion far less than the papers say."""
    max_epochs: int = 12
    """Passes through the data at most, all stages together."""
    evaluate_every: int = 0
    """Steps between validations; 0 validates once an epoch."""
    patience: int = 3
    """Validations without improvement after which a stage ends; 0 never ends early."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at each validation."""
    track_checkpoint: bool = True
    """Whether MLflow gets the last checkpoint too, and not only the best model."""
    log_every: int = 10
    """Steps between logged losses."""
    max_context: int | None = None
    """Context tokens to keep, counted from the end."""
    vocabulary: Literal["train", "everything"] = "train"
    """Whose tokens are known; `everything` is the papers' code's vocabulary, which has seen valid
    and test."""
    vocabulary_size: int | None = None
    """Tokens to know at most, special ones counted; of words the rest is `<unk>`."""
    min_count: int = 1
    """Occurrences in train that a token needs to be known."""
    tokenizer: str | None = None
    """The `tokenizer.json` of a byte-level tokenizer such as RoBERTa's, for variants that read
    subwords; without, subwords are learned from train, 16,000 where vocabulary_size is not set."""
    word_vectors: str | None = None
    """A file of word vectors (GloVe's text form, may be packed) to begin with."""
    lexicon: str | None = None
    """A file of emotion words (NRC's, or a word a line) for variants that read them; without, the
    data's own, else the small one of the bundled corpus."""
    labeller: str | None = None
    """A run of intent-classifier, for variants that read the labels of utterances: it labels what
    they are told when they answer; without, the run that labelled the data."""
    valence_arousal: str | None = None
    """A file of NRC-VAD (word, valence, arousal, dominance) for variants that read how strongly
    words are felt; without, what the lexicon has."""


SEARCH_SPACES: Mapping[str, Mapping[str, Choice | Range]] = {
    "optimizer": {
        "learning_rate": Range(low=1e-4, high=3e-3, scale="loguniform"),
        "batch_size": Choice(values=(16, 32, 64, 128)),
        "weight_decay": Range(low=1e-4, high=0.1, scale="loguniform"),
        "schedule": Choice(values=("constant", "noam", "linear", "cosine")),
        "gradient_clipping": Choice(values=(0.0, 0.5, 1.0, 2.0)),
    }
}
"""Common to all variants."""

_PRESET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "small": {"precision": "auto"},
    "compact": {"precision": "auto"},
}
"""Training settings of a preset of every variant, unless the variant's preset has its own."""

_POSITIVE = ("batch_size", "accumulation", "max_epochs", "log_every", "min_count")


def configure(
    name: str, preset: str = "small", overrides: Mapping[str, Any] | None = None
) -> tuple[Any, TrainingConfig]:
    """A variant's configuration and how it is trained: defaults, preset, ablation, overrides."""
    variant, fixed = find_variant(name)
    if preset not in variant.presets:
        raise UsageError(unknown_choice("preset", preset, variant.presets))
    model_keys = {field.name for field in dataclasses.fields(variant.Config)}
    training_keys = {field.name for field in dataclasses.fields(TrainingConfig)}
    defaults = _PRESET_DEFAULTS.get(preset, {})
    wanted = {**defaults, **variant.presets[preset], **fixed, **(overrides or {})}
    for key in wanted:
        if key not in model_keys | training_keys:
            raise UsageError(unknown_choice("setting", key, model_keys | training_keys))
    config = apply_overrides(variant.Config(), {k: v for k, v in wanted.items() if k in model_keys})
    training = apply_overrides(
        TrainingConfig(), {k: v for k, v in wanted.items() if k in training_keys}
    )
    _check(training)
    return config, training


def _check(training: TrainingConfig) -> None:
    for field in dataclasses.fields(training):
        value = getattr(training, field.name)
        lowest = 1 if field.name in _POSITIVE else 0
        if isinstance(value, int | float) and not value >= lowest:
            raise UsageError(f"{field.name}: expected at least {lowest}, got {value}")
