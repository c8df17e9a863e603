"""Compile grammars of clients in other processes first, which the system ends at a limit of time or memory.

A JSON schema of 73 bytes can need gigabytes and minutes, and a compilation can't be stopped from within its process. A
compiled grammar can't be sent to another process either. So a separate process proves that a grammar compiles
within the limits; then this process compiles it again, which costs the same and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformer.config._limited import Cancellation, CrashedError, LimitedProcesses, LimitExceededError

SECONDS = 2.0
"""time in which a grammar must compile"""
MOST_BYTES = 24 * 2**20
"""memory that a compiled grammar may need; an object of 2,000 properties needs 18 MB"""
LIMITS = {"max_lexer_states": 10_000}
"""limits of llguidance other than its defaults: a text with more states than these ends with an error. A state needs 1
to 2 kB"""
PROGRAM = Path(__file__).with_name("_grammar_worker.py")


class GrammarChecks:
    """Checks whether grammars compile within the limits; from several threads at the same time, too.

    `tokens` are the bytes of each token id; `end_ids` are the ids that end a text, at least one.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], bos_id: int | None, end_ids: Sequence[int]):
        values = {"tokens": list(tokens), "special_ids": list(special_ids), "bos_id": bos_id}
        values |= {"end_ids": list(end_ids), "limits": LIMITS}
        self._processes = LimitedProcesses(PROGRAM, values, seconds=SECONDS, most_bytes=MOST_BYTES)
        self.close = self._processes.close
        """ends the processes that wait"""

    def reason_against(self, grammar: str, cancellation: Cancellation) -> str | None:
        """Return why a grammar must not be compiled in this process; None: it compiles within the limits, or fails.

        Raises:
            OSError: no process can be started.
        """
        try:
            self._processes.ask(grammar, cancellation)
        except LimitExceededError as error:
            if cancellation.cancelled:
                return "its check was cancelled"
            return f"it does not compile within {error}. Simplify it"
        except CrashedError as error:
            return f"the process that compiles it {error}. Simplify it"
        return None
