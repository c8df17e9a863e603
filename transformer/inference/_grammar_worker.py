"""The program that compiles grammars in a process with limits (`config/_limited.py`), for `_grammar_checks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any


class Vocabulary:
    """The tokens in the form that llguidance expects. A forced text is encoded byte by byte: the cost is similar."""

    def __init__(self, tokens: list[bytes], special_ids: list[int], bos_id: int | None, end_ids: list[int]):
        self.tokens, self.special_token_ids = tokens, special_ids
        self.bos_token_id, self.eos_token_id = bos_id, end_ids[0]
        self._ids = {token: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of the bytes of a text that are tokens."""
        content = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([one])] for one in content if bytes([one]) in self._ids]


def prepare(values: dict[str, Any]) -> Callable[[str], None]:
    """Return a function that compiles a grammar and computes the mask of the first token."""
    import llguidance

    os.nice(5)  # generated texts go first
    vocabulary = Vocabulary(values["tokens"], values["special_ids"], values["bos_id"], values["end_ids"])
    wrapped = llguidance.TokenizerWrapper(vocabulary)
    tokenizer = llguidance.LLTokenizer(wrapped, len(vocabulary.tokens), values["end_ids"])
    limits = llguidance.LLParserLimits(**values["limits"])

    def compile_grammar(grammar: str) -> None:
        with contextlib.suppress(ValueError):  # too many levels: the parent raises this error, and others, too
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()

    compile_grammar(llguidance.LLMatcher.grammar_from_regex(".*"))  # what every grammar needs does not count
    return compile_grammar
