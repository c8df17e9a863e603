"""The answers of OpenAI's interface as JSON values: complete ones, and the parts of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer.data.tokenizers._base import Tokenizer
from transformer.serve._requests import Delta, Token
from transformer.serve._token_texts import TokenTexts

_PARTIAL = "bytes:"
"""what a text completion writes before a token that is a part of a character"""


@dataclass
class Choice:
    """What has arrived of one text."""

    text: str = ""
    reasoning: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        """Append the next part."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        self.finish = delta.finish or self.finish


class Answer:
    """Writes the answer to one call.

    Args:
        name: name of the model.
        tokenizer: its tokenizer.
        is_chat: a chat completion; otherwise a text completion.
        prompts: number of tokens of each prompt.
        contexts: tokens of each prompt, if the texts continue them; the space before a text is a part of it, then.
        n: number of texts per prompt.
        top: number of alternatives of each token; None: no log-probabilities.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        *,
        is_chat: bool,
        prompts: Sequence[int],
        n: int,
        top: int | None,
        contexts: Sequence[Sequence[int]] = (),
    ):
        self._is_chat, self._top = is_chat, top
        self._prompts = sum(prompts)
        self.choices = [Choice() for _ in range(len(prompts) * n)]
        before = [context for context in contexts or [()] * len(prompts) for _ in range(n)] if top is not None else []
        self._texts = [TokenTexts(tokenizer, context) for context in before]
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens; each prompt counts once."""
        generated = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": self._prompts,
            "completion_tokens": generated,
            "total_tokens": self._prompts + generated,
        }

    def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for number, choice in enumerate(self.choices):
            values: dict[str, Any] = {"index": number, "finish_reason": choice.finish}
            values["logprobs"] = self._log_probabilities(number, choice.tokens)
            if self._is_chat:
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                values["message"] = message | ({"reasoning_content": choice.reasoning} if choice.reasoning else {})
            else:
                values["text"] = choice.text
            choices.append(values)
        return {**self._head, "choices": choices, "usage": self.usage}

    def beginning(self) -> Iterator[dict[str, Any]]:
        """Yield the first parts of a stream: the role of each reply."""
        if self._is_chat:
            for number in range(len(self.choices)):
                yield self._chunk(number, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def part(self, number: int, delta: Delta) -> dict[str, Any]:
        """Return a part of a stream."""
        if self._is_chat:
            content = {"content": delta.text} if delta.text or not delta.finish else {}
            reasoning = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
            values: dict[str, Any] = {"delta": content | reasoning}
        else:
            values = {"text": delta.text}
        return self._chunk(number, values, self._log_probabilities(number, delta.tokens), delta.finish)

    def usage_part(self) -> dict[str, Any]:
        """Return the last part of a stream, with the numbers of tokens."""
        return {**self._stream_head, "choices": [], "usage": self.usage}

    @property
    def _stream_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def _chunk(
        self, number: int, values: dict[str, Any], log_probabilities: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": number, **values, "logprobs": log_probabilities, "finish_reason": finish}
        return {**self._stream_head, "choices": [choice]}

    def _log_probabilities(self, number: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Describe the next tokens of a text; each token once, in their order."""
        if self._top is None:
            return None
        texts = self._texts[number]
        if self._is_chat:
            content = []
            for token in tokens:
                top = [_named(texts, one, value) for one, value in token.top]
                content.append({**_named(texts, token.id, token.log_probability), "top_logprobs": top})
                texts.add(token.id)
            return {"content": content}
        names, tops, offsets = [], [], []
        for token in tokens:
            names.append(texts.name_of(token.id, _PARTIAL))
            # Tokens with the same text share a key: the generated one has it, otherwise the most probable one.
            top = {names[-1]: token.log_probability}
            for one, value in token.top:
                top.setdefault(texts.name_of(one, _PARTIAL), value)
            tops.append(top)
            offsets.append(texts.offset)
            texts.add(token.id)
        values = [token.log_probability for token in tokens]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _named(texts: TokenTexts, token: int, value: float) -> dict[str, Any]:
    return {"token": texts.name_of(token), "logprob": value, "bytes": list(texts.bytes_of(token))}
