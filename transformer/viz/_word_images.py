"""Attention of generated words to the patches of an image: pictures, and an interactive page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from transformer.config._local_paths import local_path
from transformer.config._parts import Patches
from transformer.viz._attention_maps import fonts_for, short_label
from transformer.viz._attention_page import check_weights
from transformer.viz._attention_weights import check_finite, printable
from transformer.viz._image_maps import check_image, draw_pictures
from transformer.viz._image_page import packed, write_image_page
from transformer.viz._output_files import files_in

MOST_WORDS = 60
"""maximum number of words in a picture file"""


def save_word_images(
    image: Float[np.ndarray, "H W C"],
    weights: Float[np.ndarray, "L N Q P"],
    rollout: Float[np.ndarray, "L Q P"],
    directory: str | os.PathLike,
    *,
    words: Sequence[str],
    patches: Patches,
    overwrite: bool = True,
) -> list[Path]:
    """Draw the attention of each word to the patches of an image on the image, as PNG files with a picture per word.

    There is one file with the mean over all layers and heads, one with the rollout through all layers, and one per
    layer with the mean over its heads. Colors are relative to the largest weight in a picture.

    Args:
        image: (H, W, C), the pixels that the model read, with values from 0 to 1.
        weights: (L, N, Q, P), weights of the Q words for the P patches, row by row.
        rollout: (L, Q, P), rollout up to each layer.
        directory: directory for the files.
        words: text of each word.
        patches: size of the image and of the squares that the P weights stand for, without learned tokens.
        overwrite: replace existing files that this package did not write.

    Returns:
        The paths of the files: `image_words.png`, `image_words_rollout.png`, `image_words_layer1.png`, ...

    Raises:
        ValueError: the sizes do not fit together, weights are not finite, or there are more than `MOST_WORDS`.
        FileExistsError: without `overwrite`, a file exists that this package did not write.
    """
    directory = local_path(directory, "directory")
    _check(image, weights, rollout, words, patches)
    if len(words) > MOST_WORDS:
        raise ValueError(
            f"a picture file shows at most {MOST_WORDS} words, got {len(words)}. Pass a smaller --max-new-tokens, or "
            f"write one page: --html FILE."
        )
    total, digits = len(weights), len(str(len(weights)))
    planned = [
        ("image_words.png", "attention of each word to the image, mean over layers and heads", weights.mean((0, 1))),
        ("image_words_rollout.png", f"attention rollout of each word through {total} layers", rollout[-1]),
    ]
    for layer, one in enumerate(weights):
        title = f"layer {layer + 1} of {total}: attention of each word to the image, mean over heads"
        planned.append((f"image_words_layer{layer + 1:0{digits}}.png", title, one.mean(0)))
    paths = files_in(directory, [file for file, *_ in planned], overwrite)
    fonts, missing = fonts_for([*map(printable, words)])
    names = [short_label(word.strip() or word, missing) for word in words]
    for path, (_, title, shown) in zip(paths, planned, strict=True):
        draw_pictures(path, image, patches.patch_size, title, names, shown.reshape(-1, *patches.grid), fonts)
    return paths


def save_word_page(
    path: str | os.PathLike,
    image: Float[np.ndarray, "H W C"],
    weights: Float[np.ndarray, "L N Q P"],
    rollout: Float[np.ndarray, "L Q P"],
    *,
    words: Sequence[str],
    patches: Patches,
    title: str,
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write an HTML page with the words of an answer, which draws the attention of a word on the image.

    The page is that of `save_image_page`, with words instead of patches as queries.

    Args:
        path: file to write; a missing directory is created.
        image: (H, W, C), the pixels that the model read, with values from 0 to 1.
        weights: (L, N, Q, P), weights of the Q words for the P patches, row by row.
        rollout: (L, Q, P), rollout up to each layer.
        words: text of each word.
        patches: size of the image and of the squares that the P weights stand for, without learned tokens.
        title: heading of the page.
        facts: texts shown below the picture, by name.

    Raises:
        ValueError: the sizes do not fit together, weights are not finite, or there are more weights than a page holds.
    """
    path = local_path(path, "path")
    _check(image, weights, rollout, words, patches)
    check_weights(weights.size + rollout.size)
    queries = {
        "tokens": [],
        "words": [printable(word.strip() or word) for word in words],
        "classToken": False,
        "views": ["mean", "head", "rollout"],
        "depth": len(weights),
        "layers": [{"layer": layer, **packed(one)} for layer, one in enumerate(weights)],
        "rollout": [packed(one[None]) for one in rollout],
        "pooling": None,
    }
    return write_image_page(path, image, patches, title, facts, queries)


def _check(image: np.ndarray, weights: np.ndarray, rollout: np.ndarray, words: Sequence[str], patches: Patches) -> None:
    check_image(image, patches)
    shapes = (
        (len(weights), weights.shape[1], len(words), patches.positions),
        (len(weights), len(words), patches.positions),
    )
    if not words or (weights.shape, rollout.shape) != shapes:
        raise ValueError(
            f"expected weights of shape {shapes[0]} and a rollout of shape {shapes[1]} for {len(words)} words and "
            f"{patches.positions} patches, at least one word, got {weights.shape} and {rollout.shape}. Pass those of "
            f"the same text."
        )
    check_finite(weights, rollout)
