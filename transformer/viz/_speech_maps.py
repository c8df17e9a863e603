"""Cross-attention of the words of a transcript over time, drawn below the log-mel frames of the recording."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from transformer.config._local_paths import local_path
from transformer.viz._attention_maps import check_pixels, fonts_for, short_label
from transformer.viz._attention_weights import check_finite, printable
from transformer.viz._output_files import files_in
from transformer.viz._style import save

_DPI = 110
_WIDTH, _SOUND, _LINE, _TOP, _BOTTOM, _LEFT, _RIGHT, _GAP = 11.0, 1.5, 0.2, 0.5, 0.75, 1.75, 0.2, 0.12  # inches
_INK, _QUIET, _RED = "#333333", "#777777", "#c2410c"


def save_speech_attention(
    frames: Float[np.ndarray, "F M"],
    weights: Float[np.ndarray, "L N W S"],
    directory: str | os.PathLike,
    *,
    words: Sequence[str],
    times: Sequence[tuple[float, float]],
    heads: Sequence[tuple[int, int]],
    seconds: float,
    overwrite: bool = True,
) -> list[Path]:
    """Draw the cross-attention of the words of a transcript over time, as PNG files.

    There is one file with the mean of the alignment heads, and one per layer with the mean of all heads. Each shows the
    log-mel frames, and below them a row per word. A box marks the time of the word. Colors are relative to the largest
    weight of each row.

    Args:
        frames: (F, M), log-mel frames of the recording.
        weights: (L, N, W, S), weights of each layer and head, for the W words and S encoder positions.
        directory: directory for the files.
        words: text of each word.
        times: start and end of each word in seconds.
        heads: layer and head of the alignment heads.
        seconds: duration of the recording.
        overwrite: replace existing files that this package did not write.

    Returns:
        The paths of the files: `audio_alignment.png`, `audio_layer1.png`, ...

    Raises:
        ValueError: the numbers of words, times and rows differ, there is no word, weights are not finite, or the
            pictures have more than `MOST_PIXELS` together.
        FileExistsError: without `overwrite`, a file exists that this package did not write.
    """
    directory = local_path(directory, "directory")
    if not len(words) == len(times) == weights.shape[2] or not words:
        raise ValueError(
            f"expected at least one word, and a time and a row of weights for each, got {len(words)} words, "
            f"{len(times)} times and {weights.shape[2]} rows. Pass those of the same transcript."
        )
    check_finite(weights)
    total, digits = len(weights), len(str(len(weights)))
    named = ", ".join(f"{layer + 1}.{head + 1}" for layer, head in heads[:8]) + (", ..." if len(heads) > 8 else "")
    title = f"cross-attention, mean of the alignment heads (layer.head: {named})"
    planned = [("audio_alignment.png", title, np.mean([weights[layer, head] for layer, head in heads], axis=0))]
    for layer, one in enumerate(weights):
        title = f"cross-attention, layer {layer + 1} of {total}: mean of the heads"
        planned.append((f"audio_layer{layer + 1:0{digits}}.png", title, one.mean(0)))
    tall = _TOP + _SOUND + _GAP + _LINE * len(words) + _BOTTOM
    check_pixels(len(planned) * _WIDTH * tall * _DPI**2, len(planned), "recording")
    paths = files_in(directory, [file for file, *_ in planned], overwrite)
    fonts, missing = fonts_for([*map(printable, words)])
    labels = [short_label(word.strip() or word, missing) for word in words]
    for path, (_, title, shown) in zip(paths, planned, strict=True):
        _draw(path, title, frames, shown, labels, times, seconds, tall, fonts)
    return paths


def _draw(
    path: Path,
    title: str,
    frames: np.ndarray,
    weights: Float[np.ndarray, "W S"],
    labels: Sequence[str],
    times: Sequence[tuple[float, float]],
    seconds: float,
    tall: float,
    fonts: list[str],
) -> None:
    figure = Figure(figsize=(_WIDTH, tall), dpi=_DPI, facecolor="white")  # not pyplot, which has global state
    figure.text(0.14 / _WIDTH, 1 - 0.14 / tall, title, va="top", fontsize=11, color=_INK)
    note = "color: weight relative to the largest one of the row; box: time of the word"
    figure.text(0.14 / _WIDTH, 0.12 / tall, note, fontsize=8, color=_QUIET)
    left, width = _LEFT / _WIDTH, 1 - (_LEFT + _RIGHT) / _WIDTH
    sound = figure.add_axes((left, 1 - (_TOP + _SOUND) / tall, width, _SOUND / tall))
    extent = (0, seconds, 0, frames.shape[1])
    sound.imshow(frames.T, origin="lower", aspect="auto", cmap="Greys", extent=extent, vmin=-1, vmax=1.5)
    sound.set_ylabel("mel bin", fontsize=8, color=_QUIET)
    rows = len(labels) * _LINE
    axes = figure.add_axes((left, _BOTTOM / tall, width, rows / tall), sharex=sound)
    share = weights / np.maximum(weights.max(-1, keepdims=True), 1e-30)
    extent = (0, seconds, len(labels) - 0.5, -0.5)
    axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    for row, (start, end) in enumerate(times):
        wide = max(end - start, seconds / 400)  # a word of one step stays visible
        axes.add_patch(Rectangle((start, row - 0.5), wide, 1, fill=False, edgecolor=_RED, linewidth=1.1))
    axes.set_yticks(range(len(labels)), labels)
    for label in axes.get_yticklabels():
        label.set(fontfamily=fonts, fontsize=8, parse_math=False)
    axes.set_xlabel("time in seconds", fontsize=8, color=_QUIET)
    for one in (sound, axes):
        one.tick_params(labelsize=8, labelcolor=_INK, color="#999999", length=2)
        one.spines[:].set(color="#999999", linewidth=0.6)
    sound.tick_params(labelbottom=False)
    save(figure, path)


def pooled(weights: Float[np.ndarray, "... S"], columns: int) -> tuple[Float[np.ndarray, "... C"], int]:
    """Add the weights of neighboring positions to at most `columns` sums; also return how many each one has."""
    step = max(1, math.ceil(weights.shape[-1] / columns))
    starts = np.arange(0, weights.shape[-1], step)
    return np.add.reduceat(weights, starts, axis=-1), step
