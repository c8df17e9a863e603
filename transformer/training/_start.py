"""Where a run begins that doesn't begin at random: a model, its parameters and its tokenizer, as plain values."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.config._paths import get_path
from transformer.data._tokenizer import Tokenizer
from transformer.training._recipe import FILE, Origin, Recipe, load_recipe
from transformer.training._serial import flatten
from transformer.training._state import TrainState, initial_params

RECIPE_S = ("output.num_classes", "dropout_rate", "attention.dropout_rate", "dtype", "param_dtype")
"""fields of the model that a recipe says, whatever the model was that a run starts from"""


@dataclass(frozen=True)
class Start:
    """A model to start from: `config` and `params` (without the outer "params"), read from `source`."""

    source: str
    """directory or name that was given"""
    model: str
    """what was there: a family and an architecture, or a run's model"""
    config: TransformerConfig
    params: Any
    tokenizer: Tokenizer | None
    """None: the recipe's is made"""
    left: tuple[str, ...] = ()
    """paths of parameters that were there and are not taken: those of another head"""

    def __post_init__(self):
        object.__setattr__(self, "fingerprint", fingerprint(self.params))

    fingerprint: str = dataclasses.field(init=False)
    """SHA-256 of the parameters"""

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with this model in place of its own, but for the fields of `RECIPE_S`."""
        origin = Origin(source=self.source, model=self.model, fingerprint=self.fingerprint)
        return dataclasses.replace(recipe, model=with_recipe_s(self.config, recipe.model), origin=origin)


def with_recipe_s(model: TransformerConfig, given: TransformerConfig) -> TransformerConfig:
    """The model with the fields of `RECIPE_S` as the recipe gave them; classes that it leaves open stay as they are."""
    changes = {field: get_path(given, field) for field in RECIPE_S}
    if given.output.num_classes is None:
        del changes["output.num_classes"]
    return model.replace(**changes)


def check_options(before: Recipe, after: Recipe, source: str) -> None:
    """Raises ConfigError for a field of the model that the command line changed and that `source` decides."""
    old, new = flatten(before.model), flatten(after.model)
    changed = [field for field in {**old, **new} if old.get(field) != new.get(field) and field not in RECIPE_S]
    if changed:
        raise ConfigError(
            f"--model.{changed[0].replace('_', '-')} can't be given: the model is that of {source}. Leave it out; of "
            f"the model a recipe chooses {', '.join(RECIPE_S)}."
        )


def origin_of(workdir: str | os.PathLike) -> str | None:
    """What the run in a workdir started from; None where there is no run, or one that began at random."""
    if not (Path(workdir) / FILE).exists():
        return None
    origin = load_recipe(workdir).origin
    return None if origin is None else origin.source


def with_new_parameters(recipe: Recipe, start: Start) -> Recipe:
    """The recipe with `origin.new` filled in: what its model has and the one to start from has not.

    Raises:
        ConfigError: parameters of the same path and another shape, or none in common.
    """
    shapes = flatten_dict(jax.eval_shape(lambda: initial_params(recipe)), sep="/")
    given = flatten_dict(start.params, sep="/")
    unequal = [
        f"{path} is {given[path].shape} there, {leaf.shape} in the recipe's model"
        for path, leaf in shapes.items()
        if path in given and given[path].shape != leaf.shape
    ]
    if unequal:
        raise ConfigError(
            f"the parameters of {start.source} don't fit: {_listed(unequal)}. Change the recipe's model or data "
            f"(model.output.num_classes must be as there), or start from another model."
        )
    if not shapes.keys() & given.keys():
        raise ConfigError(f"{start.source} ({start.model}) has no parameter of the recipe's model. Start from another.")
    new = tuple(sorted(path for path in shapes if path not in given))
    return dataclasses.replace(recipe, origin=dataclasses.replace(recipe.origin, new=new))


def begun_from(start: Start, state: TrainState) -> TrainState:
    """A new state with the parameters that there are to start from, each in the place and type of what was there."""
    if state.base is not None:
        return state.replace(base=_filled(state.base, start.params))
    ema = None if state.ema is None else _filled(state.ema, start.params)
    return state.replace(params=_filled(state.params, start.params), ema=ema)


def told(recipe: Recipe, start: Start) -> str:
    """One line: what was taken from where, what is new, what was left."""
    sizes = {path: leaf.size for path, leaf in flatten_dict(start.params, sep="/").items()}
    shapes = flatten_dict(jax.eval_shape(lambda: initial_params(recipe)), sep="/")
    new = recipe.origin.new
    unused = sorted({*start.left, *(path for path in sizes if path not in shapes)})
    taken = sum(size for path, size in sizes.items() if path in shapes)
    line = f"from {start.source} ({start.model}): {_count(taken)} parameters taken, "
    line += f"{_count(sum(shapes[path].size for path in new))} new" + (f": {_listed(new)}" if new else "")
    return line + (f"; not taken: {_listed(unused)}" if unused else "")


def fingerprint(params: Any) -> str:
    """SHA-256 of paths, types, shapes and numbers of a tree of parameters."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_dict(params, sep="/").items()):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _filled(tree: Any, given: Any) -> Any:
    leaves, numbers = flatten_dict(tree, sep="/"), flatten_dict(given, sep="/")
    taken = {path: _laid_out(numbers[path], leaf) for path, leaf in leaves.items() if path in numbers}
    # A copy: memory that NumPy owns must not be donated.
    places = {path: leaf.sharding for path, leaf in taken.items()}
    copied = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=places)(taken)
    return unflatten_dict(leaves | copied, sep="/")


def _laid_out(array: Any, like: jax.Array) -> jax.Array:
    """The numbers in the type of `like` and on its devices, each process giving its parts."""
    host = np.asarray(array).astype(like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _count(number: int) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1_000_000 else f"{number:,}"
