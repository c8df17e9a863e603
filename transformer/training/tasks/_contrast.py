"""The task of models of texts and images that are trained together."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.data._dataset import DataKind
from transformer.nn._masks import Mask
from transformer.nn.models._dual import DualEncoder, PairLogits
from transformer.nn.models._kinds import example_inputs
from transformer.training._settings import TrainingConfig
from transformer.training.tasks._base import Sums, Task, TaskRecipe, check_whole_sequences
from transformer.training.tasks._losses import Batch, Scalar, matched_by_sigmoid, matched_by_softmax, matches

LARGEST_FACTOR = 100.0
"""largest factor on the logits of CLIP (Radford et al. 2021, section 2.5): a larger one makes training unstable"""


class Contrastive(Task):
    """Find the caption of an image among those of the whole batch, and the image of a caption.

    A batch has images `values` (B, height, width, channels), captions `tokens` (B, T) with `lengths` (B,), and weights
    (B,). The pairs of all devices are compared with each other.
    """

    name = "contrastive"
    model = DualEncoder
    lengths = "data.max_length"
    targets = "pairs"
    unit = "loss per pair"
    part = "images.patches"

    def inputs(self, config: TransformerConfig, batch: Batch) -> dict[str, Any]:
        # Without a causal mask the padding is part of the text, as in SigLIP; inference computes the same.
        mask = Mask.lengths(batch["lengths"]) if config.attention.causal else None
        return {"tokens": batch["tokens"], "images": batch["values"], "mask": mask}

    def shapes(self, config: TransformerConfig, data: DataKind, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        _, image = example_inputs(self.model(config))
        return {
            "values": jax.ShapeDtypeStruct((rows, *image.shape[1:]), jnp.float32),
            "tokens": jax.ShapeDtypeStruct((rows, data.max_length), jnp.int32),
            "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }

    def layers(self, config: TransformerConfig) -> int:
        return config.num_layers + config.image_encoder.num_layers

    def tokens_through(self, config: TransformerConfig, path: str, tokens: int) -> int:
        # The projections multiply a single vector per row, and so does all of the attention pooling but keys and
        # values: negligible.
        once = "_projection/" in path or (
            "attention_pooling/" in path and not path.endswith(("key/kernel", "value/kernel"))
        )
        return 0 if once else tokens

    def check(self, training: TrainingConfig) -> None:
        if training.label_smoothing or training.z_loss:
            raise ConfigError(
                f"training.label_smoothing and training.z_loss belong to the loss of tokens and classes, which "
                f"the task {self.name} does not have. Leave them at 0."
            )
        if training.accumulation != 1:
            raise ConfigError(
                f"training.accumulation ({training.accumulation}) can't be used with the task {self.name}: it compares "
                f"all pairs of a step, and a micro-batch has only some. Leave it at 1; to save memory, use "
                f"--execution.remat full or more devices."
            )
        super().check(training)

    def check_recipe(self, recipe: TaskRecipe) -> None:
        super().check_recipe(recipe)
        model, data = recipe.model, recipe.data
        if model.images is None:
            raise ConfigError(
                f"data of kind {type(data).kind} has images and captions, but model.input describes no images. Set it "
                f"to Images(...)."
            )
        if not model.attention.causal and data.max_length != model.max_length:
            raise ConfigError(
                f"data.max_length ({data.max_length}) must be model.position.max_length ({model.max_length}): a "
                f"text encoder without a causal mask also reads the padding. Change one of them, or set "
                f"model.attention.causal."
            )
        if recipe.parallel.kind == "pmap":
            raise ConfigError(
                f"parallel.kind pmap can't be used with the task {self.name}: a replica does not see the pairs of the "
                f"others. Use --parallel.kind mesh; with all axes except data at 1 it splits the rows too."
            )
        check_whole_sequences(self, recipe)

    def limited(self, config: TransformerConfig, params: PyTree) -> PyTree:
        if config.images.similarity != "softmax":
            return params

        def one(path, leaf):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            return jnp.minimum(leaf, math.log(LARGEST_FACTOR)) if name == "logit_scale" else leaf

        return jax.tree_util.tree_map_with_path(one, params)

    def loss(self, outputs: PairLogits, batch: Batch, training: TrainingConfig | None) -> tuple[Scalar, Scalar]:
        loss = matched_by_sigmoid if outputs.similarity == "sigmoid" else matched_by_softmax
        return loss(outputs.values, batch["weights"])

    def measures(self, outputs: PairLogits, batch: Batch) -> Sums:
        to_text, to_image = matches(outputs.values, batch["weights"])
        return {"correct": (to_text + to_image) / 2, "image_to_text": to_text, "text_to_image": to_image}
