"""Prompts with images for vision-language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer.chat._image_prompts import ImagePrompts, ImageText
from transformer.chat._prompts import with_markers
from transformer.config._checks import ConfigError
from transformer.config._model import ImageTokens
from transformer.inference._image_inputs import with_size_of
from transformer.inference._loaded_model import LoadedModel
from transformer.media._image_settings import image_processor
from transformer.media._images import ImageProcessor

USE = "prompts with images"


def image_prompts(opened: LoadedModel, processor: ImageProcessor | None = None) -> ImagePrompts:
    """Return how a vision-language model reads images in prompts, for `encode_with_images` and `Chat`.

    Args:
        opened: a vision-language model.
        processor: preprocessing; None: that of preprocessor_config.json in the directory of the model.

    Raises:
        ConfigError: the model reads only text, its tokenizer lacks the image token, or the preprocessing is missing or
            does not fit the model.
    """
    if not opened.kind.image_prompts:
        raise ConfigError(
            f"{opened.directory} contains a model of the class {type(opened.model).__name__}, which does not read "
            f"images together with text. Remove the images, or pass a vision-language model, such as "
            f"google/gemma-3-4b-it."
        )
    if processor is None:
        processor = image_processor(opened.directory)
    with_size_of(opened, processor)
    images = opened.model.config.image_tokens or opened.model.config.dynamic_images
    text = ImageText() if opened.pretrained is None else opened.pretrained.family.image_text or ImageText()
    tokenizer = with_markers(opened.tokenizer, USE)
    names = {text.before.strip(), text.after.strip()} - {""}
    name = tokenizer.tokens([images.token_id])[0]
    if images.token_id not in tokenizer.special_ids or not names <= set(tokenizer.special_tokens):
        wanted = ", ".join([name, *sorted(names)])
        raise ConfigError(
            f"the tokenizer in {opened.directory} does not have the special tokens of images ({wanted}; the image "
            f"token has the id {images.token_id}). Download the tokenizer of the model again."
        )

    def read(sources: Sequence[Any]) -> list[np.ndarray]:
        return [processor([source])[0] for source in sources]

    found = {"text": text, "token": name, "token_id": images.token_id, "read": read}
    if isinstance(images, ImageTokens):
        return ImagePrompts(count=images.count, **found)
    return ImagePrompts(count=1, count_of=lambda source: images.count(*processor.size_of(source)), **found)


def encode_with_images(
    opened: LoadedModel, prompt: str, images: Sequence[Any], prompts: ImagePrompts | None = None
) -> tuple[list[int], list[np.ndarray]]:
    """Return the token ids of a prompt about images, and the pixels of the images, for `generate`.

    Args:
        opened: a vision-language model.
        prompt: the text, with a marker for each image (Gemma 3: `<start_of_image>`, LLaVA and PaliGemma: `<image>`,
            Qwen2-VL: `<|vision_start|><|image_pad|><|vision_end|>`); without any marker, the images come first.
        images: paths, PIL images or arrays, see `media.open_image`.
        prompts: the result of `image_prompts`; None: it is computed.

    Returns:
        The ids, and one array (height, width, channels), float32, per image.

    Raises:
        ConfigError: as `image_prompts`, or the number of images is not that of the markers.
        FileNotFoundError, ValueError: an image that can't be read, or a prompt that the tokenizer can't encode.
    """
    prompts = image_prompts(opened) if prompts is None else prompts
    ids = prompts.encode(prompt, len(images), with_markers(opened.tokenizer, USE))
    return [ids[i] for i in prompts.repeated(ids, images)], prompts.read(images)
