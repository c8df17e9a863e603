"""What training carries from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.training import lora
from transformer.training._optimizers import make_optimizer
from transformer.training._recipe import Recipe, build_model
from transformer.training._tasks import TASKS


@flax.struct.dataclass
class TrainState:
    """A pytree: all that the compiled step reads and writes. (Leaves may be arrays, shapes or, under pmap, stacks.)

    The key of a step's randomness is `fold_in(key(seed), step)`, so no key is carried. `params` and `opt_state` are
    trees: the parameters that are trained and what optax keeps of them. `model_params` makes the model's of them.
    """

    step: Any
    """(), batches seen, int32"""
    params: Any
    opt_state: Any
    ema: Any
    """exponential average of params, or None"""
    skipped: Any
    """(), batches that changed nothing, because they were not finite or a spike, int32; -1: with nan_policy "stop" one
    was not finite, and nothing changes any more"""
    base: Any = None
    """with LoRA the parameters that stay as they are; else None"""

    @property
    def averaged(self) -> Any:
        """The tree of what is trained, to evaluate and to use: the average where there is one."""
        return self.params if self.ema is None else self.ema


def make_state(recipe: Recipe) -> TrainState:
    """The state before the first step. Pure: call it inside `jax.jit`."""
    params, base = _split(recipe, initial_params(recipe))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(recipe).init(params),
        ema=None if recipe.training.ema_decay is None else jax.tree.map(jnp.copy, params),
        skipped=jnp.zeros((), jnp.int32),
        base=base,
    )


def initial_params(recipe: Recipe) -> Any:
    """The model's parameters before the first step, a tree. Pure, as `make_state`."""
    # Parameters don't depend on the kernel, and one made for long sequences would refuse the example.
    model = build_model(dataclasses.replace(recipe, execution=dataclasses.replace(recipe.execution, attention="auto")))
    return model.init(_initial_key(recipe), *example_inputs(recipe))["params"]


def model_params(recipe: Recipe, trained: Any, base: Any) -> Any:
    """The model's parameters, a tree, of what is trained (`params` or `averaged` of a state) and its `base`.

    With LoRA (Hu et al. 2021, arXiv 2106.09685) the updates are merged into the base; without, all is trained.
    """
    if recipe.lora is None:
        return trained
    whole = unflatten_dict(flatten_dict(base) | flatten_dict(trained["new"]))
    return lora.merge(whole, trained["updates"], recipe.lora)


def make_usable(recipe: Recipe) -> Callable[[TrainState], Any]:
    """A function from a state to the model's parameters, a tree, to evaluate and to use: averaged where there is one.

    With LoRA it is compiled, so that the merged parameters lie where the base does.
    """
    if recipe.lora is None:
        return lambda state: state.averaged
    merged = jax.jit(lambda trained, base: model_params(recipe, trained, base))
    return lambda state: merged(state.averaged, state.base)


def _split(recipe: Recipe, params: Any) -> tuple[Any, Any]:
    """What is trained, and the base that stays: with LoRA updates of the base, and whole what is new."""
    if recipe.lora is None:
        return params, None
    fresh = set(() if recipe.origin is None else recipe.origin.new)
    flat = flatten_dict(params)
    new = {path: leaf for path, leaf in flat.items() if "/".join(path) in fresh}
    base = unflatten_dict({path: leaf for path, leaf in flat.items() if path not in new})
    updates = lora.init(jax.random.fold_in(_initial_key(recipe), 1), base, recipe.lora)
    return {"new": unflatten_dict(new), "updates": updates}, base


def _initial_key(recipe: Recipe) -> jax.Array:
    return jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31 - 1)  # no step has this number


def abstract_state(recipe: Recipe) -> TrainState:
    """Shapes and dtypes of the state, for restoring a checkpoint into; nothing is computed."""
    return jax.eval_shape(lambda: make_state(recipe))


def example_inputs(recipe: Recipe) -> tuple[jax.Array, ...]:
    """Smallest arguments that initialize the model: parameters don't depend on batch or length."""
    return TASKS[recipe.task].example(recipe.model)


def parameter_paths(params: Any) -> list[str]:
    """Path of each leaf, as `encoder/layers/slot_0/attention/query/kernel`, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
