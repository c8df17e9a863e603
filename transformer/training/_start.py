"""Initialize a run from a pretrained model: its config, parameters and tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from transformer.config._checks import ConfigError, shortened
from transformer.config._local_paths import local_path
from transformer.config._model import TransformerConfig
from transformer.data.tokenizers._base import Tokenizer
from transformer.media._images import ImageProcessor
from transformer.training import lora
from transformer.training._recipe import FILE, Recipe, load_recipe
from transformer.training._serial import flatten
from transformer.training._state import TrainState, initial_params

RECIPE_FIELDS = ("output.num_classes", "dropout_rate", "attention.dropout_rate", "dtype", "parameters.dtype")
"""fields of the model config that the recipe sets, even if a run is initialized from a pretrained model"""


@dataclass(frozen=True)
class Start:
    """A pretrained model to initialize a run from."""

    source: str
    """directory or name passed to --init"""
    model: str
    """kind of model in the source: a family and an architecture, or the model of a run"""
    config: TransformerConfig
    params: PyTree
    """tree of parameters, without the outer "params" """
    tokenizer: Tokenizer | None
    """tokenizer of the model; None: the recipe's tokenizer is made from the data"""
    processor: ImageProcessor | None = None
    """preprocessing of images of the model; None: it has none, or reads no images"""
    left: tuple[str, ...] = ()
    """paths of parameters in the source that are not used: those of a different head"""

    def __post_init__(self):
        object.__setattr__(self, "fingerprint", fingerprint(self.params))

    fingerprint: str = dataclasses.field(init=False)
    """SHA-256 of the parameters"""


def check_options(before: Recipe, after: Recipe, source: str) -> None:
    """Raise ConfigError if the command line changes a field of the model that `source` determines."""
    old, new = flatten(before.model), flatten(after.model)
    changed = [field for field in {**old, **new} if old.get(field) != new.get(field) and field not in RECIPE_FIELDS]
    if changed:
        raise ConfigError(
            f"--model.{changed[0].replace('_', '-')} can't be changed, because the model is that of {source}. Remove "
            f"the option; only these fields of the model may be set: {', '.join(RECIPE_FIELDS)}."
        )


def origin_of(workdir: str | os.PathLike) -> str | None:
    """Return the model that the run in a workdir was initialized from; None for no run, or random initialization."""
    if not (local_path(workdir, "--workdir") / FILE).exists():
        return None
    origin = load_recipe(workdir).origin
    return None if origin is None else origin.source


def initialize_from(start: Start, state: TrainState) -> TrainState:
    """Return the state with the pretrained parameters, in its dtypes and shardings; a base is quantized on the host."""
    if state.base is not None:  # LoRA's frozen parameters, or the reference model
        state = state.replace(base=_filled(state.base, start.params))
    if "updates" in state.params:
        updates = state.params["updates"]
        if not any(path[-1] == "magnitude" for path in flatten_dict(updates)):
            return state
        places = jax.tree.map(lambda leaf: leaf.sharding, updates)
        updates = jax.jit(lora.magnitudes, out_shardings=places)(updates, state.base)
        params = state.params | {"updates": updates}
    else:
        params = _filled(state.params, start.params)
    ema = None if state.ema is None else _copied(params, like=state.ema)
    return state.replace(params=params, ema=ema, opt_state=_with_iterate(state.opt_state, params))


def with_teacher(teacher: Start, state: TrainState) -> TrainState:
    """Return the state with the parameters of the teacher, in the dtypes and shardings of the given ones."""
    return state.replace(teacher=_filled(state.teacher, teacher.params))


def _with_iterate(opt_state: PyTree, params: PyTree) -> PyTree:
    """Return the optimizer state in which the iterate z of schedule-free AdamW starts at these parameters."""

    def is_free(node):
        return isinstance(node, optax.contrib.ScheduleFreeState)

    def one(node):
        return node._replace(z=_copied(params)) if is_free(node) else node

    return jax.tree.map(one, opt_state, is_leaf=is_free)


def describe_start(recipe: Recipe, start: Start) -> str:
    """Return a line with the source, the numbers of loaded and of new parameters, and the unused ones."""
    sizes = {path: leaf.size for path, leaf in flatten_dict(start.params, sep="/").items()}
    shapes = flatten_dict(jax.eval_shape(lambda: initial_params(recipe)), sep="/")
    new = recipe.origin.new
    unused = sorted({*start.left, *(path for path in sizes if path not in shapes)})
    taken = sum(size for path, size in sizes.items() if path in shapes)
    line = f"initialized from {start.source} ({start.model}): {_count(taken)} parameters loaded, "
    line += f"{_count(sum(shapes[path].size for path in new))} new" + (f": {shortened(new, 6)}" if new else "")
    return line + (f"; not used: {shortened(unused, 6)}" if unused else "")


def fingerprint(params: PyTree) -> str:
    """Return the SHA-256 of the paths, dtypes, shapes and values of a tree of parameters."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_dict(params, sep="/").items()):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _filled(tree: PyTree, given: PyTree) -> PyTree:
    """Return the tree with the leaves that `given` has too replaced by those."""
    leaves, numbers = flatten_dict(tree, sep="/"), flatten_dict(given, sep="/")
    taken = {}
    for path, leaf in leaves.items():
        if path in numbers:  # a quantized kernel is a tree of several arrays
            array = lora.quantized_like(leaf, path, np.asarray(numbers[path]))
            taken[path] = jax.tree.map(_placed_like, array, leaf)
    # Copied, because the training step donates its state, and memory that NumPy owns must not be donated.
    return unflatten_dict(leaves | _copied(taken), sep="/")


def _copied(tree: PyTree, like: PyTree = None) -> PyTree:
    """Return a copy of each array, with its sharding, and with the dtypes of the tree `like` (None: its own)."""
    places = jax.tree.map(lambda leaf: leaf.sharding, tree)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree if like is None else like)

    def copies(arrays):
        return jax.tree.map(lambda array, dtype: jnp.array(array, dtype, copy=True), arrays, dtypes)

    return jax.jit(copies, out_shardings=places)(tree)


def _placed_like(array: np.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """Return an array with the dtype and sharding of `like`; each process supplies its own shards."""
    host = np.asarray(array).astype(like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1_000_000 else f"{number:,}"
