"""Attention of the words that a vision-language model generates to the patches of an image."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from transformer.config._checks import ConfigError
from transformer.config._parts import Patches
from transformer.generate._generation import generate
from transformer.generate._prompts import decoding_model
from transformer.generate._sampling import Sampling
from transformer.inference._generate import continuation
from transformer.inference._image_inputs import visible, with_size_of
from transformer.inference._image_prompts import encode_with_images, image_prompts
from transformer.inference._loaded_model import LoadedModel, Params
from transformer.inference._text_attention import reference_model
from transformer.inference._word_times import word_slices
from transformer.media._image_settings import image_processor
from transformer.nn._axes import Array, Int
from transformer.nn.models._dynamic_images import ImagePatches
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.viz._attention_weights import AttentionMap, attention_rollout, layer_weights


@dataclass(frozen=True, kw_only=True)
class ImageAttention:
    """The words that a model generated about an image, and their attention to it, of `image_attention`."""

    text: str
    """the generated text"""
    words: list[str]
    """the Q words of the text"""
    weights: Float[np.ndarray, "L N Q P"]
    """weights of each layer and head for the tokens of the image, averaged over the tokens of a word"""
    rollout: Float[np.ndarray, "L Q P"]
    """attention rollout up to each layer"""
    patches: Patches
    """size of the image and of the squares that the P tokens stand for: pooled patches are one larger square"""
    pixels: Float[np.ndarray, "H W C"]
    """the image as the model reads it, with values from 0 to 1"""


@functools.partial(jax.jit, static_argnames=("model", "prefix"))
def _weights(
    model: VisionLanguageModel,
    params: Params,
    tokens: Int[Array, "1 T"],
    images: Float[Array, "1 1 H W C"] | ImagePatches,
    queries: Int[Array, " Q"],
    keys: Int[Array, " P"],
    prefix: int | None,
) -> tuple[Float[Array, "L N Q P"], Float[Array, "L T T"]]:
    """Return the weights of chosen queries and keys, and the mean over the heads of all."""
    lengths = None if prefix is None else jnp.array([prefix])
    _, seen = model.apply({"params": params}, tokens, images=images, prefix_lengths=lengths, mutable=["intermediates"])
    layers = [
        one[0].astype(jnp.float32) for one in layer_weights(seen["intermediates"], model.config, "decoder", "self")
    ]
    return jnp.stack([one[:, queries][:, :, keys] for one in layers]), jnp.stack([one.mean(0) for one in layers])


def image_attention(opened: LoadedModel, image: Any, prompt: str, *, max_new_tokens: int = 32) -> ImageAttention:
    """Generate a text about an image greedily, and return the attention of each word to the tokens of the image.

    The weights of a word are the mean over its tokens, of the queries that predict them.

    Args:
        opened: a vision-language model.
        image: a path, PIL image or array, see `media.open_image`.
        prompt: the text, with or without the marker of the image, see `encode_with_images`.
        max_new_tokens: maximum number of generated tokens.

    Raises:
        ConfigError: as `encode_with_images`, or the text is longer than the context of the model.
        ValueError: as `encode_with_images`, or the model generates no text.
    """
    prompts = image_prompts(opened)
    processor = image_processor(opened.directory)
    opened = with_size_of(opened, processor)
    ids, pixels = encode_with_images(opened, prompt, [image], prompts)
    if opened.context is not None and len(ids) + max_new_tokens > opened.context:
        raise ConfigError(
            f"the prompt and the new tokens must fit the model's context of {opened.context} tokens, got {len(ids)} "
            f"prompt tokens and {max_new_tokens} new tokens. Pass fewer new tokens, or shorten the prompt."
        )
    greedy = Sampling(temperature=0.0, suppress=opened.suppressed)
    (row,) = generate(
        opened.model,
        opened.params,
        [ids],
        images=[pixels],
        max_new_tokens=max_new_tokens,
        eos_id=opened.eos_ids,
        sampling=greedy,
    )
    new = [token for token in row if token not in opened.eos_ids]

    def decode(tokens: Sequence[int]) -> str:
        # After the prompt: some tokenizers remove the first space of a text.
        return continuation(opened.tokenizer, [*ids, *tokens], len(tokens))

    slices = word_slices(decode, new, None)
    if not slices:
        raise ValueError("the model generated no text for this image and prompt. Pass another prompt.")
    fixed, dynamic = opened.model.config.image_tokens, opened.model.config.dynamic_images
    read = np.array([*ids, *new[:-1]])
    of_image = read == (fixed or dynamic).token_id
    model = reference_model(decoding_model(opened.model))
    images = jnp.asarray(pixels[0])[None, None] if dynamic is None else ImagePatches.of([pixels], dynamic)
    queries, keys = jnp.arange(len(ids) - 1, len(read)), np.flatnonzero(of_image)  # position i - 1 predicts token i
    prefix = len(ids) if fixed is not None and fixed.attention == "prefix" else None
    tokens = jnp.asarray(read[None], jnp.int32)
    found = _weights(model, opened.params, tokens, images, queries, jnp.asarray(keys), prefix)
    weights, means = jax.device_get(found)
    none = np.zeros(means.shape[1:], bool)
    rollouts = attention_rollout([AttentionMap("decoder", i, "self", one[None], none) for i, one in enumerate(means)])
    rollout = np.stack([one.weights[0, len(ids) - 1 :][:, of_image] for one in rollouts])
    height, width, channels = pixels[0].shape
    side = dynamic.multiple if fixed is None else fixed.patches.patch_size * fixed.pool
    sizes = {"image_height": height, "image_width": width, "patch_size": side, "channels": channels}
    return ImageAttention(
        text=decode(new),
        words=[decode(new[: word.stop])[len(decode(new[: word.start])) :] for word in slices],
        weights=np.stack([weights[:, :, word].mean(2) for word in slices], 2),
        rollout=np.stack([rollout[:, word].mean(1) for word in slices], 1),
        patches=Patches(**sizes, class_token=False, drop_remainder=True),
        pixels=visible(pixels[0], processor),
    )
