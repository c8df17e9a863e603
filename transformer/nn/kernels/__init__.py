"""Attention kernels under one contract, and the choice among them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable

import jax

from transformer.config._checks import ConfigError, nearest
from transformer.config._model import FORMER_KERNEL_NAMES, Execution, current_kernel_name
from transformer.nn._jax_compat import inside_pmap
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.kernels import _cudnn as cudnn
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels._blockwise import blockwise_attention
from transformer.nn.kernels._contract import OPTIONS, AttentionShapes, AttentionSpec, BiasFunction, Kernel, Option
from transformer.nn.kernels._cudnn import cudnn_attention, cudnn_compiler_refusal, cudnn_limits
from transformer.nn.kernels._query_chunked import query_chunked_attention, query_chunked_limits
from transformer.nn.kernels._reference import reference_attention
from transformer.nn.kernels._ring import (
    RING_REASONS,
    all_gather_kv_attention,
    all_gather_kv_limits,
    ring_attention,
    ring_limits,
)
from transformer.nn.kernels._splash import splash_attention, splash_compiler_refusal, splash_limits

__all__ = [
    "ALL_KERNELS",
    "FULL_MATRIX_SCORES",
    "FUSED_FROM",
    "GPU_KERNELS",
    "KERNELS",
    "OPTIONS",
    "QUERY_CHUNKED_SCORES",
    "SPLASH_FROM",
    "SPLIT_KERNELS",
    "TPU_KERNELS",
    "AttentionShapes",
    "AttentionSpec",
    "BiasFunction",
    "Kernel",
    "Option",
    "all_gather_kv_attention",
    "blockwise_attention",
    "choose",
    "cudnn_attention",
    "portable",
    "query_chunked_attention",
    "reference_attention",
    "ring_attention",
    "splash_attention",
]

_NO_WEIGHTS = {"weights": "it never holds all weights at once"}
"""why kernels in blocks do not return attention weights"""


def _by_name(*kernels: Kernel) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels}


KERNELS = _by_name(
    Kernel("reference", reference_attention),
    Kernel("query_chunked", query_chunked_attention, limits=query_chunked_limits, reasons=_NO_WEIGHTS),
    Kernel("blockwise", blockwise_attention, reasons=_NO_WEIGHTS),
)
"""kernels by name, for keys and values that are whole along their length, on any device"""

TPU_KERNELS = _by_name(Kernel("splash", splash_attention, limits=splash_limits, reasons=splash.REASONS))
"""kernels by name, for the same on a TPU; a CPU interprets them, for tests"""

GPU_KERNELS = _by_name(Kernel("cudnn", cudnn_attention, limits=cudnn_limits, reasons=cudnn.REASONS))
"""kernels by name, for the same on an NVIDIA GPU"""

SPLIT_KERNELS = _by_name(
    Kernel("ring", ring_attention, limits=ring_limits, reasons=RING_REASONS, split_keys=True),
    Kernel("all_gather_kv", all_gather_kv_attention, limits=all_gather_kv_limits, reasons=_NO_WEIGHTS),
)
"""kernels by name, for queries whose length a mesh splits, and nowhere else"""

ALL_KERNELS: dict[str, Kernel] = KERNELS | TPU_KERNELS | GPU_KERNELS | SPLIT_KERNELS
"""every kernel by name"""

_COMPILER_REFUSALS: dict[str, Callable[[AttentionSpec], str | None]] = {
    "splash": splash_compiler_refusal,
    "cudnn": cudnn_compiler_refusal,
}
"""for kernels that depend on versions of other software: why they don't compile for the devices in use, or None"""

FUSED_FROM = 256 * 256
"""auto: from this many scores per head, cudnn is chosen on a GPU (a guess: docs/benchmarks.md)"""

SPLASH_FROM = 512 * 512
"""auto: from this many scores per head, splash is chosen on a TPU (not measured on hardware; by the estimates of the
compiler for v5e, a GPT-2 124M training step takes 152 ms with it and 205 ms without at 512 x 512)"""

FULL_MATRIX_SCORES = {"cpu": 96 * 96, "gpu": 1024 * 1024, "tpu": 1024 * 1024}
"""auto: without such a kernel, up to this many scores per head, the full attention matrix is faster than a loop over
blocks (docs/benchmarks.md: measured on CPU; elsewhere a guess in favor of few, large operations). Scores are counted
per device."""

QUERY_CHUNKED_SCORES = {"cpu": 1024 * 1024}
"""auto: beyond these, up to so many scores are computed in slices (docs/benchmarks.md)"""


def choose(implementation: str, spec: AttentionSpec) -> str:
    """The name of the kernel that serves a call: the given one, or for "auto" the fastest that can serve it.

    "auto" logs its choice once for each size (`logging`, "transformer.nn.kernels", level INFO). If the compiler at hand
    rejects the kernel it would choose, it warns once and chooses another.

    Raises:
        ConfigError: an unknown name, or a kernel that can't do what is asked or does not compile here; the message
            names the kernels that can.
    """
    implementation = current_kernel_name(implementation)
    if implementation == "auto":
        name = _fastest(spec)
        _tell(f"{spec.shapes.num_queries} x {spec.shapes.num_keys} scores a head on {platform()}: auto takes {name}")
        return name
    if implementation not in ALL_KERNELS:
        names = ["auto", *(ALL_KERNELS if spec.shapes.length_shards > 1 else KERNELS | TPU_KERNELS | GPU_KERNELS)]
        raise ConfigError(
            f"attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    refused = ALL_KERNELS[implementation].unsupported(spec) or _compiler_refusal(implementation, spec)
    if refused is not None:
        able = [name for name in ALL_KERNELS if name != implementation and _serves(name, spec)]
        raise ConfigError(f"the {implementation} attention kernel can't {refused}. Use {' or '.join(able)}, or auto.")
    return implementation


def __getattr__(name: str) -> Callable:
    """The functions of kernels by their names of version 0.1, such as `chunked_attention`."""
    kernel = name.removesuffix("_attention")
    if kernel not in FORMER_KERNEL_NAMES or kernel == name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ALL_KERNELS[current_kernel_name(kernel)].run


def portable(execution: Execution) -> Execution:
    """The execution for any device, with a cache and without a mesh: "auto" in place of a kernel that was made for less
    (splash, cudnn, ring, all_gather_kv).
    """
    if execution.attention not in {**TPU_KERNELS, **GPU_KERNELS, **SPLIT_KERNELS}:
        return execution
    return dataclasses.replace(execution, attention="auto")


def _fastest(spec: AttentionSpec) -> str:
    if not isinstance(spec.shapes.num_queries, int) or not isinstance(spec.shapes.num_keys, int):
        return "reference"  # a length left open (jax.export) can't be cut into blocks
    if _serves("ring", spec):
        return "ring"
    scores = spec.shapes.num_queries * spec.shapes.num_keys // spec.shapes.length_shards
    for name, least in (("cudnn", FUSED_FROM), ("splash", SPLASH_FROM)):
        if scores >= least and spec.shapes.num_queries > 1 and _compiles(name, spec) and _has_its_devices(name):
            return name
    if scores <= FULL_MATRIX_SCORES.get(platform(), 0) or spec.shapes.num_queries == 1 or spec.return_weights:
        return "reference"
    if scores <= QUERY_CHUNKED_SCORES.get(platform(), 0) and _serves("query_chunked", spec):
        return "query_chunked"
    return next(name for name in ("all_gather_kv", "blockwise") if _serves(name, spec))


def _compiles(name: str, spec: AttentionSpec) -> bool:
    """Whether a kernel serves a call and compiles here; warns once if only the compiler is in the way."""
    if not _serves(name, spec):
        return False
    refused = _compiler_refusal(name, spec)
    if refused is not None:
        _warn(f"the {name} attention kernel can't {refused}. A slower kernel is used instead.")
    return refused is None


def _has_its_devices(name: str) -> bool:
    """False, with a warning, for splash without a mesh on several devices: arrays may be split over them, and the
    compiler, which alone knows how, can't split a Pallas kernel.
    """
    if name not in TPU_KERNELS or has_mesh() or inside_pmap() or jax.device_count() == 1:
        return True
    _warn(
        f"the {name} attention kernel must know over which of {jax.device_count()} devices arrays are split, but no "
        f"mesh is in force. A slower kernel is used instead. Call inside `with jax.set_mesh(mesh):`, of one device too."
    )
    return False


def _compiler_refusal(name: str, spec: AttentionSpec) -> str | None:
    return _COMPILER_REFUSALS[name](spec) if name in _COMPILER_REFUSALS else None


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@functools.cache
def _tell(choice: str) -> None:
    logging.getLogger(__name__).info(choice)


def _serves(name: str, spec: AttentionSpec) -> bool:
    """Whether a kernel can do what is asked, and is made for the platform in use, whether or not it compiles here."""
    return ALL_KERNELS[name].unsupported(spec) is None and (name not in TPU_KERNELS or platform() == "tpu")
