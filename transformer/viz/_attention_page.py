"""Who looks at whom, as one HTML file to explore: all of its data, style and program within, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from transformer.viz._attention_weights import AttentionMap, attention_rollout, printable

MOST_WEIGHTS = 60_000_000
"""of all maps together: a page of 80 MB, which a browser still opens"""

LEVELS = 255
"""a weight is kept as a multiple of 1/255 of the largest of its row"""

_STACKS = ("encoder", "decoder")
_PROGRAM = ("_data.js", "_words.js", "_map.js", "_files.js", ".js")  # the last one begins
_SCALES = 65535


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What one model looked at, under its `name`: its `maps`, as `attention_maps` gives them."""

    name: str
    maps: Sequence[AttentionMap]
    layers: Mapping[str, int] = field(default_factory=dict)
    """how many layers a stack has, where the last ones attend to nothing: "encoder", "decoder" """


def attention_page(
    panels: Sequence[Panel],
    *,
    title: str,
    source: Sequence[str] = (),
    target: Sequence[str] = (),
    written_from: int | None = None,
    texts: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
) -> str:
    """An HTML page that shows every map of each panel, the mean over its heads and the rollout of its stack; panels
    stand side by side. It is ASCII, has all it needs within and forbids itself to fetch anything.

    Weights are kept in 8 bits: as multiples of 1/255 of the largest one of their row, and of cells that the mask hides
    none at all.

    Args:
        panels: one, or several of models that read the same words.
        title: the page's heading.
        source: label of each position of the encoders; target: those of the decoders.
        written_from: the first word of `target` that a model wrote itself; None: none.
        texts: what stands above the maps, by its name: prompt, translation.
        facts: what stands below, by its name: the model, how the weights were computed.

    Raises:
        ValueError: no maps; labels and weights that differ in number; weights that are not finite, or not from 0 to 1;
            more than `MOST_WEIGHTS`.
    """
    words = {"encoder": [*map(printable, source)], "decoder": [*map(printable, target)]}
    if not panels or not all(panel.maps for panel in panels):
        raise ValueError("there is nothing to show: give at least one panel, and each at least one map.")
    maps = [one for panel in panels for one in panel.maps]
    check_weights(sum(one.weights.size for one in maps))
    for one in maps:
        _check(one, words)
    masks = _Masks()
    data = {
        "title": title,
        "texts": [*(texts or {}).items()],
        "facts": [*(facts or {}).items()],
        "words": words,
        "writtenFrom": written_from,
        "panels": [{"name": panel.name, "groups": _groups(panel, masks)} for panel in panels],
        "masks": masks.packed,
    }
    style, program = _part(".css"), "\n\n".join(map(_part, _PROGRAM))
    program = f'"use strict";\n{{\n{program}\n}}'  # a block: nothing of it is seen from outside
    # What the page may do: run this program in this style. Nothing else, and nothing from anywhere.
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(program)}"
    parts = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "program": program,
        # Within a script element only "<" can begin anything but text.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part(".html"))


def save_attention_page(path: str | os.PathLike, panels: Sequence[Panel], **options: Any) -> Path:
    """Writes the page that `attention_page` makes of the panels and its options to `path`, whose folder is made when
    missing. ValueError as there.
    """
    path, page = Path(path), attention_page(panels, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="ascii")
    return path


def check_weights(count: int) -> None:
    """Raises ValueError for more weights than a page can hold."""
    if count > MOST_WEIGHTS:
        raise ValueError(
            f"a page can hold {MOST_WEIGHTS:,} attention weights, but these texts give {count:,}: the product of "
            f"queries, keys and heads over all layers. Shorten the texts."
        )


def _check(one: AttentionMap, words: Mapping[str, Sequence[str]]) -> None:
    queries, keys = words[one.stack], words["encoder" if one.kind == "cross" else one.stack]
    if (len(queries), len(keys)) != one.weights.shape[1:]:
        raise ValueError(
            f"the {one.stack}'s {one.kind}-attention has {one.weights.shape[1]} queries and {one.weights.shape[2]} "
            f"keys, but there are {len(queries)} and {len(keys)} words for them."
        )
    if not np.isfinite(one.weights).all():
        raise ValueError(
            f"the {one.stack}'s {one.kind}-attention of layer {one.layer + 1} has weights that are not finite: there "
            f"is something wrong with the model's parameters, or its numbers are beyond their type."
        )
    if one.weights.size and not -1e-6 <= one.weights.min() <= one.weights.max() <= 1 + 1e-3:
        raise ValueError(
            f"attention weights are from 0 to 1, got {one.weights.min():.3g} to {one.weights.max():.3g} in layer "
            f"{one.layer + 1}: these are no softmax weights."
        )


def _groups(panel: Panel, masks: _Masks) -> list[dict[str, Any]]:
    """Maps of one stack and kind together, layer by layer, with the rollout of what is self-attention."""
    groups = []
    for stack in _STACKS:
        ours = [one for one in panel.maps if one.stack == stack]
        depth = max([one.layer + 1 for one in ours] + [panel.layers.get(stack, 0)])
        for kind in ("self", "cross"):
            chosen = [one for one in ours if one.kind == kind]
            if not chosen:
                continue
            group = {"stack": stack, "kind": kind, "depth": depth}
            group["layers"] = [_packed(one, masks) for one in chosen]
            group["rollout"] = [_packed(one, masks) for one in attention_rollout(chosen)]
            groups.append(group)
    return groups


class _Masks:
    """What is hidden, each pattern once, as bits."""

    def __init__(self):
        self.packed: list[str] = []

    def number(self, hidden: Bool[np.ndarray, "T S"]) -> int | None:
        """Which pattern it is; None: nothing is hidden."""
        if not hidden.any():
            return None
        bits = _text(np.packbits(hidden.ravel()))
        if bits not in self.packed:
            self.packed.append(bits)
        return self.packed.index(bits)


def _packed(one: AttentionMap, masks: _Masks) -> dict[str, Any]:
    """The weights that are not hidden, row by row: 8 bits each, and 16 for the largest one of each row."""
    scales, levels = quantize(one.weights)
    return {
        "layer": one.layer,
        "heads": len(one.weights),
        "mask": masks.number(one.hidden),
        "scales": _text(scales.astype("<u2")),
        "weights": _text(levels[:, ~one.hidden]),
    }


def quantize(weights: Float[np.ndarray, "N T S"]) -> tuple[np.ndarray, np.ndarray]:
    """Scales (N, T) in 1/65535 and levels (N, T, S) in 1/255 of their row's scale, whole numbers: a weight is the
    product, to within 1/510 of the largest one of its row, rounded up to 1/65535.
    """
    weights = np.clip(weights, 0.0, 1.0)
    scales = np.ceil(weights.max(-1, initial=0.0).astype(np.float64) * _SCALES).astype(np.uint16)
    largest = np.maximum(scales, 1)[..., None] / _SCALES
    return scales, np.rint(weights * (LEVELS / largest)).astype(np.uint8)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _part(suffix: str) -> str:
    file = Path(__file__)
    return file.with_name(file.stem.removeprefix("_") + suffix).read_text(encoding="ascii").rstrip("\n")


def _digest(text: str) -> str:
    """How a content security policy names a piece that may stand in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
