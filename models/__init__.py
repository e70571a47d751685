"""The models of the papers. `VARIANTS` has the name and the class of each system."""

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
"""Name of a variant -> `module:Class`, imported when needed. A class lists its ablations."""


def load_variant(name: str) -> "type[Variant]":
    """Return the class of a name in `VARIANTS`."""
    module, _, attribute = VARIANTS[name].partition(":")
    variant: type[Variant] = getattr(importlib.import_module(module), attribute)
    return variant


def all_variants() -> "dict[str, tuple[type[Variant], Mapping[str, Any]]]":
    """Return the class of each variant and ablation, and the settings of the ablation, by name."""
    variants: dict[str, tuple[type[Variant], Mapping[str, Any]]] = {}
    for name in VARIANTS:
        variant = load_variant(name)
        variants[name] = (variant, {})
        for ablation, settings in variant.ablations.items():
            variants[ablation] = (variant, settings)
    return variants
