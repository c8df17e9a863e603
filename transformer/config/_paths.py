"""Access to fields of nested configs by dotted path, such as `rotary.base`, and by their former names."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformer.config._checks import ConfigError, nearest

Convert = Callable[[Any, Any], Any]
"""(given value, current value at the path) -> new value at the path"""

_quiet = ContextVar("quiet", default=False)


@contextmanager
def former_names_accepted() -> Iterator[None]:
    """Context manager in which former names are accepted without a warning, to read files of earlier versions."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def reads_former_names() -> bool:
    """Return whether former names are accepted without a warning (`former_names_accepted`)."""
    return _quiet.get()


def with_paths(former: Mapping[str, str], convert: Mapping[str, Convert] | None = None) -> Callable[[type], type]:
    """Return a class decorator that lets the constructor of a config dataclass accept dotted paths and former names.

    `Config(**{"rotary.base": 5.0})` sets the field `base` of the part `rotary` and keeps its other fields. A former
    name, as keyword and as attribute, is an alias of the path that replaces it and emits a DeprecationWarning.

    Args:
        former: former name -> path of the field that replaces it.
        convert: former name -> conversion of its values, if the values have changed too.

    Raises:
        TypeError: from the constructor, for an unknown field.
        AttributeError: from an instance, for an unknown attribute.
    """
    convert = {} if convert is None else convert

    def decorate(cls: type) -> type:
        original = cls.__init__

        @functools.wraps(original)
        def init(self: Any, **given: Any) -> None:
            names = {field.name for field in dataclasses.fields(cls)}
            if given.keys() <= names:
                return original(self, **given)
            fields = {name: given.pop(name) for name in list(given) if name in names}
            inside: dict[str, dict[str, Any]] = {}
            for name, value in given.items():
                path = former.get(name, name)
                if path != name:
                    _warn(cls, name, path)
                part, _, rest = path.partition(".")
                if part not in names:
                    raise TypeError(f"{cls.__name__} has no field {part!r}.{nearest(part, names)}")
                if name in convert:
                    fields[part] = convert[name](value, fields[part] if part in fields else _default(cls, part))
                elif rest:
                    inside.setdefault(part, {})[rest] = value
                else:
                    fields[part] = value
            for part, changes in inside.items():
                now = fields[part] if part in fields else _default(cls, part)
                fields[part] = set_paths(now, changes, part)
            return original(self, **fields)

        def getattr_(self: Any, name: str) -> Any:
            if name not in former:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            _warn(cls, name, former[name])
            return get_path(self, former[name])

        cls.__init__ = init
        cls.__getattr__ = getattr_
        cls.former_names = dict(former)
        return cls

    return decorate


def get_path(config: Any, path: str) -> Any:
    """Return the value of the field at a dotted path."""
    return functools.reduce(getattr, path.split("."), config)


def set_paths(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    """Return a copy of a config with changed fields.

    All changes are made together, so that only their combination must be valid.

    Args:
        config: a config dataclass.
        changes: dotted path -> new value.
        where: the name of `config` in error messages.

    Raises:
        ConfigError: an unknown field; the message suggests the most similar name.
    """
    if not dataclasses.is_dataclass(config):
        raise ConfigError(f"{where} is {config!r}, so its field {min(changes)!r} can't be set. Set {where} first.")
    names = [field.name for field in dataclasses.fields(config)]
    fields: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if name not in names and name not in getattr(config, "former_names", {}):
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


def _default(cls: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _warn(cls: type, name: str, path: str) -> None:
    if not _quiet.get():
        warnings.warn(
            f"{cls.__name__}: {name!r} is now {path!r}. The former name works for one release.",
            DeprecationWarning,
            stacklevel=3,
        )
