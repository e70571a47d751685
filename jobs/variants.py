"""`attune variants`: what can be trained, and with which settings."""

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

    An ablation is a system with a part taken out; it is trained like any other. A search space is
    a group of settings that `attune tune` can look for good values of.

    Examples:

    - `attune variants`
    - `attune variants multi-trs` shows what `attune train multi-trs --set KEY=VALUE` can change
    """
    from attune.platform.core.settings import find_variant

    screen = console(as_json)
    if name is None:
        found = _all_described()
        _show_all(screen, found)
    else:
        find_variant(name)
        found = [one for one in _all_described() if one["name"] == name]
        found[0]["settings"] = _settings(name)
        _show_one(screen, found[0])
    if as_json:
        print_json({"variants": found})


def _all_described() -> list[dict[str, Any]]:
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
            "search_spaces": _search_spaces(variant.search_spaces),
        }
        for name, (variant, _) in all_variants().items()
    ]


def _search_spaces(own: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The variant's own groups behind those that all share."""
    from attune.platform.training.settings import SEARCH_SPACES
    from attune.platform.tuning.spaces import to_json

    return {
        group: {key: to_json(space) for key, space in settings.items()}
        for group, settings in {**SEARCH_SPACES, **own}.items()
    }


def _settings(name: str) -> list[dict[str, Any]]:
    """Every setting of a variant and of its training: default, value in each preset, help."""
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


def _show_all(screen: Console, found: list[dict[str, Any]]) -> None:
    listed = table("", "variant", "system", "paper", "kind")
    listed.columns[0].no_wrap = True
    for one in found:
        name = escape(one["name"])
        if one["ablation_of"]:
            listed.add_row(f"  {name}", "", "", "")
        else:
            told = (escape(one[key]) for key in ("system", "paper", "kind"))
            listed.add_row(f"[bold]{name}[/bold]", *told)
    screen.print(listed)
    screen.print("\nBelow a variant stand its ablations, each without one of its parts.")
    screen.print("'attune variants NAME' shows the settings and search spaces of one of them.")


def _show_one(screen: Console, one: dict[str, Any]) -> None:
    about = f"ablation of {one['ablation_of']}" if one["ablation_of"] else one["paper"]
    screen.print(f"{one['name']}: {one['system']} ({about})", style="bold", markup=False)
    for part in ("model", "training"):
        settings = [setting for setting in one["settings"] if setting["of"] == part]
        presets = list(settings[0]["presets"]) if settings else []
        listed = table(f"\nsettings of the {part}", "--set", "default", *presets, "")
        for setting in settings:
            values = (_changed(v, setting["default"]) for v in setting["presets"].values())
            named = (setting["name"], _text(setting["default"]))
            listed.add_row(*named, *values, escape(setting["help"]))
        screen.print(listed)
    for group, keys in one["search_spaces"].items():
        screen.print(f"\nsearch space {group}: {', '.join(keys)}", markup=False)


def _changed(value: Any, default: Any) -> str:
    return "" if value == default else f"[cyan]{_text(value)}[/cyan]"


def _text(value: Any) -> str:
    """As a user would type it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return escape(f"{value:g}" if isinstance(value, float) else str(value))
