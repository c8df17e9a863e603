"""`transformer-zoo inspect image`: attention over the patches of an image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer.cli._arguments import PathText, check_least
from transformer.cli._inspect import InspectCommand, called
from transformer.cli._models import check_images
from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel

NEW_TOKENS = 32
"""default maximum of new tokens about an image"""


@dataclass(frozen=True, kw_only=True)
class InspectImage(InspectCommand):
    """Draw the attention of a model on an image: for an image encoder its attention to the patches, for a
    vision-language model the attention of the words that it generates after --prompt.
    """

    image: Annotated[tyro.conf.Positional[PathText], tyro.conf.arg(metavar="IMAGE")]
    """image file"""
    prompt: str | None = None
    """vision-language model: text after the image; - reads stdin"""
    max_new_tokens: int | None = None
    """vision-language model: maximum new tokens to generate (greedily); None: 32"""


def main(command: InspectImage, arguments: Sequence[str]) -> None:
    check_least("max-new-tokens", command.max_new_tokens)
    check_images([command.image])
    command.check_page()
    opened = command.load()

    if opened.kind.image_prompts:
        _draw_words(command, arguments, opened)
        return
    _check_reader(command, opened)
    from transformer.viz._attention_weights import attention_maps

    image, config, sown = _capture(opened, command.image)
    pooling = sown.get("attention_pooling", {}).get("cross_attention", {}).get("weights")
    maps, pooling = attention_maps(sown, config), None if pooling is None else pooling[0][0]
    paths = []
    if command.draws_pictures:
        from transformer.viz._image_maps import save_image_attention

        directory, overwrite = command.pictures
        given = {"patches": config.patches, "pooling": pooling}
        paths = save_image_attention(image, maps, directory, overwrite=overwrite, **given)
    if command.html is not None:
        from transformer.viz._image_page import save_image_page

        facts = {
            "Model": f"{type(opened.model).__name__} in {opened.directory}; layers: {config.num_layers}, heads: "
            f"{config.num_heads}, patches: {config.patches.count} of {config.patches.patch_size} x "
            f"{config.patches.patch_size} pixels",
            "Image": command.image,
            "Command": called("image", arguments),
        }
        title = f"Attention of {opened.directory} to {Path(command.image).name}"
        save_image_page(command.html, image, maps, patches=config.patches, title=title, pooling=pooling, facts=facts)
    command.report(opened, None, image=command.image, paths=paths)


def _draw_words(command: InspectImage, arguments: Sequence[str], opened: LoadedModel) -> None:
    """Draw the attention of the words that a vision-language model generates about the image."""
    if command.prompt is None:
        raise ConfigError(
            f"{command.directory} contains a vision-language model, which reads an image together with a text. Pass "
            f"--prompt TEXT."
        )
    from transformer.cli._texts import read_prompts, shown
    from transformer.inference._image_attention import image_attention

    (prompt,) = read_prompts([command.prompt], lines=False)
    found = image_attention(opened, command.image, prompt, max_new_tokens=command.max_new_tokens or NEW_TOKENS)
    given = {"words": found.words, "patches": found.patches}
    paths = []
    if command.draws_pictures:
        from transformer.viz._word_images import save_word_images

        directory, overwrite = command.pictures
        paths = save_word_images(found.pixels, found.weights, found.rollout, directory, overwrite=overwrite, **given)
    if command.html is not None:
        from transformer.viz._word_images import save_word_page

        config, size = opened.model.config, found.patches.patch_size
        facts = {
            "Model": f"{type(opened.model).__name__} in {opened.directory}; layers: {config.num_layers}, heads: "
            f"{config.num_heads}, image tokens: {found.patches.count}, each for {size} x {size} pixels",
            "Image": command.image,
            "Prompt": prompt,
            "Generated": found.text,
            "Command": called("image", arguments),
        }
        title = f"Attention of {opened.directory} to {Path(command.image).name}"
        save_word_page(command.html, found.pixels, found.weights, found.rollout, title=title, facts=facts, **given)
    texts = {"image": command.image, "prompt": prompt, "output": found.text, "words": found.words}
    command.report(opened, shown(found.text), paths=paths, **texts)


def _check_reader(command: InspectImage, opened: LoadedModel) -> None:
    """Raise ConfigError for a model that does not encode images alone, or for options of texts."""
    if given := [name for name in ("prompt", "max_new_tokens") if getattr(command, name) is not None]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for vision-language models; {command.directory} contains a model of "
            f"type {type(opened.model).__name__}. Remove it."
        )
    if "images" not in opened.kind.inspects:
        raise ConfigError(
            f"inspect image needs a model that reads images, such as ViT, DINOv2, CLIP, SigLIP or LLaVA; "
            f"{command.directory} contains a model of type {type(opened.model).__name__}. Pass another model."
        )


def _capture(opened: LoadedModel, image: str) -> tuple[Any, Any, Any]:
    """Return the pixels (height, width, channels) from 0 to 1, and the config and sown weights of the image encoder."""
    import jax

    from transformer.inference._image_inputs import visible, with_size_of
    from transformer.inference._text_attention import reference_model
    from transformer.media._image_settings import image_processor

    processor = image_processor(opened.directory)
    opened = with_size_of(opened, processor)
    pixels = processor([image])
    model, dual = reference_model(opened.model), opened.kind.compares

    @jax.jit
    def sown(params, pixels):
        method = "embed_images" if dual else None
        return model.apply({"params": params}, pixels, method=method, mutable=["intermediates"])[1]["intermediates"]

    found = jax.device_get(sown(opened.params, pixels))
    config = model.config.image_encoder if dual else model.config
    if config.patches.resize_positions:  # the pictures show the grid of this image
        height, width = pixels.shape[1:3]
        own = dataclasses.replace(config.patches, image_height=height, image_width=width)
        config = config.replace(input=own)
    return visible(pixels[0], processor), config, found["image"] if dual else found
