"""Chat templates: give messages the form that a template reads, which differs between templates, and render them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformer.chat._functions import tool_schemas
from transformer.chat._messages import check_documents, check_messages, plain
from transformer.config._checks import ConfigError
from transformer.config._limited import CrashedError, LimitedProcesses, LimitExceededError
from transformer.config._untrusted import parse_json

MAX_CHARACTERS = 2**20
"""maximum length of a template"""
MOST_SECONDS = 10.0
"""maximum time of one rendering"""
MOST_BYTES = 2**29
"""maximum memory of one rendering"""
PROGRAM = Path(__file__).with_name("_template_worker.py")
_OLDEST = (3, 1, 6)
"""oldest version of jinja2; the sandbox of older ones has known holes"""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""marks the end of the message that `continue_final_message` continues"""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "text of a message"
"""content of the messages that show how a template reads them"""
_QUESTION = {"role": "user", "content": "a"}


class ChatTemplateError(ConfigError):
    """A chat template is missing, invalid, or refuses the messages. The message names its file."""


class _StoppedError(ChatTemplateError):
    """A chat template takes too long, or builds too much text."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as one text."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()
    """(start, end) of each part that the assistant wrote, if the template marks them with `{% generation %}`"""


@dataclass(frozen=True)
class ChatTemplate:
    """A template that turns messages into the text that a model was trained with. Rendering needs the package jinja2.

    The template is untrusted code: it runs in Jinja's sandbox, in a process with limits of time and memory.

    Raises:
        ChatTemplateError: the template does not parse.
    """

    source: str
    """the template, in the language Jinja"""
    name: str = "the chat template"
    """name of its file, for error messages"""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """variables with the names of special tokens, such as ("bos_token", "<s>")"""
    option: str = "--template"
    """command-line option that selects another template, for error messages"""

    def __post_init__(self):
        if not isinstance(self.source, str):
            self._refuse(f"must be a text, got {self.source!r:.80}")
        if len(self.source) > MAX_CHARACTERS:
            self._refuse(f"has {len(self.source):,} characters; expected at most {MAX_CHARACTERS:,}")
        self._answers([], None)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **switches: Any,
    ) -> str:
        """Return the conversation as text, as `apply_chat_template` of transformers does.

        Args:
            messages: dicts with a `role` and a `content`; see `check_messages`.
            tools: functions with type hints and a docstring, or their JSON schemas as dicts.
            documents: dicts with a title and a text, for templates that support them.
            add_generation_prompt: end with the beginning of the assistant's next message.
            continue_final_message: end inside the last message, so that the model continues it.
            **switches: further variables of the template, such as `enable_thinking=False`.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or takes too long.
            ConfigError: messages, tools, documents or switches are invalid.
        """
        values = self.variables(messages, tools, documents, add_generation_prompt, continue_final_message, switches)
        return self.run(values, continue_final_message).text

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        switches: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Check the arguments of `render`, and return the variables of the template, without special tokens.

        Raises:
            ConfigError: an argument is invalid.
        """
        if add_generation_prompt and continue_final_message:
            raise ConfigError(
                "add_generation_prompt begins a new message, and continue_final_message continues the last one. Pass "
                "only one of them."
            )
        values = {
            "messages": [_fitted(self, number, one) for number, one in enumerate(check_messages(messages))],
            "tools": tool_schemas(tools),
            "documents": check_documents(documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        if taken := sorted(values.keys() & switches.keys()):
            raise ConfigError(
                f"{taken[0]} can't be a switch of the template, which has its own variable of this name. Remove it, or "
                f"pass it as the argument {taken[0]}."
            )
        return {**plain(switches, "switches"), **values}

    def attempt(self, *messages: dict[str, Any], prompt: bool = False) -> str | None:
        """Return checked messages as text; None: the template refuses them, or fails.

        With `prompt`, the text ends with the beginning of the assistant's next message.

        Raises:
            ChatTemplateError: the template takes too long, so it is not tried again.
        """
        values = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": prompt}
        try:
            return self.run(values).text
        except _StoppedError:
            raise
        except ChatTemplateError:
            return None

    @property
    def marks_generated(self) -> bool:
        """Whether the template marks what the assistant writes, with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def run(
        self, values: Mapping[str, Any], continue_final_message: bool = False, now: datetime | None = None
    ) -> Rendered:
        """Render checked variables; `now` is the time of `strftime_now` (None: the current time).

        Raises:
            ChatTemplateError: as `render`.
        """
        if not continue_final_message:
            return self._rendered(values, now)
        messages, final = _tagged(values["messages"])
        found = self._rendered({**values, "messages": messages}, now)
        if final.strip() not in found.text or _TAG.strip() not in found.text:
            self._refuse("changes the last message, so it can't be continued. Pass add_generation_prompt instead")
        end = found.text.rindex(_TAG.strip())
        kept = found.text[:end]
        # If the template trimmed the tag, it also trims the spaces at the end of a message.
        return Rendered(kept if found.text[end : end + len(_TAG)] == _TAG else kept.rstrip())

    def run_each(
        self, several: Sequence[Mapping[str, Any]], now: datetime | None = None
    ) -> list[Rendered | ChatTemplateError]:
        """Render checked variables several times, which costs less than one by one; a failure is its error.

        Raises:
            ChatTemplateError: the template takes too long.
        """
        answers = self._answers([{**dict(self.special_tokens), **values} for values in several], now)
        return [
            self._error(one) if "error" in one else Rendered(one["text"], tuple(map(tuple, one["generated"])))
            for one in answers
        ]

    def _rendered(self, values: Mapping[str, Any], now: datetime | None) -> Rendered:
        (found,) = self.run_each([values], now)
        if isinstance(found, ChatTemplateError):
            raise found
        return found

    def _answers(self, several: Sequence[Mapping[str, Any]], now: datetime | None) -> list[dict[str, Any]]:
        """Return the answers of `_template_worker.py` to variables; without variables, only parse the template."""
        _check_jinja()
        try:
            answers = _renderers().ask((self.source, several, now or datetime.now()))
        except LimitExceededError as error:
            answers = [{"kind": "stopped", "error": f"was stopped, because it needs more than {error}"}]
        except CrashedError as error:
            answers = [{"kind": "stopped", "error": f"was stopped, because the process that renders it {error}"}]
        if len(answers) != len(several):
            raise self._error(answers[0])
        return answers

    def _error(self, answer: Mapping[str, str]) -> ChatTemplateError:
        remedy = "Change the messages" if answer["kind"] == "refused" else "Correct it"
        kind = _StoppedError if answer["kind"] == "stopped" else ChatTemplateError
        return kind(
            f"{self.name}: the chat template {answer['error']}. {remedy}, or use another template ({self.option})."
        )

    def _refuse(self, what: str) -> NoReturn:
        raise self._error({"kind": "failed", "error": what})


@functools.cache
def _renderers() -> LimitedProcesses:
    return LimitedProcesses(PROGRAM, None, seconds=MOST_SECONDS, most_bytes=MOST_BYTES)


def _check_jinja() -> None:
    remedy = "Install it: pip install 'transformer-zoo[chat]'."
    try:
        import jinja2
    except ModuleNotFoundError:
        raise ChatTemplateError(f"chat templates need the package jinja2. {remedy}") from None
    version = tuple(int(part) for part in jinja2.__version__.split(".") if part.isdecimal())
    if version < _OLDEST:
        raise ChatTemplateError(f"chat templates need jinja2 3.1.6 or newer, found {jinja2.__version__}. {remedy}")


def _tagged(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages with `_TAG` after the text of the last one, and this text."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _TAG}], content
    texts = [i for i, part in enumerate(content or []) if isinstance(part, dict) and "text" in part]
    if not isinstance(content, list) or not texts:
        raise ConfigError("continue_final_message needs a last message with a text. Add one to its content.")
    part = content[texts[-1]]
    parts = [*content[: texts[-1]], {**part, "text": part["text"] + _TAG}, *content[texts[-1] + 1 :]]
    return [*before, {**last, "content": parts}], part["text"]


def _fitted(template: ChatTemplate, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a checked message in the form that a template reads; `number` is its index, for errors.

    Most templates write `message.content` as it is, so that a list would become the text of a Python list. For them,
    the texts of the parts are joined by line breaks, as vLLM and llama.cpp do. Others iterate over the parts, and get
    parts also for a text, if they need them. A message with calls of tools may have no content; a template that fails
    then gets an empty one. The arguments of a call are an object or, as OpenAI writes them, its JSON text; a template
    reads one of the two.
    """
    content, role = message.get("content"), message["role"]
    if "tool_calls" in message:
        message = {**message, "tool_calls": [_fitted_call(template, number, call) for call in message["tool_calls"]]}
    if content is None:
        needs_content = _tried(template, role, None) is None and _tried(template, role, "") is not None
        return {**message, "content": ""} if needs_content else message
    if isinstance(content, str) and not _reads(template, role, "text") and _reads(template, role, "parts"):
        return {**message, "content": [{"type": "text", "text": content}]}
    if not _is_parts(content):
        return message
    reads_parts = _reads(template, role, "parts")
    has_images = any(part["type"] == "image" for part in content)
    if has_images and not (reads_parts and _reads(template, role, "images")):
        raise ConfigError(
            f"message {number} has an image, but {template.name} reads only texts in messages of the role {role}. "
            "Remove the image."
        )
    return message if reads_parts else {**message, "content": "\n".join(part["text"] for part in content)}


def _is_parts(content: object) -> bool:
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
def _reads(template: ChatTemplate, role: str, form: Literal["text", "parts", "images"]) -> bool:
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


def _tried(template: ChatTemplate, role: str, content: object) -> str | None:
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

    def text_of(arguments: object) -> str:
        return template.attempt(_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}) or ""

    of_object, of_text = text_of({"key": _PROBE}), text_of(json.dumps({"key": _PROBE}))
    return (_PROBE not in of_object or "{'key'" in of_object) and json.dumps({"key": _PROBE}) in of_text


def _call(arguments: object) -> dict[str, Any]:
    return {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
