"""Interactive HTML page of the attention to the patches of an image: one self-contained file."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.image import imsave

from transformer.config._local_paths import local_path
from transformer.config._parts import Patches
from transformer.viz._attention_page import check_weights, quantize
from transformer.viz._attention_weights import AttentionMap, attention_rollout
from transformer.viz._image_maps import check_image, patch_weights
from transformer.viz._page_parts import encoded, fill_page, part


def save_image_page(
    path: str | os.PathLike,
    image: np.ndarray,
    maps: Sequence[AttentionMap],
    *,
    patches: Patches,
    title: str,
    pooling: Float[np.ndarray, "N 1 S"] | None = None,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write an HTML page that draws the attention of any patch or learned token on the image.

    The reader selects layer, head and query: a learned token by its button, a patch by pointing at it. The page also
    has the mean over the heads, attention rollout, and the pooling. It stores the weights in 8 bits, as multiples of
    1/255 of the largest weight of their query, is self-contained, and its content security policy forbids network
    access.

    Args:
        path: file to write; a missing directory is created.
        image: (height, width, channels), the pixels that the model read, with values from 0 to 1, in one or three
            channels.
        maps: self-attention maps of the image encoder, those of `attention_maps`.
        patches: size of the image and of its patches.
        title: heading of the page.
        pooling: weights of the pooling for each of its N heads.
        facts: texts shown below the picture, by name.

    Raises:
        ValueError: there are no maps; the sizes of the image, the maps and the patches do not fit together; weights are
            not finite; or there are more weights than a page can hold.
    """
    path = local_path(path, "path")
    check_image(image, patches)
    if not maps:
        raise ValueError("there is nothing to show: expected at least one attention map. Pass maps=.")
    rollouts = attention_rollout(maps)
    weights = [one.weights for one in [*maps, *rollouts]] + ([] if pooling is None else [pooling])
    for one in weights:
        patch_weights(one, patches)  # checks the number of positions, and that the weights are finite
    check_weights(sum(one.size for one in weights))
    queries = {
        "tokens": _token_names(patches),
        "words": None,
        "classToken": patches.class_token,
        "views": ["head", "mean", "rollout", *(["pooling"] if pooling is not None else [])],
        "depth": 1 + max(one.layer for one in maps),
        "layers": [{"layer": one.layer, **packed(one.weights)} for one in maps],
        "rollout": [packed(one.weights) for one in rollouts],
        "pooling": None if pooling is None else packed(pooling),
    }
    return write_image_page(path, image, patches, title, facts, queries)


def write_image_page(
    path: Path, image: np.ndarray, patches: Patches, title: str, facts: Mapping[str, str] | None, shown: dict[str, Any]
) -> Path:
    """Write a page with an image, and the attention `shown` on it, in the form that image_page.js reads."""
    data = {
        "title": title,
        "facts": [*(facts or {}).items()],
        "image": _png_url(image),
        "width": patches.image_width,
        "height": patches.image_height,
        "patch": patches.patch_size,
        "rows": patches.grid[0],
        "columns": patches.grid[1],
        **shown,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fill_page("image_page", title, part("image_page.js"), data), encoding="ascii")
    return path


def _token_names(patches: Patches) -> list[str]:
    """Return the names of the learned tokens before the patches, in the order of their positions."""
    names = ["class token"] * patches.class_token + ["distillation token"] * patches.distillation_token
    return [*names, *(f"register {number + 1}" for number in range(patches.registers))]


def packed(weights: Float[np.ndarray, "N T S"]) -> dict[str, Any]:
    """Return the weights of a map as the page stores them."""
    scales, levels = quantize(weights)
    return {
        "heads": weights.shape[0],
        "queries": weights.shape[1],
        "scales": encoded(scales.astype("<u2")),
        "weights": encoded(levels),
    }


def _png_url(image: np.ndarray) -> str:
    """Return an image (height, width, channels) as the URL of a PNG file."""
    file = io.BytesIO()
    imsave(file, np.clip(np.broadcast_to(image, (*image.shape[:2], 3)), 0.0, 1.0).astype(np.float64), format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
