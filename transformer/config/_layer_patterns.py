"""Short descriptions of lists of layer kinds."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._parts import LayerKind


def fold(kinds: Sequence[LayerKind]) -> dict[str, tuple[LayerKind, ...]]:
    """Return the shortest prefix, period and suffix that describe this list of layer kinds.

    The layers are the prefix, then the period repeated as often as necessary, then the suffix. Short descriptions
    matter because the layers of all periods are stacked and scanned, while a prefix or suffix is compiled per layer.
    """
    # Try every period: kinds[first : first + size], repeated until `last`. The rest is prefix and suffix.
    best: tuple[int, int, int] | None = None
    count = len(kinds)
    for size in range(1, count + 1):
        for first in range(count - size + 1):
            last = first + size
            if best is not None and last > best[0]:  # the length is at least first + size, so this can't be shorter
                break
            while last + size <= count and list(kinds[last : last + size]) == list(kinds[first : first + size]):
                last += size
            # Length of prefix + period + suffix; of equally short descriptions, the one with the shortest prefix wins.
            cost = (first + size + count - last, first, size)
            best = cost if best is None or cost < best else best
    _, first, size = best
    repeats = 1
    while list(kinds[first + repeats * size : first + (repeats + 1) * size]) == list(kinds[first : first + size]):
        repeats += 1
    return {
        "stack.prefix": tuple(kinds[:first]),
        "stack.period": tuple(kinds[first : first + size]),
        "stack.suffix": tuple(kinds[first + repeats * size :]),
    }
