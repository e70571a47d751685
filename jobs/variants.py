"""`attune variants`: list the systems that can be trained, and their settings."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attune.jobs.console import Json, console, print_json
from attune.jobs.tables import table
from attune.models import VARIANTS

PRESETS = {
    "tiny": "for tests: trains in seconds, answers are of no use",
    "small": "the default: trains on the bundled corpus in minutes on a laptop",
    "compact": "converges on EmpatheticDialogues in 20 to 60 minutes on two cores",
    "paper": "the sizes and training settings that the paper states; meant for a GPU",
}
"""What each preset is for."""
HELP_WIDTH = 100
"""Columns of the settings of one variant, also where the output is not a terminal."""


def variants(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A variant whose settings to show.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the systems that can be trained, or the settings of one of them.

    An ablation is a system with a part removed; it is trained like any other variant. A search
    space is a group of settings that `attune tune` optimises.

    Examples:

    - `attune variants`
    - `attune variants multi-trs` lists each KEY of `attune train multi-trs --set KEY=VALUE`
    """
    from attune.platform.core.settings import find_variant

    if name is None:
        descriptions = _describe_all_variants()
        _print_variants(console(as_json), descriptions)
    else:
        find_variant(name)
        descriptions = [each for each in _describe_all_variants() if each["name"] == name]
        descriptions[0]["settings"] = _describe_variant_settings(name)
        _print_variant(console(as_json, max_width=HELP_WIDTH), descriptions[0])
    if as_json:
        print_json({"variants": descriptions})


def _describe_all_variants() -> list[dict[str, Any]]:
    from attune.models import all_variants, load_variant
    from attune.models.base import DialogueVariant

    parents = {ablation: name for name in VARIANTS for ablation in load_variant(name).ablations}
    return [
        {
            "name": name,
            "system": variant.system,
            "paper": variant.paper,
            "ablation_of": parents.get(name),
            "kind": "dialogue" if issubclass(variant, DialogueVariant) else "classifier",
            "search_spaces": _describe_variant_spaces(variant.search_spaces),
        }
        for name, (variant, _) in all_variants().items()
    ]


def _describe_variant_spaces(
    variant_spaces: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the groups that all variants share, then the variant's."""
    from attune.platform.training.settings import SEARCH_SPACES
    from attune.platform.tuning.spaces import to_json

    return {
        group: {key: to_json(space) for key, space in settings.items()}
        for group, settings in {**SEARCH_SPACES, **variant_spaces}.items()
    }


def _describe_variant_settings(name: str) -> list[dict[str, Any]]:
    """Describe each setting of a variant and its training: default, values in presets, help."""
    from attune.platform.core.settings import find_variant, setting_help
    from attune.platform.training.settings import TrainingConfig, configure

    variant, _ = find_variant(name)
    presets = {preset: configure(name, preset) for preset in variant.presets}
    return [
        {
            "name": field.name,
            "of": part,
            "default": getattr(config(), field.name),
            "presets": {p: getattr(configs[place], field.name) for p, configs in presets.items()},
            "help": setting_help(config)[field.name],
        }
        for place, (part, config) in enumerate(
            (("model", variant.Config), ("training", TrainingConfig))
        )
        for field in dataclasses.fields(config)
    ]


def _print_variants(screen: Console, descriptions: list[dict[str, Any]]) -> None:
    listed = table("", "variant", "system", "paper", "kind")
    listed.columns[0].no_wrap = True
    for description in descriptions:
        name = escape(description["name"])
        if description["ablation_of"]:
            listed.add_row(f"  {name}", "", "", "")
        else:
            cells = (escape(description[key]) for key in ("system", "paper", "kind"))
            listed.add_row(f"[bold]{name}[/bold]", *cells)
    screen.print(listed)
    screen.print("\nThe ablations of a variant are listed below it, indented.")
    screen.print("'attune variants NAME' lists the settings and search spaces of one variant.")


def _print_variant(screen: Console, description: dict[str, Any]) -> None:
    parent = description["ablation_of"]
    origin = f"ablation of {parent}" if parent else description["paper"]
    title = f"{description['name']}: {description['system']} ({origin})"
    screen.print(title, style="bold", markup=False)
    settings = description["settings"]
    listed = table("\npresets", "--preset", "")
    for preset in settings[0]["presets"]:
        listed.add_row(preset, PRESETS[preset])
    screen.print(listed)
    for part, part_title in (("model", "model settings"), ("training", "training settings")):
        of_part = [setting for setting in settings if setting["of"] == part]
        screen.print(_tabulate_variant_settings(f"\n{part_title}", of_part))
    listed = table("\nsearch spaces", "--space", "settings")
    for group, keys in description["search_spaces"].items():
        listed.add_row(group, ", ".join(keys))
    screen.print(listed)


def _tabulate_variant_settings(title: str, settings: list[dict[str, Any]]) -> Table:
    """Return a table of settings; a preset's column shows where it differs from the default."""
    presets = list(settings[0]["presets"]) if settings else []
    listed = table(title, "--set", "default", *presets, "")
    for column in listed.columns[:-1]:
        column.no_wrap = True
    for setting in settings:
        default = setting["default"]
        values = (
            "" if value == default else f"[cyan]{_format_variant_value(value)}[/cyan]"
            for value in setting["presets"].values()
        )
        listed.add_row(
            setting["name"], _format_variant_value(default), *values, escape(setting["help"])
        )
    return listed


def _format_variant_value(value: Any) -> str:
    """Format a value as a user would type it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return escape(f"{value:g}" if isinstance(value, float) else str(value))
