"""Access to fields of nested configs by dotted path, such as `position.base`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from transformer.config._checks import ConfigError, nearest


def with_paths(cls: type) -> type:
    """Class decorator that lets the constructor of a config dataclass accept dotted paths.

    `Config(**{"position.base": 5.0})` sets the field `base` of the part `position` and keeps its other fields.
    """
    original = cls.__init__
    names = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(original)
    def init(self: Any, **given: Any) -> None:
        fields = {name: value for name, value in given.items() if name in names}
        inside: dict[str, dict[str, Any]] = {}
        for path in (name for name in given if name not in fields):
            part, _, rest = path.partition(".")
            if part not in names:
                raise TypeError(f"{cls.__name__} has no field {part!r}.{nearest_path(cls, part)}")
            inside.setdefault(part, {})[rest] = given[path]
        for part, changes in inside.items():
            now = fields[part] if part in fields else getattr(cls, part)
            fields[part] = set_paths(now, changes, part)
        original(self, **fields)

    cls.__init__ = init
    return cls


def nearest_path(cls: type, name: str) -> str:
    """Return `" Did you mean 'part.x'?"` for `x` or `part_x`, or as `nearest` for a field of the class itself."""
    parts = {field.name: field.default for field in dataclasses.fields(cls) if dataclasses.is_dataclass(field.default)}
    inner = [(part, field.name) for part, default in parts.items() for field in dataclasses.fields(default)]
    paths = [f"{part}.{field}" for part, field in inner if name in (field, f"{part}_{field}")]
    return f" Did you mean {' or '.join(map(repr, paths))}?" if paths else nearest(name, cls.__dataclass_fields__)


def get_path(config: Any, path: str) -> Any:
    """Return the value of the field at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def set_paths(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a config with changed fields, which are given by dotted path; `where` is its name in errors.

    All changes are made together, so that only their combination must be valid.
    """
    if not dataclasses.is_dataclass(config):
        raise ConfigError(f"{where} is {config!r}, so its field {min(changes)!r} can't be set. Set {where} first.")
    names = [field.name for field in dataclasses.fields(config)]
    fields: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if name not in names:
            raise ConfigError(f"{where} has no field {name!r}.{nearest(name, names)}")
        if rest:
            inside.setdefault(name, {})[rest] = value
        else:
            fields[name] = value
    for name, below in inside.items():
        fields[name] = set_paths(fields.get(name, getattr(config, name)), below, f"{where}.{name}")
    return dataclasses.replace(config, **fields)


def fields_by_path(config: Any) -> dict[str, Any]:
    """Return all fields of a config and of its parts: dotted path -> value.

    A field is a part if its default is a config dataclass and its value has the class of the default.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(field.default) and type(value) is type(field.default):
            values |= {f"{field.name}.{name}": inner for name, inner in fields_by_path(value).items()}
        else:
            values[field.name] = value
    return values
