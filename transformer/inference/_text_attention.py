"""Attention weights of a model for given tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.inference._loaded_model import Params
from transformer.viz._attention_page import check_weights

Model = TypeVar("Model", bound=nn.Module)


def reference_model(model: Model) -> Model:
    """Return the model with the kernel `reference`, which is the only one that stores its attention weights."""
    execution = dataclasses.replace(model.execution, attention="reference", sow_weights=True)
    return model.clone(execution=execution)


def sown_weights(model: nn.Module, params: Params, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the attention weights that a model sows for the token ids of its stacks; empty if no layer attends.

    Raises ValueError for weights that are more than a page can hold, before they are computed: the model is traced.
    """
    model, tokens = reference_model(model), [jnp.asarray([ids], jnp.int32) for ids in rows]
    compute = functools.partial(_sown, model)
    check_weights(sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(compute, params, *tokens))))
    return jax.device_get(compute(params, *tokens))


@functools.partial(jax.jit, static_argnames=("model",))
def _sown(model: nn.Module, params: Params, *tokens: jax.Array) -> dict[str, Any]:
    """Compiled once per model and lengths."""
    return model.apply({"params": params}, *tokens, mutable=["intermediates"])[1].get("intermediates", {})
