"""Descriptions of Python functions as JSON schemas, for templates that offer tools to a model."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, Union

from transformer.chat._messages import plain
from transformer.config._checks import ConfigError

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
"""JSON types of scalars"""
_PLAIN = {hint: {"type": name} for hint, name in _NAMES.items()}
_PLAIN |= {list: {"type": "array"}, tuple: {"type": "array"}, dict: {"type": "object"}, Any: {}}
_SECTION = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^([ \t]*)(\w+):[ \t]*(.*(?:\n(?:\1[ \t]+.*|[ \t]*$))*)", re.MULTILINE)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schemas(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Return the schemas of tools: dicts are used as they are, functions are described by `function_schema`."""
    if tools is None:
        return None
    if isinstance(tools, str | dict) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of functions or of dicts, got {tools!r:.80}. Pass a list.")
    return [_schema(tool) for tool in tools]


def _schema(tool: object) -> dict[str, Any]:
    if isinstance(tool, dict):
        return plain(tool, "a tool")
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return function_schema(tool)
    raise ConfigError(
        f"a tool must be a function with type hints and a docstring, or a dict with its JSON schema, got {tool!r:.80}. "
        "Pass one of these."
    )


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function as a JSON schema, from its type hints and its docstring (Google style, with `Args:`).

    The result is that of `get_json_schema` of transformers. A description may end with `(choices: ["a", "b"])`.

    Examples:
        >>> def weather(city: str) -> str:
        ...     '''Return the weather.
        ...
        ...     Args:
        ...         city: name of the city
        ...     '''
        >>> function_schema(weather)["function"]["parameters"]["required"]
        ['city']

    Raises:
        ConfigError: the docstring, the description of an argument or a type hint is missing, or a hint has no JSON
            type.
    """
    name = getattr(function, "__name__", "operation")
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise ConfigError(f"the tool {name} has no docstring. Describe the function and its arguments in one.")
    sections = _sections(text.strip())
    described = _arguments(sections.get("Args", ""))
    schema = _parameters(function, name)
    result = schema["properties"].pop("return", None)
    for argument, found in schema["properties"].items():
        if argument not in described:
            raise ConfigError(f"the docstring of the tool {name} does not describe {argument}. Add it under `Args:`.")
        found |= _description(name, argument, described[argument])
    schema = {"name": name, "description": sections[""], "parameters": schema}
    if result is not None:
        schema["return"] = result | ({"description": sections["Returns"]} if "Returns" in sections else {})
    return {"type": "function", "function": schema}


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring by heading; the text before the first heading is ""."""
    first, *rest = _SECTION.split(text)
    found = {"": first.strip()}
    for heading, body in zip(rest[::2], rest[1::2], strict=True):
        found.setdefault(heading, body.strip() if heading != "Args" else body)
    return found


def _arguments(text: str) -> dict[str, str]:
    """Return the descriptions of arguments, each as one line."""
    lines = "\n".join(line for line in text.split("\n") if line.strip())
    return {name: re.sub(r"\s*\n+\s*", " ", body.strip()) for _, name, body in _ARGUMENT.findall(lines)}


def _description(name: str, argument: str, text: str) -> dict[str, Any]:
    found = _CHOICES.search(text)
    if found is None:
        return {"description": text}
    try:
        choices = json.loads(found[1])
    except ValueError:
        choices = None
    if not isinstance(choices, list):
        raise ConfigError(
            f"the choices of {argument} of the tool {name} must be a JSON list such as "
            f'(choices: ["a", "b"]), got {found[1]!r:.80}. Correct the docstring.'
        )
    choices = [one.strip() if isinstance(one, str) else one for one in choices]
    return {"enum": choices, "description": text[: found.start()].strip()}


def _parameters(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the schema of the parameters; the property "return" is that of the result, if it has one."""
    parameters = inspect.signature(function).parameters
    first = next(iter(parameters), None)
    implicit = first if first in ("self", "cls") and parameters[first].annotation is inspect.Parameter.empty else None
    required = []
    for parameter in parameters.values():
        if parameter.name == implicit:
            continue
        if parameter.annotation is inspect.Parameter.empty:
            raise ConfigError(f"the argument {parameter.name} of the tool {name} has no type hint. Add one.")
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    properties = {}
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, SyntaxError) as error:  # hints that are texts are evaluated now
        raise ConfigError(
            f"a type hint of the tool {name} can't be evaluated: {error}. Import or define its types in the module of "
            "the function."
        ) from None
    for argument, hint in hints.items():
        found = _hint_schema(hint)
        if found is None and argument != "return":  # models never write the result, so its type may be anything
            raise ConfigError(
                f"the type {hint!r:.80} of {argument} of the tool {name} has no JSON schema. Use int, float, str, "
                "bool, list, dict, tuple, an Enum, Literal or a union of these, or pass the schema as a dict."
            )
        if found is not None and argument != implicit:
            properties[argument] = found
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required} if required else {})


def _hint_schema(hint: object) -> dict[str, Any] | None:
    """Return the JSON schema of a type hint; None if it has none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enumeration([member.value for member in hint])
        known = _PLAIN.get(hint) if isinstance(hint, Hashable) else None
        return None if known is None else dict(known)
    if origin in (Union, types.UnionType):
        return _union(inner)
    if origin is Literal:
        return _enumeration(list(inner))
    return _container(origin, inner)


def _container(origin: object, inner: Sequence[Any]) -> dict[str, Any] | None:
    """Return the schema of list[...], tuple[...] or dict[...]; None for other types."""
    if origin is list:
        items = _hint_schema(inner[0])
        return None if items is None else {"type": "array", "items": items}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        entries = [_hint_schema(one) for one in inner]
        return None if None in entries else {"type": "array", "prefixItems": entries}
    if origin is dict:
        values = _hint_schema(inner[1]) if len(inner) == 2 else None
        return None if values is None else {"type": "object", "additionalProperties": values}
    return None


def _enumeration(values: list[Any]) -> dict[str, Any] | None:
    if not values or any(type(value) not in _NAMES for value in values):
        return None
    kinds = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(hints: Sequence[Any]) -> dict[str, Any] | None:
    """Return the schema of a union: a list of types if all are plain, otherwise `anyOf`."""
    schemas = [_hint_schema(hint) for hint in hints if hint is not type(None)]
    if None in schemas:
        return None
    found: dict[str, Any]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        found = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        found = {"anyOf": schemas}
    return found | ({"nullable": True} if type(None) in hints else {})
