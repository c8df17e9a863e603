"""Chat templates: find the template of a model, and render messages with it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from transformer.chat._fitting import fitted
from transformer.chat._functions import tool_schemas
from transformer.chat._messages import check_documents, check_messages, plain
from transformer.config._checks import ConfigError, nearest
from transformer.config._limited import LimitedProcesses, LimitExceededError
from transformer.config._untrusted import parse_json
from transformer.data._pretrained_tokenizer import TEMPLATE_FILES, TEMPLATE_FOLDER

TEMPLATE_FILE, JSON_FILE = TEMPLATE_FILES
CONFIG_FILE = "tokenizer_config.json"
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
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""special tokens that a template reads as `bos_token` and so on"""


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
            "messages": [fitted(self, number, one) for number, one in enumerate(check_messages(messages))],
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
            ChatTemplateError: the template takes too long, so that it is not tried again.
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

    def run(self, values: Mapping[str, Any], continue_final_message: bool = False, now: Any = None) -> Rendered:
        """Render checked variables; `now` is the time of `strftime_now` (None: the current time).

        Raises:
            ChatTemplateError: as `render`.
        """
        if not continue_final_message:
            return self._rendered(values, now)
        messages, final = _tagged(values["messages"])
        found = self._rendered({**values, "messages": messages}, now)
        if final.strip() not in found.text or _TAG.strip() not in found.text:
            self._refuse("changes the last message, so that it can't be continued. Pass add_generation_prompt instead")
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
            self._error(one)
            if "error" in one
            else Rendered(one["text"], tuple((start, end) for start, end in one["generated"]))
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


def has_template(files: Mapping[str, bytes]) -> bool:
    """Return whether the files of a tokenizer contain a chat template; `find_template` finds it."""
    return bool(_templates(files, ""))


def find_template(
    files: Mapping[str, bytes], name: str | None = None, *, tools: bool = False, place: str = ""
) -> ChatTemplate:
    """Return the chat template among the files of a tokenizer.

    A template can be in chat_template.jinja (further ones in additional_chat_templates/), in chat_template.json or in
    tokenizer_config.json. The first of these files that has one is used.

    Args:
        files: contents by file name.
        name: name of the template; None: "default", or "tool_use" if there are tools and a template of this name.
        tools: whether tools are offered.
        place: directory of the files, for error messages.

    Raises:
        ChatTemplateError: there is no such template, or it does not parse.
    """
    prefix = f"{place}/" if place else ""
    found = {key: (f"{prefix}{file}", source) for key, (file, source) in _templates(files, prefix).items()}
    if not found:
        raise ChatTemplateError(
            f"{place or 'the tokenizer'} has no chat template ({TEMPLATE_FILE}, {JSON_FILE}, or chat_template in "
            f"{CONFIG_FILE}): expected a model trained for conversations. Use `generate` instead, or pass a template "
            "(--template FILE)."
        )
    if name is None:
        name = "tool_use" if tools and "tool_use" in found else "default"
    if name not in found:
        raise ChatTemplateError(
            f"{place or 'the tokenizer'} has no chat template {name!r}.{nearest(name, found)} It has: "
            f"{', '.join(sorted(found))}. Pass one of these names."
        )
    file, source = found[name]
    return ChatTemplate(source, file, tuple(special_tokens(files).items()))


def _templates(files: Mapping[str, bytes], prefix: str) -> dict[str, tuple[str, str]]:
    """Return {name: (file, template)}."""
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(name for name in files if name.startswith(f"{TEMPLATE_FOLDER}/") or name == TEMPLATE_FILE):
        name = "default" if file == TEMPLATE_FILE else file.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja")
        try:
            found[name] = file, files[file].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{prefix}{file} is not UTF-8: byte {error.start}. Convert it.") from None
    for file in (JSON_FILE, CONFIG_FILE):
        if not found and file in files:
            value = json_object(files, file, prefix).get("chat_template")
            found = {key: (file, source) for key, source in _named(value, f"{prefix}{file}").items()}
    return found


def _named(value: Any, file: str) -> dict[str, str]:
    """Return the templates of a JSON value by name: a text, a list of named templates, or a dict of them."""
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [one if isinstance(one, dict) else {} for one in value]
        value = {one.get("name"): one.get("template") for one in entries}
    templates = {"default": value} if isinstance(value, str) else value
    pairs = templates.items() if isinstance(templates, dict) else ()
    if not pairs or not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise ChatTemplateError(
            f'chat_template in {file} must be a text, or a list of {{"name": ..., "template": ...}}, got '
            f"{json.dumps(value, default=str)[:80]}. Download the file again."
        )
    return dict(pairs)


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the names of special tokens that a template may use: {"bos_token": "<s>", ...}."""
    found = {}
    for file in ("special_tokens_map.json", CONFIG_FILE):
        values = json_object(files, file, "")
        for role in _ROLES:
            token = values.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[f"{role}_token"] = token
    return found


def json_object(files: Mapping[str, bytes], file: str, prefix: str) -> dict[str, Any]:
    """Return the JSON object of a file; {} if the file is missing or holds something else."""
    try:
        value = parse_json(files.get(file, b"{}"))
    except ValueError as error:
        raise ChatTemplateError(f"{prefix}{file} is not valid JSON: {error}. Download the file again.") from None
    return value if isinstance(value, dict) else {}
