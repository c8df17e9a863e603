"""Unstack the layers of a decoder, so that the loop over tokens contains no inner loop over layers."""

from __future__ import annotations

import functools
from typing import Any

import jax

from transformer.config._options import StackOptions
from transformer.config._parts import Layer
from transformer.nn._partitioning import platform
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

COPIED = 2**31
"""on CPU, the maximum size in bytes of a decoder whose parameters are copied by default"""


def uses_unstacked_layers(model: CausalLM | Seq2Seq, params: Any) -> bool:
    """Return whether the loop over tokens uses separate parameter arrays for each layer.

    For this the decoder's parameters are copied once. It is the case if `execution.scan` is off, and on CPU if the
    parameters are at most `COPIED` bytes: there it saves a third of the time per token (docs/benchmarks.md).
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["decoder"]))
    return not model.execution.scan or (platform() == "cpu" and size <= COPIED)


def unstack_layers(model: CausalLM | Seq2Seq, tree: Any) -> Any:
    """Split a decoder's parameters or cache into one tree per layer; repeated layers are stacked on a leading axis.

    For one token, a matrix multiplication takes as long as reading its matrix. A scan over stacked layers copies each
    layer out of the stack first, for every token, which reads and writes the matrix once more. This function makes that
    copy once.
    """
    layers = [_part(tree, layer) for layer in _layers(model)]
    rest = {name: leaf for name, leaf in tree.items() if not name.startswith(("prefix_", "suffix_", "layers"))}
    return rest | {f"prefix_{i}": layer for i, layer in enumerate(layers)}


copy_unstacked = jax.jit(unstack_layers, static_argnums=0)
"""`unstack_layers` as one compiled call, for loops that the host controls"""


def unstacked_model(model: CausalLM | Seq2Seq) -> CausalLM | Seq2Seq:
    """Return the model whose decoder has the unstacked layers of `unstack_layers`.

    Its encoder config is not meaningful: decoding steps do not run the encoder.
    """
    config = model.config
    kinds = tuple(layer.kind for layer in _layers(model))
    own = config.stack
    options = {"final_norm": own.final_norm, "layer_scale": own.layer_scale, "layer_scalar": own.layer_scalar}
    stack = StackOptions(prefix=kinds, **options)
    config = config.replace(num_layers=len(kinds), stack=stack)
    return type(model)(config, model.execution)


def _layers(model: CausalLM | Seq2Seq) -> tuple[Layer, ...]:
    return model.config.layers(model.config.decoder_layers if isinstance(model, Seq2Seq) else None)


def _part(tree: Any, layer: Layer) -> Any:
    part = functools.reduce(lambda tree, name: tree[name], layer.path.split("/"), tree)
    return part if layer.index is None else jax.tree.map(lambda stacked: stacked[layer.index], part)
