"""The error of everything that can't be, and the checks that raise it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class ConfigError(ValueError):
    """A model, recipe or command that can't be: the message says what, what was expected, what was got, what to do."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the choice most like `name`, or an empty string when none is close."""
    close = difflib.get_close_matches(str(name)[:200], list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def boxed_message(box: str) -> str:
    """What tyro says inside a box that it draws around an error: its first paragraph, on one line. The frame is blank
    where UTF-8 can't be printed.
    """
    paragraph: list[str] = []
    for line in box.splitlines()[1:]:
        line = line.strip("│╰╯ ")
        if line.strip("─-"):
            paragraph.append(line)
        elif paragraph:
            break
    text = " ".join(paragraph)
    text = re.sub(r"^Missing from [^:]*: (\S+) (.*?)( \(required\))?$", r"\1 is missing: \2", text)
    text = re.sub(r"no type matching (\S+) could be instantiated from \['(.*)'\]", r"expected \1, got '\2'", text)
    place = re.match(r"Error parsing ([\w.-]+): ", text)
    if place:
        text = text[place.end() :]
        if not text.startswith(place[1]) and not place[1][0].isupper():  # a class of ours is no word of the user's
            text = f"{place[1]}: {text}"
    text = text.replace("{None}|", "").replace("Unrecognized options:", "this is one word too many:")
    return text if text.endswith((".", "?")) else f"{text}."


def named(config: object, field: str) -> str:
    """A field by the path that a user gives: with the section of the model config that the class of `config` is."""
    section = getattr(type(config), "section", "")
    return f"{section}.{field}" if section else field


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, naming the nearest right one, unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{nearest(str(value), choices)}")


def check_choices(config: object, **kinds: object) -> None:
    """Raises ConfigError unless each field is one of the values of its Literal."""
    for field, kind in kinds.items():
        check_choice(named(config, field), getattr(config, field), kind.__args__)


def check_flags(config: object, *fields: str) -> None:
    """Raises ConfigError unless each field is None (where its default is), True or False."""
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is None:
            continue
        if not isinstance(value, bool):
            raise ConfigError(f"{named(config, field)} must be true or false, got {value!r}.")


def check_whole(config: object, *fields: str, least: int = 1) -> None:
    """Raises ConfigError unless each field is None (where its default is) or an integer of at least `least`."""
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{named(config, field)} must be an integer of at least {least}, got {value!r}.")


def check_range(config: object, low: float, high: float, *fields: str) -> None:
    """Raises ConfigError unless each field is None (where its default is) or a number with low <= value < high."""
    for field in fields:
        value = getattr(config, field)
        if value is None and type(config).__dataclass_fields__[field].default is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            expected = f"at least {low}" if high == float("inf") else f"at least {low} and below {high}"
            raise ConfigError(f"{named(config, field)} must be a number of {expected}, got {value!r}.")


def check_positive(config: object, *fields: str) -> None:
    """Raises ConfigError unless each field is None (where its default is) or a number above 0."""
    check_range(config, 5e-324, float("inf"), *fields)
