"""Interactive HTML page of attention maps: one self-contained file that loads nothing from the network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from transformer.config._local_paths import local_path
from transformer.viz._attention_weights import AttentionMap, attention_rollout, labels_of, printable
from transformer.viz._page_parts import encoded, fill_page, part

MOST_WEIGHTS = 60_000_000
"""maximum number of attention weights on a page; the file then has 80 MB, which browsers can still open"""

LEVELS = 255
"""a weight is stored as a multiple of 1/255 of the largest weight of its query"""

_STACKS = ("encoder", "decoder")
_PROGRAM = ("_data.js", "_words.js", "_map.js", "_files.js", ".js")  # the last file runs first and uses the others
_SCALES = 65535


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Attention maps of one model, as returned by `attention_maps`, and the name of the model."""

    name: str
    maps: Sequence[AttentionMap]
    layers: Mapping[str, int] = field(default_factory=dict)
    """number of layers by stack ("encoder", "decoder"); needed only if the last layers have no attention"""


def attention_page(
    panels: Sequence[Panel],
    *,
    title: str,
    source: Sequence[str] = (),
    target: Sequence[str] = (),
    written_from: int | None = None,
    texts: Mapping[str, str] | None = None,
    facts: Mapping[str, str] | None = None,
    rows: str | None = None,
) -> str:
    """Return an HTML page with every map of each panel, the mean over its heads and the rollout of its stack.

    Several panels are shown side by side. The page is ASCII and self-contained; its content security policy forbids
    network access. Weights are stored in 8 bits, as multiples of 1/255 of the largest weight of their query; masked
    cells are not stored.

    Args:
        panels: one model, or several models that read the same tokens.
        title: heading of the page.
        source: labels of the encoder positions.
        target: labels of the decoder positions.
        written_from: index of the first generated token in `target`; None: no token was generated.
        texts: texts shown above the maps, by name, such as the prompt and the translation.
        facts: texts shown below the maps, by name, such as the model and its attention kernel.
        rows: sentence that describes a row; None: in a decoder, the last token before the next one.

    Raises:
        ValueError: there are no maps; the numbers of labels and positions differ; weights are not finite or not from 0
            to 1; or there are more than `MOST_WEIGHTS`.
    """
    words = {"encoder": [*map(printable, source)], "decoder": [*map(printable, target)]}
    if not panels or not all(panel.maps for panel in panels):
        raise ValueError(
            "there is nothing to show: expected at least one panel, and at least one map per panel. Pass panels=."
        )
    maps = [one for panel in panels for one in panel.maps]
    check_weights(sum(one.weights.size for one in maps))
    for one in maps:
        _check(one, words)
    masks: list[str] = []  # patterns of masked cells as bits
    data = {
        "title": title,
        "texts": [*(texts or {}).items()],
        "facts": [*(facts or {}).items()],
        "rows": rows,
        "words": words,
        "writtenFrom": written_from,
        "panels": [{"name": panel.name, "groups": _groups(panel, masks)} for panel in panels],
        "masks": masks,
    }
    program = "\n\n".join(part(f"attention_page{suffix}") for suffix in _PROGRAM)
    # The block keeps its names out of the global scope.
    return fill_page("attention_page", title, f'"use strict";\n{{\n{program}\n}}', data)


def save_attention_page(path: str | os.PathLike, panels: Sequence[Panel], **options: Any) -> Path:
    """Write the page of `attention_page`, with its options, to `path`; a missing directory is created.

    Raises:
        ValueError: see `attention_page`.
    """
    path, page = local_path(path, "path"), attention_page(panels, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="ascii")
    return path


def check_weights(count: int) -> None:
    """Raise ValueError if there are more weights than a page can hold."""
    if count > MOST_WEIGHTS:
        raise ValueError(
            f"too many attention weights for a page: expected at most {MOST_WEIGHTS:,}, got {count:,} (queries x keys "
            f"x heads, summed over the layers). Shorten the texts."
        )


def _check(one: AttentionMap, words: Mapping[str, Sequence[str]]) -> None:
    labels_of(one, words)
    if not np.isfinite(one.weights).all():
        raise ValueError(
            f"the {one.stack} {one.kind}-attention of layer {one.layer + 1} has weights that are not finite. Check the "
            f"parameters of the model, or compute in a dtype with a larger range."
        )
    if one.weights.size and not -1e-6 <= one.weights.min() <= one.weights.max() <= 1 + 1e-3:
        raise ValueError(
            f"attention weights must be from 0 to 1, got {one.weights.min():.3g} to {one.weights.max():.3g} in layer "
            f"{one.layer + 1}. Pass softmax weights."
        )


def _groups(panel: Panel, masks: list[str]) -> list[dict[str, Any]]:
    """Return the maps grouped by stack and kind, in the order of the layers, with the rollout of the self-attention."""
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


def _number(hidden: Bool[np.ndarray, "T S"], masks: list[str]) -> int | None:
    """Return the index of a pattern of masked cells in `masks`, which stores each once; None if no cell is masked."""
    if not hidden.any():
        return None
    bits = encoded(np.packbits(hidden.ravel()))
    if bits not in masks:
        masks.append(bits)
    return masks.index(bits)


def _packed(one: AttentionMap, masks: list[str]) -> dict[str, Any]:
    """Return the unmasked weights of a map, row by row: 8 bits per weight and a scale of 16 bits per row."""
    scales, levels = quantize(one.weights)
    return {
        "layer": one.layer,
        "heads": len(one.weights),
        "mask": _number(one.hidden, masks),
        "scales": encoded(scales.astype("<u2")),
        "weights": encoded(levels[:, ~one.hidden]),
    }


def quantize(weights: Float[np.ndarray, "N T S"]) -> tuple[np.ndarray, np.ndarray]:
    """Quantize attention weights to 8 bits, with one scale per query.

    Integer scales (N, T) are in units of 1/65535, the largest weight of a query rounded up; integer levels (N, T, S) in
    units of 1/255 of that scale. Their product differs from the weight by at most 1/510 of the scale.
    """
    weights = np.clip(weights, 0.0, 1.0)
    # Rounded up, so that no weight exceeds its scale and level 255.
    scales = np.ceil(weights.max(-1, initial=0.0).astype(np.float64) * _SCALES).astype(np.uint16)
    # A scale of 0 would divide by zero; all weights of such a query are 0.
    largest = np.maximum(scales, 1)[..., None] / _SCALES
    return scales, np.rint(weights * (LEVELS / largest)).astype(np.uint8)
