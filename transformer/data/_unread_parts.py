"""Name the parts of conversations that a chat template does not read, so that the model never sees them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from transformer.chat._messages import REASONING
from transformer.data._turns import Conversation, template_values

if TYPE_CHECKING:
    from transformer.chat._markers import ChatEncoder
    from transformer.chat._template import ChatTemplate

_READ_HERE = ("role", "content", "weight")
"""entries of a message that need not be in the source of the template"""


def warn_of_unread(encoders: Mapping[bool, ChatEncoder], conversations: Iterable[Conversation], now: datetime) -> None:
    """Warn once of all entries of messages, and of tools and switches, that do not change the text of a template.

    Args:
        encoders: the encoders for conversations without (False) and with tools (True).
        conversations: valid conversations.
        now: time that the template may write.
    """
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
