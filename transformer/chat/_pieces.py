"""Decode generated tokens piece by piece, without broken characters, and stop at given strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._pretrained import BYTE_TOKEN

_BROKEN = "\ufffd"


class Detokenizer:
    """Decodes a growing list of tokens. The pieces joined are the text of all tokens.

    Text that later tokens can change is held back: the bytes of an unfinished character, and a run of byte-fallback
    tokens, which is decoded as a whole.

    Args:
        tokenizer: any tokenizer of this package.
        prompt: tokens before the text. They are not part of it, but some tokenizers remove the space at the beginning
            of a text, and only there.
    """

    reasoning = ""  # `Channels` has some

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._ids = [i for i in prompt if i not in self._special]
        # A character that the text would complete changes the text of the prompt, to which pieces are added.
        while self._ids and tokenizer.decode(self._ids[-4:]).endswith(_BROKEN):
            self._ids.pop()
        # The text of ids[:_done] has been returned. Only ids from _start on are decoded again, where a complete
        # character begins; so the time per token does not grow.
        self._start, self._done = 0, len(self._ids)

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; it can be empty."""
        self._ids += [i for i in ids if i not in self._special]
        if len(self._ids) == self._done or BYTE_TOKEN.fullmatch(self._tokenizer.tokens(self._ids[-1:])[0]):
            return ""
        before, text = self._texts()
        if len(text) <= len(before) or text.endswith(_BROKEN) or not text.startswith(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character is a replacement character."""
        before, text = self._texts()
        self._done = len(self._ids)
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """Return the text from `_start` on, without and with the tokens whose text was not returned yet."""
        decode = self._tokenizer.decode
        return decode(self._ids[self._start : self._done]), decode(self._ids[self._start :])


class StopStrings:
    """Ends a text before the first of some strings that is complete, regardless of the pieces in which it arrives.

    Raises:
        ConfigError: a stop string is empty or no text.
    """

    def __init__(self, stop: Sequence[str] = ()):
        stop = [stop] if isinstance(stop, str) else list(stop)
        if wrong := [one for one in stop if not isinstance(one, str) or not one]:
            raise ConfigError(f"a stop string must be a text of at least one character, got {wrong[0]!r}. Remove it.")
        self._stop = stop
        self._beginnings = {one[:size] for one in stop for size in range(1, len(one))}
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return the text that can't be part of a stop string; after one was found, nothing."""
        if self.stopped:
            return ""
        text = self._held + piece
        # The first to end, as if each character came alone: of "b" and "abc", the text "abc" ends before "b".
        found = [(place + len(one), place) for one in self._stop if (place := text.find(one)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        longest = max(map(len, self._stop), default=1) - 1
        held = next((n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held
