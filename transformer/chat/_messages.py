"""Check the messages of a conversation, and convert them to plain JSON values for a template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import utf8

MAX_DEPTH = 32
"""maximum nesting depth of lists and dicts in a message, a tool or a document"""

# A template may write a role into a marker: <|ROLE|>. So a role is a plain word.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""fields with the reasoning of a message; the first is the standard one"""
_DATA_ROLES = ("tool", "function", "ipython")
"""roles whose content may be data other than text: results of a function"""


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages as new plain dicts, without entries that are None.

    A message has a `role` and a `content`, which is a text or a list of `{"type": "text", "text": ...}` and, for models
    that read images, `{"type": "image"}`. A message with
    `tool_calls` or reasoning needs no content. Other entries are given to the template unchanged. Reasoning is
    available to the template as `reasoning_content` and as `thinking`, as in transformers.

    Raises:
        ConfigError: a message is invalid; the error names it.
        ValueError: a text has a lone surrogate.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            f"messages must be a list with at least one message, got {messages!r:.80}. Pass, for example, "
            '[{"role": "user", "content": "Hello"}].'
        )
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: object) -> dict[str, Any]:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        _refuse(name, 'a dict such as {"role": "user", "content": "Hello"}', message)
    found = {key: value for key, value in plain(message, name).items() if value is not None}
    role = found.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        _refuse(f"the role of {name}", "a word such as user, assistant, system or tool", role)
    reasoning = next((found[field] for field in REASONING if field in found), None)
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _refuse(f"tool_calls of {name}", "a list of dicts", calls)
    if "content" in found and role not in _DATA_ROLES:
        _check_content(f"the content of {name}", found["content"])
    elif "content" not in found and not calls and reasoning is None:
        _refuse(f"the content of {name}", "a text", None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _check_content(name: str, content: object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        _refuse(name, 'a text, or a list of {"type": "text", "text": ...}', content)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if part == {"type": "image"}:  # `Chat` has taken out the image
            continue
        if kind is not None and kind != "text":
            _refuse(f"a part of {name}", "the type text, because these models read only text", kind)
        if kind is None or not isinstance(part.get("text"), str):
            _refuse(f"a part of {name}", '{"type": "text", "text": ...}', part)


def _refuse(name: str, expected: str, value: object) -> NoReturn:
    raise ConfigError(f"{name} must be {expected}, got {value!r:.80}. Correct it.")


def plain(value: object, name: str, depth: int = MAX_DEPTH) -> Any:
    """Return a copy of a value that consists of JSON types only, so that a template can't reach methods of others."""
    if depth == 0:
        raise ConfigError(f"{name} is nested more than {MAX_DEPTH} levels deep. Simplify it.")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        utf8(text)
        return text
    if isinstance(value, Mapping):
        return {plain(key, name, depth - 1): plain(one, name, depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, name, depth - 1) for one in value]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return plain(value.item(), name, depth - 1)
    raise ConfigError(
        f"{name} contains a value of type {type(value).__name__}; expected only dicts, lists, texts, numbers, booleans "
        "and None. Convert it."
    )


def check_documents(documents: object) -> list[dict[str, Any]] | None:
    """Return documents as plain dicts; None if there are none."""
    if documents is None:
        return None
    found = plain(documents, "documents")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        _refuse("documents", "a list of dicts such as {'title': ..., 'text': ...}", documents)
    return found
