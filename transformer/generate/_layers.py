"""Unstack the layers of a decoder, so that the loop over tokens contains no inner loop over layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from transformer.config._options import StackOptions
from transformer.config._parts import Layer
from transformer.nn._axes import DType
from transformer.nn._parameter_axes import axes_of
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._kinds import kind_of
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.quantization._int8 import Int8
from transformer.nn.quantization._linear import multiplies_bfloat16
from transformer.nn.quantization._transposed import Widened, transposed

Params: TypeAlias = Mapping[str, Any]
"""a tree of parameters, without the outer "params\""""
Cache: TypeAlias = Mapping[str, Any]
"""a KV cache: a tree with the part of each layer, or of all layers together"""
COPIED = {"cpu": 2**31, "gpu": 2**32}
"""maximum size in bytes of a decoder whose parameters are copied by default, by platform; 0 on others"""


def uses_unstacked_layers(model: CausalLM | Seq2Seq, params: Params) -> bool:
    """Return whether the loop over tokens uses separate parameter arrays for each layer."""
    # For this the decoder's parameters are copied once. It is the case if `execution.scan` is off, and on CPU and GPU
    # if the parameters are at most `COPIED` bytes. On CPU it saves a third of the time per token (docs/benchmarks.md);
    # on GPU the compiler would copy each layer out of the stack at every token (docs/scaling.md).
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["decoder"]))
    return not model.execution.scan or size <= COPIED.get(platform(), 0)


def unstack_layers(model: CausalLM | Seq2Seq, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Split a decoder's parameters or cache into one tree per layer; repeated layers are stacked on a leading axis."""
    # For one token, a matrix multiplication takes as long as reading its matrix. A scan over stacked layers copies each
    # layer out of the stack first, for every token, which reads and writes the matrix once more. This function makes
    # that copy once.
    layers = [_part(tree, layer) for layer in _layers(model)]
    rest = {name: leaf for name, leaf in tree.items() if not name.startswith(("prefix_", "suffix_", "layers"))}
    return rest | {f"prefix_{i}": layer for i, layer in enumerate(layers)}


def decoding_params(model: CausalLM | Seq2Seq, params: Params) -> Params:
    """Return the parameters for `unstacked_model`, in the layout that is fast for the few rows of a decoding step."""
    # On CPU, 8-bit kernels get one row per output, and 16-bit kernels that XLA would convert for each product become
    # 32-bit ones (`nn/quantization/_transposed.py`). On GPU, 32-bit kernels become 16-bit ones if the model computes in
    # 16 bits: XLA would convert them for each token.
    return {**params, **_decoding_parts(model, _read_by_steps(params))}


def copied_for_decoding(model: CausalLM | Seq2Seq, params: Params) -> tuple[CausalLM | Seq2Seq, Params]:
    """Return the model and its parameters with unstacked layers, copied once, for loops that the host controls."""
    return unstacked_model(model), {**params, **_copied_parts(model, _read_by_steps(params))}


def _read_by_steps(params: Params) -> dict[str, Any]:
    names = ("decoder", "output", *(["embedding"] if platform() == "gpu" else []))
    return {name: params[name] for name in names if name in params}


def _decoding_parts(model: CausalLM | Seq2Seq, parts: dict[str, Any]) -> dict[str, Any]:
    parts = {**parts, "decoder": unstack_layers(model, parts["decoder"])}
    if model.execution.quantization != "none":
        return parts
    if platform() == "gpu" and jnp.dtype(model.config.dtype).itemsize == 2:
        narrow = functools.partial(_narrowed, jnp.dtype(model.config.dtype))
        return {name: jax.tree_util.tree_map_with_path(functools.partial(narrow, name), parts[name]) for name in parts}
    if platform() != "cpu" or has_mesh():
        return parts
    return {name: _kernels_for_cpu(part, name) for name, part in parts.items()}


_copied_parts = jax.jit(_decoding_parts, static_argnums=0)


def _narrowed(dtype: DType, name: str, path: tuple, leaf: Any) -> Any:
    """Convert a float32 kernel or table of embeddings, which its module would convert before each product."""
    axes = axes_of(f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}", len(leaf.shape))
    is_kernel = axes is not None and axes.int8 and leaf.dtype == jnp.float32
    return leaf.astype(dtype) if is_kernel else leaf


def _kernels_for_cpu(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Convert the kernels of a tree of parameters, whose layers are not stacked."""
    done = {}
    for name, part in tree.items():
        place = f"{path}/{name}"
        if not isinstance(part, Mapping):
            done[name] = _kernel_for_cpu(part, place)
        elif "latent" in tree and name in ("key", "value"):
            done[name] = part  # multi-head latent attention multiplies by these in another order
        else:
            done[name] = _kernels_for_cpu(part, place)
    return done


def _kernel_for_cpu(part: Any, path: str) -> Any:
    """Convert a parameter if it is a 16-bit or 8-bit kernel (*in, *out) of a `Linear`."""
    axes = axes_of(path, len(part.shape)) if isinstance(part, jax.Array | Int8) else None
    if axes is None or not axes.int8 or axes.inputs != tuple(range(-len(part.shape), -len(axes.outputs))):
        return part
    if isinstance(part, Int8):
        return transposed(part.values, part.scale, len(axes.inputs))
    if part.dtype.itemsize != 2 or (part.dtype == jnp.bfloat16 and multiplies_bfloat16()):
        return part
    return Widened(part.astype(jnp.float32))


def unstacked_model(model: CausalLM | Seq2Seq) -> CausalLM | Seq2Seq:
    """Return the model whose decoder has the unstacked layers of `unstack_layers`."""
    # Its encoder config is not meaningful: decoding steps do not run the encoder.
    config = model.config
    kinds = tuple(layer.kind for layer in _layers(model))
    own = config.stack
    options = {"final_norm": own.final_norm, "layer_scale": own.layer_scale, "layer_scalar": own.layer_scalar}
    stack = StackOptions(prefix=kinds, **options)
    config = config.replace(num_layers=len(kinds), stack=stack)
    return type(model)(config, model.execution)


def _layers(model: CausalLM | Seq2Seq) -> tuple[Layer, ...]:
    return model.config.layers(model.config.decoder_layers if kind_of(model).source else None)


def _part(tree: Any, layer: Layer) -> Any:
    part = functools.reduce(lambda tree, name: tree[name], layer.path.split("/"), tree)
    return part if layer.index is None else jax.tree.map(lambda stacked: stacked[layer.index], part)
