"""Replacements for functions that the oldest supported versions of JAX and Flax lack.

Each entry names the release that makes it unnecessary. When the minimum version in pyproject.toml reaches that release,
delete the entry and call JAX directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def platform_of(device: Any) -> str:
    """Return the platform ("cpu", "gpu" or "tpu") of an abstract device (`jax.sharding.AbstractDevice`)."""
    # Unnecessary from jax 0.10.1 on, where they have an attribute `platform`. Before that, the device kind identifies
    # it: "cpu", a name that starts with "TPU", or the product name of a GPU ("NVIDIA H100 80GB HBM3").
    if (platform := getattr(device, "platform", None)) is not None:
        return platform
    kind = device.device_kind
    if kind == "cpu":
        return "cpu"
    return "tpu" if kind.startswith("TPU") else "gpu"


def check_explicit_axes(axes: Sequence[str]) -> None:
    """Raise a ValueError if Explicit mesh axes (`axes`, their names) are used with a JAX version before 0.9."""
    # Earlier releases lose the axis type in the backward pass of functions with a custom derivative.
    if jax.__version_info__ < (0, 9):
        raise ValueError(
            f"the mesh axes {', '.join(axes)} are Explicit, which needs jax >= 0.9, but this is jax {jax.__version__}. "
            f"Create the mesh with axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)}, or upgrade jax."
        )


def inside_pmap() -> bool:
    """Return whether a `jax.pmap` is traced that sets no mesh; unnecessary from jax 0.10 on, where each sets one."""
    if jax.__version_info__ >= (0, 10):
        return False
    from jax._src import core

    return bool(core.get_axis_env().axis_sizes)
