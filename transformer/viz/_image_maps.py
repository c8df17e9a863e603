"""Attention over the patches of an image, drawn on the image: every layer and head, and attention rollout."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from transformer.config._local_paths import local_path
from transformer.config._parts import Patches
from transformer.viz._attention_weights import AttentionMap, attention_rollout, check_finite
from transformer.viz._output_files import files_in
from transformer.viz._style import save

_DPI = 110
_PANEL, _TITLE, _EDGE, _TOP, _BOTTOM = 1.9, 0.26, 0.14, 0.46, 0.3  # inches
_COLOR = np.array((0.84, 0.10, 0.11))  # a red that gray pictures do not contain
_STRONGEST = 0.8
"""opacity of the color on the patch with the largest weight, so that the picture stays visible"""
_INK = "#333333"


def save_image_attention(
    image: np.ndarray,
    maps: Sequence[AttentionMap],
    directory: str | os.PathLike,
    *,
    patches: Patches,
    pooling: Float[np.ndarray, "N 1 S"] | None = None,
    overwrite: bool = True,
) -> list[Path]:
    """Draw the attention to the patches of an image on the image, as PNG files.

    There is one file per layer with a picture for each head, one with the attention rollout up to each layer, and one
    with the attention of the pooling, if the model pools by attention. Each picture shows the weights of the class
    token, or without one, the mean over all patches; its color is relative to the largest weight in it.

    Args:
        image: (height, width, channels), the pixels that the model read, with values from 0 to 1, in one or three
            channels.
        maps: self-attention maps of the image encoder, those of `attention_maps`.
        directory: directory for the files.
        patches: size of the image and of its patches.
        pooling: weights of the pooling for each of its N heads.
        overwrite: replace existing files that this package did not write.

    Returns:
        The paths of the files: `image_layer1.png`, ..., `image_rollout.png` and `image_pooling.png`.

    Raises:
        ValueError: the sizes of the image, the maps and the patches do not fit together, or weights are not finite.
        FileExistsError: without `overwrite`, a file exists that this package did not write.
    """
    directory = local_path(directory, "directory")
    check_image(image, patches)
    digits, total = len(str(len(maps))), max((one.layer + 1 for one in maps), default=0)
    query = "of the class token" if patches.class_token else "mean over all patches"
    planned: list[tuple[str, str, list[str], np.ndarray]] = []
    for one in maps:
        weights = patch_weights(one.weights, patches)
        names = [f"head {head + 1}" for head in range(len(weights))]
        title = f"layer {one.layer + 1} of {total}: attention {query}"
        planned.append((f"image_layer{one.layer + 1:0{digits}}.png", title, names, weights))
    if rollouts := attention_rollout(maps):
        weights = np.concatenate([patch_weights(one.weights, patches) for one in rollouts])
        names = [f"layer {one.layer + 1}" for one in rollouts]
        planned.append(("image_rollout.png", f"attention rollout {query}", names, weights))
    if pooling is not None:
        weights = patch_weights(pooling, patches)
        names = [f"head {head + 1}" for head in range(len(weights))]
        planned.append(("image_pooling.png", "attention of the pooling", names, weights))
    paths = files_in(directory, [file for file, *_ in planned], overwrite)
    for path, (_, *page) in zip(paths, planned, strict=True):
        draw_pictures(path, image, patches.patch_size, *page)
    return paths


def check_image(image: np.ndarray, patches: Patches) -> None:
    """Raise ValueError if an image does not have the shape that the model reads."""
    expected = (patches.image_height, patches.image_width, patches.channels)
    if image.shape != expected:
        raise ValueError(f"expected an image of shape {expected}, as the model reads it, got {image.shape}. Resize it.")


def patch_weights(weights: Float[np.ndarray, "N T S"], patches: Patches) -> np.ndarray:
    """Return the weights of the patches, (N, T, S) -> (N, rows, columns): of the class token or, without one, the mean
    over the T queries. Learned tokens are left out among the keys, so that a picture may sum to less than 1.
    """
    if weights.shape[-1] != patches.positions:
        raise ValueError(
            f"expected the weights of {patches.positions} positions ({patches.extra_tokens} learned tokens and "
            f"{patches.count} patches), got {weights.shape[-1]}. Pass the maps of the same image encoder."
        )
    check_finite(weights)
    chosen = weights[:, 0] if patches.class_token else weights.mean(1)
    rows, columns = patches.image_height // patches.patch_size, patches.image_width // patches.patch_size
    return chosen[:, patches.extra_tokens :].reshape(-1, rows, columns)


def painted(image: np.ndarray, weights: np.ndarray, patch_size: int) -> np.ndarray:
    """Color the patches of an image (height, width, channels) in gray by their weights, relative to the largest one.

    Pixels outside of all patches, at the right and at the bottom, get no color. The result is (height, width, 3).
    """
    gray = image.mean(-1, keepdims=True)
    share = weights / max(float(weights.max()), 1e-30)
    opacity = np.zeros((*image.shape[:2], 1))
    covered = share.repeat(patch_size, 0).repeat(patch_size, 1)  # (rows p, columns p)
    opacity[: covered.shape[0], : covered.shape[1], 0] = _STRONGEST * covered
    return (1 - opacity) * gray + opacity * _COLOR


def draw_pictures(
    path: Path,
    image: np.ndarray,
    patch_size: int,
    title: str,
    names: Sequence[str],
    weights: np.ndarray,
    fonts: Sequence[str] = ("DejaVu Sans",),
) -> None:
    """Write a PNG file with the image, and one picture for each name with its weights (rows, columns)."""
    height, width = image.shape[0] / max(image.shape[:2]) * _PANEL, image.shape[1] / max(image.shape[:2]) * _PANEL
    count = len(names) + 1  # the image itself comes first
    columns = min(count, max(2, math.ceil(math.sqrt(count * 1.5 * height / width))))
    rows = -(-count // columns)
    note = "color: weight of a patch, relative to the largest one in each picture (max)"
    wide = max(columns * (width + _EDGE) + _EDGE, 0.3 + 0.1 * len(title), 0.3 + 0.068 * len(note))
    tall = _TOP + rows * (height + _TITLE) + _BOTTOM
    figure = Figure(figsize=(wide, tall), dpi=_DPI, facecolor="white")  # not pyplot, which has global state
    figure.text(0.14 / wide, 1 - 0.14 / tall, title, va="top", fontsize=12, color=_INK)
    figure.text(0.14 / wide, 0.12 / tall, note, fontsize=8, color="#777777")
    plain = np.broadcast_to(image, (*image.shape[:2], 3)) if image.shape[-1] == 1 else image
    pictures = [("image", plain)]
    for name, one in zip(names, weights, strict=True):
        pictures.append((f"{name}, max {one.max():.3g}", painted(image, one, patch_size)))
    for place, (name, picture) in enumerate(pictures):
        row, column = divmod(place, columns)
        left, top = _EDGE + column * (width + _EDGE), _TOP + row * (height + _TITLE) + _TITLE
        axes = figure.add_axes((left / wide, 1 - (top + height) / tall, width / wide, height / tall))
        axes.imshow(np.clip(picture, 0, 1), interpolation="nearest", aspect="auto")
        # A $ in a word does not start a formula.
        axes.set_title(name, loc="left", fontsize=8, color=_INK, pad=3, fontfamily=list(fonts), parse_math=False)
        axes.set_axis_off()
    save(figure, path)
