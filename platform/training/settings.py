"""Training settings, which are the same for all variants, by their names in `--set`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from attune.models.base import Bounds, Choice, Count, Range, Share, Steps, Weight
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.settings import find_variant, override_settings, parse_settings


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Data, optimizer, schedule, and when to validate, save and stop."""

    batch_size: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = 32
    """Size of a batch over all workers, in samples or in tokens (see batch_by). Usually 16 to 128
    samples, or 1,000 to 10,000 tokens."""
    batch_by: Literal["samples", "tokens"] = "samples"
    """What batch_size counts."""
    accumulation: Count = 1
    """Number of parts in which a batch is computed one after another, to save memory; does not
    change results. Usually 1 to 8."""
    learning_rate: Annotated[float, Bounds(above=0, at_most=100)] = 1e-3
    """Highest learning rate of the schedule. Usually 0.0001 to 0.003; 0.00002 to 0.0001 for
    pretrained encoders."""
    schedule: Literal["constant", "noam", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up: constant, inverse square root (noam), linear or
    cosine."""
    warmup_share: Share = 0.0
    """Share of each stage's steps in which the learning rate rises linearly from 0. Usually 0 to
    0.1."""
    warmup_steps: Steps = 0
    """The same as a number of steps, for stages without a schedule of their own; the longer of both
    is used."""
    dropout_decay_share: Share = 0.0
    """Share of each stage's steps, at its end, in which dropout and word dropout decay linearly to
    0; patience counts validations only from then on. Usually 0 to 0.5."""
    adam_beta1: Share = 0.9
    """Adam beta1. Usually 0.9; 0.5 to 0.9 for adversarial training."""
    adam_beta2: Share = 0.999
    """Adam beta2. Usually 0.98 to 0.999."""
    adam_epsilon: Annotated[float, Bounds(above=0, below=1)] = 1e-8
    """Adam epsilon. Usually 1e-9 to 1e-6."""
    weight_decay: Annotated[float, Bounds(at_least=0, at_most=100)] = 0.01
    """Decoupled weight decay (AdamW); 0 is plain Adam. Usually 0 to 0.1."""
    gradient_clipping: Weight = 1.0
    """Maximum norm of a player's gradient; 0 does not clip. Usually 0.5 to 5."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Number format of training. `auto` selects bf16 where the machine computes it natively (GPUs,
    and CPUs with `avx512_bf16` or `amx_bf16`), else fp32."""
    deepspeed: str | None = None
    """DeepSpeed settings: `one-cpu`, `one-gpu`, `one-gpu-offload`, `eight-gpus-zero-1`,
    `eight-gpus-zero-2`, `many-nodes`, or a JSON file (docs/operations.md). Its ZeRO stage is used
    if --zero is not given."""
    loss_scale: Literal["mean", "public"] = "mean"
    """`mean` divides token terms by the mean number of tokens in a batch and sample terms by the
    mean number of samples, both constants of the run; `public` sums token terms over the batch, as
    the papers' code does, which gives the emotion loss far less weight than the papers state."""
    max_epochs: Annotated[int, Bounds(at_least=1, at_most=1_000_000)] = 12
    """Maximum number of epochs, all stages together. Usually 3 to 50."""
    evaluate_every: Steps = 0
    """Steps between validations; 0 validates once per epoch. Usually 0, or 200 to 2,000."""
    patience: Annotated[int, Bounds(at_least=0, at_most=1_000_000)] = 3
    """Validations without improvement after which a stage ends; 0 never ends early. Usually 2 to
    5."""
    checkpoint_every: Steps = 0
    """Steps between checkpoints; 0 writes one at each validation. Usually 0, or 100 to 1,000."""
    track_checkpoint: bool = True
    """Log the last checkpoint to MLflow, besides the best model."""
    log_every: Annotated[int, Bounds(at_least=1, at_most=1_000_000_000)] = 10
    """Steps between logged losses. Usually 1 to 100."""
    max_context: Annotated[int | None, Bounds(at_least=1, at_most=1_000_000)] = None
    """Maximum number of context tokens; the last ones are kept. Usually none, or 100 to 500."""
    vocabulary: Literal["train", "everything"] = "train"
    """Splits from which the vocabulary is built; `everything`, as in the papers' code, includes the
    words of valid and test."""
    vocabulary_size: Annotated[int | None, Bounds(at_least=1, at_most=10_000_000)] = None
    """Maximum number of tokens in the vocabulary, special tokens included; other words become
    `<unk>`. Usually none, or 10,000 to 50,000."""
    min_count: Annotated[int, Bounds(at_least=1, at_most=1_000_000_000)] = 1
    """Occurrences in train from which a token is part of the vocabulary. Usually 1 to 5."""
    tokenizer: str | None = None
    """The `tokenizer.json` of a byte-level tokenizer such as RoBERTa's, for variants that read
    subwords. Without it, subwords are learned from train: vocabulary_size of them, or 16,000."""
    word_vectors: str | None = None
    """File of word vectors (GloVe's text format, also compressed) that initialises the word
    embedding."""
    lexicon: str | None = None
    """File of emotion words (NRC's, or one word per line) for variants that use them. By default
    that of the data, or else the small lexicon of the bundled corpus."""
    labeller: str | None = None
    """Run of intent-classifier that labels the context when the model answers, for variants that
    read labels of utterances. By default the run that labelled the data."""
    valence_arousal: str | None = None
    """NRC-VAD file (word, valence, arousal, dominance) for variants that use the intensity of
    words. By default the lexicon's values."""


SEARCH_SPACES: Mapping[str, Mapping[str, Choice | Range]] = {
    "optimizer": {
        "learning_rate": Range(low=1e-4, high=3e-3, scale="loguniform"),
        "batch_size": Choice(values=(16, 32, 64, 128)),
        "weight_decay": Range(low=1e-4, high=0.1, scale="loguniform"),
        "schedule": Choice(values=("constant", "noam", "linear", "cosine")),
        "gradient_clipping": Choice(values=(0.0, 0.5, 1.0, 2.0)),
    }
}
"""Search spaces that all variants have."""

_PRESET_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "small": {"precision": "auto"},
    "compact": {"precision": "auto"},
}
"""Training settings by preset, for all variants; a variant's own preset overrides them."""


def configure(
    name: str, preset: str = "small", overrides: Mapping[str, Any] | None = None
) -> tuple[Any, TrainingConfig]:
    """Return the model's and the training's settings: defaults, preset, ablation, overrides."""
    variant, fixed = find_variant(name)
    if preset not in variant.presets:
        raise UsageError(unknown_choice_error("preset", preset, variant.presets))
    model, training = parse_variant_settings(
        name,
        {
            **_PRESET_DEFAULTS.get(preset, {}),
            **variant.presets[preset],
            **fixed,
            **(overrides or {}),
        },
    )
    return override_settings(variant.Config(), model), override_settings(TrainingConfig(), training)


def parse_variant_settings(
    name: str, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a variant's model settings and training settings, each value parsed and checked."""
    config = find_variant(name)[0].Config
    model_keys = {field.name for field in dataclasses.fields(config)}
    training_keys = {field.name for field in dataclasses.fields(TrainingConfig)}
    for key in overrides:
        if key not in model_keys | training_keys:
            hint = f"'attune variants {name}' lists the settings"
            raise UsageError(unknown_choice_error("setting", key, model_keys | training_keys, hint))
    return (
        parse_settings(config, {k: v for k, v in overrides.items() if k in model_keys}),
        parse_settings(TrainingConfig, {k: v for k, v in overrides.items() if k in training_keys}),
    )
