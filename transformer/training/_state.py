"""The training state: parameters, optimizer state and counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from transformer.nn._axes import DType
from transformer.nn.models._kinds import example_inputs
from transformer.training import lora
from transformer.training._optimizers import AVERAGED, make_optimizer
from transformer.training._recipe import Recipe, build_model, build_teacher
from transformer.training.tasks._table import TASKS


@flax.struct.dataclass
class TrainState:
    """The state that the compiled step reads and writes, as a pytree.

    The leaves are arrays or shapes; with pmap, arrays with a leading device axis. The state has no random key, because
    the key of a step is `fold_in(key(seed), step)`. `model_params` computes the model's parameters from `params` and
    `base`.
    """

    step: Any
    """(), number of batches seen, int32"""
    params: PyTree
    """tree of the trained parameters; with LoRA the updates and the new parameters"""
    opt_state: PyTree
    """state of the optax optimizer for `params`"""
    ema: PyTree
    """average of `params`: an exponential moving average, in at least float32, or that of the optimizer; None without
    one"""
    skipped: Any
    """(), number of skipped batches (non-finite or a loss spike), int32; -1: with nan_policy "stop" a batch was not
    finite, and no later step changes the state"""
    base: PyTree = None
    """with LoRA the frozen parameters; without LoRA a copy of the initial ones if the task compares the model with them
    (`Task.keeps_reference`); otherwise None"""
    teacher: PyTree = None
    """parameters of the teacher, frozen; None without distillation"""

    @property
    def averaged(self) -> PyTree:
        """The moving average of the trained parameters, in their dtypes, if there is one, otherwise these."""
        return self.params if self.ema is None else in_dtypes_of(self.params, self.ema)


def make_state(recipe: Recipe) -> TrainState:
    """Create the state before the first step. Pure: call it inside `jax.jit`."""
    params, base = _split(recipe, initial_params(recipe))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(recipe).init(params),
        ema=initial_average(recipe, params),
        skipped=jnp.zeros((), jnp.int32),
        base=base,
        teacher=None if recipe.distill is None else _initialized(recipe, build_teacher(recipe)),
    )


def initial_average(recipe: Recipe, params: PyTree) -> PyTree:
    """Return a copy of the parameters, the first value of `TrainState.ema`; None without an average.

    An exponential moving average changes by (1 - decay) of its distance from the parameters. In bfloat16, which has 8
    significant bits, such a change is rounded to nothing for usual decays, so the average is stored in float32.
    """
    own = recipe.optimizer.name in AVERAGED  # the optimizer computes its average from its state
    if not own and recipe.training.ema_decay is None:
        return None
    return jax.tree.map(lambda leaf: jnp.array(leaf, None if own else wide_dtype(leaf.dtype), copy=True), params)


def wide_dtype(dtype: DType) -> DType:
    """Return the dtype in which many values are summed or averaged: this one, or float32 if it has fewer bits."""
    return jnp.promote_types(dtype, jnp.float32)


def in_dtypes_of(params: PyTree, wide: PyTree) -> PyTree:
    """Return a tree such as an average or a gradient with the dtypes of the parameters."""
    return jax.tree.map(lambda leaf, own: own if own.dtype == leaf.dtype else own.astype(leaf.dtype), params, wide)


def initial_params(recipe: Recipe) -> PyTree:
    """Initialize the model's parameters. Pure, like `make_state`."""
    return _initialized(recipe, build_model(recipe))


def _initialized(recipe: Recipe, model: nn.Module) -> PyTree:
    # Parameters don't depend on the attention kernel, and a kernel for long sequences would reject the short example.
    model = model.clone(execution=dataclasses.replace(model.execution, attention="auto"))
    return model.init(_initial_key(recipe), *example_inputs(model))["params"]


def model_params(recipe: Recipe, trained: PyTree, base: PyTree) -> PyTree:
    """Return the model's parameters, as a model applies them, from `params` or `averaged`, and `base`, of a state.

    With LoRA (Hu et al. 2021, arXiv 2106.09685) each updated kernel is the frozen kernel with its update, `Adapted`.
    Without LoRA these are the trained parameters.
    """
    if recipe.lora is None:
        return trained
    whole = unflatten_dict(flatten_dict(base) | flatten_dict(trained["new"]))
    return lora.adapt(whole, trained["updates"], recipe.lora)


def merged_params(recipe: Recipe, trained: PyTree, base: PyTree) -> PyTree:
    """Return the model's parameters as plain arrays: like `model_params`, with LoRA's updates merged into the base."""
    if recipe.lora is None:
        return trained
    dtype = None if recipe.lora.base is None else recipe.model.parameters.dtype
    return lora.flatten_adapted(model_params(recipe, trained, base), dtype)


def make_usable(recipe: Recipe) -> Callable[[TrainState], PyTree]:
    """Return a function from a state to the model's parameters for evaluation: the moving average if there is one.

    With LoRA the function is compiled, so that the merged parameters are sharded like the base. A base in another
    number format is not merged: the merged parameters may not fit into memory.
    """
    if recipe.lora is None:
        return lambda state: state.averaged
    if recipe.lora.base is not None:
        return lambda state: model_params(recipe, state.averaged, state.base)
    merged = jax.jit(lambda trained, base: merged_params(recipe, trained, base))
    return lambda state: merged(state.averaged, state.base)


def _split(recipe: Recipe, params: PyTree) -> tuple[PyTree, PyTree]:
    """Split parameters into the trained ones (with LoRA, updates and those that the pretrained model lacks) and the
    base.
    """
    if recipe.lora is None:
        return params, jax.tree.map(jnp.copy, params) if TASKS[recipe.task].keeps_reference(recipe) else None
    fresh = set(() if recipe.origin is None else recipe.origin.new)
    flat = flatten_dict(params)
    new = {path: leaf for path, leaf in flat.items() if "/".join(path) in fresh}
    base = unflatten_dict({path: leaf for path, leaf in flat.items() if path not in new})
    updates = lora.init(jax.random.fold_in(_initial_key(recipe), 1), base, recipe.lora)
    if recipe.lora.base is not None:
        # Zeros, until the pretrained parameters replace them: a base in 4 bits may be all that the memory can hold.
        shapes = jax.eval_shape(lambda: lora.quantize_base(base, recipe.lora.base, recipe.model.dtype))
        base = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return {"new": unflatten_dict(new), "updates": updates}, base


def _initial_key(recipe: Recipe) -> jax.Array:
    # No step has this number, so the initialization and dropout never share a key.
    return jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31 - 1)


def abstract_state(recipe: Recipe) -> TrainState:
    """Return the shapes and dtypes of the state without computing it, as the target of restoring a checkpoint."""
    return jax.eval_shape(lambda: make_state(recipe))


def parameter_paths(params: PyTree) -> list[str]:
    """Return the path of each leaf, like `encoder/layers/slot_0/attention/query/kernel`, in `jax.tree.leaves` order."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
