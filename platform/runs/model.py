"""A model on disk: a folder that describes itself and answers on any machine.

model.safetensors       the weights
model.json              variant, configuration, emotions
vocabulary.txt          the tokens
tokenizer.json          what cuts words into them, where the variant reads subwords
lexicon.json            the emotion words, where the variant needs them
encoder/                the pretrained encoder's shape and tokenizer, where the variant has one
labeller/               the model that labels utterances for it, where the variant reads labels
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
from safetensors.torch import load_file, save_file
from torch import nn

from attune.models.base import Annotator, DataInfo, DataRequirements, Variant
from attune.platform.batching.encoding import (
    IntArray,
    Layout,
    Ragged,
    encode,
    encoder_columns,
    subword_columns,
)
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.settings import (
    apply_overrides,
    find_variant,
    labels_utterances,
    variants_where,
)
from attune.platform.data.dataset_folder import (
    read_cause_samples,
    read_labelled_utterances,
    read_samples,
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
    """A variant with what it needs to read and write text."""

    name: str
    """The variant's, as a user types it."""
    variant: Variant
    vocabulary: Vocabulary
    max_context: int | None = None
    """Context tokens that it was taught with, counted from the end."""
    lexicon: Lexicon | None = None
    """The emotion words it was taught with, where it needs them."""
    encoder: TextEncoder | None = None
    """The pretrained encoder it reads contexts with, where it does."""
    labeller: Path | None = None
    """The folder of the model that labels the utterances it reads, where it reads labels."""

    def columns(self, samples: pl.DataFrame) -> dict[str, Ragged | IntArray]:
        """Samples as the numbers it reads."""
        requirements, find = self.variant.requirements_for(self.variant.config), None
        if self.lexicon is not None and EMOTION_WORDS in requirements.columns:
            find = EmotionWords(self.lexicon).find
        columns = encode(
            samples,
            self.vocabulary,
            layout=self.layout,
            # Who is not told an emotion's number may be given any emotion's word.
            emotions=self.variant.data_info.emotions if "emotion" in requirements.columns else (),
            emotion_words=find,
            causes=CAUSES in requirements.columns,
            labels=CONTEXT_LABELS in requirements.columns,
        )
        if self.encoder is None:
            return columns
        encoder_input = subword_columns if SUBWORDS in requirements.columns else encoder_columns
        return {**columns, **encoder_input(self.encoder, samples)}

    @property
    def layout(self) -> Layout:
        """How it wants a context laid out."""
        return Layout(separators=self.variant.requirements.separators, max_context=self.max_context)


def read_split(variant: Variant | type[Variant], folder: Path, split: str) -> pl.DataFrame:
    """The samples of a split that a variant learns from and is measured on."""
    if issubclass(variant if isinstance(variant, type) else type(variant), Annotator):
        return read_cause_samples(folder, split)
    if variant.requirements.labels == "utterances":
        return read_labelled_utterances(folder, split)
    return read_samples(folder, split)


def check_labels(requirements: DataRequirements, samples: pl.DataFrame, place: str) -> None:
    """Who reads the labels of utterances must find some: none at all would be read as one."""
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


def label_names(requirements: DataRequirements) -> tuple[str, ...]:
    """What the numbers of `emotion` stand for."""
    return LABELS if requirements.labels == "utterances" else EMOTIONS


def requires_lexicon(requirements: DataRequirements) -> bool:
    """Whether a variant needs a lexicon."""
    return EMOTION_WORDS in requirements.columns or requirements.intensity


def build_data_info(
    vocabulary: Vocabulary,
    emotions: tuple[str, ...],
    requirements: DataRequirements,
    *,
    vectors: WordVectors | None = None,
    lexicon: Lexicon | None = None,
    pretrained: Mapping[str, nn.Module] | None = None,
) -> DataInfo:
    """What a model must know of its data."""
    marks = intensity = None
    if lexicon is not None and EMOTION_WORDS in requirements.columns:
        marks = torch.tensor(EmotionWords(lexicon).marks(vocabulary))
    if lexicon is not None and requirements.intensity:
        intensity = torch.tensor([lexicon.intensity(token) for token in vocabulary.tokens])
    return DataInfo(
        num_tokens=len(vocabulary),
        specials={token: vocabulary.numbers[token] for token in SPECIALS},
        emotions=emotions,
        emotion_tokens=tuple(vocabulary.number(emotion) for emotion in emotions),
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
    """A new model; the seed decides its first weights and leaves torch's own state as it was."""
    variant, _ = find_variant(name)
    requirements = variant.requirements_for(config)
    encoder = (
        None
        if requirements.encoder is None
        else encoders.load(getattr(config, requirements.encoder))
    )
    data_info = build_data_info(
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
    """An encoder under the name by which a variant asks for it."""
    return {} if setting is None or encoder is None else {setting: encoder.module}


def save_model(model: Model, folder: Path) -> None:
    """Write a model where `load` finds it."""
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
        copy_labeller(model.labeller, folder)
    (folder / MODEL_DESCRIPTION).write_text(
        json.dumps(description, indent=2) + "\n", encoding="utf-8"
    )


def copy_labeller(labeller: Path, folder: Path) -> None:
    """Put a labeller into a folder; it is large, and linked where the disk can do that."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another disk, or none that links
            shutil.copyfile(source, target)

    shutil.copytree(labeller, folder / LABELLER, copy_function=link, dirs_exist_ok=False)


def find_labeller(folder: Path) -> Path | None:
    """The folder of the labeller that was put into a folder."""
    return folder / LABELLER if (folder / LABELLER).is_dir() else None


def load_model(folder: Path) -> Model:
    """The model in a folder, ready to answer."""
    for name in (MODEL_DESCRIPTION, VOCABULARY_FILE, MODEL_WEIGHTS):
        if not (folder / name).is_file():
            raise UsageError(f"'{folder}' is not a model: {name} is missing")
    description = json.loads((folder / MODEL_DESCRIPTION).read_text(encoding="utf-8"))
    vocabulary = subwords.load(folder / VOCABULARY_FILE)
    variant, _ = find_variant(description["variant"])
    config = apply_overrides(variant.Config(), description["config"])
    requirements = variant.requirements_for(config)
    lexicon = Lexicon.load(folder / LEXICON_FILE) if requires_lexicon(requirements) else None
    encoder = None
    if requirements.encoder is not None:
        encoder = encoders.restore(getattr(config, requirements.encoder), folder / ENCODER)
    data_info = build_data_info(
        vocabulary,
        tuple(description["emotions"]),
        requirements,
        lexicon=lexicon,
        pretrained=_encoder_modules(requirements.encoder, encoder),
    )
    dimension = description["word_vector_dimension"]
    if dimension is not None:  # only the shape: the weights hold what became of the vectors
        blank = torch.zeros(len(vocabulary), dimension)
        data_info = dataclasses.replace(data_info, word_vectors=blank)
    built = variant(config, data_info)
    try:
        load_weights(built, folder / MODEL_WEIGHTS)
    except RuntimeError as error:
        raise DataError(
            f"{folder / MODEL_WEIGHTS} does not fit {folder / MODEL_DESCRIPTION}: {error}"
        ) from error
    return Model(
        name=description["variant"],
        variant=built.eval(),
        vocabulary=vocabulary,
        max_context=description["max_context"],
        lexicon=lexicon,
        encoder=encoder,
        labeller=find_labeller(folder),
    )


load_model_once = functools.lru_cache(1)(load_model)
"""For processes that do many tasks with one model."""


def save_weights(variant: Variant, path: Path) -> None:
    """Each weight once, under the first of its names where parts share it.

    Copies: ZeRO lays all weights of a player into one piece of memory, which a file must not hold
    again for each of them.
    """
    first_names = _first_names(variant).values()
    state = variant.state_dict()
    save_file({name: state[name].detach().cpu().clone() for name in first_names}, path)


def load_weights(variant: Variant, path: Path) -> None:
    """What `save_weights` wrote, under all names."""
    weights = load_file(path)
    names = _first_names(variant)
    shared = {name: weights[first] for name, first in names.items() if first in weights}
    variant.load_state_dict({**weights, **shared})


def _first_names(variant: Variant) -> dict[str, str]:
    """Every name in the state -> the first name of the same tensor."""
    first: dict[int, str] = {}
    state = variant.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
