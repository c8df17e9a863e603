"""What the oldest supported JAX and Flax lack.

Each entry names the release that makes it unnecessary. When the floor in pyproject.toml reaches that release, delete
the entry and call JAX directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def platform_of(device: Any) -> str:
    """The platform ("cpu", "gpu" or "tpu") of an abstract device (`jax.sharding.AbstractDevice`).

    Unnecessary from jax 0.10.1, where abstract devices have `platform`. Before that, the kind tells: CPUs report "cpu",
    TPUs a name that starts with "TPU", and GPUs their product name ("NVIDIA H100 80GB HBM3").
    """
    if (platform := getattr(device, "platform", None)) is not None:
        return platform
    kind = device.device_kind
    if kind == "cpu":
        return "cpu"
    return "tpu" if kind.startswith("TPU") else "gpu"


def check_explicit_axes(axes: Sequence[str]) -> None:
    """Raises ValueError when mesh axes of type Explicit (`axes`, their names) are in use on a JAX before 0.9.

    Unnecessary from jax 0.9, where `jax.make_mesh` makes Explicit axes by default: earlier releases lose their type in
    the backward pass of functions with a derivative of their own.
    """
    if jax.__version_info__ < (0, 9):
        raise ValueError(
            f"the mesh axes {', '.join(axes)} are Explicit, which needs jax >= 0.9, but this is jax {jax.__version__}. "
            f"Make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)}, or upgrade jax."
        )


def inside_pmap() -> bool:
    """Whether the function being traced runs under a `jax.pmap` that sets no mesh; each device has arrays of its own.

    Unnecessary from jax 0.10, where pmap is made of shard_map and its axis is one of the mesh in force.
    """
    if jax.__version_info__ >= (0, 10):
        return False
    from jax._src import core

    return bool(core.get_axis_env().axis_sizes)
