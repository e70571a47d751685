"""Search spaces: the groups of settings of a variant, bundled sweeps, and sweep files.

A sweep file is YAML. Every key is optional, and options on the command line have priority:

about: its purpose
variants: [mime]
space:                                       # overrides and extends the groups of the variant
  elbo_weight: {low: 0.5, high: 4.0, scale: loguniform}
  gate: [each, open]
set: {max_epochs: 5}
search: grid
metric: perplexity
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from attune.models.base import Choice, Range
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.core.settings import find_variant, parse_settings
from attune.platform.training.settings import (
    SEARCH_SPACES,
    TrainingConfig,
    configure,
    parse_variant_settings,
)

if TYPE_CHECKING:
    from optuna import Trial

Space = dict[str, Choice | Range]
Search = Literal["optuna", "random", "grid"]
SEARCHES: tuple[str, ...] = get_args(Search)
ALL = "all"
VARIANT = "variant"
VALUES_PER_RANGE = 5
"""The number of values that a grid search tries of a range."""
MAX_GRID_SIZE = 10_000

DECODING_SPACES: Mapping[str, Space] = {
    "beam": {
        "beams": Choice(values=(1, 2, 5, 10)),
        "length_penalty": Range(low=0.0, high=2.0),
        "block_ngrams": Choice(values=(0, 3, 4)),
    },
    "topk": {
        "top_k": Choice(values=(2, 3, 5, 10, 40)),
        "temperature": Range(low=0.3, high=1.5),
    },
    "nucleus": {
        "top_p": Range(low=0.5, high=1.0),
        "temperature": Range(low=0.3, high=1.5),
    },
}
"""The search space of each decoding method; the same for all variants."""


@dataclass(frozen=True, kw_only=True)
class SweepDefinition:
    """The content of a sweep file."""

    source: str = ""
    about: str = ""
    variants: tuple[str, ...] = ()
    space: Space = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    search: str | None = None
    metric: str | None = None
    decode: str | None = None
    """The decoding method, if it is a sweep of `attune tune-decoding`."""


def read_bundled_sweeps() -> dict[str, SweepDefinition]:
    """Return the bundled sweeps by name."""
    folder = resources.files("attune.models.sweeps")
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".yaml"))
    return {
        name.removesuffix(".yaml"): _parse_definition(
            name, folder.joinpath(name).read_text(encoding="utf-8")
        )
        for name in files
    }


def find_definition(text: str) -> SweepDefinition:
    """Return a bundled sweep by its name, or the one in a YAML file."""
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"--sweep {text}: the file does not exist")
        try:
            content = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise UsageError(
                f"--sweep {text}: not readable as text ({error}); a sweep is a YAML file in UTF-8"
            ) from None
        return _parse_definition(text, content)
    known = read_bundled_sweeps()
    if text not in known:
        raise UsageError(f"{unknown_choice_error('sweep', text, known)} (or give a .yaml file)")
    return known[text]


def _parse_definition(source: str, text: str) -> SweepDefinition:
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise UsageError(f"{source}{line}: expected YAML") from error
    known = {each.name for each in dataclasses.fields(SweepDefinition)} - {"source"}
    if not isinstance(content, dict):
        raise UsageError(f"{source}: expected keys with values: {', '.join(sorted(known))}")
    for key in content:
        if key not in known:
            raise UsageError(f"{source}: {unknown_choice_error('key', key, known)}")
    for key in ("space", "set"):
        if not isinstance(content.get(key, {}), dict):
            raise UsageError(
                f"{source}: {key}: expected settings, as in '{key}: {{dropout: ...}}', got "
                f"{content[key]!r}"
            )
    if content.get("search") not in (None, *SEARCHES):
        raise UsageError(f"{source}: {unknown_choice_error('search', content['search'], SEARCHES)}")
    variants = content.get("variants", ())
    names = [variants] if isinstance(variants, str) else variants
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"{source}: variants: expected names, as in 'variants: [mime]', got {variants!r}"
        )
    for key in ("about", "metric", "decode"):
        if not isinstance(content.get(key, ""), str):
            raise UsageError(f"{source}: {key}: expected a text, got {content[key]!r}")
    space = {
        key: _parse_dimension(source, key, value) for key, value in content.get("space", {}).items()
    }
    return SweepDefinition(
        **{
            **content,
            "source": source,
            "variants": tuple(names),
            "space": space,
        }
    )


def _parse_dimension(source: str, key: str, value: Any) -> Choice | Range:
    place = f"{source}: space.{key}"
    form = "expected a list of values, or {low: A, high: B, scale: uniform|loguniform|int}"
    if isinstance(value, list):
        if not value or not all(isinstance(v, bool | int | float | str) for v in value):
            raise UsageError(f"{place}: expected numbers, texts or booleans, got {value!r}")
        return Choice(values=tuple(_parse_number(v) for v in value))
    if not isinstance(value, dict) or not {"low", "high"} <= set(value) <= {"low", "high", "scale"}:
        raise UsageError(f"{place}: {form}, got {value!r}")
    low, high, scale = (
        _parse_number(value["low"]),
        _parse_number(value["high"]),
        value.get("scale", "uniform"),
    )
    scales = ("uniform", "loguniform", "int")
    if scale not in scales:
        raise UsageError(f"{place}: {unknown_choice_error('scale', scale, scales)}")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in (low, high)):
        raise UsageError(f"{place}: expected numbers as low and high, got {low!r} and {high!r}")
    if not low < high:
        raise UsageError(f"{place}: low: expected less than high={high}, got {low}")
    if scale == "loguniform" and low <= 0:
        raise UsageError(
            f"{place}: low: expected a number above 0 with scale loguniform, got {low}"
        )
    if scale == "int" and (low != int(low) or high != int(high)):
        raise UsageError(f"{place}: expected integers as low and high, got {low} and {high}")
    return Range(low=low, high=high, scale=scale)


def _parse_number(value: Any) -> Any:
    """Return a number for a text such as 1e-4, which YAML reads as a text for lack of a dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def get_search_groups(variant: str) -> dict[str, Mapping[str, Choice | Range]]:
    """Return the groups of settings of a variant, without those that define an ablation."""
    own, fixed = find_variant(variant)
    groups = {**SEARCH_SPACES, **own.search_spaces}
    tunable = {
        group: {key: dimension for key, dimension in space.items() if key not in fixed}
        for group, space in groups.items()
    }
    return {group: space for group, space in tunable.items() if space}


def build_variant_spaces(
    variants: Sequence[str], groups: Sequence[str], definition: SweepDefinition,
    fixed: Mapping[str, Any], preset: str = "small",
) -> dict[str, Space]:  # fmt: skip
    """Return the search space of each variant: its groups and a sweep file's space, without the
    `fixed` settings."""
    spaces = {name: _merge_groups(name, groups) for name in variants}
    for key, dimension in definition.space.items():
        having = [name for name in variants if key in _setting_names(name)]
        if not having:
            known = set().union(*(_setting_names(name) for name in variants))
            raise UsageError(
                f"{definition.source}: space: {unknown_choice_error('setting', key, known)}"
            )
        for name in having:
            spaces[name][key] = dimension
    for name, space in spaces.items():
        for key in fixed:
            space.pop(key, None)
        _check_values(name, space, fixed, preset, definition)
        if not space and len(spaces) == 1:
            raise UsageError(f"no setting of '{name}' is left to tune: choose another --space")
    return spaces


def _merge_groups(variant: str, groups: Sequence[str]) -> Space:
    known = get_search_groups(variant)
    space: Space = {}
    for group in known if ALL in groups else groups:
        if group not in known:
            raise UsageError(
                f"'{variant}' has no search space '{group}': it has {', '.join(known)}, or {ALL}"
            )
        space.update(known[group])
    return space


def _setting_names(variant: str) -> set[str]:
    own = find_variant(variant)[0].Config
    return {each.name for kind in (own, TrainingConfig) for each in dataclasses.fields(kind)}


def _check_values(
    variant: str, space: Space, fixed: Mapping[str, Any], preset: str, definition: SweepDefinition
) -> None:
    """Check the settings that all trials share, and every value of a choice or end of a range."""
    for key, value in fixed.items():
        place = f"{definition.source}: set." if key in definition.set else ""
        with _errors_at(place, key):
            parse_variant_settings(variant, {key: value})
    for key, dimension in space.items():
        place = f"{definition.source}: space." if key in definition.space else ""
        for value in boundary_values(dimension):
            with _errors_at(place, key):
                configure(variant, preset, {**fixed, key: value})


@contextmanager
def _errors_at(place: str, key: str) -> Iterator[None]:
    """Add the place in the sweep file to errors about a setting."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        name = f"{key}: " if place and not text.startswith(f"{key}:") else ""
        raise UsageError(f"{place}{name}{text}") from None


def boundary_values(dimension: Choice | Range) -> tuple[Any, ...]:
    """Return all values of a choice, or the ends of a range."""
    if isinstance(dimension, Choice):
        return dimension.values
    return tuple(_to_number(dimension, value) for value in (dimension.low, dimension.high))


def _to_number(dimension: Range, value: float) -> float:
    return round(value) if dimension.scale == "int" else float(value)


def build_decoding_spaces(
    methods: Sequence[str], definition: SweepDefinition, fixed: Mapping[str, Any]
) -> dict[str, Space]:
    """Return the search space of each decoding method, without the `fixed` settings."""
    spaces: dict[str, Space] = {}
    keys = {each.name for each in dataclasses.fields(Decoding)}
    for method in methods:
        if method not in DECODING_SPACES:
            raise UsageError(unknown_choice_error("decoding method", method, DECODING_SPACES))
        spaces[method] = (
            {**DECODING_SPACES[method], **definition.space}
            if not definition.decode
            else {**definition.space}
        )
        for key in fixed:
            spaces[method].pop(key, None)
    for key in (*definition.space, *fixed):
        if key not in keys:
            raise UsageError(f"{unknown_choice_error('decoding setting', key, keys)}")
    for key, value in fixed.items():
        with _errors_at(f"{definition.source}: set." if key in definition.set else "", key):
            parse_settings(Decoding, {key: value})
    for key, dimension in definition.space.items():
        for value in boundary_values(dimension):
            with _errors_at(f"{definition.source}: space.", key):
                parse_settings(Decoding, {key: value})
    return spaces


def suggest(trial: "Trial", spaces: Mapping[str, Space]) -> tuple[str, dict[str, Any]]:
    """Let Optuna suggest one of the spaces and a value of each of its settings; return both."""
    names = list(spaces)
    chosen = names[0] if len(names) == 1 else trial.suggest_categorical(VARIANT, names)
    settings: dict[str, Any] = {}
    for key, dimension in spaces[chosen].items():
        label = _parameter_name(chosen, key, len(names))
        if isinstance(dimension, Choice):
            settings[key] = trial.suggest_categorical(label, dimension.values)
        elif dimension.scale == "int":
            settings[key] = trial.suggest_int(label, int(dimension.low), int(dimension.high))
        else:
            log = dimension.scale == "loguniform"
            settings[key] = trial.suggest_float(label, dimension.low, dimension.high, log=log)
    return chosen, settings


def iterate_grid(spaces: Mapping[str, Space]) -> Iterator[dict[str, Any]]:
    """Yield every combination of values as the parameters of a trial."""
    for name, space in spaces.items():
        head = {VARIANT: name} if len(spaces) > 1 else {}
        labels = [_parameter_name(name, key, len(spaces)) for key in space]
        for values in itertools.product(*(_grid_values(dimension) for dimension in space.values())):
            yield {**head, **dict(zip(labels, values, strict=True))}


def count_grid_points(spaces: Mapping[str, Space]) -> int:
    """Return the number of combinations."""
    count = sum(
        math.prod(len(_grid_values(dimension)) for dimension in space.values())
        for space in spaces.values()
    )
    if count > MAX_GRID_SIZE:
        raise UsageError(
            f"expected a grid of at most {MAX_GRID_SIZE:,} trials, got {count:,}: choose fewer "
            f"settings, or --search optuna or random"
        )
    return count


def _parameter_name(name: str, key: str, count: int) -> str:
    """Return a setting's name in the search, where each variant's settings are separate."""
    return key if count == 1 else f"{name}/{key}"


def _grid_values(dimension: Choice | Range) -> list[Any]:
    if isinstance(dimension, Choice):
        return list(dimension.values)
    fractions = [n / (VALUES_PER_RANGE - 1) for n in range(VALUES_PER_RANGE)]
    if dimension.scale == "loguniform":
        low, high = math.log(dimension.low), math.log(dimension.high)
        inner = [math.exp(low + fraction * (high - low)) for fraction in fractions[1:-1]]
        return [dimension.low, *inner, dimension.high]
    values = [dimension.low + part * (dimension.high - dimension.low) for part in fractions]
    return list(dict.fromkeys(_to_number(dimension, value) for value in values))


def to_json(dimension: Choice | Range) -> dict[str, Any]:
    """Return a dimension as in the JSON of `attune variants`."""
    if isinstance(dimension, Choice):
        return {"type": "choice", "values": list(dimension.values)}
    ends = {
        "low": _to_number(dimension, dimension.low),
        "high": _to_number(dimension, dimension.high),
    }
    return {"type": dimension.scale, **ends}


def from_json(content: Mapping[str, Any]) -> Choice | Range:
    """Return the dimension that `to_json` describes."""
    if content["type"] == "choice":
        return Choice(values=tuple(content["values"]))
    return Range(low=content["low"], high=content["high"], scale=content["type"])
