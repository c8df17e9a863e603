"""Serialize frozen dataclasses to JSON and back. An unknown or mistyped field is an error.

Every dataclass becomes a JSON object with its tag under the key `class` (a Python keyword, so never a field): the class
attribute `kind` if there is one, otherwise the class name. Decoding follows the type hints. A missing field takes its
default, so older files stay readable after a class gets another field.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from transformer.config._checks import ConfigError, nearest

TAG = "class"


def tag_of(cls: type) -> str:
    """Return the tag of a dataclass in JSON."""
    kind = getattr(cls, "kind", None)
    is_field = any(field.name == "kind" for field in dataclasses.fields(cls))
    return kind if isinstance(kind, str) and not is_field else cls.__name__


def encode(value: Any) -> Any:
    """Convert a tree of dataclasses, tuples, lists and plain values to JSON values; TypeError for any other type."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {TAG: tag_of(type(value))} | fields
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} can't be written to JSON: {value!r}")


def decode(hint: Any, value: Any, where: str) -> Any:
    """Convert a JSON value of `encode` back to type `hint`; ConfigError, with its path `where`, if it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r:.80}.")
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    if origin in (tuple, list):
        return _decode_sequence(origin, arguments, value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(_choose({tag_of(hint): hint}, value, where), value, where)
    # JSON writers may drop ".0". 2**1023 is the largest power of 2 in a float; float() of 2**1024 would overflow.
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    if hint is type(None) and value is None:
        return None
    if not isinstance(hint, type) or not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {value!r:.80}.")
    return value


def _choose(choices: Mapping[str, type], value: Any, where: str) -> type:
    if not isinstance(value, dict) or TAG not in value:
        raise ConfigError(f"{where} must be an object with a {TAG!r} ({', '.join(choices)}), got {value!r:.80}.")
    if not isinstance(value[TAG], str) or value[TAG] not in choices:
        hint = nearest(value[TAG], choices) if isinstance(value[TAG], str) else ""
        raise ConfigError(f"{where} has class {value[TAG]!r:.80}, which is not one of {', '.join(choices)}.{hint}")
    return choices[value[TAG]]


def _decode_dataclass(cls: type, value: dict, where: str) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    for name in value:
        if name not in names and name != TAG:
            raise ConfigError(f"{where} has an unknown field {name!r:.80}.{nearest(name, names)}")
    missing = [field.name for field in dataclasses.fields(cls) if _is_required(field) and field.name not in value]
    if missing:
        raise ConfigError(
            f"{where} lacks {', '.join(missing)}: it was written by a different version, or is incomplete."
        )
    hints = _hints(cls)
    return cls(**{name: decode(hints[name], value[name], f"{where}.{name}") for name in value if name != TAG})


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _decode_union(arguments: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    if isinstance(value, dict):
        choices = {tag_of(kind): kind for kind in arguments if dataclasses.is_dataclass(kind)}
        return _decode_dataclass(_choose(choices, value, where), value, where)
    errors = []
    for argument in arguments:
        if argument is not type(None):
            try:
                return decode(argument, value, where)
            except ConfigError as error:
                errors.append(error)
    raise errors[0]


def _decode_sequence(origin: type, arguments: tuple, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, got {value!r:.80}.")
    if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
        hints = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        hints = list(arguments)
    else:
        raise ConfigError(f"{where} must have {len(arguments)} items, got {len(value)}.")
    return origin(decode(hints[index], item, f"{where}[{index}]") for index, item in enumerate(value))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the plain values by dotted field name, which `difference` compares and the command line can override."""
    if dataclasses.is_dataclass(value):
        flat = {}
        for field in dataclasses.fields(value):
            flat |= flatten(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
        return flat
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        flat = {}
        for index, item in enumerate(value):
            flat |= flatten(item, f"{prefix}.{index}")
        return flat
    return {prefix: value}
