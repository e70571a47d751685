"""`attune variants`: list the systems that can be trained, and their settings."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from attune.jobs.console import Json, console, print_json
from attune.jobs.tables import table
from attune.models import VARIANTS
from attune.platform.core.field_help import field_help


def variants(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show the settings of this one.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the systems that can be trained, or the settings of one.

    An ablation is a system with a part removed; it is trained like any other. A search space is a
    group of settings that `attune tune` can optimise.

    Examples:

    - `attune variants`
    - `attune variants multi-trs` shows what `attune train multi-trs --set KEY=VALUE` can change
    """
    from attune.platform.core.settings import find_variant

    screen = console(as_json)
    if name is None:
        descriptions = _describe_all()
        _show_all(screen, descriptions)
    else:
        find_variant(name)
        descriptions = [each for each in _describe_all() if each["name"] == name]
        descriptions[0]["settings"] = _describe_settings(name)
        _show_one(screen, descriptions[0])
    if as_json:
        print_json({"variants": descriptions})


def _describe_all() -> list[dict[str, Any]]:
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
            "search_spaces": _describe_search_spaces(variant.search_spaces),
        }
        for name, (variant, _) in all_variants().items()
    ]


def _describe_search_spaces(
    variant_spaces: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the groups that all variants share, then the variant's."""
    from attune.platform.training.settings import SEARCH_SPACES
    from attune.platform.tuning.spaces import to_json

    return {
        group: {key: to_json(space) for key, space in settings.items()}
        for group, settings in {**SEARCH_SPACES, **variant_spaces}.items()
    }


def _describe_settings(name: str) -> list[dict[str, Any]]:
    """Describe each setting of a variant and its training: default, values in presets, help."""
    from attune.platform.core.settings import find_variant
    from attune.platform.training.settings import TrainingConfig, configure

    variant, _ = find_variant(name)
    presets = {preset: configure(name, preset) for preset in variant.presets}
    return [
        {
            "name": field.name,
            "of": part,
            "default": getattr(config(), field.name),
            "presets": {p: getattr(configs[place], field.name) for p, configs in presets.items()},
            "help": field_help(config).get(field.name, ""),
        }
        for place, (part, config) in enumerate(
            (("model", variant.Config), ("training", TrainingConfig))
        )
        for field in dataclasses.fields(config)
    ]


def _show_all(screen: Console, descriptions: list[dict[str, Any]]) -> None:
    rows = table("", "variant", "system", "paper", "kind")
    rows.columns[0].no_wrap = True
    for description in descriptions:
        name = escape(description["name"])
        if description["ablation_of"]:
            rows.add_row(f"  {name}", "", "", "")
        else:
            cells = (escape(description[key]) for key in ("system", "paper", "kind"))
            rows.add_row(f"[bold]{name}[/bold]", *cells)
    screen.print(rows)
    screen.print("\nThe ablations of a variant are listed below it.")
    screen.print("'attune variants NAME' shows the settings and search spaces of one of them.")


def _show_one(screen: Console, description: dict[str, Any]) -> None:
    parent = description["ablation_of"]
    origin = f"ablation of {parent}" if parent else description["paper"]
    title = f"{description['name']}: {description['system']} ({origin})"
    screen.print(title, style="bold", markup=False)
    for part in ("model", "training"):
        settings = [setting for setting in description["settings"] if setting["of"] == part]
        presets = list(settings[0]["presets"]) if settings else []
        rows = table(f"\nsettings of the {part}", "--set", "default", *presets, "")
        for setting in settings:
            values = (_format_override(v, setting["default"]) for v in setting["presets"].values())
            name_and_default = (setting["name"], _format(setting["default"]))
            rows.add_row(*name_and_default, *values, escape(setting["help"]))
        screen.print(rows)
    for group, keys in description["search_spaces"].items():
        screen.print(f"\nsearch space {group}: {', '.join(keys)}", markup=False)


def _format_override(value: Any, default: Any) -> str:
    return "" if value == default else f"[cyan]{_format(value)}[/cyan]"


def _format(value: Any) -> str:
    """Format a value as a user would type it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return escape(f"{value:g}" if isinstance(value, float) else str(value))
