"""Conversations with language models: chat templates, and replies that arrive piece by piece.

`Chat` needs the package jinja2, the extra `chat`.
"""

from transformer.chat._chat import Chat, Reply, ReplyStream
from transformer.chat._functions import function_schema
from transformer.chat._image_prompts import ImagePrompts, ImageText
from transformer.chat._markers import ChatEncoder, Encoded
from transformer.chat._messages import check_messages
from transformer.chat._pieces import Detokenizer, StopStrings
from transformer.chat._prompts import ChatPrompts, default_sampling
from transformer.chat._template import ChatTemplate, ChatTemplateError, Rendered
from transformer.chat._template_files import find_template

__all__ = [
    "Chat",
    "ChatEncoder",
    "ChatPrompts",
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "Encoded",
    "ImagePrompts",
    "ImageText",
    "Rendered",
    "Reply",
    "ReplyStream",
    "StopStrings",
    "check_messages",
    "default_sampling",
    "find_template",
    "function_schema",
]
