"""The training state: parameters, optimizer state and counters."""

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
    """The state that the compiled step reads and writes, as a pytree.

    The leaves are arrays or shapes; with pmap, arrays with a leading device axis. The state has no random key, because
    the key of a step is `fold_in(key(seed), step)`. `model_params` computes the model's parameters from `params` and
    `base`.
    """

    step: Any
    """(), number of batches seen, int32"""
    params: Any
    """tree of the trained parameters; with LoRA the updates and the new parameters"""
    opt_state: Any
    """state of the optax optimizer for `params`"""
    ema: Any
    """exponential moving average of `params`, or None"""
    skipped: Any
    """(), number of skipped batches (non-finite or a loss spike), int32; -1: with nan_policy "stop" a batch was not
    finite, and no later step changes the state"""
    base: Any = None
    """with LoRA the frozen parameters; otherwise None"""

    @property
    def averaged(self) -> Any:
        """The moving average of the trained parameters if there is one, otherwise the trained parameters."""
        return self.params if self.ema is None else self.ema


def make_state(recipe: Recipe) -> TrainState:
    """Create the state before the first step. Pure: call it inside `jax.jit`."""
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
    """Initialize the model's parameters. Pure, like `make_state`."""
    # Parameters don't depend on the attention kernel, and a kernel for long sequences would reject the short example.
    model = build_model(dataclasses.replace(recipe, execution=dataclasses.replace(recipe.execution, attention="auto")))
    return model.init(_initial_key(recipe), *example_inputs(recipe))["params"]


def model_params(recipe: Recipe, trained: Any, base: Any) -> Any:
    """Return the model's parameters.

    With LoRA (Hu et al. 2021, arXiv 2106.09685) the updates are merged into the base. Without LoRA these are the
    trained parameters.

    Args:
        recipe: recipe of the run.
        trained: `params` or `averaged` of a state.
        base: `base` of the same state.
    """
    if recipe.lora is None:
        return trained
    whole = unflatten_dict(flatten_dict(base) | flatten_dict(trained["new"]))
    return lora.merge(whole, trained["updates"], recipe.lora)


def make_usable(recipe: Recipe) -> Callable[[TrainState], Any]:
    """Return a function from a state to the model's parameters for evaluation: the moving average if there is one.

    With LoRA the function is compiled, so that the merged parameters are sharded like the base.
    """
    if recipe.lora is None:
        return lambda state: state.averaged
    merged = jax.jit(lambda trained, base: model_params(recipe, trained, base))
    return lambda state: merged(state.averaged, state.base)


def _split(recipe: Recipe, params: Any) -> tuple[Any, Any]:
    """Split the model's parameters into the trained ones and the frozen base (None without LoRA).

    With LoRA the low-rank updates of the base are trained, and all parameters that the pretrained model lacks.
    """
    if recipe.lora is None:
        return params, None
    fresh = set(() if recipe.origin is None else recipe.origin.new)
    flat = flatten_dict(params)
    new = {path: leaf for path, leaf in flat.items() if "/".join(path) in fresh}
    base = unflatten_dict({path: leaf for path, leaf in flat.items() if path not in new})
    updates = lora.init(jax.random.fold_in(_initial_key(recipe), 1), base, recipe.lora)
    return {"new": unflatten_dict(new), "updates": updates}, base


def _initial_key(recipe: Recipe) -> jax.Array:
    # No step has this number, so the initialization and dropout never share a key.
    return jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31 - 1)


def abstract_state(recipe: Recipe) -> TrainState:
    """Return the shapes and dtypes of the state without computing it, as the target of restoring a checkpoint."""
    return jax.eval_shape(lambda: make_state(recipe))


def example_inputs(recipe: Recipe) -> tuple[jax.Array, ...]:
    """Return the smallest arguments that initialize the model; parameters don't depend on batch size or length."""
    return TASKS[recipe.task].example(recipe.model)


def parameter_paths(params: Any) -> list[str]:
    """Return the path of each leaf, like `encoder/layers/slot_0/attention/query/kernel`, in `jax.tree.leaves` order."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
