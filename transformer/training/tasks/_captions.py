"""The task of models that read an image and write its caption."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.data._config import DataKind
from transformer.nn._masks import Mask
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.training.tasks._base import Task, has_router, target_shapes
from transformer.training.tasks._losses import Batch


class Captioning(Task):
    """Write the caption of an image.

    A batch has images `values` (B, height, width, channels), and tokens, targets and weights (B, T): the image tokens,
    a prompt of `prefix_lengths` (B,) tokens together with the image, the caption and padding after `lengths` (B,)
    tokens. Only the caption and its end token have a weight.
    """

    name = "captioning"
    model = VisionLanguageModel
    lengths = "data.max_length"
    each_token = True
    exact_answers = True
    targets = "caption tokens"
    part = "image_tokens.patches"
    remedy = "images of the model's size"
    writes = True
    captions = True
    try_it = ("generate", "--prompt '' --temperature 0 --image")

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        found = {"tokens": batch["tokens"], "images": batch["values"][:, None]}
        if config.image_tokens.attention == "prefix":
            found["prefix_lengths"] = batch["prefix_lengths"]
        if has_router(config):
            found["mask"] = Mask.lengths(batch["lengths"])
        return found

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        sizes, each = config.image_tokens.patches, jax.ShapeDtypeStruct((rows,), jnp.int32)
        pixels = (rows, sizes.image_height, sizes.image_width, sizes.channels)
        return target_shapes((rows, data.max_length)) | {
            "values": jax.ShapeDtypeStruct(pixels, jnp.float32),
            "lengths": each,
            "prefix_lengths": each,
        }

    def layers(self, config: TransformerConfig) -> int:
        return config.num_layers + config.image_encoder.num_layers

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        return 0 if path.startswith("image_unused/") else super().tokens_through(config, path, tokens)

    def sizes(self, batch: Batch) -> dict[str, int]:
        return dict(zip(("image_height", "image_width", "channels"), batch["values"].shape[1:], strict=True))

    def check_recipe(self, recipe: Any) -> None:
        images, data = recipe.model.image_tokens, recipe.data
        if images is None:
            raise ConfigError(
                f"data of kind {type(data).kind} has images and captions to write, but model.input describes no image "
                f"tokens. Set it to ImageTokens(...)."
            )
        if data.image_tokens != images.count:
            raise ConfigError(
                f"data.image_tokens ({data.image_tokens}) must be the number of image tokens of the model, "
                f"{images.count}. Pass --data.image-tokens {images.count}."
            )
        if recipe.parallel.context not in (1, None):
            raise ConfigError(
                f"parallel.context ({recipe.parallel.context}) can't split the sequences of the task {self.name}. "
                f"Leave it at 1; use fsdp or tensor."
            )

    def decided_by_data(self, recipe: Any, dataset: Any) -> Any:
        images, found = recipe.model.image_tokens, dataset.image_token_id
        if images.token_id not in (None, found):
            raise ConfigError(
                f"model.input.token_id is {images.token_id}, but the image token of the tokenizer has the id {found}. "
                f"Remove it: training sets it."
            )
        model = recipe.model.replace(input=dataclasses.replace(images, token_id=found))
        return dataclasses.replace(recipe, model=model)
