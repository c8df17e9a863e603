"""Separate the answer of a model from its reasoning, if it writes them in different channels (gpt-oss)."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.chat._pieces import Detokenizer
from transformer.data.tokenizers._base import Tokenizer

_HEADERS = ("<|start|>", "<|channel|>")
_BODY, _END = "<|message|>", "<|end|>"
_ANSWERS = ("final", "assistant", "")
"""channels of the answer; a header without a channel has only a role, or is empty"""


class Channels:
    """Decodes the tokens of a reply, and returns only the text of the answer.

    A model of the family gpt-oss writes `<|channel|>NAME<|message|>TEXT<|end|>` several times; the answer has the name
    `final`. The text of other channels is collected in `reasoning`. Other models write the answer alone.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        names = dict(zip(tokenizer.special_tokens, sorted(tokenizer.special_ids), strict=True))
        self._headers = {names[name] for name in _HEADERS if name in names}
        self._body, self._end = names.get(_BODY), names.get(_END)
        self._has_channels = self._body is not None and len(self._headers) == len(_HEADERS)
        self._text = Detokenizer(tokenizer)
        self._header: list[int] | None = None
        self._is_answer = True
        self.reasoning = ""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text of the answer that these tokens complete."""
        if not self._has_channels:
            return self._text.add(ids)
        return "".join(map(self._one, ids))

    def finish(self) -> str:
        """Return the text of the answer that was held back."""
        return self._sorted(self._text.finish())

    def _one(self, token: int) -> str:
        if token in self._headers or token == self._end:
            text = self._sorted(self._text.finish())
            self._text = Detokenizer(self._tokenizer)
            self._header = [] if token in self._headers else None
            return text
        if token == self._body:
            # A header may have more words: the name of a function, or the format of the text.
            self._is_answer = self._tokenizer.decode(self._header or []).strip().split(" ")[0] in _ANSWERS
            self._header = None
            return ""
        if self._header is not None:
            self._header.append(token)
            return ""
        return self._sorted(self._text.add([token]))

    def _sorted(self, text: str) -> str:
        if self._is_answer:
            return text
        self.reasoning += text
        return ""
