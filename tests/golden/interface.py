"""The recorded interface of the command line: commands, options, and the keys of JSON output.

`interface.json` holds two tables. `commands` describes every argument and option; re-record it
with `python -m tests.golden.interface`. `json_keys` describes, by command, the object that `--json`
prints, and is edited by hand: `null` is a value without keys, `[...]` a list whose items have these
keys, `*` any key (names of settings, splits, emotions and the like are content), and a key that
ends in `?` may be missing.
"""

import json
import typing
from pathlib import Path

import typer

from attune.jobs.cli import app

RECORD = Path(__file__).with_name("interface.json")
ANY = "*"
OPTIONAL = "?"
TYPER_OPTIONS = ("--install-completion", "--show-completion")


def read_record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def walk_commands(command=None, path=()):
    """Yield the words of every command and group, and its object in Typer's tree."""
    command = command or typer.main.get_command(app)
    yield " ".join(("attune", *path)), command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk_commands(child, (*path, name))


def describe_commands():
    """Describe each argument and option of each command in one line, without its help text."""
    return {
        words: {
            name_parameter(each): describe_parameter(each)
            for each in command.params
            if each.opts[0] not in TYPER_OPTIONS
        }
        for words, command in walk_commands()
    }


def name_parameter(parameter):
    if parameter.opts[0].startswith("-"):
        return "/".join((*parameter.opts, *parameter.secondary_opts))
    return parameter.metavar or parameter.name.upper()


def describe_parameter(parameter):
    kind = parameter.type_descriptor.annotation
    [kind] = typing.get_args(kind) or [kind]
    is_option = parameter.opts[0].startswith("-")
    parts = ["flag" if getattr(parameter, "is_flag", False) else kind.__name__]
    if is_option and parameter.metavar:
        parts.append(parameter.metavar)
    if parameter.multiple or parameter.nargs != 1:
        parts.append("repeatable")
    if parameter.required:
        parts.append("required")
    if default := describe_default(parameter):
        parts.append(f"default {default}")
    return ", ".join(parts)


def describe_default(parameter):
    """Return the default value; a text with blanks is a description and not a value."""
    if parameter.default is not None and parameter.default is not False:
        return str(parameter.default)
    shown = parameter.show_default
    return shown if isinstance(shown, str) and " " not in shown else ""


def commands_with_json():
    return {words for words, options in describe_commands().items() if "--json" in options}


def command_of(arguments):
    """Return the command that the arguments of `attune` call, as it is named in the record."""
    known = dict(walk_commands())
    first, *rest = (str(each) for each in arguments)
    words = f"attune {first}"
    if not hasattr(known[words], "commands"):
        return words
    longer = f"{words} {rest[0]}"
    return longer if longer in known else f"{words} run"  # `attune tune mime`


def assert_json_keys(arguments, output):
    """Compare what `attune ARGUMENTS --json` printed with the recorded keys."""
    command = command_of(arguments)
    several = "--seeds" in arguments and command == "attune train"
    recorded = read_record()["json_keys"][f"{command} --seeds" if several else command]
    differences = dict.fromkeys(compare_keys(output, recorded, ""))
    assert not differences, f"{command} --json: " + "; ".join(differences)


def compare_keys(value, recorded, place):
    """Yield a line for each key that is missing or unknown; None and [] match any value."""
    if value is None or value == []:
        return
    if isinstance(value, list) and isinstance(recorded, list):
        for item in value:
            yield from compare_keys(item, recorded[0], f"{place}[]")
    elif isinstance(value, dict) and isinstance(recorded, dict):
        yield from _compare_objects(value, recorded, place)
    elif isinstance(value, dict) or recorded is not None:
        yield f"{place or 'the output'} has another shape than recorded"
    elif isinstance(value, list):
        for item in value:
            yield from compare_keys(item, None, f"{place}[]")


def _compare_objects(value, recorded, place):
    known = {key.removesuffix(OPTIONAL): inner for key, inner in recorded.items()}
    required = {key for key in recorded if key != ANY and not key.endswith(OPTIONAL)}
    for key in sorted(required - set(value)):
        yield f"{place}.{key} is missing"
    for key, inner in value.items():
        if key in known or ANY in known:
            yield from compare_keys(inner, known.get(key, known.get(ANY)), f"{place}.{key}")
        else:
            yield f"{place}.{key} is not recorded"


def main():
    record = {"commands": describe_commands(), "json_keys": read_record()["json_keys"]}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
