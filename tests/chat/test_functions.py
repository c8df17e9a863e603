"""Descriptions of Python functions. The parity tests compare them with transformers."""

import enum

import pytest
from chat_parts import weather

from transformer.chat import ChatTemplate, function_schema
from transformer.config import ConfigError


def test_a_function():
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


def test_other_tools_are_refused():
    messages = [{"role": "user", "content": "x"}]
    for tools, message in ((3, "tools must be a list"), (["x"], "a tool must be a function"), ({}, "tools must be")):
        with pytest.raises(ConfigError, match=message):
            ChatTemplate("x").render(messages, tools=tools)
