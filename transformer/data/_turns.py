"""Conversations in files of the user, their token ids, which of them are trained, and what a template does not read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from transformer.chat._messages import REASONING
from transformer.config._checks import ConfigError
from transformer.data._dataset import same_start
from transformer.data.files._records import Record, parsed

if TYPE_CHECKING:
    from transformer.chat._markers import ChatEncoder, Encoded
    from transformer.chat._template import ChatTemplate, ChatTemplateError, Rendered
    from transformer.data.tokenizers._pretrained import PretrainedTokenizer

TrainOn = Literal["assistant", "last", "everything"]
"""which messages are trained"""
_COLUMNS = "messages, prompt and completion, or conversations"
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""names in the column `conversations`, and their roles"""
_READ_HERE = ("role", "content", "weight")
"""entries of a message that need not be in the source of the template"""


@dataclass(frozen=True)
class Conversation:
    """The messages of one row."""

    place: str
    """file and line or row, for error messages"""
    messages: Sequence[Mapping[str, Any]]
    given: int = 0
    """number of first messages that are a prompt, and never trained"""
    tools: Sequence[Any] | None = None
    """JSON schemas of the tools"""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """further variables of the template"""


def conversation(record: Record) -> Conversation:
    """Return the conversation of a row. Raises ValueError if its columns are others, or contain something else.

    Its messages are in the column `messages`, or in `conversations` with the fields `from` and `value` (ShareGPT), or
    those of `prompt`, then those of `completion`. A prompt that is a text is a message of the user, and a completion
    that is a text is a message of the assistant. Optional columns are `tools` and `chat_template_kwargs`.
    """
    row, place = record.values, record.place
    if "messages" in row:
        messages, given = _listed(record, "messages"), 0
    elif "conversations" in row:
        messages, given = [_from_sharegpt(place, message) for message in _listed(record, "conversations")], 0
    elif "prompt" in row and "completion" in row:
        prompt = one_or_list(record, "prompt", "user")
        messages, given = [*prompt, *one_or_list(record, "completion", "assistant")], len(prompt)
    else:
        raise ValueError(
            f"{place}: expected the columns {_COLUMNS}, got {record.columns}. Rename the columns, or fill in or remove "
            f"the row."
        )
    tools = parsed(record, "tools") or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: tools must be a list of JSON schemas, got {type(tools).__name__}. Correct it.")
    switches = parsed(record, "chat_template_kwargs") or {}
    if not isinstance(switches, Mapping):
        raise ValueError(f"{place}: chat_template_kwargs must be a JSON object, got {switches!r:.60}. Correct it.")
    return Conversation(place, messages, given, tools, switches)


def _listed(record: Record, column: str) -> list[Any]:
    """Return a column with a list of messages; structs of lists, as `Sequence` of datasets has them, are transposed."""
    value = parsed(record, column)
    if isinstance(value, Mapping) and value and all(isinstance(part, list) for part in value.values()):
        if len({len(part) for part in value.values()}) > 1:
            raise ValueError(f"{record.place}: the lists in {column} must have the same length. Correct them.")
        value = [
            {key: one for key, one in zip(value, row, strict=True) if one is not None}
            for row in zip(*value.values(), strict=True)
        ]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{record.place}: {column} must be a list of messages, got {value!r:.60}. Correct it.")
    return value


def one_or_list(record: Record, column: str, role: str) -> list[Any]:
    value = record.values[column]
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(record, column)


def _from_sharegpt(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("from"), str) or "value" not in message:
        raise ValueError(
            f"{place}: a message in conversations must have from and value, got {message!r:.60}. Correct it."
        )
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": _SPEAKERS.get(message["from"], message["from"]), "content": message["value"]}


def chat_encoders(tokenizer: PretrainedTokenizer, template_path: str | None = None) -> dict[bool, ChatEncoder]:
    """Return the encoders for conversations without (False) and with tools (True): a model can have two templates.

    Errors of a template name the file at `template_path`, from which the tokenizer has it (None: its own file).
    """
    from transformer.chat._markers import ChatEncoder
    from transformer.chat._template_files import find_template

    named = {"option": "--data.template-path"} | ({} if template_path is None else {"name": template_path})
    templates = {tools: replace(find_template(tokenizer.files, tools=tools), **named) for tools in (False, True)}
    made = {template: ChatEncoder(template, tokenizer) for template in templates.values()}
    return {tools: made[template] for tools, template in templates.items()}


def encode(encoder: ChatEncoder, one: Conversation, train_on: TrainOn, now: datetime) -> tuple[Encoded, list[bool]]:
    """Return a conversation as token ids, and for each whether it is trained.

    If the template marks what the assistant writes with `{% generation %}`, these tokens are trained. Otherwise a
    message of the assistant begins where the prompt for it ends, and it ends with the first marker after it. A message
    with `"weight": 0` is read and not trained, as in OpenAI's files for fine-tuning. Raises ValueError if a message is
    invalid, the template refuses the messages, or no message would be trained.
    """
    try:
        values = template_values(encoder.template, one)
        encoded = encoder.encode(values, now=now)
        spans = _spans(encoder, encoded, values, one.given, train_on, now)
    except ValueError as error:
        raise ValueError(f"{one.place}: {error}") from None
    trained = [any(start < last and end > first for first, last in spans) for start, end in encoded.offsets]
    if encoder.template.marks_generated and train_on != "everything":
        trained = [a and b for a, b in zip(trained, encoded.generated, strict=True)]
    if not any(trained[1:]):
        raise ValueError(
            f"{one.place}: no token of this conversation would be trained, with train_on {train_on!r}. Add a message "
            "of the assistant with text and without weight 0, or remove the row; or use a template that writes it "
            "(--data.template-path)."
        )
    return encoded, trained


def template_values(template: ChatTemplate, one: Conversation) -> dict[str, Any]:
    """Return the variables of a template for a conversation. Raises ConfigError if a message is invalid."""
    return template.variables(one.messages, one.tools, None, False, False, one.switches)


def _spans(
    encoder: ChatEncoder, encoded: Encoded, values: Mapping[str, Any], given: int, train_on: TrainOn, now: datetime
) -> list[tuple[int, int]]:
    """Return (start, end) of the trained parts of a rendered conversation, in characters."""
    messages = values["messages"]
    without = _without_training(messages, train_on)
    if train_on == "everything":
        return [(0, len(encoded.text))]
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= given]
    if not turns:
        after = " after the prompt" if given else ""
        raise ConfigError(
            f"a conversation needs a message with the role assistant{after}, got the roles "
            f"{', '.join(message['role'] for message in messages)[:80]}. Add one, or remove the row."
        )
    chosen = [turn for turn in (turns[-1:] if train_on == "last" else turns) if turn not in without]
    if encoder.template.marks_generated and not without:
        if train_on == "assistant" and not given:
            return [(0, len(encoded.text))]
        prompt, plain, _ = _renderings(encoder, values, chosen[0], now)
        return [(_start(encoded, prompt, plain, chosen[0]), len(encoded.text))]
    spans: list[tuple[int, int]] = []
    for turn in chosen:
        prompt, plain, alone = _renderings(encoder, values, turn, now)
        start = _start(encoded, prompt, plain, turn)
        if spans and start < spans[-1][1]:
            _refuse_changed(turn)
        spans.append((start, _end(encoder, encoded, alone, turn, start)))
    return spans


def _without_training(messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> set[int]:
    """Return the indices of the messages with weight 0. Raises ConfigError if a weight can't be followed."""
    weights = {number: message["weight"] for number, message in enumerate(messages) if "weight" in message}
    for number, weight in weights.items():
        role = messages[number]["role"]
        if isinstance(weight, str) or weight not in (0, 1):
            raise ConfigError(f"the weight of message {number} must be 0 or 1, got {weight!r:.80}. Correct it.")
        if weight == 1 and role != "assistant" and train_on != "everything":
            raise ConfigError(
                f"message {number} has the role {role} and weight 1, but with train_on {train_on!r} only messages of "
                "the assistant are trained. Remove the weight, or use --data.train-on everything."
            )
        if weight == 0 and train_on == "everything":
            raise ConfigError(
                f"message {number} has weight 0, but train_on 'everything' trains all tokens. Remove the weight, or "
                "use --data.train-on assistant."
            )
    return {number for number, weight in weights.items() if weight == 0}


def _renderings(
    encoder: ChatEncoder, values: Mapping[str, Any], turn: int, now: datetime
) -> list[Rendered | ChatTemplateError]:
    """Render the messages before a turn, with and without the prompt for it, and those up to it."""
    before, upto = values["messages"][:turn], values["messages"][: turn + 1]
    given = [{"messages": before, "add_generation_prompt": asked} for asked in (True, False)]
    return encoder.template.run_each([{**values, **one} for one in (*given, {"messages": upto})], now)


def _text(rendered: Rendered | ChatTemplateError) -> str:
    if isinstance(rendered, Exception):
        raise rendered
    return rendered.text


def _start(
    encoded: Encoded, with_prompt: Rendered | ChatTemplateError, without: Rendered | ChatTemplateError, turn: int
) -> int:
    """Return where the text of a message begins: where the prompt for it ends."""
    try:
        prompt, plain = _text(with_prompt), _text(without)
    except ValueError:
        if turn:
            raise
        return 0  # many templates can't render an empty conversation
    # A template may begin the message with more than the prompt, such as <think>.
    start = same_start(encoded.text, prompt)
    if start < len(prompt) and not (encoded.text.startswith(plain) and start > len(plain)):
        _refuse_changed(turn)
    return start


def _end(encoder: ChatEncoder, encoded: Encoded, rendered: Rendered | ChatTemplateError, turn: int, start: int) -> int:
    """Return where the text of a message ends, including the marker after it, without line feeds after that."""
    tokens = list(zip(encoded.offsets, encoded.ids, strict=True))
    found = [end for (offset, end), i in tokens if offset >= start and i in encoder.ends][:1]
    alone = _text(rendered)
    stripped = alone.rstrip()
    if marker := encoder.last_marker(stripped):
        # Another marker may follow the message here: some templates end the last message with its own one.
        body = stripped[: -len(marker)]
        written = (end for (offset, end), i in tokens if offset == len(body) and encoder.is_marker(i))
        found += [end for end in written if encoded.text.startswith(body)]
    elif encoded.text.startswith(alone):
        found.append(len(alone))
    if not found:
        _refuse_changed(turn)
    return min(found)


def _refuse_changed(turn: int) -> NoReturn:
    raise ConfigError(
        f"the chat template writes the messages before message {turn} differently from without this message, so "
        "the text of the assistant can't be found. Train on the last message only (--data.train-on last), or use "
        "a template with {% generation %} (--data.template-path)."
    )


def warn_of_unread(encoders: Mapping[bool, ChatEncoder], conversations: Iterable[Conversation], now: datetime) -> None:
    """Warn once of all entries of messages, and of tools and switches, that do not change the text of a template."""
    first: dict[str, str] = {}
    for one in conversations:
        template = encoders[bool(one.tools)].template
        for name in _names(one) - first.keys():
            first[name] = "" if _reads(template, one, name, now) else one.place
    if unread := {name: place for name, place in first.items() if place}:
        listed = ", ".join(f"{name} (first in {place})" for name, place in sorted(unread.items()))
        warnings.warn(
            f"the chat template does not read these parts of the conversations, so they are not trained: {listed}. "
            "Use a template that writes them (--data.template-path), or ignore this warning.",
            stacklevel=3,
        )


def _names(one: Conversation) -> set[str]:
    """Return the names of the parts of a conversation that a template may ignore."""
    entries = {
        key for message in one.messages for key, value in message.items() if value is not None and key not in _READ_HERE
    }
    switches = {f"chat_template_kwargs.{name}" for name in one.switches}
    return {*(f"messages.{entry}" for entry in entries), *switches, *["tools"] * bool(one.tools)}


def _reads(template: ChatTemplate, one: Conversation, name: str, now: datetime) -> bool:
    """Return whether the source of a template has the name of a part, or its text changes without the part."""
    entry = name.split(".", 1)[-1]
    aliases = REASONING if entry in REASONING else (entry,)
    if any(re.search(rf"\b{re.escape(alias)}\b", template.source) for alias in aliases):
        return True
    values = template_values(template, one)
    return template.run(values, now=now).text != template.run(_without(values, name, aliases), now=now).text


def _without(values: Mapping[str, Any], name: str, entries: Iterable[str]) -> dict[str, Any]:
    """Return the variables of a template without a part."""
    if name.startswith("messages."):
        messages = [{key: one for key, one in message.items() if key not in entries} for message in values["messages"]]
        return {**values, "messages": messages}
    return {key: value for key, value in values.items() if key not in entries}
