"""Operations of a training step, counted from the model and the shapes of a batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax

from transformer.data.kinds import DataConfig
from transformer.nn._parameter_axes import axes_of
from transformer.training._recipe import Recipe
from transformer.training._state import initial_params
from transformer.training._tasks import TASKS, Shapes


def batch_field(data: DataConfig) -> str:
    """The field of the data that says how large a training batch is."""
    return "batch_size" if getattr(data, "batch_tokens", None) is None else "batch_tokens"


def batch_rows(data: DataConfig) -> int:
    """Rows of a training batch; of batches by tokens those of the widest: the others hold as many tokens, shorter."""
    if batch_field(data) == "batch_size":
        return data.batch_size
    width = max(data.max_source_length, data.max_target_length)
    return data.batch_tokens // width // data.row_multiple * data.row_multiple


def batch_shapes(recipe: Recipe) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch of a recipe whose lengths are known, as shapes."""
    return TASKS[recipe.task].shapes(recipe.model, recipe.data, batch_rows(recipe.data))


def sequences(recipe: Recipe, batch: Shapes) -> tuple[int, int]:
    """Rows of a batch (arrays or shapes by name) as a stack reads them, a target's in pairs, and their length: an image
    is one row, a time series one for each channel.
    """
    return TASKS[recipe.task].sequences(recipe.model, batch)


def step_tokens(recipe: Recipe) -> int:
    """Tokens that the stacks read in a training step: of sources and targets, or patches of images and time series."""
    shapes = batch_shapes(recipe)
    rows, length = sequences(recipe, shapes)
    return rows * length + (shapes["source"].size if "source" in shapes else 0)


def counted(recipe: Recipe) -> tuple[int, str]:
    """By what speed is told: how many tokens a training step reads, or targets where it reads none; and their name."""
    task = TASKS[recipe.task]
    return (step_tokens(recipe), "tokens") if task.tokens else (batch_shapes(recipe)["targets"].size, task.targets)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a training step over all devices, by what does them."""

    matrices: int
    """products with parameters"""
    attention: int
    """scores and weighted sums"""

    @property
    def total(self) -> int:
        """Both."""
        return self.matrices + self.attention


def step_flops(recipe: Recipe, batch: Shapes | None = None, params: Any = None) -> Flops:
    """Operations of a training step, counted from model and shapes (Chowdhery et al. 2022, arXiv 2204.02311, B).

    Forward: 2 x parameters x tokens for each matrix (of routed experts, those chosen), and 2 T S N (H + Hv) a row for
    each attention, whole: neither causality nor a window nor packing is taken off, though a kernel may save by them.
    Backward is twice that: in all, with one kind of head and no encoder, 6 x parameters + 12 x L x N x H x T a token.
    Padding counts, it is computed. What remat computes again, norms, softmax and optimizer are not counted. LoRA counts
    as whole training: the gradients of the merged matrices are computed.

    `batch` are arrays or shapes (B, ...) by name, those of the recipe's widest batch if not given; `params` is the tree
    of the model's parameters, or of their shapes.
    """
    model, shapes = recipe.model, batch_shapes(recipe) if batch is None else batch
    rows, length = sequences(recipe, shapes)
    source = shapes["source"].shape[1] if "source" in shapes else 0
    matrices = matrix_flops(recipe, rows * length, rows * (source or length), params)

    def scores(queries, keys):
        return 2 * rows * queries * keys * model.num_heads * (model.size_of_head + model.size_of_value)

    def self_attentions(layers):
        return sum(layer.kind.self_attention for layer in model.layers(layers))

    if source:
        attention = self_attentions(model.encoder_layers) * scores(source, source)
        attention += self_attentions(model.decoder_layers) * scores(length, length)
        attention += model.decoder_layers * scores(length, source)
    else:
        attention = self_attentions(model.num_layers) * scores(length, length)
    return Flops(3 * matrices, 3 * attention)


def matrix_flops(recipe: Recipe, tokens: int, source_tokens: int, params: Any = None) -> int:
    """Operations of a forward pass in products with parameters (a tree of them, or of their shapes; else found out), of
    `tokens` that are no source and those of sources.
    """
    params = jax.eval_shape(lambda: initial_params(recipe)) if params is None else params
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = axes_of(name, leaf.ndim)
        if axes is None or not axes.inputs or (axes.is_table and name != "embedding/embedding"):
            continue
        reads_source = name.startswith("encoder/") or re.search(r"cross_attention/(key|value)/", name)
        size = leaf.size
        count = TASKS[recipe.task].tokens_through(recipe.model, name, source_tokens if reads_source else tokens)
        if "expert" in axes.names:
            model = recipe.model
            layers = (*model.layers(model.encoder_layers), *model.layers(model.decoder_layers))
            moe = next(layer.kind.moe for layer in layers if f"/{layer.path}/" in name)
            size = size * moe.top_k // moe.num_experts
        total += 2 * size * count
    return total
