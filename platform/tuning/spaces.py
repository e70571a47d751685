"""What a sweep may try: a variant's groups of settings, ready-made sweeps, and files of one's own.

A file is YAML; every key is optional, and what is typed on the command line wins:

about: what it is for
variants: [mime]
space:                                       # overrides and adds to the variant's own groups
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
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from attune.models.base import Choice, Range
from attune.models.decoding import Decoding
from attune.platform.core.errors import UsageError, unknown_choice
from attune.platform.core.settings import find_variant
from attune.platform.training.settings import SEARCH_SPACES, TrainingConfig, configure

if TYPE_CHECKING:
    from optuna import Trial

Space = dict[str, Choice | Range]
Search = Literal["optuna", "random", "grid"]
SEARCHES: tuple[str, ...] = get_args(Search)
ALL = "all"
VARIANT = "variant"
GRID_POINTS = 5
"""How many values of a range a grid tries."""
LARGEST_GRID = 10_000

DECODING: Mapping[str, Space] = {
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
"""What there is to choose of each way of decoding; common to all variants."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A sweep as a file describes it."""

    source: str = ""
    about: str = ""
    variants: tuple[str, ...] = ()
    space: Space = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    search: str | None = None
    metric: str | None = None
    decode: str | None = None
    """A way of decoding, where it is a sweep of `attune tune-decoding`."""


def ready_made() -> dict[str, Ready]:
    """The sweeps of the papers, by name."""
    folder = resources.files("attune.models.sweeps")
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".yaml"))
    return {
        name.removesuffix(".yaml"): _read(name, folder.joinpath(name).read_text(encoding="utf-8"))
        for name in files
    }


def find_ready(text: str) -> Ready:
    """A ready-made sweep by its name, or one's own by its file."""
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
        if not path.is_file():
            raise UsageError(f"--sweep {text}: there is no such file")
        return _read(text, path.read_text(encoding="utf-8"))
    known = ready_made()
    if text not in known:
        raise UsageError(f"{unknown_choice('sweep', text, known)} (or name a .yaml file of yours)")
    return known[text]


def _read(source: str, text: str) -> Ready:
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise UsageError(f"{source}{line}: not readable as YAML") from error
    known = {each.name for each in dataclasses.fields(Ready)} - {"source"}
    if not isinstance(content, dict):
        raise UsageError(f"{source}: keys with values are expected: {', '.join(sorted(known))}")
    for key in content:
        if key not in known:
            raise UsageError(f"{source}: {unknown_choice('key', key, known)}")
    for key in ("space", "set"):
        if not isinstance(content.get(key, {}), dict):
            raise UsageError(
                f"{source}: '{key}' must name settings, as in '{key}: {{dropout: ...}}'"
            )
    if content.get("search") not in (None, *SEARCHES):
        raise UsageError(f"{source}: {unknown_choice('search', content['search'], SEARCHES)}")
    variants = content.get("variants", ())
    names = [variants] if isinstance(variants, str) else variants
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{source}: 'variants' must be names, as in 'variants: [mime]'")
    for key in ("about", "metric", "decode"):
        if not isinstance(content.get(key, ""), str):
            raise UsageError(f"{source}: '{key}' must be a text, not {content[key]!r}")
    space = {key: _tried(source, key, value) for key, value in content.get("space", {}).items()}
    return Ready(
        **{
            **content,
            "source": source,
            "variants": tuple(names),
            "space": space,
        }
    )


def _tried(source: str, key: str, value: Any) -> Choice | Range:
    place = f"{source}: space.{key}"
    form = "write a list of values, or {low: A, high: B, scale: uniform|loguniform|int}"
    if isinstance(value, list):
        if not value or not all(isinstance(v, bool | int | float | str) for v in value):
            raise UsageError(f"{place}: a choice needs values that are numbers, texts or booleans")
        return Choice(values=tuple(_plain(v) for v in value))
    if not isinstance(value, dict) or not {"low", "high"} <= set(value) <= {"low", "high", "scale"}:
        raise UsageError(f"{place}: {form}")
    low, high, scale = _plain(value["low"]), _plain(value["high"]), value.get("scale", "uniform")
    scales = ("uniform", "loguniform", "int")
    if scale not in scales:
        raise UsageError(f"{place}: {unknown_choice('scale', scale, scales)}")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in (low, high)):
        raise UsageError(f"{place}: low and high must be numbers")
    if not low < high:
        raise UsageError(f"{place}: low={low} must be less than high={high}")
    if scale == "loguniform" and low <= 0:
        raise UsageError(f"{place}: low={low}: more than 0 is expected with scale loguniform")
    if scale == "int" and (low != int(low) or high != int(high)):
        raise UsageError(f"{place}: low={low} and high={high} must be whole numbers")
    return Range(low=low, high=high, scale=scale)


def _plain(value: Any) -> Any:
    """YAML takes 1e-4, which has no dot, for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def groups_of(variant: str) -> dict[str, Mapping[str, Choice | Range]]:
    """The groups that a variant has, those that all share among them. What makes an ablation is
    not to be tuned."""
    own, fixed = find_variant(variant)
    groups = {**SEARCH_SPACES, **own.search_spaces}
    left = {g: {k: s for k, s in keys.items() if k not in fixed} for g, keys in groups.items()}
    return {group: keys for group, keys in left.items() if keys}


def of_variants(
    variants: Sequence[str], groups: Sequence[str], ready: Ready, fixed: Mapping[str, Any],
    preset: str = "small",
) -> dict[str, Space]:  # fmt: skip
    """What is tried of each variant: its groups, with a file's overrides, without what is fixed."""
    made = {name: _of_groups(name, groups) for name in variants}
    for key, tried in ready.space.items():
        takers = [name for name in variants if key in _keys(name)]
        if not takers:
            known = set().union(*(_keys(name) for name in variants))
            raise UsageError(f"{ready.source}: space: {unknown_choice('setting', key, known)}")
        for name in takers:
            made[name][key] = tried
    for name, space in made.items():
        for key in fixed:
            space.pop(key, None)
        _check(name, space, fixed, preset, ready)
        if not space and len(made) == 1:
            raise UsageError(f"nothing is left to be tuned of '{name}': choose another --space")
    return made


def _of_groups(variant: str, groups: Sequence[str]) -> Space:
    known = groups_of(variant)
    found: Space = {}
    for group in known if ALL in groups else groups:
        if group not in known:
            raise UsageError(
                f"'{variant}' has no search space '{group}': it has {', '.join(known)}, or {ALL}"
            )
        found.update(known[group])
    return found


def _keys(variant: str) -> set[str]:
    own = find_variant(variant)[0].Config
    return {each.name for kind in (own, TrainingConfig) for each in dataclasses.fields(kind)}


def _check(variant: str, space: Space, fixed: Mapping[str, Any], preset: str, ready: Ready) -> None:
    """Have the variant's own checks look at every value that may be tried, at a range's ends."""
    for key, tried in space.items():
        for value in ends(tried):
            try:
                configure(variant, preset, {**fixed, key: value})
            except UsageError as error:
                place = f"{ready.source}: space.{key}: " if key in ready.space else f"{key}: "
                raise UsageError(f"{place}{error}") from None


def ends(tried: Choice | Range) -> tuple[Any, ...]:
    """All values of a choice, or the ends of a range."""
    if isinstance(tried, Choice):
        return tried.values
    return tuple(_number(tried, value) for value in (tried.low, tried.high))


def _number(tried: Range, value: float) -> float:
    return round(value) if tried.scale == "int" else float(value)


def of_decoding(methods: Sequence[str], ready: Ready, fixed: Mapping[str, Any]) -> dict[str, Space]:
    """The same of ways of decoding."""
    made: dict[str, Space] = {}
    keys = {each.name for each in dataclasses.fields(Decoding)}
    for method in methods:
        if method not in DECODING:
            raise UsageError(unknown_choice("way of decoding", method, DECODING))
        made[method] = {**DECODING[method], **ready.space} if not ready.decode else {**ready.space}
        for key in fixed:
            made[method].pop(key, None)
    for key in (*ready.space, *fixed):
        if key not in keys:
            raise UsageError(f"{unknown_choice('setting of decoding', key, keys)}")
    return made


def suggest(trial: "Trial", spaces: Mapping[str, Space]) -> tuple[str, dict[str, Any]]:
    """Let a search choose one of the spaces, by its name, and a value for each of its settings."""
    names = list(spaces)
    chosen = names[0] if len(names) == 1 else trial.suggest_categorical(VARIANT, names)
    settings: dict[str, Any] = {}
    for key, tried in spaces[chosen].items():
        label = _label(chosen, key, len(names))
        if isinstance(tried, Choice):
            settings[key] = trial.suggest_categorical(label, tried.values)
        elif tried.scale == "int":
            settings[key] = trial.suggest_int(label, int(tried.low), int(tried.high))
        else:
            log = tried.scale == "loguniform"
            settings[key] = trial.suggest_float(label, tried.low, tried.high, log=log)
    return chosen, settings


def grid(spaces: Mapping[str, Space]) -> Iterator[dict[str, Any]]:
    """Every combination, as the parameters of a search's trials; of a range some values."""
    for name, space in spaces.items():
        head = {VARIANT: name} if len(spaces) > 1 else {}
        labels = [_label(name, key, len(spaces)) for key in space]
        for values in itertools.product(*(_points(tried) for tried in space.values())):
            yield {**head, **dict(zip(labels, values, strict=True))}


def size_of_grid(spaces: Mapping[str, Space]) -> int:
    """How many combinations there are."""
    count = sum(
        math.prod(len(_points(tried)) for tried in space.values()) for space in spaces.values()
    )
    if count > LARGEST_GRID:
        raise UsageError(
            f"a grid of {count:,} trials: choose fewer settings, or --search optuna or random"
        )
    return count


def _label(name: str, key: str, count: int) -> str:
    """Several variants' settings of the same name are different parameters of a search."""
    return key if count == 1 else f"{name}/{key}"


def _points(tried: Choice | Range) -> list[Any]:
    if isinstance(tried, Choice):
        return list(tried.values)
    shares = [n / (GRID_POINTS - 1) for n in range(GRID_POINTS)]
    if tried.scale == "loguniform":
        low, high = math.log(tried.low), math.log(tried.high)
        inner = [math.exp(low + share * (high - low)) for share in shares[1:-1]]
        return [tried.low, *inner, tried.high]
    values = [tried.low + share * (tried.high - tried.low) for share in shares]
    return list(dict.fromkeys(_number(tried, value) for value in values))


def to_json(tried: Choice | Range) -> dict[str, Any]:
    """As `attune variants --json` says it."""
    if isinstance(tried, Choice):
        return {"type": "choice", "values": list(tried.values)}
    ends_of = {"low": _number(tried, tried.low), "high": _number(tried, tried.high)}
    return {"type": tried.scale, **ends_of}


def from_json(content: Mapping[str, Any]) -> Choice | Range:
    """What `to_json` made."""
    if content["type"] == "choice":
        return Choice(values=tuple(content["values"]))
    return Range(low=content["low"], high=content["high"], scale=content["type"])
