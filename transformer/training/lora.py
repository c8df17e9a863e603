"""LoRA, low-rank updates of pretrained parameters (Hu et al. 2021, arXiv 2106.09685), as pure functions on pytrees.

Also DoRA (Liu et al. 2024, arXiv 2402.09353), and a frozen base in 8 or 4 bits (QLoRA, Dettmers et al. 2023, arXiv
2305.14314).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import transformer.nn.models  # noqa: F401 - declares the axes of their parameters
from transformer.config._checks import ConfigError, check_choice, check_positive, check_whole
from transformer.nn._axes import DType, PRNGKey
from transformer.nn._parameter_axes import axes_of, declared
from transformer.nn.quantization._adapted import NF4, Adapted, Encoded, dense, output_norms, quantized_nf4
from transformer.nn.quantization._int8 import Int8, quantized

__all__ = [
    "Base",
    "LoRA",
    "adapt",
    "flatten_adapted",
    "host_memory",
    "init",
    "magnitudes",
    "merge",
    "nested_like",
    "quantize_base",
    "quantized_like",
]

Base = Literal["float32", "bfloat16", "int8", "nf4"]
"""format in which the frozen kernels are stored"""


def _maps() -> dict[str, None]:
    """Return the names of the linear layers that can have low-rank updates, in the order of their declaration.

    These are the layers whose kernel is declared as a hidden matrix (`transformer.nn._parameter_axes`).
    """
    ends = (end.split("/") for end, axes in declared().items() if axes.role == "hidden" and axes.inputs)
    return dict.fromkeys(end[-2] for end in ends if len(end) > 1 and end[-1] == "kernel")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Replace each targeted kernel W by W + alpha / rank A B, and train only A and B (Hu et al. 2021, section 4.1).

    Raises:
        ConfigError: a rank below 1, an alpha that is not above 0, empty or unknown targets, or an unknown base.
    """

    rank: int = 8
    """rank r of the updates: A has r columns, B has r rows"""
    alpha: float = 16.0
    """scale of the updates: they are multiplied by alpha / rank;
    a different rank then does not need a different learning rate"""
    targets: tuple[str, ...] = ("query", "value")
    """linear layers to update: query, key, value, out, up, gate, down;
    with MLA also query_latent, latent, rotary_key"""
    rslora: bool = False
    """multiply the updates by alpha / sqrt(rank) instead, so that a high rank does not slow down learning
    (Kalajdzievski 2023, arXiv 2312.03732)"""
    dora: bool = False
    """DoRA: also train the norm of the weights of each output, and normalize the updated weights (Liu et al. 2024,
    arXiv 2402.09353)"""
    base: Base | None = None
    """number format of the frozen kernels: int8 (a scale per output) or nf4 (4 bits, a scale per 64 weights; QLoRA);
    None: the dtype of the model's parameters"""

    def __post_init__(self):
        check_whole(self, "rank")
        check_positive(self, "alpha")
        if not self.targets:
            raise ConfigError(f"lora.targets must not be empty. Choose from {', '.join(_maps())}.")
        for name in self.targets:
            check_choice("lora.targets", name, tuple(_maps()))
        if self.base is not None:
            check_choice("lora.base", self.base, Base.__args__)

    @property
    def scale(self) -> float:
        """Factor of the updates A B."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def init(key: PRNGKey, params: PyTree, config: LoRA) -> PyTree:
    """Initialize the updates of a tree of parameters: `a` and `b` under the path of each targeted layer.

    For a kernel (..., *in, *out), `a` has shape (..., I, r) and `b` (..., r, O), where I and O are the total sizes of
    the input and output axes. A is normal with variance 1 / I. B is 0, so that the updated model initially equals the
    pretrained one (section 4.1). With DoRA there is also `magnitude` (..., O), the norm of the weights of each output.

    Args:
        key: random key of A.
        params: tree of parameters; without DoRA, the shapes suffice.
        config: rank and targets.

    Raises:
        ConfigError: a target that these parameters don't have.
    """
    kernels = _targeted(params, config.targets)
    updates = {}
    for number, (path, kernel) in enumerate(sorted(kernels.items())):  # sorted: each layer always has the same key
        lead, inputs, outputs = _matrix(path, kernel.shape)
        # (..., I, r): stacked layers and experts, the leading axes, have one update each
        a = jax.random.normal(jax.random.fold_in(key, number), (*lead, inputs, config.rank), jnp.float32)
        # Variance 1 / I: each entry of x A (a sum over I terms) then has the variance of an entry of x. If B were
        # random too, the model would differ from the pretrained one; if A were 0 too, no gradient would reach either.
        updates[*path, "a"] = (a / math.sqrt(inputs)).astype(kernel.dtype)
        updates[*path, "b"] = jnp.zeros((*lead, config.rank, outputs), kernel.dtype)
        if config.dora:
            updates[*path, "magnitude"] = _magnitude(path, kernel, kernel.dtype)
    return flax.traverse_util.unflatten_dict(updates)


def magnitudes(updates: PyTree, params: PyTree) -> PyTree:
    """Return the updates with the `magnitude` of each layer set to the norms of these parameters, DoRA's start.

    W = m W / ||W|| then holds for the quantized base too, if `params` are the quantized parameters.
    """
    flat, kernels = flax.traverse_util.flatten_dict(updates), flax.traverse_util.flatten_dict(params)
    return flax.traverse_util.unflatten_dict(
        {
            path: _magnitude(path[:-1], kernels[*path[:-1], "kernel"], leaf.dtype) if path[-1] == "magnitude" else leaf
            for path, leaf in flat.items()
        }
    )


def _magnitude(path: Sequence[str], kernel: PyTree, dtype: DType) -> jax.Array:
    """Compute the norm of the weights of each output, (..., O), in float32, and round it to `dtype`."""
    lead, inputs, outputs = _matrix(path, kernel.shape)
    return output_norms(kernel, (*lead, inputs, outputs)).astype(dtype)


def adapt(params: PyTree, updates: PyTree, config: LoRA) -> PyTree:
    """Return the parameters with each updated kernel as an `Adapted`: the frozen kernel and its update, side by side.

    A model applies such parameters like any others. Nothing is computed here: a layer applies the update to its
    activations, and dequantizes only its own kernels.

    Raises:
        ConfigError: an update of a layer that the parameters don't have, or of a different shape.
    """
    adapted = flax.traverse_util.flatten_dict(params)
    parts = flax.traverse_util.flatten_dict(updates)
    for path in sorted({path[:-1] for path in parts}):
        a, b, kernel = parts[*path, "a"], parts[*path, "b"], adapted.get((*path, "kernel"))
        if kernel is None or not _is_map((*path, "kernel"), len(kernel.shape)):
            raise ConfigError(
                f"the updates have an entry for {'/'.join(path)}, but the parameters have no linear layer there. Use "
                f"the updates of this model."
            )
        lead, inputs, outputs = _matrix(path, kernel.shape)
        if (a.shape, b.shape) != ((*lead, inputs, a.shape[-1]), (*lead, a.shape[-1], outputs)):
            raise ConfigError(
                f"the updates of {'/'.join(path)} have shapes {a.shape} and {b.shape}, which don't fit its kernel of "
                f"shape {kernel.shape}. Use the updates of this model."
            )
        adapted[*path, "kernel"] = Adapted(kernel, a, b, parts.get((*path, "magnitude")), config.scale)
    return flax.traverse_util.unflatten_dict(adapted)


def merge(params: PyTree, updates: PyTree, config: LoRA, dtype: DType | None = None) -> PyTree:
    """Return the parameters with each updated kernel W replaced by W + alpha / rank A B (section 4.1), all as arrays.

    Args:
        params: tree of parameters, quantized or not.
        updates: tree of updates of these parameters.
        config: scale of the updates.
        dtype: dtype of kernels that were quantized, or whose dtype `LoRA.base` changed; None: float32 for quantized
            kernels, unchanged for others.

    Raises:
        ConfigError: an update of a layer that the parameters don't have, or of a different shape.
    """
    return flatten_adapted(adapt(params, updates, config), dtype)


def flatten_adapted(params: PyTree, dtype: DType | None = None) -> PyTree:
    """Return a tree in which every quantized or updated kernel is an array; `dtype` as in `merge`."""

    # Merged in float32, and rounded only once, after the addition: rounding A B to bfloat16 first would add a second
    # rounding error.
    def one(leaf):
        inner = leaf.kernel if isinstance(leaf, Adapted) else leaf
        given = jnp.float32 if isinstance(inner, Encoded) else inner.dtype
        return dense(leaf, given if dtype is None else dtype)

    flat = flax.traverse_util.flatten_dict(params)
    return flax.traverse_util.unflatten_dict({path: one(leaf) for path, leaf in flat.items()})


def quantize_base(params: PyTree, base: Base | None, dtype: DType = jnp.float32) -> PyTree:
    """Return frozen parameters in the format of `LoRA.base`.

    int8 and nf4 apply to the kernels of the linear layers (those that can have updates), bfloat16 to all matrices.
    With int8 and nf4, the embeddings and the output kernel have the dtype of the computation: they are converted to it
    anyway. Norms, biases, position tables and routers keep theirs.

    Args:
        params: tree of parameters.
        base: the format; None: unchanged.
        dtype: dtype of the model's computation.
    """
    if base is None:
        return params

    def one(path, leaf):
        axes = axes_of("/".join(path), leaf.ndim)
        if axes is None or axes.role == "vector" or path[-2] == "router":
            return leaf
        if base in ("float32", "bfloat16"):
            return leaf.astype(base)
        if axes.role != "hidden" or path[-1] != "kernel":
            return leaf.astype(dtype) if "vocab" in axes.names else leaf
        return quantized(leaf, axes.inputs) if base == "int8" else quantized_nf4(leaf, axes.inputs[-1])

    flat = flax.traverse_util.flatten_dict(params)
    return flax.traverse_util.unflatten_dict({path: one(path, leaf) for path, leaf in flat.items()})


def quantized_like(kernel: PyTree, path: str, array: np.ndarray) -> PyTree:
    """Return an array in the number format of `kernel`, the leaf at this path; plain leaves leave it unchanged.

    It is quantized in host memory: the memory of the devices may not suffice for the array.
    """
    if not isinstance(kernel, Int8 | NF4):
        return array
    with host_memory():
        if isinstance(kernel, NF4):
            return jax.jit(quantized_nf4, static_argnums=1)(array, kernel.axis)
        return jax.jit(quantized, static_argnums=1)(array, axes_of(path, array.ndim).inputs)


def host_memory() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that computes and places new arrays in host memory, where JAX has a CPU backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return contextlib.nullcontext()


def nested_like(tree: PyTree, nested: PyTree) -> PyTree:
    """Return `tree`, shapes of parameters, filled with the arrays of nested dicts, as a checkpoint returns them."""

    def at(path, _):
        inner = nested
        for key in path:
            inner = inner[jax.tree_util.keystr((key,), simple=True)]
        return inner

    return jax.tree_util.tree_map_with_path(at, tree)


def _targeted(params: PyTree, targets: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """Map the path of each layer with one of these names to its kernel."""
    flat = flax.traverse_util.flatten_dict(params)
    found = {path[:-1]: leaf for path, leaf in flat.items() if path[-1] == "kernel" and _is_map(path, leaf.ndim)}
    there = {path[-1] for path in found}
    if missing := [name for name in targets if name not in there]:
        raise ConfigError(
            f"lora.targets contains {', '.join(missing)}, which this model doesn't have. Choose from the layers that "
            f"it has: {', '.join(name for name in _maps() if name in there) or 'none'}."
        )
    return {path: leaf for path, leaf in found.items() if path[-1] in targets}


def _is_map(path: Sequence[str], ndim: int) -> bool:
    axes = axes_of("/".join(path), ndim)
    return axes is not None and axes.role == "hidden"


def _matrix(path: Sequence[str], shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Return the leading axes (layers, experts), the input size and the output size of the kernel of a layer."""
    axes = axes_of("/".join((*path, "kernel")), len(shape))
    lead = len(shape) - len(axes.inputs) - len(axes.outputs)
    return shape[:lead], math.prod(shape[a] for a in axes.inputs), math.prod(shape[a] for a in axes.outputs)
