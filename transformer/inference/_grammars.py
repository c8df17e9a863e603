"""Constrain generated text to a JSON schema or a regular expression, by the library llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer.config._limited import Cancellation
from transformer.data.tokenizers._base import TOKENIZER_FILE, Tokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.generate._constraints import WORD
from transformer.inference._grammar_checks import LIMITS, GrammarChecks

if TYPE_CHECKING:
    import llguidance


class GrammarError(ValueError):
    """A JSON schema or regular expression is invalid, not supported, or too costly."""


@dataclass(frozen=True)
class _Vocabulary:
    """What llguidance needs of a tokenizer, by its names."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]
    encode: Callable[[str], list[int]]

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, str) else text.decode("utf-8"))


class Grammars:
    """Creates constraints for the texts of one tokenizer.

    Reading a vocabulary takes up to a second, so keep the instance. Each schema and expression is compiled in another
    process first, with limits of time (2 s) and memory (24 MiB), because a short one can need hours and gigabytes. This
    process starts with the first one, reads the vocabulary, and is kept.

    Args:
        tokenizer: a byte-level tokenizer, or one that falls back to bytes, with an end token.
        vocab_size: number of token ids of the model; None: that of the tokenizer.

    Raises:
        ValueError: the tokenizer has no end token, more ids than the model, or a form that llguidance does not support.
        ModuleNotFoundError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None):
        try:
            import llguidance
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "JSON schemas and regular expressions need the package llguidance. Install it: pip install "
                "'transformer-zoo[serve]'."
            ) from None
        self._library = llguidance
        pretrained = as_pretrained(tokenizer)
        self.end_ids = tuple(pretrained.eos_ids)
        self.vocab_size = pretrained.vocab_size if vocab_size is None else vocab_size
        if not self.end_ids:
            raise ValueError("a constraint needs a tokenizer with an end token, and this one has none.")
        if self.vocab_size < pretrained.vocab_size:
            raise ValueError(
                f"the tokenizer has {pretrained.vocab_size} ids, but the model only {self.vocab_size}. Use the "
                f"tokenizer of the model."
            )
        vocabulary = self._read_vocabulary(pretrained)
        wrapped = llguidance.TokenizerWrapper(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(wrapped, self.vocab_size, list(self.end_ids))
        # One thread: what several compile at a time would add up, and each thread's heap keeps its peak.
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._limits = llguidance.LLParserLimits(**LIMITS)
        special_ids, bos_id = vocabulary.special_token_ids, vocabulary.bos_token_id
        self._checks = GrammarChecks(vocabulary.tokens, special_ids, bos_id, self.end_ids)

    def close(self) -> None:
        """End the processes that check grammars and wait. This also happens when the instance is deleted."""
        self._checks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def json_schema(
        self, schema: Mapping[str, Any] | bool, cancellation: Cancellation | None = None
    ) -> GrammarConstraint:
        """Return a constraint to JSON that matches a schema, written with one space after `,` and `:`, on one line.

        Without free white space, a model can't write white space until the limit of tokens.

        Args:
            schema: the JSON schema.
            cancellation: ends the check of the schema from another thread; None: nothing does.

        Raises:
            GrammarError: the schema is invalid, contradicts itself, has keywords that are not supported (none of them
                is ignored), or does not compile within the limits.
            OSError: the process that checks the schema can't be started.
        """
        if not isinstance(schema, Mapping | bool):
            raise GrammarError(f"a JSON schema must be an object, true or false, got {type(schema).__name__}.")
        try:
            given = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema can't be written as JSON: {_first_line(str(error))}.") from None
        # `defaults` and not `overrides`: a schema can allow white space with "x-guidance".
        options = {"whitespace_flexible": False}
        grammar = self._library.LLMatcher.grammar_from_json_schema(given, options)
        return self._constraint("JSON schema", grammar, cancellation)

    def regex(self, pattern: str, cancellation: Cancellation | None = None) -> GrammarConstraint:
        """Return a constraint to texts that match a regular expression as a whole.

        The syntax is that of Rust's regex crate, without look-around and back-references.

        Args:
            pattern: the regular expression.
            cancellation: ends the check of the expression from another thread; None: nothing does.

        Raises:
            GrammarError: the expression is invalid, no text matches it, or it does not compile within the limits.
            OSError: the process that checks the expression can't be started.
        """
        if not isinstance(pattern, str):
            raise GrammarError(f"a regular expression must be a text, got {type(pattern).__name__}.")
        grammar = self._library.LLMatcher.grammar_from_regex(pattern)
        return self._constraint("regular expression", grammar, cancellation)

    def _read_vocabulary(self, tokenizer: PretrainedTokenizer) -> _Vocabulary:
        """Return the vocabulary in the form of llguidance."""
        content = tokenizer.files[TOKENIZER_FILE].decode("utf-8")
        try:
            read = self._library.LLTokenizer(content, self.vocab_size)
        except ValueError as error:
            raise ValueError(
                f"llguidance can't read this tokenizer ({_first_line(str(error))}). Constraints need a byte-level "
                f"tokenizer, or one that falls back to bytes."
            ) from None
        # `read` recognizes special tokens in a text: the expression "<eos>" would give the end token, and a client
        # could write the markers of a conversation. So only the bytes of the tokens are taken from it.
        return _Vocabulary(
            eos_token_id=self.end_ids[0],
            bos_token_id=tokenizer.bos_id,
            tokens=[read.decode_bytes([i]) for i in range(self.vocab_size)],
            special_token_ids=sorted(
                tokenizer.special_ids | {i for i in range(self.vocab_size) if read.is_special_token(i)}
            ),
            encode=tokenizer.encode,
        )

    def _constraint(self, what: str, grammar: str, cancellation: Cancellation | None) -> GrammarConstraint:
        reason = self._checks.reason_against(grammar, cancellation or Cancellation())
        if reason is not None:
            raise GrammarError(f"the {what} can't be used: {reason}.")
        try:
            matcher = self._thread.submit(self._compile, grammar).result()
        except ValueError as error:  # a grammar with too many levels
            raise GrammarError(f"the {what} can't be used: {_first_line(str(error))}.") from None
        if matcher.is_error():
            raise GrammarError(f"the {what} can't be used: {_first_line(matcher.get_error())}.")
        return GrammarConstraint(matcher, self.vocab_size, self.end_ids)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        return self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)


class GrammarConstraint:
    """One text that must match a grammar; a `transformer.generate.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: tuple[int, ...]):
        self.vocab_size, self.end_ids, self._matcher = vocab_size, end_ids, matcher

    @property
    def complete(self) -> bool:
        """Whether the text so far matches; it may be False only if the limit of tokens ended the text."""
        return self._matcher.is_accepting()

    def allowed(self) -> np.ndarray:
        """Return the bits of the tokens that may come next, (ceil(V / 32),) uint32.

        Raises:
            GrammarError: the text has become too complex for the library.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        words = -(-self.vocab_size // WORD)
        return np.pad(found[:words], (0, words - len(found[:words])))

    def accept(self, token: int) -> None:
        """Append a token. Raises GrammarError if the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> GrammarConstraint:
        """Return a constraint in the same state, for another text."""
        return GrammarConstraint(self._matcher.deep_copy(), self.vocab_size, self.end_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the text can't be continued: {_first_line(self._matcher.get_error())}.")


def _first_line(message: str) -> str:
    """Return the message without the state of the parser and drawings of the expression."""
    lines = [line.strip() for line in message.split("<state>")[0].splitlines()]
    reason = next((line for line in reversed(lines) if line.startswith("error:")), lines[0] if lines else "")
    return reason.removeprefix("error:").strip()[:200].rstrip(".")
