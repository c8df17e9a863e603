"""Give messages the form that a chat template reads, which differs between templates."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Literal

from transformer.chat._messages import plain
from transformer.config._checks import ConfigError
from transformer.config._untrusted import parse_json

if TYPE_CHECKING:
    from transformer.chat._template import ChatTemplate

_PROBE = "text of a message"
"""content of the messages that show how a template reads them"""
_QUESTION = {"role": "user", "content": "a"}


def fitted(template: ChatTemplate, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form that a template reads.

    Most templates write `message.content` as it is, so that a list would become the text of a Python list. For them,
    the texts of the parts are joined by line breaks, as vLLM and llama.cpp do. Others iterate over the parts, and get
    parts also for a text, if they need them. A message with calls of tools may have no content; a template that fails
    then gets an empty one. The arguments of a call are an object or, as OpenAI writes them, its JSON text; a template
    reads one of the two.

    Args:
        template: the template.
        number: index of the message, for errors.
        message: a checked message.

    Raises:
        ConfigError: the message has an image, and the template reads only texts; or the arguments of a call are neither
            an object nor its JSON text.
    """
    content, role = message.get("content"), message["role"]
    if "tool_calls" in message:
        message = {**message, "tool_calls": [_fitted_call(template, number, call) for call in message["tool_calls"]]}
    if content is None:
        needs_content = _tried(template, role, None) is None and _tried(template, role, "") is not None
        return {**message, "content": ""} if needs_content else message
    if isinstance(content, str) and not reads(template, role, "text") and reads(template, role, "parts"):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not _is_parts(content):
        return message
    reads_parts = reads(template, role, "parts")
    has_images = any(part["type"] == "image" for part in content)
    if has_images and not (reads_parts and reads(template, role, "images")):
        raise ConfigError(
            f"message {number} has an image, but {template.name} reads only texts in messages of the role {role}. "
            "Remove the image."
        )
    return message if reads_parts else {**message, "content": "\n".join(part["text"] for part in content)}


def _is_parts(content: Any) -> bool:
    """Return whether a content is a list of texts and images."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and (part == {"type": "image"} or part.get("type") == "text") for part in content
    )


def _fitted_call(template: ChatTemplate, number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with its arguments in the form that a template reads."""
    function = call.get("function")
    if not isinstance(function, dict) or function.get("arguments") is None:
        return call
    arguments = function["arguments"]
    try:
        found = parse_json(arguments.encode()) if isinstance(arguments, str) else arguments
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"the arguments of a tool call of message {number} must be an object or its JSON text, got "
            f"{arguments!r:.80}. Correct them."
        )
    found = plain(found, f"the arguments of a tool call of message {number}")
    given = json.dumps(found, ensure_ascii=False) if _reads_arguments_as_text(template) else found
    return {**call, "function": {**function, "arguments": given}}


@functools.lru_cache(maxsize=256)
def reads(template: ChatTemplate, role: str, form: Literal["text", "parts", "images"]) -> bool:
    """Return whether a template reads the content of messages of a role in a form, tried with a short conversation.

    It reads a text or a list of parts if the text appears, and the list around it does not; it reads images if an image
    changes the result.
    """
    part = {"type": "text", "text": _PROBE}
    if form == "images":
        with_image, without = (_tried(template, role, content) for content in ([{"type": "image"}, part], [part]))
        return with_image not in (None, without)
    text = _tried(template, role, _PROBE if form == "text" else [part])
    return text is not None and _PROBE in text and "'type'" not in text and '"type"' not in text


def _tried(template: ChatTemplate, role: str, content: Any) -> str | None:
    """Return a short conversation with a message of this role and content; None: the template refuses it."""
    call = _call({"key": "value"})
    before: dict[str, list[dict[str, Any]]] = {
        "assistant": [_QUESTION],
        "tool": [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}],
    }
    last = {"role": role} | ({"tool_calls": [call]} if content is None else {"content": content})
    after = [_QUESTION] if role in ("system", "developer") else []
    return template.attempt(*before.get(role, []), last, *after)


@functools.lru_cache(maxsize=64)
def _reads_arguments_as_text(template: ChatTemplate) -> bool:
    """Return whether a template needs the arguments of a call as JSON text: an object fails, or becomes Python text."""

    def text_of(arguments: Any) -> str:
        return template.attempt(_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}) or ""

    of_object, of_text = text_of({"key": _PROBE}), text_of(json.dumps({"key": _PROBE}))
    return (_PROBE not in of_object or "{'key'" in of_object) and json.dumps({"key": _PROBE}) in of_text


def _call(arguments: Any) -> dict[str, Any]:
    return {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
