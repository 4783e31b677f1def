"""A dataclass as command-line flags and as YAML: one place for the name, the type, the default and the help of each."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ConfigError
from ..files import written_whole

__all__ = ["add_arguments", "flag", "given", "make", "pairs", "read_yaml", "write_yaml"]

C = TypeVar("C")

END = "\n..."
"""How YAML says that a document is over."""


def flag(default: Any, help: str, **argument: Any) -> Any:
    """A field that is also a flag; `argument` goes to argparse."""
    return dataclasses.field(default=default, metadata={"help": help, **argument})


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """A flag for every field that has a help text, without defaults: what is not given is not there."""
    for field in dataclasses.fields(config):
        argument = dict(field.metadata)
        if not argument:
            continue
        name = "--" + field.name.replace("_", "-")
        shown = argument.pop("help").replace("%", "%%")
        if field.default is not None and not isinstance(field.default, bool):
            shown += f" (default: {field.default})"
        if isinstance(field.default, bool):
            argument.setdefault("action", argparse.BooleanOptionalAction)
        elif "type" not in argument and isinstance(field.default, (int, float)):
            argument["type"] = type(field.default)
        if field.default is None and argument.get("type") in (int, float):
            argument["type"] = _or_none(argument["type"])
        if field.default is None and "choices" in argument:
            argument["choices"] = [*argument["choices"], "none"]
        parser.add_argument(name, help=shown, default=argparse.SUPPRESS, **argument)


def _or_none(kind: type) -> Any:
    """A flag that takes "none" too, for a setting that a file or a recipe has on."""

    def parse(text: str) -> Any:
        return text if text == "none" else kind(text)

    parse.__name__ = kind.__name__
    return parse


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The flags that were given."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config) if hasattr(args, f.name)}


def make(config: type[C], *layers: Mapping[str, Any]) -> C:
    """A config from layers of settings, later ones first in force.

    Raises:
        ConfigError: if a setting is not known, or not of its type; names the nearest one.
    """
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            field = fields.get(str(name).replace("-", "_"))
            if field is None:
                near = difflib.get_close_matches(str(name), fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(fields)}"
                raise ConfigError(f"there is no setting {name!r}; {hint}")
            values[field.name] = _checked(field, value)
    return config(**values)


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """A value as YAML or a caller gave it, in the type that the flag would have given."""
    default, parse = field.default, field.metadata.get("type")
    if isinstance(value, str) and value.lower() == "none":
        value = None
    if value is None:
        if default is not None:
            raise ConfigError(f"{field.name} is empty; give a value, or leave it out for {default!r}")
        return None
    kind: Any = parse or (str if default is None else type(default))
    try:
        if kind is bool or isinstance(value, bool):
            if not (kind is bool and isinstance(value, bool)):
                raise ValueError("give true or false" if kind is bool else "give no true or false")
        elif isinstance(value, str):
            value = kind(value)
        elif kind in (int, float):
            if kind(value) != value:
                raise ValueError("give a whole number")
            value = kind(value)
        elif kind is str:
            raise ValueError("give a text")
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{field.name}={value!r}: {error}") from None
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{field.name}={value!r} is not known; use one of {', '.join(map(str, choices))}")
    return value


def pairs(text: str) -> dict[str, Any]:
    """`a=1,b=x,c=[2,3]` as a dictionary; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form name=value")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise argparse.ArgumentTypeError(f"{part!r}: the value cannot be read") from None
    return found


def read_yaml(path: Path, whole: bool = False) -> dict[str, Any]:
    """Settings from a file; with `whole`, one of `write_yaml` that must have its end.

    Raises:
        ConfigError: if the file is not there, not a mapping, or names a setting twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value).replace("-", "_") for key, _ in getattr(node, "value", ())]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"{twice} is there twice{node.start_mark}; leave one of them")
            return super().construct_mapping(node, deep)

    try:
        text = path.read_text()
        if whole and not text.rstrip("\n").endswith(END):
            raise ConfigError(
                f"{path} is not whole: its last line, '...', is missing. Put a whole one there, or begin anew in "
                "another --output"
            )
        found = yaml.load(text, Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; give settings as 'name: value' lines")
    return found


def write_yaml(path: Path, config: Any) -> None:
    """All settings of a config, in a form that `read_yaml` and `make` take."""
    import yaml

    with written_whole(path) as partial:
        partial.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, explicit_end=True))
