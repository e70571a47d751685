"""The decoding settings on the page: one component for each field of `Decoding`."""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import gradio as gr

from attune.models.decoding import Decoding
from attune.platform.core.settings import override_settings, setting_help

RANGES: dict[str, tuple[float, float, float]] = {
    "max_tokens": (1, 100, 1),
    "beams": (1, 20, 1),
    "length_penalty": (0, 3, 0.1),
    "block_ngrams": (0, 6, 1),
    "top_k": (1, 100, 1),
    "top_p": (0.05, 1, 0.05),
    "temperature": (0.1, 3, 0.1),
}
"""Minimum, maximum and step of the settings that have a slider."""


def build_settings() -> list[gr.components.Component]:
    """Build the components, in the order of the fields."""
    return [_build_setting(field) for field in dataclasses.fields(Decoding)]


def _build_setting(field: "dataclasses.Field[Any]") -> gr.components.Component:
    """Build a dropdown, a number field or a slider, by the type of the setting."""
    help_text = setting_help(Decoding)[field.name]
    default: Any = field.default
    field_type = typing.get_type_hints(Decoding)[field.name]
    if typing.get_origin(field_type) is typing.Literal:
        choices = typing.get_args(field_type)
        return gr.Dropdown(choices, value=default, label=field.name, info=help_text)
    if field.name not in RANGES:
        return gr.Number(default, label=field.name, info=help_text, precision=0, minimum=0)
    minimum, maximum, step = RANGES[field.name]
    return gr.Slider(minimum, maximum, default, step=step, label=field.name, info=help_text)


def read_decoding(values: Sequence[Any]) -> Decoding:
    """Return the decoding settings from the values of their components."""
    hints = typing.get_type_hints(Decoding)
    names = [field.name for field in dataclasses.fields(Decoding)]
    overrides = dict(zip(names, values, strict=True))
    for name, value in overrides.items():
        if hints[name] is int and isinstance(value, float) and value.is_integer():
            overrides[name] = int(value)  # JavaScript has one kind of number
    decoding: Decoding = override_settings(Decoding(), overrides)
    return decoding
