"""A model on disk: a self-contained folder that can be loaded on any machine.

model.safetensors       the weights
model.json              variant, configuration, emotions
vocabulary.txt          the tokens
tokenizer.json          the subword tokenizer, if the variant reads subwords
lexicon.json            the emotion words, if the variant uses them
encoder/                configuration and tokenizer of the pretrained encoder, if it has one
labeller/               the model that labels utterances for it, if the variant reads labels
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from attune.models.base import Annotator, DataInfo, DataRequirements, Variant
from attune.platform.batching.encoding import (
    IntArray,
    Layout,
    Ragged,
    encode,
    encode_as_subwords,
    encode_for_pretrained,
)
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.settings import (
    find_variant,
    labels_utterances,
    override_settings,
    variants_where,
)
from attune.platform.data.dataset_folder import (
    read_cause_samples,
    read_dataset_samples,
    read_labelled_utterances,
)
from attune.platform.data.labels import EMOTIONS, LABELS
from attune.platform.text import encoders, subwords
from attune.platform.text.emotion_words import EmotionWords
from attune.platform.text.encoders import TextEncoder
from attune.platform.text.lexicons import Lexicon
from attune.platform.text.vocabulary import SPECIALS, Vocabulary
from attune.platform.text.word_vectors import WordVectors

MODEL_WEIGHTS, MODEL_DESCRIPTION, VOCABULARY_FILE = (
    "model.safetensors",
    "model.json",
    "vocabulary.txt",
)
LEXICON_FILE, ENCODER, LABELLER = "lexicon.json", "encoder", "labeller"
EMOTION_WORDS, CAUSES, SUBWORDS = "emotion_words", "context_causes", "context_subwords"
CONTEXT_LABELS = "context_labels"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A variant with its vocabulary and the other resources that encode its input."""

    name: str
    """The name of the variant or ablation, as a user types it."""
    variant: Variant
    vocabulary: Vocabulary
    max_context: int | None = None
    """The maximum number of context tokens; longer contexts lose their beginning."""
    lexicon: Lexicon | None = None
    """The emotion words that it was trained with, if the variant uses them."""
    encoder: TextEncoder | None = None
    """The pretrained encoder of the contexts, if the variant has one."""
    labeller: Path | None = None
    """The folder of the model that labels utterances for it, if the variant reads labels."""

    def columns(self, samples: pl.DataFrame) -> dict[str, Ragged | IntArray]:
        """Encode samples as the columns that the variant reads."""
        requirements, find = self.variant.requirements_for(self.variant.config), None
        if self.lexicon is not None and EMOTION_WORDS in requirements.columns:
            find = EmotionWords(self.lexicon).find_emotion_words
        columns = encode(
            samples,
            self.vocabulary,
            layout=self.layout,
            # Without emotions, samples are not checked: a variant that does not read the column
            # accepts emotions that it was not trained with.
            emotions=self.variant.data_info.emotions if "emotion" in requirements.columns else (),
            emotion_words=find,
            causes=CAUSES in requirements.columns,
            labels=CONTEXT_LABELS in requirements.columns,
        )
        if self.encoder is None:
            return columns
        encoder_input = (
            encode_as_subwords if SUBWORDS in requirements.columns else encode_for_pretrained
        )
        return {**columns, **encoder_input(self.encoder, samples)}

    @property
    def layout(self) -> Layout:
        """The layout of its contexts."""
        return Layout(separators=self.variant.requirements.separators, max_context=self.max_context)


def read_model_split(variant: Variant | type[Variant], folder: Path, split: str) -> pl.DataFrame:
    """Return the samples of a split that a variant is trained or evaluated on."""
    if issubclass(variant if isinstance(variant, type) else type(variant), Annotator):
        return read_cause_samples(folder, split)
    if variant.requirements.labels == "utterances":
        return read_labelled_utterances(folder, split)
    return read_dataset_samples(folder, split)


def check_model_labels(requirements: DataRequirements, samples: pl.DataFrame, place: str) -> None:
    """Raise DataError if a variant reads utterance labels and the samples have none.

    Missing labels would otherwise be read as one more label.
    """
    if CONTEXT_LABELS not in requirements.columns:
        return
    for kind, labels in {
        "utterance of a context": samples["context_labels"].explode(),
        "response": samples["response_label"],
    }.items():
        if not labels.is_in(LABELS).any():
            labellers = " or ".join(variants_where(labels_utterances))
            raise DataError(
                f"{place}: no {kind} has one of the 41 labels that this system reads: add labels "
                f"with 'attune annotate emotions RUN --data DIR', where RUN is a run of {labellers}"
            )


def model_label_names(requirements: DataRequirements) -> tuple[str, ...]:
    """Return the class names of the column `emotion`."""
    return LABELS if requirements.labels == "utterances" else EMOTIONS


def model_requires_lexicon(requirements: DataRequirements) -> bool:
    """Return whether a variant needs a lexicon."""
    return EMOTION_WORDS in requirements.columns or requirements.intensity


def build_model_data_info(
    vocabulary: Vocabulary,
    emotions: tuple[str, ...],
    requirements: DataRequirements,
    *,
    vectors: WordVectors | None = None,
    lexicon: Lexicon | None = None,
    pretrained: Mapping[str, nn.Module] | None = None,
) -> DataInfo:
    """Return what a variant needs to know about its data to be built."""
    marks = intensity = None
    if lexicon is not None and EMOTION_WORDS in requirements.columns:
        marks = torch.tensor(EmotionWords(lexicon).mark_emotion_words(vocabulary))
    if lexicon is not None and requirements.intensity:
        intensity = torch.tensor(
            [lexicon.emotional_intensity(token) for token in vocabulary.tokens]
        )
    return DataInfo(
        num_tokens=len(vocabulary),
        specials={token: vocabulary.numbers[token] for token in SPECIALS},
        emotions=emotions,
        emotion_tokens=tuple(vocabulary.token_id(emotion) for emotion in emotions),
        word_vectors=None if vectors is None else torch.from_numpy(vectors.matrix),
        emotion_words=marks,
        intensity=intensity,
        encoders=pretrained or {},
    )


def build_model(
    name: str,
    config: Any,
    vocabulary: Vocabulary,
    emotions: tuple[str, ...],
    *,
    vectors: WordVectors | None = None,
    lexicon: Lexicon | None = None,
    max_context: int | None = None,
    labeller: Path | None = None,
    seed: int = 0,
) -> Model:
    """Build a model; the seed sets its initial weights without changing torch's global state."""
    variant, _ = find_variant(name)
    requirements = variant.requirements_for(config)
    encoder = (
        None
        if requirements.encoder is None
        else encoders.load_encoder(getattr(config, requirements.encoder))
    )
    data_info = build_model_data_info(
        vocabulary,
        emotions,
        requirements,
        vectors=vectors,
        lexicon=lexicon,
        pretrained=_encoder_modules(requirements.encoder, encoder),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = variant(config, data_info)
    return Model(
        name=name,
        variant=built,
        vocabulary=vocabulary,
        max_context=max_context,
        lexicon=lexicon,
        encoder=encoder,
        labeller=labeller,
    )


def _encoder_modules(setting: str | None, encoder: TextEncoder | None) -> dict[str, nn.Module]:
    """Return the encoder by the name of the setting that selects it; empty without one."""
    return {} if setting is None or encoder is None else {setting: encoder.module}


def save_model(model: Model, folder: Path) -> None:
    """Write a model to a folder that `load_model` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    data_info = model.variant.data_info
    vectors = data_info.word_vectors
    description = {
        "variant": model.name,
        "config": dataclasses.asdict(model.variant.config),
        "emotions": data_info.emotions,
        "word_vector_dimension": None if vectors is None else vectors.shape[1],
        "max_context": model.max_context,
    }
    save_weights(model.variant, folder / MODEL_WEIGHTS)
    model.vocabulary.save(folder / VOCABULARY_FILE)
    if model.lexicon is not None:
        model.lexicon.save(folder / LEXICON_FILE)
    if model.encoder is not None:
        model.encoder.save(folder / ENCODER)
    if model.labeller is not None:
        copy_model_labeller(model.labeller, folder)
    (folder / MODEL_DESCRIPTION).write_text(
        json.dumps(description, indent=2) + "\n", encoding="utf-8"
    )


def copy_model_labeller(labeller: Path, folder: Path) -> None:
    """Copy a labeller into a folder, by hard links where possible because it is large."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another disk, or none that links
            shutil.copyfile(source, target)

    shutil.copytree(labeller, folder / LABELLER, copy_function=link, dirs_exist_ok=False)


def find_model_labeller(folder: Path) -> Path | None:
    """Return the folder of the labeller inside a folder; None without one."""
    return folder / LABELLER if (folder / LABELLER).is_dir() else None


def load_model(folder: Path) -> Model:
    """Load the model in a folder, in evaluation mode."""
    for name in (MODEL_DESCRIPTION, VOCABULARY_FILE, MODEL_WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"'{folder}' is not a model: {name} is missing")
    description = json.loads((folder / MODEL_DESCRIPTION).read_text(encoding="utf-8"))
    vocabulary = subwords.load_words_or_subwords(folder / VOCABULARY_FILE)
    variant, _ = find_variant(description["variant"])
    config = override_settings(variant.Config(), description["config"])
    requirements = variant.requirements_for(config)
    lexicon = Lexicon.load(folder / LEXICON_FILE) if model_requires_lexicon(requirements) else None
    encoder = None
    if requirements.encoder is not None:
        encoder = encoders.restore_encoder(getattr(config, requirements.encoder), folder / ENCODER)
    data_info = build_model_data_info(
        vocabulary,
        tuple(description["emotions"]),
        requirements,
        lexicon=lexicon,
        pretrained=_encoder_modules(requirements.encoder, encoder),
    )
    dimension = description["word_vector_dimension"]
    if dimension is not None:  # only the shape: the saved weights include the trained vectors
        blank = torch.zeros(len(vocabulary), dimension)
        data_info = dataclasses.replace(data_info, word_vectors=blank)
    built = variant(config, data_info)
    load_weights(built, folder / MODEL_WEIGHTS)
    return Model(
        name=description["variant"],
        variant=built.eval(),
        vocabulary=vocabulary,
        max_context=description["max_context"],
        lexicon=lexicon,
        encoder=encoder,
        labeller=find_model_labeller(folder),
    )


load_model_once = functools.lru_cache(1)(load_model)
"""`load_model` with a cache, for processes that run many tasks with one model."""


def save_weights(variant: Variant, path: Path) -> None:
    """Write each weight once, under its first name if modules share it.

    Weights are cloned: ZeRO keeps all weights of a player in one buffer, which would otherwise be
    written again for each of them.
    """
    first_names = _first_weight_names(variant).values()
    state = variant.state_dict()
    save_file({name: state[name].detach().cpu().clone() for name in first_names}, path)


def load_weights(variant: Variant, path: Path) -> None:
    """Load what `save_weights` wrote, under all names of each weight."""
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    names = _first_weight_names(variant)
    shared = {name: weights[first] for name, first in names.items() if first in weights}
    try:
        variant.load_state_dict({**weights, **shared})
    except RuntimeError as error:
        raise DataError(
            f"{path} does not fit the model: its settings, or the vocabulary in its folder, have "
            f"changed since ({' '.join(str(error).split())[:300]})"
        ) from error


def _first_weight_names(variant: Variant) -> dict[str, str]:
    """Return the first name of the same tensor for every name in the state."""
    first: dict[int, str] = {}
    state = variant.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
