"""Use a dataclass as command-line flags and as YAML. Each field declares its name, type, default and help text once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError
from .files import text_of, written_whole
from .numbers import Numbers
from .report import brief

__all__ = ["add_arguments", "check", "flag", "given", "make", "pairs", "read_yaml", "write_yaml"]

C = TypeVar("C")

END = "\n..."
"""Marks the end of a document in YAML."""


def flag(default: Any, help: str, **argument: Any) -> Any:
    """A field that is also a flag; `argument` goes to argparse.

    `type` is a function that turns text into a value, and returns a value of the right type unchanged. For anything
    else it raises a ValueError that says what to give. `Numbers` is an example. Values from flags, YAML and Python all
    go through it.
    """
    return dataclasses.field(default=default, metadata={"help": help, **argument})


def add_arguments(parser: argparse.ArgumentParser, config: type, without: tuple[str, ...] = ()) -> None:
    """Add a flag for every field with a help text. Flags have no defaults: one that is not given is left out."""
    for field in dataclasses.fields(config):
        argument = dict(field.metadata)
        if not argument or field.name in without:
            continue
        name = "--" + field.name.replace("_", "-")
        shown = argument.pop("help").replace("%", "%%")
        if field.default is not None and not isinstance(field.default, bool):
            shown += f" (default: {field.default})"
        if isinstance(field.default, bool) or argument.get("type") is bool:
            argument.setdefault("action", argparse.BooleanOptionalAction)
        if field.default is None and "choices" in argument:
            argument["choices"] = [*argument["choices"], "none"]
        argument.pop("type", None)  # `given` turns texts into values
        parser.add_argument(name, help=shown, default=argparse.SUPPRESS, **argument)


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The flags that were given.

    Raises:
        ConfigError: if the value of a flag has the wrong type.
    """
    return {f.name: _checked(f, getattr(args, f.name)) for f in dataclasses.fields(config) if hasattr(args, f.name)}


def make(config: type[C], *layers: Mapping[str, Any]) -> C:
    """A config from layers of settings; later layers override earlier ones.

    Raises:
        ConfigError: if a setting is not known (the message names the nearest one), or has the wrong type.
    """
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            field = fields.get(str(name).replace("-", "_"))
            if field is None:
                near = difflib.get_close_matches(str(name), fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(fields)}"
                raise ConfigError(f"there is no setting {name!r:.80}; {hint}")
            values[field.name] = _checked(field, value)
    return config(**values)


def check(config: Any) -> None:
    """Convert every field of a frozen config to its type. To be called in `__post_init__`.

    Raises:
        ConfigError: if a value has the wrong type, or is out of its range.
    """
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, _checked(field, getattr(config, field.name)))


def _checked(field: dataclasses.Field, value: Any) -> Any:
    """Convert a value from a flag, YAML or Python to the type of its field."""
    default = field.default
    if isinstance(value, str) and value.lower() == "none":
        value = None
    if value is None:
        if default is not None:
            raise ConfigError(f"{field.name} is empty; give a value, or leave it out for {default!r}")
        return None
    try:
        value = _in_type(_type_of(field), value)
        if value == "" and default is None:
            raise ValueError("give a text, or leave it out")
    except ValueError as error:
        raise ConfigError(f"{field.name}={brief(value)}: {error}") from None
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{field.name}={brief(value)} is not known; use one of {', '.join(map(str, choices))}")
    return value


def _type_of(field: dataclasses.Field) -> Any:
    if "type" in field.metadata:
        return field.metadata["type"]
    kind = str if field.default is None else type(field.default)
    return Numbers(kind) if kind in (int, float) else kind


def _in_type(kind: Any, value: Any) -> Any:
    if kind is bool or isinstance(value, bool):
        if not (kind is bool and isinstance(value, bool)):
            raise ValueError("give true or false" if kind is bool else "give no true or false")
        return value
    if kind is str and not isinstance(value, str):
        raise ValueError("give a text")
    return kind(value)


def pairs(text: str, value_of: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """`a=1,b=x,c=[2,3]` as a dictionary; values are read as YAML, or by `value_of`."""
    value_of = value_of or _yaml_value
    found: dict[str, Any] = {}
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{part!r} is not of the form name=value")
        if name.strip() in found:
            raise ValueError(f"{name.strip()} is there twice; leave one of them")
        try:
            found[name.strip()] = value_of(value)
        except ValueError:
            raise ValueError(f"{part!r}: the value cannot be read") from None
    return found


def _yaml_value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, RecursionError) as error:  # AttributeError: for an invalid date
        raise ValueError from error


def read_yaml(path: Path, whole: bool = False) -> dict[str, Any]:
    """Read settings from a file. With `whole`, the end mark of `write_yaml` must be there: a truncated file has none.

    Raises:
        ConfigError: if the file does not exist, is not a mapping, or names a setting twice.
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
        text = text_of(path)
        if whole and not text.rstrip("\n").endswith(END):
            raise ConfigError(
                f"{path} is not whole: its last line, '...', is missing. Put a whole one there, or begin anew in "
                "another --output"
            )
        found = yaml.load(text, Loader)
    except (OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; give settings as 'name: value' lines")
    return found


def write_yaml(path: Path, config: Any) -> None:
    """Write all settings of a config in a form that `read_yaml` and `make` can read."""
    import yaml

    with written_whole(path) as partial:
        partial.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, explicit_end=True))
