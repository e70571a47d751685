"""The papers' models. `VARIANTS` names each system that can be trained and where its class is."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attune.models.base import Variant

VARIANTS: dict[str, str] = {
    "transformer": "attune.models.transformer:Transformer",
    "multi-trs": "attune.models.multitask:MultiTransformer",
    "emoprepend-1": "attune.models.multitask:EmoPrepend",
    "moel": "attune.models.moel:Moel",
    "mime": "attune.models.mime:Mime",
    "empdg": "attune.models.empdg:Empdg",
    "emotion-cause-soft": "attune.models.emotion_cause:EmotionCause",
    "emotion-cause-hard": "attune.models.emotion_cause:HardEmotionCause",
    "dual-emp": "attune.models.dual_emp:DualEmp",
    "dual-vae": "attune.models.dual_vae:DualVae",
    "meed2": "attune.models.meed2:Meed2",
    "cause-annotator": "attune.models.cause_annotator:CauseAnnotator",
    "emotion-classifier": "attune.models.classifiers:EmotionClassifier",
    "intent-classifier": "attune.models.classifiers:IntentClassifier",
    "dummy": "attune.models.dummy:Dummy",
}
"""Name of a variant -> `module:Class`, imported on demand. Classes list their ablations."""


def load_variant(name: str) -> "type[Variant]":
    """Return the class of a name in `VARIANTS`."""
    module, _, attribute = VARIANTS[name].partition(":")
    variant: type[Variant] = getattr(importlib.import_module(module), attribute)
    return variant


def all_variants() -> "dict[str, tuple[type[Variant], Mapping[str, Any]]]":
    """Return every name that can be trained, with its class and an ablation's settings."""
    variants: dict[str, tuple[type[Variant], Mapping[str, Any]]] = {}
    for name in VARIANTS:
        variant = load_variant(name)
        variants[name] = (variant, {})
        variants.update({ablation: (variant, s) for ablation, s in variant.ablations.items()})
    return variants
