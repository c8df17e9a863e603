"""Descriptions of Python functions. The parity tests compare them with transformers."""

import enum
from typing import Literal

import pytest
from chat_parts import weather

from transformer.chat import ChatTemplate, function_schema
from transformer.config import ConfigError


def test_a_function_is_described_as_a_tool():
    days = {"type": "integer", "enum": [1, 2], "description": "number of days"}
    assert function_schema(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the name of the city"}, "days": days},
                "required": ["city"],
            },
            "return": {"type": "string", "description": "a description"},
        },
    }


class Empty(enum.Enum):
    """An enumeration without members."""


def undocumented(x: int): ...


def incomplete(x: int):
    """Do it."""


def untyped(x):
    """Do it.

    Args:
        x: a value
    """


def unknown(x: object):
    """Do it.

    Args:
        x: a value
    """


def empty(x: Empty):
    """Do it.

    Args:
        x: a value
    """


def wrong(x: str):
    """Do it.

    Args:
        x: a value (choices: a, b)
    """


def undefined(x: "Missing"):
    """Do it.

    Args:
        x: a value
    """


class Unit(enum.Enum):
    """Units."""

    SMALL = "mm"
    LARGE = "km"


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (int, {"type": "integer"}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (tuple[int, str], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "a"], {"type": ["integer", "string"], "enum": [1, "a"]}),
        (Unit, {"type": "string", "enum": ["mm", "km"]}),
        (bool | None, {"type": "boolean", "nullable": True}),
        (str | int, {"type": ["integer", "string"]}),
        (list | tuple, {"type": "array"}),
        (int | list[int], {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}),
    ],
)
def test_argument_types_become_schema_types(hint, schema):
    def tool(x):
        """Do it.

        Args:
            x: a value
        """

    tool.__annotations__ = {"x": hint}
    found = function_schema(tool)["function"]["parameters"]
    assert found == {"type": "object", "properties": {"x": schema | {"description": "a value"}}, "required": ["x"]}


@pytest.mark.parametrize("hint", [list[object], tuple[int, ...], dict[str, object], int | object, Literal[b"a"]])
def test_types_without_a_schema_are_refused(hint):
    def tool(x):
        """Do it.

        Args:
            x: a value
        """

    tool.__annotations__ = {"x": hint}
    with pytest.raises(ConfigError, match=r"of x of the tool tool has no JSON schema"):
        function_schema(tool)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undefined, r"'Missing'"),
        (undocumented, "the tool undocumented has no docstring"),
        (incomplete, "the docstring of the tool incomplete does not describe x"),
        (untyped, "the argument x of the tool untyped has no type hint"),
        (unknown, r"JSON"),
        (empty, r"JSON"),
        (wrong, r"JSON"),
    ],
)
def test_a_function_without_description_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        function_schema(function)


def test_rejects_tools_of_unsupported_types():
    messages = [{"role": "user", "content": "x"}]
    for tools, message in ((3, "tools must be a list"), (["x"], "a tool must be a function"), ({}, "tools must be")):
        with pytest.raises(ConfigError, match=message):
            ChatTemplate("x").render(messages, tools=tools)
