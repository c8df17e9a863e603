"""Check whether the compiler of the current devices accepts a kernel, by compiling a small program once per process."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer.nn._axes import DType
from transformer.nn._partitioning import device_kind, platform

FLOAT32_ALONE = ("TPU v2", "TPU v3")
"""kinds of TPU for which the kernel compiler rejects bfloat16 matrix multiplications"""

Example: TypeAlias = Callable[[DType], tuple[Callable[..., Any], Sequence[jax.ShapeDtypeStruct]]]
"""dtype -> a small program that uses a kernel, and the shapes of its arguments"""


def compiler_error(example: Example, dtype: DType, on: str) -> str | None:
    """Return the first line of the error of compiling an example for a device of the mesh, or the first one.

    None if the compiler accepts it, or if there is no device of the platform `on` (as with an abstract mesh). Each
    example is compiled once per process, dtype and device, in about half a second.
    """
    device = _device()
    if device is None or device.platform != on:
        return None
    return _error(example, jnp.dtype(dtype).name, device)


def tpu_compiler_refusal(example: Example, dtype: DType) -> str | None:
    """Return why the installed TPU compiler rejects an example, and what to install; None: it doesn't, or no TPU.

    JAX emits Mosaic, the intermediate language of TPU kernels, in the version of its own release; an older libtpu
    rejects it. The text follows "can't".
    """
    if platform() != "tpu" or (error := compiler_error(example, dtype, "tpu")) is None:
        return None
    return (
        f"be compiled with {library_version('libtpu')} and {library_version('jax')} ({error}). To use it, run "
        f'pip install "{matching_libtpu()}", which this JAX was released with, and restart Python'
    )


def gpu_compiler_refusal(example: Example, dtype: DType, *, uses: str = "this GPU") -> str | None:
    """Return why the GPU compiler rejects an example; None: it doesn't, or no GPU. The text follows "can't"."""
    if platform() != "gpu" or (error := compiler_error(example, dtype, "gpu")) is None:
        return None
    return f"be compiled for {uses} ({error})"


def tpu_dtype_refusal(dtype: DType) -> str | None:
    """Return why kernels for TPUs can't compute in a data type on the current device; None if they can."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"compute in {jnp.dtype(dtype)}: it supports float32 and bfloat16"
    if dtype == jnp.bfloat16 and (kind := device_kind()) in FLOAT32_ALONE:
        return f"compute in bfloat16 on {kind}: kernels support only float32 there"
    return None


def library_version(name: str) -> str:
    """Return the name and version of a package: "libtpu 0.0.23", or "libtpu" if pip does not list it."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name


def matching_libtpu() -> str:
    """Return the pip requirement for the libtpu version that the installed JAX was released with: "libtpu==0.0.23"."""
    for requirement in importlib.metadata.requires("jax") or ():
        if found := re.match(r"(libtpu==[\w.*]+)", requirement):
            return found.group(1)
    return "libtpu"


def _device() -> Any | None:
    kind = jax.sharding.get_abstract_mesh().abstract_device
    local = jax.local_devices()
    if kind is None:
        return local[0]
    # Prefer a device of this process: a process can't compile for a single device of another process.
    same = [device for device in local if device.device_kind == kind.device_kind]
    # During tracing jax.sharding.get_mesh raises an error, and the abstract mesh has no devices.
    from jax._src.mesh import get_concrete_mesh

    mesh = get_concrete_mesh()
    return next(iter(same), None if mesh is None or mesh.empty else mesh.devices.flat[0])


@functools.cache
def _error(example: Example, dtype: str, device: Any) -> str | None:
    # Compile in a new thread, which has no active mesh and no trace, whatever the caller's context is.
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(_compile, example, dtype, device).exception()
    return None if error is None else next((line for line in str(error).splitlines() if line), type(error).__name__)


def _compile(example: Example, dtype: str, device: Any) -> None:
    mesh = Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):  # so that `partitioning.platform` returns the platform of the device
        function, shapes = example(jnp.dtype(dtype))
        arrays = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole) for shape in shapes]
        # Nothing runs: the arguments are shapes.
        jax.jit(function).lower(*arrays).compile()
