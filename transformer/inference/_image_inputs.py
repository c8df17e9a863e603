"""Pixels of images, as a model reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._model import DynamicImageTokens
from transformer.config._parts import Patches
from transformer.inference._loaded_model import LoadedModel
from transformer.media._image_settings import image_processor
from transformer.media._images import ImageProcessor
from transformer.nn.models._dynamic_images import ImagePatches
from transformer.zoo._image_size import with_image_size

BATCH = 16
"""Number of images that the model reads at the same time."""


def run_images(
    opened: LoadedModel,
    images: Sequence[Any],
    processor: ImageProcessor | None,
    compute: Callable[[Any, Any, Any], jax.Array],
) -> list[np.ndarray]:
    """Preprocess images and apply `compute(model, params, pixels)` to batches (B, height, width, channels) of them.

    For a model that reads any aspect ratio, `pixels` are `ImagePatches`. Results that are not finite raise ValueError.
    """
    if processor is None:
        processor = image_processor(opened.directory)
    opened = with_size_of(opened, processor)
    results: list[np.ndarray] = []
    for pixels in _batches(images, processor):
        results += list(np.asarray(compute(opened.model, opened.params, pixels), np.float32))
    return [opened.finite(number, row, "image") for number, row in enumerate(results[: len(images)])]


def with_size_of(opened: LoadedModel, processor: ImageProcessor) -> LoadedModel:
    """Return the model for images of the size that the preprocessing gives; raise ConfigError if it can't read them."""
    config, size = opened.model.config, processor.size
    if config.dynamic_images is not None:
        _check_multiple(opened, processor, config.dynamic_images)
        return opened
    patches = config.patches or (config.images or config.image_tokens).patches
    if patches.resize_positions:
        _check_any_grid(opened, patches, processor)
        return opened
    wanted = (patches.image_height, patches.image_width)
    fits = len(processor.mean) == patches.channels
    found = opened.pretrained
    if fits and size not in (None, wanted) and found is not None and found.family.any_image_size:
        model, params = with_image_size(opened.model, opened.params, *size, antialias=found.family.antialias)
        return dataclasses.replace(opened, model=model, params=params)
    if not fits or size not in (None, wanted):
        given = "any size" if size is None else f"{size[0]} x {size[1]}"
        raise ConfigError(
            f"the model in {opened.directory} reads images of {wanted[0]} x {wanted[1]} pixels with {patches.channels} "
            f"channels, but its preprocessing gives {given} with {len(processor.mean)} channels. Correct its "
            f"preprocessor_config.json, pass another processor, or change the model with zoo.with_image_size."
        )
    return opened


def _check_multiple(opened: LoadedModel, processor: ImageProcessor, images: DynamicImageTokens) -> None:
    """Raise ConfigError unless the preprocessing gives images whose sides are multiples of those of a token."""
    if (processor.multiple, len(processor.mean)) != (images.multiple, images.channels):
        given = "other sizes" if processor.multiple is None else f"multiples of {processor.multiple}"
        raise ConfigError(
            f"the model in {opened.directory} reads images whose sides are multiples of {images.multiple} pixels, with "
            f"{images.channels} channels, but its preprocessing gives {given} with {len(processor.mean)} channels. "
            f"Correct its preprocessor_config.json, or pass another processor."
        )


def _check_any_grid(opened: LoadedModel, patches: Patches, processor: ImageProcessor) -> None:
    """Raise ConfigError if the preprocessing does not give patches of the size that the model reads."""
    wanted, given = (patches.patch_size, patches.channels), (processor.multiple, len(processor.mean))
    if processor.max_patches is None or wanted != given:
        raise ConfigError(
            f"the model in {opened.directory} reads images of any aspect ratio as patches of {wanted[0]} x {wanted[0]} "
            f"pixels with {wanted[1]} channels: expected an ImageProcessor with multiple={wanted[0]} and max_patches, "
            f"got multiple={given[0]}, max_patches={processor.max_patches} and {given[1]} channels. Correct its "
            f"preprocessor_config.json (Siglip2ImageProcessor), or pass another processor."
        )


def _batches(images: Sequence[Any], processor: ImageProcessor) -> Iterator[np.ndarray | ImagePatches]:
    """Yield the pixels of the images in batches of one size, so that one program is compiled: the last is filled up."""
    if not images:
        raise ValueError("there are no images. Pass at least one.")
    size = min(len(images), BATCH)
    for first in range(0, len(images), BATCH):
        part = images[first : first + BATCH]
        arrays = (processor(part),) if processor.max_patches is None else processor.flat_patches(part)
        arrays = [filled(one, size) for one in arrays]
        yield arrays[0] if len(arrays) == 1 else ImagePatches(*arrays)


def visible(pixels: np.ndarray, processor: ImageProcessor) -> np.ndarray:
    """Return preprocessed pixels (height, width, channels) with values from 0 to 1."""
    return np.clip(pixels * np.asarray(processor.std) + np.asarray(processor.mean), 0.0, 1.0)


def filled(values: np.ndarray, size: int) -> np.ndarray:
    """Return a batch (B, ...) with its last row repeated up to `size` rows: one program is compiled for all batches."""
    return np.concatenate([values, np.repeat(values[-1:], size - len(values), axis=0)])
