"""Progress of long work: library functions report it, and a program may show it (`transformer.cli._bars`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

Shown = Callable[[str, float, float | None, str], None]
"""receives what is counted, how many are done, how many there are (None: unknown), and a note such as a speed"""

_SHOWN: ContextVar[Shown | None] = ContextVar("shown", default=None)


@contextlib.contextmanager
def showing(shown: Shown | None) -> Iterator[None]:
    """Context manager in which `shown` receives the progress of `counting`; None: nobody does."""
    before = _SHOWN.set(shown)
    try:
        yield
    finally:
        _SHOWN.reset(before)


class Add(Protocol):
    """Adds to what is done; `note` is shown next to it."""

    def __call__(self, more: float, note: str = "") -> None: ...


def counting(what: str, total: float | None = None) -> Add:
    """Start to report how many "texts" or the like are done (total of None: unknown); return a function that adds."""
    shown, done = _SHOWN.get(), 0.0
    if shown is None:
        return lambda more, note="": None
    shown(what, 0.0, total, "")

    def add(more: float, note: str = "") -> None:
        nonlocal done
        done += more
        shown(what, done, total, note)

    return add
