"""`python -m transformer inspect --image`: attention over the patches of an image."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.cli._inspect_text import Inspect
    from transformer.inference._loaded_model import LoadedModel

_OF_TEXTS = ("target", "system", "template", "switch", "compare", "chat", "sizes")
"""options that need a text"""
NEW_TOKENS = 32
"""default maximum of new tokens about an image"""


def check_page(command: Inspect) -> None:
    """Raise an error if --html names no HTML file, or a file of the user, before a model is loaded."""
    if command.html is None:
        return
    if command.html.is_dir() or command.html.suffix not in (".html", ".htm"):
        raise ConfigError(f"--html must name the HTML file to write, such as attention.html, got {command.html}.")
    if not command.overwrite:
        from transformer.viz._output_files import check_replaceable

        check_replaceable([command.html])


def check(command: Inspect) -> None:
    """Raise an error for options that --image excludes, or a missing image, before a model is loaded."""
    from transformer.cli._models import check_images

    if given := [name for name in _OF_TEXTS if getattr(command, name) not in (None, False, ())]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for texts and can't be combined with --image. Remove one of them."
        )
    if command.max_new_tokens is not None and command.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {command.max_new_tokens}.")
    check_images([command.image])
    check_page(command)


def draw(command: Inspect, arguments: Sequence[str]) -> None:
    """Draw the attention to the patches of an image on the image, and print the paths of the files."""
    run = command.load()
    if run.kind.image_prompts:
        _draw_words(command, arguments, run)
        return
    _check_reader(command, run)
    from transformer.viz._attention_weights import attention_maps

    image, config, sown = _capture(run, command.image)
    pooling = sown.get("attention_pooling", {}).get("cross_attention", {}).get("weights")
    maps, pooling = attention_maps(sown, config), None if pooling is None else pooling[0][0]
    paths = []
    if command.html is None or command.output is not None:
        from transformer.viz._image_maps import save_image_attention

        directory = command.directory / "attention" if command.output is None else command.output
        overwrite = command.overwrite or command.output is None  # this program owns the file names in a workdir
        paths = save_image_attention(
            image, maps, directory, patches=config.patches, pooling=pooling, overwrite=overwrite
        )
    if command.html is not None:
        from transformer.viz._image_page import save_image_page

        facts = {
            "Model": f"{type(run.model).__name__} in {run.directory}; layers: {config.num_layers}, heads: "
            f"{config.num_heads}, patches: {config.patches.count} of {config.patches.patch_size} x "
            f"{config.patches.patch_size} pixels",
            "Image": command.image,
            "Command": f"{program('inspect')} {shlex.join(arguments)}",
        }
        title = f"Attention of {run.directory} to {Path(command.image).name}"
        save_image_page(command.html, image, maps, patches=config.patches, title=title, pooling=pooling, facts=facts)
    if command.json:
        page = {} if command.html is None else {"page": str(command.html)}
        command.print_json(run, image=command.image, paths=[str(path) for path in paths], **page)
        return
    for path in [*paths, *([] if command.html is None else [command.html])]:
        print(path)


def _draw_words(command: Inspect, arguments: Sequence[str], run: LoadedModel) -> None:
    """Draw the attention of the words that a vision-language model generates about the image."""
    if command.prompt is None:
        raise ConfigError(
            f"{command.directory} contains a vision-language model, which reads an image together with a text. Pass "
            f"--prompt TEXT, too."
        )
    from transformer.cli._texts import read_prompts, shown
    from transformer.inference._image_attention import image_attention

    (prompt,) = read_prompts([command.prompt], lines=False)
    found = image_attention(run, command.image, prompt, max_new_tokens=command.max_new_tokens or NEW_TOKENS)
    given = {"words": found.words, "patches": found.patches}
    paths = []
    if command.html is None or command.output is not None:
        from transformer.viz._word_images import save_word_images

        directory = command.directory / "attention" if command.output is None else command.output
        overwrite = command.overwrite or command.output is None  # this program owns the file names in a workdir
        paths = save_word_images(found.pixels, found.weights, found.rollout, directory, overwrite=overwrite, **given)
    if command.html is not None:
        from transformer.viz._word_images import save_word_page

        config, size = run.model.config, found.patches.patch_size
        facts = {
            "Model": f"{type(run.model).__name__} in {run.directory}; layers: {config.num_layers}, heads: "
            f"{config.num_heads}, image tokens: {found.patches.count}, each for {size} x {size} pixels",
            "Image": command.image,
            "Prompt": prompt,
            "Generated": found.text,
            "Command": f"{program('inspect')} {shlex.join(arguments)}",
        }
        title = f"Attention of {run.directory} to {Path(command.image).name}"
        save_word_page(command.html, found.pixels, found.weights, found.rollout, title=title, facts=facts, **given)
    if command.json:
        page = {} if command.html is None else {"page": str(command.html)}
        texts = {"image": command.image, "prompt": prompt, "output": found.text, "words": found.words}
        command.print_json(run, paths=[str(path) for path in paths], **texts, **page)
        return
    print(shown(found.text))
    for path in [*paths, *([] if command.html is None else [command.html])]:
        print(path)


def _check_reader(command: Inspect, run: LoadedModel) -> None:
    """Raise ConfigError for a model that does not encode images alone, or for options of texts."""
    if given := [name for name in ("prompt", "max_new_tokens") if getattr(command, name) is not None]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} together with --image is for vision-language models; {command.directory} "
            f"contains a model of type {type(run.model).__name__}. Remove one of them."
        )
    if "images" not in run.kind.inspects:
        raise ConfigError(
            f"`inspect --image` needs an encoder of images, such as ViT, DINOv2, CLIP or SigLIP; {command.directory} "
            f"contains a model of type {type(run.model).__name__}. Pass --prompt for a model that reads text."
        )


def _capture(run: LoadedModel, image: str) -> tuple[Any, Any, Any]:
    """Return the pixels (height, width, channels) from 0 to 1 that the model reads, the config of its image encoder,
    and the weights that this encoder sows.
    """
    import jax
    import numpy as np

    from transformer.inference._image_inputs import with_size_of
    from transformer.media._image_settings import image_processor

    processor = image_processor(run.directory)
    run = with_size_of(run, processor)
    pixels = processor([image])
    # The reference kernel is the only one that stores its attention weights.
    execution = dataclasses.replace(run.model.execution, attention="reference", sow_weights=True)
    model, dual = run.model.clone(execution=execution), run.kind.compares

    @jax.jit
    def sown(params, pixels):
        method = "embed_images" if dual else None
        return model.apply({"params": params}, pixels, method=method, mutable=["intermediates"])[1]["intermediates"]

    found = jax.device_get(sown(run.params, pixels))
    shown = np.clip(pixels[0] * np.asarray(processor.std) + np.asarray(processor.mean), 0.0, 1.0)
    config = model.config.image_encoder if dual else model.config
    if config.patches.resize_positions:  # the pictures show the grid of this image
        height, width = pixels.shape[1:3]
        own = dataclasses.replace(config.patches, image_height=height, image_width=width)
        config = config.replace(input=own)
    return shown, config, found["image"] if dual else found
