"""The tasks of models of images and texts: to write the caption of an image, and to find it among others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.config._progress import counting
from transformer.data._captions import CaptioningDataset
from transformer.data._dataset import DataKind, Dataset
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.nn._masks import Mask
from transformer.nn.models._dual import DualEncoder, PairLogits
from transformer.nn.models._kinds import example_inputs
from transformer.nn.models._vision_language import VisionLanguageModel
from transformer.training._settings import TrainingConfig
from transformer.training.tasks._base import (
    Options,
    Sums,
    Task,
    TaskRecipe,
    TokenTask,
    check_whole_sequences,
    has_router,
    target_shapes,
)
from transformer.training.tasks._evaluation import Evaluation
from transformer.training.tasks._log_probabilities import answer_sums
from transformer.training.tasks._losses import Batch, Scalar, matched_by_sigmoid, matched_by_softmax, matches
from transformer.training.tasks._results import Results
from transformer.training.tasks._translation import Translation, corrected, scores, selection

PICTURES = "pictures"
"""folder of a workdir with the images of the captions that the summary shows"""


class Captioning(TokenTask):
    """Write the caption of an image.

    A batch has images `values` (B, height, width, channels), and tokens, targets and weights (B, T): the image tokens,
    a prompt of `prefix_lengths` (B,) tokens together with the image, the caption and padding after `lengths` (B,)
    tokens. Only the caption and its end token have a weight.
    """

    name = "captioning"
    model = VisionLanguageModel
    lengths = "data.max_length"
    targets = "caption tokens"
    part = "image_tokens.patches"
    writes = True
    shown = "captions of unseen images"
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

    def check_recipe(self, recipe: TaskRecipe) -> None:
        super().check_recipe(recipe)
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
        check_whole_sequences(self, recipe)

    def decided_by_data(self, recipe: TaskRecipe, dataset: Dataset) -> TaskRecipe:
        images, found = recipe.model.image_tokens, dataset.image_token_id
        if images.token_id not in (None, found):
            raise ConfigError(
                f"model.input.token_id is {images.token_id}, but the image token of the tokenizer has the id {found}. "
                f"Remove it: training sets it."
            )
        return with_image_token(recipe, found)

    def kept_from(self, recipe: TaskRecipe, old: TaskRecipe) -> TaskRecipe:
        images, kept = recipe.model.image_tokens, old.model.image_tokens
        given = images is None or kept is None or images.token_id is not None
        return recipe if given else with_image_token(recipe, kept.token_id)

    def sums(self, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options) -> Sums:
        return answer_sums(model, params, self.inputs(model.config, batch), batch)

    def samples(self, run: Evaluation) -> str:
        found = _captioned(run, "validation", run.options.samples)
        return "\n".join(corrected(item) for _, item in found or [])

    def report(self, run: Evaluation, folder: Path) -> Results | None:
        """Write captions of unseen images, count exact ones, and name the files of the shown images: the data's, or new
        ones.
        """
        done = _captioned(run, run.unseen, run.options.exact_match_examples)
        if not done:
            return None
        shown = selection(done, run.options.translations)
        files = [str(run.dataset.picture_file(run.unseen, place, folder / PICTURES)) for place, _ in shown]
        return Results(
            exact_match=scores([item for _, item in done]),
            group_name=run.dataset.config.group_name,
            split=run.unseen,
            translations=tuple(
                (file, item.example.target, item.output) for file, (_, item) in zip(files, shown, strict=True)
            ),
            prompt=files[0] if files else "",
        )


def with_image_token(recipe: TaskRecipe, token_id: int) -> TaskRecipe:
    """Return the recipe with the id of its image token."""
    images = dataclasses.replace(recipe.model.image_tokens, token_id=token_id)
    return dataclasses.replace(recipe, model=recipe.model.replace(input=images))


def write_captions(
    model: nn.Module,
    params: PyTree,
    dataset: CaptioningDataset,
    split: str,
    places: Sequence[int],
    *,
    batch_size: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[str] | None:
    """Write captions of the images in these rows of a split by greedy decoding; None if `should_stop` returned True."""
    outputs: list[str] = []
    size, add = min(batch_size, len(places)), counting("captions", len(places))
    for start in range(0, len(places), max(size, 1)):
        if should_stop():
            return None
        part = list(places[start : start + size])
        filled = part + part[-1:] * (size - len(part))  # a fixed batch size, so that one program is compiled
        rows = generate(
            model,
            params,
            [dataset.prefix] * size,
            images=[[pixels] for pixels in dataset.values(split, filled)],
            max_new_tokens=dataset.max_new_tokens,
            sampling=Sampling(temperature=0.0),
            eos_id=dataset.tokenizer.eos_id,
        )
        outputs += [dataset.tokenizer.decode(row) for row in rows[: len(part)]]
        add(len(part))
    return outputs


def _captioned(run: Evaluation, split: str, limit: int) -> list[tuple[int, Translation]] | None:
    """Return the index and the caption of up to `limit` images of a split; None if `should_stop` ended it."""
    dataset = run.dataset
    places, size = dataset.places(split, limit), dataset.config.eval_batch_size
    outputs = write_captions(
        run.model, run.params, dataset, split, places, batch_size=size, should_stop=run.should_stop
    )
    if outputs is None:
        return None
    pairs = zip(dataset.examples(split, limit), outputs, strict=True)
    return list(zip(places, (Translation(*pair) for pair in pairs), strict=True))


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
