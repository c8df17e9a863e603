"""Short descriptions of lists of layer kinds, and checks of the kinds of layers of a model config."""

from __future__ import annotations

from collections.abc import Sequence

from transformer.config._checks import ConfigError
from transformer.config._parts import LayerKind, RotaryScaling


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
    period, last = list(kinds[first : first + size]), first + size
    while list(kinds[last : last + size]) == period:
        last += size
    return {"stack.prefix": tuple(kinds[:first]), "stack.period": tuple(period), "stack.suffix": tuple(kinds[last:])}


def check_shared_keys(
    kinds: Sequence[LayerKind], prefix: int, size_of_head: int, scaling: RotaryScaling | None
) -> None:
    """Raise ConfigError unless layers that read keys and values find those of an earlier layer that stores them.

    `prefix` is the number of kinds in the prefix, `size_of_head` is that of kinds that set none, and `scaling` is that
    of the model.
    """
    stored: dict[str, LayerKind] = {}
    for index, kind in enumerate(kinds):
        if kind.stores_kv is not None:
            if index >= prefix or kind.stores_kv in stored:
                raise ConfigError(
                    f"stores_kv={kind.stores_kv!r} must be the name of one layer, in stack.prefix: others can't read "
                    f"the keys and values of repeated layers. Move the layer, or rename it."
                )
            stored[kind.stores_kv] = kind
        if kind.reads_kv is None:
            continue
        if kind.reads_kv not in stored:
            raise ConfigError(
                f"reads_kv={kind.reads_kv!r}, but no earlier layer has stores_kv={kind.reads_kv!r}. Name one of "
                f"{', '.join(stored) or 'the layers in stack.prefix, with stores_kv'}."
            )
        other = stored[kind.reads_kv]
        size, own = other.head_dim or size_of_head, kind.head_dim or size_of_head
        if own != size:
            raise ConfigError(
                f"a layer reads keys of head_dim {size} by reads_kv={kind.reads_kv!r}, but its own is {own}. Change "
                f"one of them."
            )
        if any(one is not None and one.by_length for one in (scaling, other.rotary_scaling)):
            raise ConfigError("reads_kv does not support rotary scaling by the length of the text. Remove one of them.")
