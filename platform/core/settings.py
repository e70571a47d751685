"""Names that users type: variants, and settings after `--set`, checked and typed."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attune.models import VARIANTS, all_variants, load_variant
from attune.models.base import TextClassifier, Variant
from attune.platform.core.errors import UsageError, unknown_choice

PRESETS = ("tiny", "small", "paper")
_TYPE_NAMES = {int: "an integer", float: "a float", bool: "true or false", str: "text"}


def find_variant(name: str) -> tuple[type[Variant], Mapping[str, Any]]:
    """Return the class of a variant or ablation, and the settings that the ablation fixes."""
    if name in VARIANTS:  # the common case, without importing every model
        return load_variant(name), {}
    known = all_variants()
    if name not in known:
        raise UsageError(unknown_choice("variant", name, known))
    return known[name]


def variants_where(condition: Callable[[type[Variant]], bool]) -> list[str]:
    """Return the names of the variants whose class meets a condition, without their ablations.

    For error messages: they tell the user which variant to use without naming one in the code.
    """
    return [name for name in VARIANTS if condition(load_variant(name))]


def labels_utterances(variant: type[Variant]) -> bool:
    """Return whether a variant labels single utterances."""
    return issubclass(variant, TextClassifier) and variant.requirements.labels == "utterances"


def apply_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a dataclass with some fields changed; text is parsed as the field's type."""
    hints = typing.get_type_hints(type(config))
    values = {}
    for key, value in overrides.items():
        if key not in hints:
            raise UsageError(unknown_choice("setting", key, hints))
        values[key] = _parse_value(key, value, hints[key])
    try:
        return dataclasses.replace(config, **values)
    except ValueError as error:  # settings that do not go together
        raise UsageError(str(error)) from None


class Threshold(NamedTuple):
    """A threshold on data, with the name of its setting for error messages."""

    setting: str
    value: float

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


def find_threshold(config: Any, setting: str | None) -> Threshold | None:
    """Return the threshold that a variant declares by the name of a setting (`DataFilters`), or
    None if the variant has none or the threshold is 0."""
    value = getattr(config, setting) if setting else 0.0
    return Threshold(setting, value) if setting and value else None


def _parse_value(key: str, value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if value not in choices:
            raise UsageError(unknown_choice(f"value of {key}", value, map(str, choices)))
        return value
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value in ("none", None) and type(None) in allowed:
        return None
    kind = next(one for one in allowed if one is not type(None))
    if isinstance(value, str) and kind is not str:
        try:
            value = json.loads(value.lower())
        except json.JSONDecodeError:
            raise UsageError(f"{key}: expected {_TYPE_NAMES[kind]}, got '{value}'") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UsageError(f"{key}: expected {_TYPE_NAMES[kind]}, got '{value}'")
    return value
