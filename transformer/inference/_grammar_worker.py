"""The program of a process that compiles grammars under limits of time and memory, for `_grammar_checks`.

The parent process starts this file by its path, so that the process imports neither JAX nor this package: it starts in
0.1 s. It sends lines of JSON: first an object with the settings and the vocabulary, then one grammar each as a text.
The answer to each is one byte, after the vocabulary is read or the grammar is compiled. If the process exceeds a
limit, the operating system ends it, also within compiled code.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

MEMORY_FILE = Path("/proc/self/statm")
"""file of Linux with the size of the address space, in pages; on other systems, only the time is limited"""


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


def limit_memory(most_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `most_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if MEMORY_FILE.exists():
        size = int(MEMORY_FILE.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Answer messages until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    os.nice(5)  # generated texts go first
    settings: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = settings["path"]
    import llguidance

    end_ids = settings["end_ids"]
    tokens = [token.encode("latin-1") for token in settings["tokens"]]
    vocabulary = Vocabulary(tokens, settings["special_ids"], settings["bos_id"], end_ids)
    wrapped = llguidance.TokenizerWrapper(vocabulary)
    tokenizer = llguidance.LLTokenizer(wrapped, len(vocabulary.tokens), end_ids)
    limits = llguidance.LLParserLimits(**settings["limits"])

    def try_out(grammar: str) -> None:
        """Compile a grammar, and compute the mask of the first token. Errors are those of the parent, later."""
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()

    try_out(llguidance.LLMatcher.grammar_from_regex(".*"))  # what every grammar needs does not count
    limit_memory(settings["most_bytes"])
    while True:
        sys.stdout.buffer.write(b".")
        sys.stdout.buffer.flush()
        if not (line := sys.stdin.buffer.readline()):
            return
        grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, settings["seconds"])
        with contextlib.suppress(ValueError):  # too many levels: the parent raises this error, too
            try_out(grammar)
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
