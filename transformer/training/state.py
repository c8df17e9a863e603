"""What training carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer.training.optimizers import make_optimizer
from transformer.training.recipe import Recipe, build_model


@flax.struct.dataclass
class TrainState:
    """A pytree: all that the compiled step reads and writes. (Leaves may be arrays, shapes or, under pmap, stacks.)

    The key of a step's randomness is `fold_in(key(seed), step)`, so no key is carried. `params` and `opt_state` are
    trees: the model's parameters and what optax keeps of them.
    """

    step: Any
    """(), batches seen, int32"""
    params: Any
    opt_state: Any
    ema: Any
    """exponential average of params, or None"""
    skipped: Any
    """(), batches that changed nothing, because loss or gradient was not finite, int32"""

    @property
    def averaged(self) -> Any:
        """The parameters to evaluate and to use: the average where there is one."""
        return self.params if self.ema is None else self.ema


def make_state(recipe: Recipe) -> TrainState:
    """The state before the first step. Pure: call it inside `jax.jit`."""
    # Parameters don't depend on the kernel, and one made for long sequences would refuse the example.
    model = build_model(dataclasses.replace(recipe, execution=dataclasses.replace(recipe.execution, attention="auto")))
    key = jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31 - 1)  # no step has this number
    params = model.init(key, *example_inputs(recipe))["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(recipe).init(params),
        ema=None if recipe.training.ema_decay is None else jax.tree.map(jnp.copy, params),
        skipped=jnp.zeros((), jnp.int32),
    )


def abstract_state(recipe: Recipe) -> TrainState:
    """Shapes and dtypes of the state, for restoring a checkpoint into; nothing is computed."""
    return jax.eval_shape(lambda: make_state(recipe))


def example_inputs(recipe: Recipe) -> tuple[jax.Array, ...]:
    """Smallest arguments that initialize the model: parameters don't depend on batch or length."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return (tokens, tokens) if recipe.task == "seq2seq" else (tokens,)


def count_parameters(params: Any) -> int:
    """Numbers in a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def parameter_paths(params: Any) -> list[str]:
    """Path of each leaf, as `encoder/layers/slot_0/attention/query/kernel`, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
