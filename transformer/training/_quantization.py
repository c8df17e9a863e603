"""Check the quantization of a recipe before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from transformer.config._checks import ConfigError
from transformer.nn._parameter_axes import LAYERS, axes_of
from transformer.nn.quantization._schemes import INSTALL, Quantization, is_installed
from transformer.training._recipe import Recipe
from transformer.training._state import initial_params

FP8_CAPABILITY = 8.9
"""lowest CUDA compute capability with multiplications in float8_e4m3fn (Ada; Hopper has 9.0)"""


def check_quantization(recipe: Recipe, devices: Sequence[Any]) -> None:
    """Check that `execution.quantization` is possible: the package, the devices, and the paths that it selects.

    Raises:
        ConfigError: qwix is not installed, a GPU lacks multiplications in fp8, or one of `quantization_paths` is in no
            path of a kernel; the message lists the paths.
    """
    name = recipe.execution.quantization
    if name == "none":
        return
    if not is_installed():
        raise ConfigError(
            f"execution.quantization {name} needs the package qwix, which is not installed. Install it, {INSTALL}, or "
            f"set execution.quantization to none."
        )
    capability = getattr(devices[0], "compute_capability", None) if devices[0].platform in ("gpu", "cuda") else None
    if name.startswith("fp8") and capability is not None and float(capability) < FP8_CAPABILITY:
        raise ConfigError(
            f"execution.quantization {name} needs a GPU of compute capability {FP8_CAPABILITY} or higher (Ada, "
            f"Hopper), but {devices[0].device_kind} has {capability}. Set execution.quantization to "
            f"{name.replace('fp8', 'int8')}."
        )
    check_paths(recipe)


def check_paths(recipe: Recipe) -> None:
    """Raise a ConfigError if one of `execution.quantization_paths` selects no kernel of the layers."""
    if not recipe.execution.quantization_paths:
        return
    kernels = quantizable(recipe)
    for part in recipe.execution.quantization_paths:
        one = dataclasses.replace(recipe.execution, quantization_paths=(part,))
        if not any(Quantization.of(one).at(*path.split("/")) for path in kernels):
            raise ConfigError(
                f"execution.quantization_paths must be parts of the paths of kernels in the layers, but no path "
                f"contains {part!r}. Choose parts of: {', '.join(kernels)}."
            )


def quantizable(recipe: Recipe) -> list[str]:
    """Return the paths of the kernels whose multiplications can be quantized: hidden matrices of the layers.

    These are the projections of attention, the feed-forward layers and the experts, but not routers, embeddings and
    heads.
    """
    plain = dataclasses.replace(recipe.execution, quantization="none", quantization_paths=())
    shapes = jax.eval_shape(lambda: initial_params(dataclasses.replace(recipe, execution=plain)))
    paths = {path: axes_of(path, leaf.ndim) for path, leaf in flatten_dict(shapes, sep="/").items()}
    in_layers = (LAYERS, "prefix_", "suffix_")
    return [
        path
        for path, axes in paths.items()
        if axes is not None and axes.role == "hidden" and any(part.startswith(in_layers) for part in path.split("/"))
    ]
