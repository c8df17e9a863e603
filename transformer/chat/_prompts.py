"""`ChatPrompts`: conversations as token ids, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformer.chat._image_prompts import ImagePrompts, without_sources
from transformer.chat._markers import ChatEncoder, Encoded
from transformer.chat._template import ChatTemplate
from transformer.chat._template_files import find_template, json_object, special_tokens
from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.generate._sampling import Sampling

Message = Mapping[str, Any]
"""a dict with a `role` and a `content`"""


class ChatPrompts:
    """Turns conversations into token ids, with the chat template of a tokenizer. `Chat` also generates the replies.

    Args:
        tokenizer: tokenizer of the model.
        template: a `ChatTemplate`, or the text of one; None: that of the tokenizer's files.
        images: how a `VisionLanguageModel` reads images; None: it reads only text.
        longest: maximum number of tokens of a conversation. A much longer one is refused before all of it is encoded,
            which takes seconds; the caller checks the exact number. None: none is refused.

    Raises:
        ChatTemplateError: the tokenizer has no template, or the template is invalid.
        ConfigError: the tokenizer has no equivalent with special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | str | None = None,
        images: ImagePrompts | None = None,
        longest: int | None = None,
    ):
        self.tokenizer = with_markers(tokenizer, "conversations")
        self._files, self._images, self._longest = self.tokenizer.files, images, longest
        self._given = ChatTemplate(template) if isinstance(template, str) else template
        self._encoders: dict[ChatTemplate, ChatEncoder] = {}
        encoder = self._encoder(tools=False)  # an invalid template is an error now
        self.eos_ids = _end_ids(self.tokenizer, encoder)
        self.sampling = default_sampling(self._files)

    @property
    def template(self) -> ChatTemplate:
        """The template of conversations without tools."""
        return self._encoder(tools=False).template

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **switches: Any,
    ) -> Encoded:
        """Return the text and the token ids of a conversation; the arguments are those of `ChatTemplate.render`.

        A part of type image of a message needs a source: `{"type": "image", "image": ...}`, with a path, a PIL image or
        an array. Its marker is replaced by the tokens of the image.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or takes too long.
            ConfigError: messages, tools, documents or switches are invalid.
            ValueError: the tokenizer can't encode the text, or the conversation is too long.
        """
        encoder = self._encoder(tools=bool(tools))
        messages, sources = without_sources(messages)
        if sources and self._images is None:
            raise ConfigError(
                f"the conversation has {len(sources)} images, but this model reads only text. Remove them, or use a "
                f"model of images."
            )
        values = encoder.template.variables(
            messages, tools, documents, add_generation_prompt, continue_final_message, switches
        )
        found = encoder.encode(values, continue_final_message)
        if self._images is None:
            return found
        tokens = found.ids.count(self._images.token_id)
        self._images.check_count(tokens // self._images.count, len(sources))
        places = self._images.repeated(found.ids, sources)
        ids, generated, offsets = ([part[i] for i in places] for part in (found.ids, found.generated, found.offsets))
        return dataclasses.replace(found, ids=ids, generated=generated, offsets=offsets)

    def _encoder(self, tools: bool) -> ChatEncoder:
        template = self._given
        if template is None:
            template = find_template(self._files, tools=tools)
        elif not template.special_tokens:
            names = special_tokens(self._files)
            template = dataclasses.replace(template, special_tokens=tuple(names.items()))
        if template not in self._encoders:
            self._encoders[template] = ChatEncoder(template, self.tokenizer, self._images, self._longest)
        return self._encoders[template]


def with_markers(tokenizer: Tokenizer, use: str) -> PretrainedTokenizer:
    """Return the tokenizer with names of special tokens, which texts for this use contain."""
    try:
        return as_pretrained(tokenizer)
    except ValueError as error:
        raise ConfigError(f"this tokenizer can't be used for {use}: {error}") from None


def _end_ids(tokenizer: PretrainedTokenizer, encoder: ChatEncoder) -> list[int]:
    """Return the tokens that end a reply.

    If generation_config.json names no end token, the marker that the template writes after a message of the assistant
    is one too: the tokenizer files only name the end of a document.
    """
    ends = list(tokenizer.eos_ids)
    if json_object(tokenizer.files, "generation_config.json", "").get("eos_token_id") is None:
        ends += [i for i in [encoder.end_of_turn()] if i is not None and i not in ends]
    return ends


def default_sampling(files: Mapping[str, bytes]) -> Sampling:
    """Return the sampling that generation_config.json recommends; without a recommendation greedy decoding.

    Raises:
        ConfigError: a value of the file is invalid.
    """
    values = json_object(files, "generation_config.json", "")
    given: dict[str, Any] = {"temperature": 0.0}
    if values.get("do_sample"):
        given = {name: values[name] for name in ("temperature", "top_p", "min_p") if values.get(name) is not None}
        given |= {"top_k": values.get("top_k") or None}  # 0: no filter
    if values.get("repetition_penalty") is not None:
        given["repetition_penalty"] = values["repetition_penalty"]
    # In JSON, 1 is also a temperature.
    given = {name: float(x) if type(x) is int and name != "top_k" else x for name, x in given.items()}
    try:
        return Sampling(**given)
    except ConfigError as error:
        raise ConfigError(f"generation_config.json: {error} Correct it.") from None
