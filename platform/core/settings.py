"""Names that users type: variants, and settings after `--set`, checked and typed."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from attune.models import VARIANTS, all_variants, load_variant
from attune.models.base import Bounds, TextClassifier, Variant
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.field_help import field_help

PRESETS = ("tiny", "small", "compact", "paper")
_TYPE_NAMES = {int: "an integer", float: "a float", bool: "true or false", str: "text"}


def find_variant(name: str) -> tuple[type[Variant], Mapping[str, Any]]:
    """Return the class of a variant or ablation, and the settings that the ablation fixes."""
    if name in VARIANTS:  # the common case, without importing every model
        return load_variant(name), {}
    known = all_variants()
    if name not in known:
        raise UsageError(unknown_choice_error("variant", name, known))
    return known[name]


def variants_where(condition: Callable[[type[Variant]], bool]) -> list[str]:
    """Return the names of the variants whose class meets a condition, without their ablations.

    For error messages: they tell the user which variant to use without naming one in the code.
    """
    return [name for name in VARIANTS if condition(load_variant(name))]


def labels_utterances(variant: type[Variant]) -> bool:
    """Return whether a variant labels single utterances."""
    return issubclass(variant, TextClassifier) and variant.requirements.labels == "utterances"


def override_settings(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a dataclass with some fields changed, after checking each value and all together."""
    try:
        return dataclasses.replace(config, **parse_settings(type(config), overrides))
    except UsageError:
        raise
    except ValueError as error:  # settings that do not go together
        raise UsageError(str(error)) from None


class Threshold(NamedTuple):
    """A threshold on data, with the name of its setting for error messages."""

    setting: str
    value: float

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


def find_threshold_setting(config: Any, setting: str | None) -> Threshold | None:
    """Return the threshold that a variant declares by the name of a setting (`DataFilters`), or
    None if the variant has none or the threshold is 0."""
    value = getattr(config, setting) if setting else 0.0
    return Threshold(setting, value) if setting and value else None


def parse_settings(dataclass: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields of a dataclass; text is parsed, types and bounds are checked."""
    hints = typing.get_type_hints(dataclass, include_extras=True)
    for key in overrides:
        if key not in hints:
            raise UsageError(unknown_choice_error("setting", key, hints))
    return {key: _parse_setting_value(key, value, hints[key]) for key, value in overrides.items()}


def setting_help(dataclass: type) -> dict[str, str]:
    """Return the help of each field: its docstring, then its choices or bounds."""
    hints = typing.get_type_hints(dataclass, include_extras=True)
    texts = field_help(dataclass)
    return {
        field.name: f"{texts[field.name]}{_describe_setting_values(hints[field.name])}"
        for field in dataclasses.fields(dataclass)
    }


def _describe_setting_values(hint: Any) -> str:
    """Return ` (from 0 to below 1)`, ` (mean or public)`, or nothing where any value is allowed."""
    _, choices, bounds = _split_setting_hint(hint)
    if choices:
        return f" ({', '.join(choices[:-1])} or {choices[-1]})"
    return "" if bounds is None else f" ({bounds})"


def _split_setting_hint(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...], Bounds | None]:
    """Return the types, choices and bounds that a type hint such as `Annotated[int | None,
    Bounds(at_least=1)]` declares."""
    bounds = None
    if typing.get_origin(hint) is Annotated:
        hint, bounds = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return (str,), typing.get_args(hint), bounds
    return (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)), (), bounds


def _parse_setting_value(key: str, value: Any, hint: Any) -> Any:
    allowed, choices, bounds = _split_setting_hint(hint)
    if choices:
        if value not in choices:
            raise UsageError(unknown_choice_error(f"value of {key}", value, choices))
        return value
    if value in ("none", None) and type(None) in allowed:
        return None
    kind: Any = next(one for one in allowed if one is not type(None))
    parsed = value
    if isinstance(value, str) and kind is not str:
        try:
            parsed = json.loads(value.lower())
        except json.JSONDecodeError:
            raise UsageError(f"{key}: expected {_TYPE_NAMES[kind]}, got '{value}'") from None
    if kind is float and isinstance(parsed, int) and not isinstance(parsed, bool):
        parsed = float(parsed)
    if type(parsed) is not kind:
        raise UsageError(f"{key}: expected {_TYPE_NAMES[kind]}, got '{value}'")
    if bounds is not None and parsed not in bounds:
        noun = "" if str(bounds).startswith("at least") else "a number "
        raise UsageError(f"{key}: expected {noun}{bounds}, got {value}")
    return parsed
