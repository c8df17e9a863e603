"""Low-rank updates of parameters (Hu et al. 2021, arXiv 2106.09685): pure functions over trees of them."""

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
    """Names of the linear maps of layers that low-rank updates are made for, in the order of their declaration: those
    whose kernel is declared as a hidden matrix (`transformer.nn._parameter_axes`).
    """
    ends = (end.split("/") for end, axes in declared().items() if axes.role == "hidden" and axes.inputs)
    return dict.fromkeys(end[-2] for end in ends if len(end) > 1 and end[-1] == "kernel")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Each targeted kernel W becomes W + alpha / rank A B, where A and B alone are trained (Hu et al. 2021, 4.1).

    Raises:
        ConfigError: a rank below 1, an alpha that is not above 0, or targets that are none or unknown.
    """

    rank: int = 8
    """r, columns of A and rows of B"""
    alpha: float = 16.0
    """the update is scaled by alpha / rank, so that another rank needs no other learning rate"""
    targets: tuple[str, ...] = ("query", "value")
    """maps of the layers that are updated: query, key, value, out, up, gate, down; of MLA also query_latent, latent,
    rotary_key"""

    def __post_init__(self):
        check_whole(self, "rank")
        check_positive(self, "alpha")
        if not self.targets:
            raise ConfigError(f"lora.targets is empty: name some of {', '.join(_maps())}.")
        for name in self.targets:
            check_choice("lora.targets", name, tuple(_maps()))


def init(key: PRNGKey, params: Any, config: LoRA) -> Any:
    """The updates of a tree of parameters (or of their shapes): `a` and `b` under the path of each targeted map.

    For a kernel (..., *in, *out) they are (..., I, r) and (..., r, O), I and O the products of its input and output
    axes. A is normal with variance 1 / I; B is 0, so that a merged model equals the one that is updated (section 4.1).

    Raises:
        ConfigError: a target that these parameters don't have.
    """
    kernels = _targeted(params, config.targets)
    updates = {}
    for number, (path, kernel) in enumerate(sorted(kernels.items())):
        lead, inputs, outputs = _matrix(path, kernel.shape)
        a = jax.random.normal(jax.random.fold_in(key, number), (*lead, inputs, config.rank), jnp.float32)
        updates[*path, "a"] = (a / math.sqrt(inputs)).astype(kernel.dtype)
        updates[*path, "b"] = jnp.zeros((*lead, config.rank, outputs), kernel.dtype)
    return flax.traverse_util.unflatten_dict(updates)


def merge(params: Any, updates: Any, config: LoRA) -> Any:
    """The tree of parameters with W + alpha / rank A B in place of each targeted kernel W (section 4.1).

    Raises:
        ConfigError: updates of maps that the parameters don't have, or of other sizes.
    """
    merged = flax.traverse_util.flatten_dict(params)
    pairs = flax.traverse_util.flatten_dict(updates)
    for path in sorted({path[:-1] for path in pairs}):
        a, b, kernel = pairs[*path, "a"], pairs[*path, "b"], merged.get((*path, "kernel"))
        if kernel is None or not _is_map((*path, "kernel"), kernel.ndim):
            raise ConfigError(f"there are updates of {'/'.join(path)}, which is no map of these parameters.")
        lead, inputs, outputs = _matrix(path, kernel.shape)
        if (a.shape, b.shape) != ((*lead, inputs, a.shape[-1]), (*lead, a.shape[-1], outputs)):
            raise ConfigError(
                f"the updates of {'/'.join(path)} are {a.shape} and {b.shape}, which don't fit its kernel "
                f"{kernel.shape}. They are of another model."
            )
        update = (config.alpha / config.rank) * jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
        merged[*path, "kernel"] = (kernel + update.reshape(kernel.shape)).astype(kernel.dtype)
    return flax.traverse_util.unflatten_dict(merged)


def _targeted(params: Any, targets: Sequence[str]) -> dict[tuple[str, ...], Any]:
    """Path of each map of these names -> its kernel."""
    flat = flax.traverse_util.flatten_dict(params)
    found = {path[:-1]: leaf for path, leaf in flat.items() if path[-1] == "kernel" and _is_map(path, leaf.ndim)}
    there = {path[-1] for path in found}
    if missing := [name for name in targets if name not in there]:
        raise ConfigError(
            f"lora.targets names {', '.join(missing)}, which this model doesn't have. It has "
            f"{', '.join(name for name in _maps() if name in there) or 'none of them'}."
        )
    return {path: leaf for path, leaf in found.items() if path[-1] in targets}


def _is_map(path: Sequence[str], ndim: int) -> bool:
    axes = axes_of("/".join(path), ndim)
    return axes is not None and axes.role == "hidden"


def _matrix(path: Sequence[str], shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """Leading axes (layers, experts), input size and output size of the kernel of the map at `path`."""
    axes = axes_of("/".join((*path, "kernel")), len(shape))
    lead = len(shape) - len(axes.inputs) - len(axes.outputs)
    return shape[:lead], math.prod(shape[a] for a in axes.inputs), math.prod(shape[a] for a in axes.outputs)
