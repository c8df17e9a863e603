"""`ConfigError`, and checks of config fields that raise it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class ConfigError(ValueError):
    """An invalid model config, recipe or command.

    The message names the problem, the expected value, the value received, and the remedy.
    """


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the choice most similar to `name`, or an empty string if none is similar."""
    close = difflib.get_close_matches(str(name)[:200], list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def shortened(texts: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Join texts for a message: the first ones and the number of the others, such as "a, b and 3 more"."""
    more = f"{separator.rstrip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def boxed_message(box: str) -> str:
    """Return the first paragraph of an error message of tyro as one line, without the box that tyro draws around it.

    The frame of the box consists of spaces if the terminal can't print UTF-8.
    """
    paragraph: list[str] = []
    for line in box.splitlines()[1:]:
        line = line.strip("│╰╯ ")
        if line.strip("─-"):
            paragraph.append(line)
        elif paragraph:
            break
    text = " ".join(paragraph)
    if missing := re.match(r"Missing from [^:]*: (\S+) (.*)$", text):  # the first one, without the type of its value
        name, meaning = missing[1], missing[2].partition(" (required)")[0]
        if name.startswith("-"):
            meaning = re.sub(r"^(\{\S+\}|[A-Z]+)(\|\S+)? ", "", meaning)
        text = f"{name} is missing: {meaning}"
    text = re.sub(r"no type matching (\S+) could be instantiated from \['(.*)'\]", r"expected \1, got '\2'", text)
    if "Expected one of (" in text:
        text = text.replace("'None', ", "").replace(", 'None')", ")")
    if place := re.match(r"Error parsing ([\w.-]+): ", text):
        text, name = text[place.end() :], place[1]
        if not text.startswith(name) and not name[0].isupper():  # capitalized: a class, which users don't know
            text = f"{name}: {text}"
    text = text.replace("{None}|", "").replace("Unrecognized options:", "unexpected argument:")
    return text if text.endswith((".", "?")) else f"{text}."


def named(config: object, field: str) -> str:
    """Return the path of a field as users write it: prefixed with the section of the model config, if any."""
    section = getattr(type(config), "section", "")
    return f"{section}.{field}" if section else field


def _given(config: object, fields: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field, but not None if its type allows it."""
    for field in fields:
        value = getattr(config, field)
        if value is not None or not type(config).__dataclass_fields__[field].type.endswith("None"):
            yield named(config, field), value


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError, with a suggestion, unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{nearest(str(value), choices)}")


def check_choices(config: object, **kinds: object) -> None:
    """Raise ConfigError unless each field has one of the values of its Literal (`kinds`: field -> Literal)."""
    for field, kind in kinds.items():
        check_choice(named(config, field), getattr(config, field), kind.__args__)


def check_flags(config: object, *fields: str) -> None:
    """Raise ConfigError unless each field is True or False (or None, if its type allows it)."""
    for name, value in _given(config, fields):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}.")


def check_whole(config: object, *fields: str, least: int = 1) -> None:
    """Raise ConfigError unless each field is an integer of at least `least` (or None, if its type allows it)."""
    for name, value in _given(config, fields):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_range(config: object, low: float, high: float, *fields: str) -> None:
    """Raise ConfigError unless each field is a number with low <= value < high (or None, if its type allows it)."""
    for name, value in _given(config, fields):
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < high:
            expected = f"at least {low}" if high == float("inf") else f"at least {low} and below {high}"
            raise ConfigError(f"{name} must be a number of {expected}, got {value!r}.")


def check_positive(config: object, *fields: str) -> None:
    """Raise ConfigError unless each field is a number above 0 (or None, if its type allows it)."""
    # 5e-324 is the smallest positive float.
    check_range(config, 5e-324, float("inf"), *fields)
