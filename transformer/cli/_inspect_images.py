"""`python -m transformer inspect --image`: attention over the patches of an image."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    from transformer.cli._inspect_attention import Inspect
    from transformer.inference._loading import LoadedModel

_OF_TEXTS = ("prompt", "target", "max_new_tokens", "system", "template", "switch", "compare", "html", "chat", "sizes")
"""options that need a text"""


def check(command: Inspect) -> None:
    """Raise an error for options that --image excludes, or a missing image, before a model is loaded."""
    from transformer.cli._models import check_images

    if given := [name for name in _OF_TEXTS if getattr(command, name) not in (None, False, ())]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for texts and can't be combined with --image. Remove one of them."
        )
    check_images([command.image])


def draw(command: Inspect) -> None:
    """Draw the attention to the patches of an image on the image, and print the paths of the files."""
    run = command.load()
    _check_reader(command, run)
    from transformer.viz._attention_weights import attention_maps
    from transformer.viz._image_maps import save_image_attention

    image, config, sown = _capture(run, command.image)
    pooling = sown.get("attention_pooling", {}).get("cross_attention", {}).get("weights")
    paths = save_image_attention(
        image,
        attention_maps(sown, config),
        command.directory / "attention" if command.output is None else command.output,
        patches=config.patches,
        pooling=None if pooling is None else pooling[0][0],
        overwrite=command.overwrite or command.output is None,
    )
    if command.json:
        command.print_json(run, image=command.image, paths=[str(path) for path in paths])
        return
    for path in paths:
        print(path)


def _check_reader(command: Inspect, run: LoadedModel) -> None:
    """Raise ConfigError for a model that does not encode images alone."""
    from transformer.nn.models._dual import DualEncoder
    from transformer.nn.models._vision import VisionEncoder

    if not isinstance(run.model, VisionEncoder | DualEncoder):
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

    from transformer.inference._images import with_size_of
    from transformer.media._image_settings import image_processor
    from transformer.nn.models._dual import DualEncoder

    processor = image_processor(run.directory)
    run = with_size_of(run, processor)
    pixels = processor([image])
    # The reference kernel is the only one that stores its attention weights.
    execution = dataclasses.replace(run.model.execution, attention="reference", sow_weights=True)
    model, dual = run.model.clone(execution=execution), isinstance(run.model, DualEncoder)

    @jax.jit
    def sown(params, pixels):
        method = "embed_images" if dual else None
        return model.apply({"params": params}, pixels, method=method, mutable=["intermediates"])[1]["intermediates"]

    found = jax.device_get(sown(run.params, pixels))
    shown = np.clip(pixels[0] * np.asarray(processor.std) + np.asarray(processor.mean), 0.0, 1.0)
    return shown, model.config.image_encoder if dual else model.config, found["image"] if dual else found
