"""LoRA, low-rank updates of pretrained parameters (Hu et al. 2021, arXiv 2106.09685), as pure functions on pytrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

import transformer.nn.models  # noqa: F401 - declares the axes of their parameters
from transformer.config._checks import ConfigError, check_choice, check_positive, check_whole
from transformer.nn._axes import PRNGKey
from transformer.nn._parameter_axes import axes_of, declared

__all__ = ["LoRA", "init", "merge"]


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
        ConfigError: a rank below 1, an alpha that is not above 0, or targets that are empty or unknown.
    """

    rank: int = 8
    """rank r of the updates: A has r columns, B has r rows"""
    alpha: float = 16.0
    """scale of the updates: they are multiplied by alpha / rank;
    a different rank then does not need a different learning rate"""
    targets: tuple[str, ...] = ("query", "value")
    """linear layers to update: query, key, value, out, up, gate, down;
    with MLA also query_latent, latent, rotary_key"""

    def __post_init__(self):
        check_whole(self, "rank")
        check_positive(self, "alpha")
        if not self.targets:
            raise ConfigError(f"lora.targets must not be empty. Choose from {', '.join(_maps())}.")
        for name in self.targets:
            check_choice("lora.targets", name, tuple(_maps()))


def init(key: PRNGKey, params: Any, config: LoRA) -> Any:
    """Initialize the updates of a tree of parameters: `a` and `b` under the path of each targeted layer.

    For a kernel (..., *in, *out), `a` has shape (..., I, r) and `b` (..., r, O), where I and O are the total sizes of
    the input and output axes. A is normal with variance 1 / I. B is 0, so that the merged model initially equals the
    pretrained one (section 4.1).

    Args:
        key: random key of A.
        params: tree of parameters, or of their shapes.
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
    return flax.traverse_util.unflatten_dict(updates)


def merge(params: Any, updates: Any, config: LoRA) -> Any:
    """Return the parameters with each updated kernel W replaced by W + alpha / rank A B (section 4.1).

    Raises:
        ConfigError: an update of a layer that the parameters don't have, or of a different shape.
    """
    merged = flax.traverse_util.flatten_dict(params)
    pairs = flax.traverse_util.flatten_dict(updates)
    for path in sorted({path[:-1] for path in pairs}):
        a, b, kernel = pairs[*path, "a"], pairs[*path, "b"], merged.get((*path, "kernel"))
        if kernel is None or not _is_map((*path, "kernel"), kernel.ndim):
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
        # alpha / r A B, (..., I, r) x (..., r, O) -> (..., I, O), reshaped below to (..., *in, *out). In float32, and
        # rounded only once, after the addition: rounding A B to bfloat16 first would add a second rounding error.
        update = (config.alpha / config.rank) * jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
        merged[*path, "kernel"] = (kernel + update.reshape(kernel.shape)).astype(kernel.dtype)
    return flax.traverse_util.unflatten_dict(merged)


def _targeted(params: Any, targets: Sequence[str]) -> dict[tuple[str, ...], Any]:
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
