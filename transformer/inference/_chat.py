"""Conversations with a loaded model."""

from __future__ import annotations

from typing import Any

from transformer.chat._chat import Chat
from transformer.chat._image_prompts import ImagePrompts
from transformer.chat._template_files import find_template
from transformer.config._checks import ConfigError
from transformer.inference._loaded_model import LoadedModel


def open_chat(opened: LoadedModel, template: Any = None, images: ImagePrompts | None = None) -> Chat:
    """Return the chat of a model with its chat template, or with this one; `images`: how it reads images."""
    if opened.kind.writes != "continuation":
        kind = type(opened.model).__name__
        raise ConfigError(
            f"a conversation needs a causal model; {opened.directory} contains a model of type {kind}. Pass the "
            "directory of a model trained for conversations."
        )
    if template is None:
        template = find_template(getattr(opened.tokenizer, "files", {}), place=str(opened.directory))
    # Without special tokens, `Chat` adds those of the tokenizer.
    options = {"context": opened.context, "suppress": opened.suppressed, "images": images}
    return Chat(opened.model, opened.params, opened.tokenizer, template=template, **options)
