"""Operations of a training step, counted from the model; what the data would decide is assumed aloud."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.config import ConfigError, LayerKind
from transformer.data.configs import NumberWords
from transformer.training.recipe import Recipe
from transformer.training.state import abstract_state, example_inputs
from transformer.training.tasks import TASKS

ASSUMED_LENGTH = 64
"""tokens of a source or target where the recipe leaves that to the data"""
ASSUMED_VOCABULARY = {"char": 128, "byte": 259, "bpe": 8192}
"""tokens of a vocabulary by the kind of tokenizer, where the recipe leaves that to the data"""


def without_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with what the data would decide filled in, and a sentence for each of these.

    Raises:
        ConfigError: a vocabulary that nothing but the data can tell, batches too small for their rows, or low-rank
            updates and packed pairs, which no plan knows yet.
    """
    assumed, data = [], recipe.data
    if recipe.lora is not None:
        raise ConfigError("a plan knows no low-rank updates (lora) yet. Leave them out: whole training takes more.")
    task = TASKS[recipe.task]
    if task.tokens and recipe.model.vocab_size is None:
        kind = data.tokenizer.kind
        size = (
            data.tokenizer.vocab_size or ASSUMED_VOCABULARY.get(kind) or (128 if isinstance(data, NumberWords) else 0)
        )
        if not size:
            raise ConfigError(
                f"the {kind} vocabulary follows from the data, which is not read. Give --model.vocab-size."
            )
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(vocab_size=size))
        assumed.append(f"a vocabulary of {size:,} (--model.vocab-size)")
    if task.labels and recipe.model.num_classes is None:
        classes = len(data.labels) or 2
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(num_classes=classes))
        assumed += [] if data.labels else ["2 classes (--model.num-classes)"]
    if recipe.task == "seq2seq":
        free = [field for field in ("max_source_length", "max_target_length") if getattr(data, field) is None]
        length = min(ASSUMED_LENGTH, recipe.model.max_length or ASSUMED_LENGTH)
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(data, **dict.fromkeys(free, length)))
        assumed += [f"{f[4:10]}s of {length} tokens (--data.{f.replace('_', '-')})" for f in free]
        if data.batch_tokens is not None:
            recipe, told = _widest_bucket(recipe)
            assumed.append(told)
    return recipe, assumed


def _widest_bucket(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with batches of as many pairs as the widest bucket has: the others hold as many tokens, shorter."""
    data = recipe.data
    if data.packed_length is not None:
        raise ConfigError("a plan knows no packed pairs yet. Leave --data.packed-length out: buckets are planned.")
    width = max(data.max_source_length, data.max_target_length)
    rows = data.batch_tokens // width // data.row_multiple * data.row_multiple
    if not rows:
        raise ConfigError(
            f"batch_tokens ({data.batch_tokens:,}) has no room for row_multiple ({data.row_multiple}) pairs of {width} "
            f"tokens. Give at least {width * data.row_multiple:,}, or a smaller --data.max-source-length and "
            "--data.max-target-length."
        )
    told = f"every batch as the widest: {rows} pairs of {width} tokens (--data.batch-tokens)"
    return dataclasses.replace(recipe, data=dataclasses.replace(data, batch_tokens=None, batch_size=rows)), told


def batch_shapes(recipe: Recipe) -> dict[str, jax.ShapeDtypeStruct]:
    """A training batch of a recipe whose lengths are known, as shapes."""
    rows, data = recipe.data.batch_size, recipe.data
    if not TASKS[recipe.task].tokens:
        (example,), series = example_inputs(recipe), recipe.model.series
        targets = ((rows,), jnp.int32) if series is None else ((rows, series.horizon, series.channels), jnp.float32)
        shapes = {"values": ((rows, *example.shape[1:]), jnp.float32), "targets": targets}
        shapes["weights"] = ((rows,), jnp.float32)
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    if recipe.task in ("classifier", "masked_lm"):
        table, column = (rows, data.max_length), (rows,)
        targets = column if recipe.task == "classifier" else table
        shapes = {"tokens": (table, jnp.int32), "lengths": (column, jnp.int32)}
        shapes |= {"targets": (targets, jnp.int32), "weights": (targets, jnp.float32)}
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    pairs = recipe.task == "seq2seq"
    length = data.max_target_length if pairs else data.sequence_length
    shapes = dict.fromkeys(("tokens", "targets"), ((rows, length), jnp.int32))
    shapes["weights"] = ((rows, length), jnp.float32)
    if pairs:
        shapes |= {"source": ((rows, data.max_source_length), jnp.int32), "source_lengths": ((rows,), jnp.int32)}
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def sequences(recipe: Recipe) -> tuple[int, int]:
    """Rows that a stack reads in a training step, a target's in pairs, and their length: an image is one, a time series
    one for each channel.
    """
    model = recipe.model
    if recipe.task == "forecaster":
        return recipe.data.batch_size * model.series.channels, model.series.positions
    if recipe.task == "image_classifier":
        return recipe.data.batch_size, 1 + model.patches.count
    return batch_shapes(recipe)["tokens"].shape


def step_tokens(recipe: Recipe) -> int:
    """Tokens that the stacks read in a training step: of sources and targets, or patches of images and time series."""
    rows, length = sequences(recipe)
    shapes = batch_shapes(recipe)
    return rows * length + (shapes["source"].size if "source" in shapes else 0)


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


def step_flops(recipe: Recipe) -> Flops:
    """Operations of a training step, counted from model and shapes (Chowdhery et al. 2022, arXiv 2204.02311, B).

    Forward: 2 x parameters x tokens for each matrix (of routed experts, those chosen), and 2 T S N (H + Hv) a row for
    each attention, whole: neither causality nor a window is taken off, though a kernel may save by them. Backward is
    twice that. What remat computes again, norms, softmax and optimizer are not counted.
    """
    model, shapes = recipe.model, batch_shapes(recipe)
    rows, length = sequences(recipe)
    source = shapes["source"].shape[1] if "source" in shapes else 0
    matrices = matrix_flops(recipe, rows * length, rows * (source or length))

    def scores(queries, keys):
        return 2 * rows * queries * keys * model.num_heads * (model.size_of_head + model.size_of_value)

    def self_attentions(layers):
        kinds = [*model.prefix, *model.suffix]
        kinds += model.period * ((layers - len(kinds)) // len(model.period))
        return sum(kind.self_attention for kind in kinds)

    if source:
        attention = self_attentions(model.encoder_layers) * scores(source, source)
        attention += self_attentions(model.decoder_layers) * scores(length, length)
        attention += model.decoder_layers * scores(length, source)
    else:
        attention = self_attentions(model.num_layers) * scores(length, length)
    return Flops(3 * matrices, 3 * attention)


def matrix_flops(recipe: Recipe, tokens: int, source_tokens: int) -> int:
    """Operations of a forward pass in products with parameters, of `tokens` that are no source and those of sources."""
    total = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_state(recipe).params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        classifies = TASKS[recipe.task].labels
        tied = name == "embedding/embedding" and recipe.model.tie_embeddings and not classifies
        of_rows = classifies and name.startswith(("output/", "head_transform/"))  # one vector each: next to nothing
        if of_rows or not (tied or name.endswith("kernel")):
            continue
        reads_source = name.startswith("encoder/") or re.search(r"cross_attention/(key|value)/", name)
        size, count = leaf.size, source_tokens if reads_source else tokens
        if recipe.task == "forecaster":  # read once a sequence, and a channel's own map by one sequence in so many
            parts = {"output": recipe.model.series.positions, "channel_embedding": recipe.model.series.channels}
            count //= parts.get(name.partition("/")[0], 1)
        if "/experts/" in name:
            moe = _kind_at(recipe, name).moe
            size = size * moe.top_k // moe.num_experts
        total += 2 * size * count
    return total


def _kind_at(recipe: Recipe, path: str) -> LayerKind:
    where, index = re.search(r"(prefix|slot|suffix)_(\d+)/", path).groups()
    return getattr(recipe.model, {"slot": "period"}.get(where, where))[int(index)]
