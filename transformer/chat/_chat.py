"""`Chat`: a conversation with a causal language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer.chat._channels import Channels
from transformer.chat._image_prompts import ImagePrompts, without_sources
from transformer.chat._pieces import Detokenizer, StopStrings
from transformer.chat._prompts import ChatPrompts, Message
from transformer.chat._template import ChatTemplate, ChatTemplateError
from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.generate._sampling import Sampling
from transformer.generate._streaming import Piece, TokenStream

MAX_NEW_TOKENS = 1024
"""default maximum number of tokens of a reply"""


@dataclass(frozen=True)
class Reply:
    """The reply of a model."""

    text: str
    """without end tokens, stop strings and reasoning"""
    tokens: list[int]
    """all generated tokens, without the end token"""
    log_probabilities: list[float]
    """of each token under the model, before penalties, temperature and filters"""
    finish: Literal["end", "stop", "length", "interrupted"]
    """why it ended: an end token, a stop string, the maximum number of tokens, or the caller stopped reading"""
    reasoning: str = ""
    """text that the model wrote in a different channel from the answer (gpt-oss)"""

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, str]:
        """The reply as a message of the conversation."""
        return {"role": "assistant", "content": self.text}


class ReplyStream:
    """The pieces of a reply, as they are generated; an iterator of texts. `reply` is the reply so far."""

    def __init__(self, pieces: Iterator[Piece], decoder: Channels | Detokenizer, stop: Sequence[str]):
        self._pieces, self._decoder, self._stop = pieces, decoder, StopStrings(stop)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []
        self._finish: Literal["end", "stop", "length", "interrupted"] = "interrupted"
        self._texts = self._run()

    def __iter__(self) -> ReplyStream:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    @property
    def reply(self) -> Reply:
        """The reply: complete after the last piece, before that its part so far."""
        text = "".join(self._text)
        return Reply(text, self._tokens, self._log_probabilities, self._finish, self._decoder.reasoning)

    def _run(self) -> Iterator[str]:
        ended = False
        for piece in self._pieces:
            self._tokens += piece.tokens
            self._log_probabilities += piece.log_probabilities
            ended = piece.ended
            yield from self._given(self._decoder.add(piece.tokens))
            if self._stop.stopped:
                self._finish = "stop"
                return
        yield from self._given(self._decoder.finish())
        held = self._stop.finish()
        self._finish = "stop" if self._stop.stopped else "end" if ended else "length"
        if held:
            self._text.append(held)
            yield held

    def _given(self, text: str) -> Iterator[str]:
        if text := self._stop.add(text):
            self._text.append(text)
            yield text


class Chat(ChatPrompts):
    """Converses with a model. The template of its tokenizer turns messages into the text that it was trained with.

    Markers such as `<|im_end|>` come from the template only: in a message they are text.

    Examples:
        >>> chat = Chat(model, params, tokenizer)  # doctest: +SKIP
        >>> chat.reply([{"role": "user", "content": "Name a color."}]).text  # doctest: +SKIP
        'Blue.'
        >>> for piece in chat.stream([{"role": "user", "content": "Another one."}]):  # doctest: +SKIP
        ...     print(piece, end="", flush=True)

    An instance keeps the KV cache of its last conversation, so that a next turn reads only the new messages. Use one
    instance per thread.

    Args:
        model: a `CausalLM`.
        params: its parameters, without the outer "params".
        tokenizer: its tokenizer.
        template: a `ChatTemplate`, or the text of one; None: that of the tokenizer's files.
        context: maximum number of tokens of a conversation; None: the size of a learned position table, or unlimited.
        suppress: token ids that are never generated.
        images: how a `VisionLanguageModel` reads images; None: it reads only text.

    Raises:
        ChatTemplateError: the tokenizer has no template, or the template is invalid.
        ValueError: the model is not a `CausalLM`, or the tokenizer has no equivalent with special tokens.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | str | None = None,
        context: int | None = None,
        suppress: Sequence[int] = (),
        images: ImagePrompts | None = None,
    ):
        super().__init__(tokenizer, template, images)
        self._stream = TokenStream(model, params)
        self.context = context if context is not None else model.config.max_length
        self._suppress = tuple(suppress)

    def stream(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **switches: Any,
    ) -> ReplyStream:
        """Return the reply to a conversation as an iterator of pieces of text.

        Args:
            messages: the conversation so far.
            max_new_tokens: maximum number of tokens of the reply.
            sampling: how tokens are sampled; None: as the authors of the model recommend in generation_config.json,
                without a recommendation greedily.
            stop: strings that end the reply; it does not contain them.
            seed: random seed.
            tools: functions with type hints and a docstring, or their JSON schemas.
            documents: dicts with a title and a text, for templates that support them.
            continue_final_message: continue the last message, instead of beginning a new one.
            **switches: variables of the template, such as `enable_thinking=False`.

        Raises:
            ConfigError: the conversation fills the context. Other errors are those of `encode`.
        """
        given = {"tools": tools, "documents": documents, "continue_final_message": continue_final_message}
        encoded = self.encode(messages, add_generation_prompt=not continue_final_message, **given, **switches)
        if not encoded.ids:
            raise ChatTemplateError("the chat template renders these messages as an empty text. Correct it.")
        if self.context is not None:
            left = self.context - len(encoded.ids)
            if left < 1:
                raise ConfigError(
                    f"the conversation has {len(encoded.ids):,} tokens: expected fewer than {self.context:,}, the "
                    "context of the model. Remove earlier messages."
                )
            max_new_tokens = min(max_new_tokens, left)
        sampling = self.sampling if sampling is None else sampling
        sources = without_sources(messages)[1]
        pieces = self._stream.generate(
            encoded.ids,
            images=self._images.read(sources) if self._images is not None and sources else None,
            max_new_tokens=max_new_tokens,
            sampling=dataclasses.replace(sampling, suppress=(*sampling.suppress, *self._suppress)),
            eos_id=self.eos_ids,
            seed=seed,
        )
        return ReplyStream(pieces, Channels(self.tokenizer), stop)

    def reply(self, messages: Sequence[Message], **options: Any) -> Reply:
        """Return the reply to a conversation. The options and errors are those of `stream`."""
        stream = self.stream(messages, **options)
        for _ in stream:
            pass
        return stream.reply

    def replies(self, messages: Sequence[Message], *, samples: int, seed: int = 0, **options: Any) -> list[Reply]:
        """Return several replies to a conversation, with the seeds `seed`, `seed` + 1, and so on.

        The conversation is read once. The other options and the errors are those of `stream`.

        Raises:
            ConfigError: `samples` is not an integer of at least 1.
        """
        if type(samples) is not int or samples < 1:
            raise ConfigError(f"samples must be an integer of at least 1, got {samples!r}.")
        return [self.reply(messages, seed=(seed + i) % 2**32, **options) for i in range(samples)]
