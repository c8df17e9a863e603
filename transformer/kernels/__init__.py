"""Attention kernels under one contract, and the choice among them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable

import jax

from transformer.config import ConfigError, Execution, nearest
from transformer.jax_compat import inside_pmap
from transformer.kernels.chunked import chunked_attention
from transformer.kernels.contract import BiasFunction, Kernel, Request
from transformer.kernels.cudnn import cudnn_attention, cudnn_compiler_refusal, cudnn_refusal
from transformer.kernels.reference import reference_attention
from transformer.kernels.ring import gathered_attention, gathered_refusal, ring_attention, ring_refusal
from transformer.kernels.sliced import sliced_attention, sliced_refusal
from transformer.kernels.splash import splash_attention, splash_compiler_refusal, splash_refusal
from transformer.partitioning import has_mesh, platform

__all__ = [
    "ALL_KERNELS",
    "GPU_KERNELS",
    "KERNELS",
    "SPLIT_KERNELS",
    "TPU_KERNELS",
    "BiasFunction",
    "Kernel",
    "Request",
    "anywhere",
    "choose",
    "chunked_attention",
    "cudnn_attention",
    "gathered_attention",
    "reference_attention",
    "ring_attention",
    "sliced_attention",
    "splash_attention",
]

KERNELS: dict[str, Kernel] = {
    "reference": Kernel(run=reference_attention, refusal=lambda request: None),
    "sliced": Kernel(run=sliced_attention, refusal=sliced_refusal),
    "chunked": Kernel(
        run=chunked_attention,
        refusal=lambda request: (
            "return attention weights: it never holds all weights at once" if request.return_weights else None
        ),
    ),
}
"""kernels by name, for keys and values that are whole along their length, on any device"""

TPU_KERNELS: dict[str, Kernel] = {"splash": Kernel(run=splash_attention, refusal=splash_refusal)}
"""kernels by name, for the same on a TPU; a CPU interprets them, for tests"""

GPU_KERNELS: dict[str, Kernel] = {"cudnn": Kernel(run=cudnn_attention, refusal=cudnn_refusal)}
"""kernels by name, for the same on an NVIDIA GPU"""

SPLIT_KERNELS: dict[str, Kernel] = {
    "ring": Kernel(run=ring_attention, refusal=ring_refusal, split_keys=True),
    "gathered": Kernel(run=gathered_attention, refusal=gathered_refusal),
}
"""kernels by name, for queries whose length a mesh splits, and nowhere else"""

ALL_KERNELS: dict[str, Kernel] = KERNELS | TPU_KERNELS | GPU_KERNELS | SPLIT_KERNELS
"""every kernel by name"""

COMPILER_REFUSALS: dict[str, Callable[[Request], str | None]] = {
    "splash": splash_compiler_refusal,
    "cudnn": cudnn_compiler_refusal,
}
"""for kernels that depend on versions of other software: why they don't compile for the devices in use, or None"""

FUSED_FROM = 256 * 256
"""auto: from this many scores per head, cudnn is chosen on a GPU (a guess: docs/benchmarks.md)"""

SPLASH_FROM = 512 * 512
"""auto: from this many scores per head, splash is chosen on a TPU (not measured on hardware; by the estimates of the
compiler for v5e, a GPT-2 124M training step takes 152 ms with it and 205 ms without at 512 x 512)"""

WHOLE_SCORES = {"cpu": 96 * 96, "gpu": 1024 * 1024, "tpu": 1024 * 1024}
"""auto: without such a kernel, up to this many scores per head, the full attention matrix is faster than a loop over
blocks (docs/benchmarks.md: measured on CPU; elsewhere a guess in favor of few, large operations). Scores are counted
per device."""

SLICED_SCORES = {"cpu": 1024 * 1024}
"""auto: beyond these, up to so many scores are computed in slices (docs/benchmarks.md)"""


def choose(implementation: str, request: Request) -> str:
    """The name of the kernel that serves a request: the given one, or for "auto" the fastest that can serve it.

    "auto" logs its choice once for each size (`logging`, "transformer.kernels", level INFO). If the compiler at hand
    rejects the kernel it would choose, it warns once and chooses another.

    Raises:
        ConfigError: an unknown name, or a kernel that can't do what is asked or does not compile here; the message
            names the kernels that can.
    """
    if implementation == "auto":
        name = _fastest(request)
        _tell(f"{request.num_queries} x {request.num_keys} scores a head on {platform()}: auto takes {name}")
        return name
    if implementation not in ALL_KERNELS:
        names = ["auto", *(ALL_KERNELS if request.length_ways > 1 else KERNELS | TPU_KERNELS | GPU_KERNELS)]
        raise ConfigError(
            f"attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    refused = ALL_KERNELS[implementation].refusal(request) or _compiler_refusal(implementation, request)
    if refused is not None:
        able = [name for name in ALL_KERNELS if name != implementation and _serves(name, request)]
        raise ConfigError(f"the {implementation} attention kernel can't {refused}. Use {' or '.join(able)}, or auto.")
    return implementation


def anywhere(execution: Execution) -> Execution:
    """The execution for any device, with a cache and without a mesh: "auto" in place of a kernel that was made for less
    (splash, cudnn, ring, gathered).
    """
    if execution.attention not in {**TPU_KERNELS, **GPU_KERNELS, **SPLIT_KERNELS}:
        return execution
    return dataclasses.replace(execution, attention="auto")


def _fastest(request: Request) -> str:
    if not isinstance(request.num_queries, int) or not isinstance(request.num_keys, int):
        return "reference"  # a length left open (jax.export) can't be cut into blocks
    if _serves("ring", request):
        return "ring"
    scores = request.num_queries * request.num_keys // request.length_ways
    for name, least in (("cudnn", FUSED_FROM), ("splash", SPLASH_FROM)):
        if scores >= least and request.num_queries > 1 and _compiles(name, request) and _has_its_devices(name):
            return name
    if scores <= WHOLE_SCORES.get(platform(), 0) or request.num_queries == 1 or request.return_weights:
        return "reference"
    if scores <= SLICED_SCORES.get(platform(), 0) and _serves("sliced", request):
        return "sliced"
    return next(name for name in ("gathered", "chunked") if _serves(name, request))


def _compiles(name: str, request: Request) -> bool:
    """Whether a kernel serves a request and compiles here; warns once if only the compiler is in the way."""
    if not _serves(name, request):
        return False
    refused = _compiler_refusal(name, request)
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


def _compiler_refusal(name: str, request: Request) -> str | None:
    return COMPILER_REFUSALS[name](request) if name in COMPILER_REFUSALS else None


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


@functools.cache
def _tell(choice: str) -> None:
    logging.getLogger(__name__).info(choice)


def _serves(name: str, request: Request) -> bool:
    """Whether a kernel can do what is asked, and is made for the platform in use, whether or not it compiles here."""
    return ALL_KERNELS[name].refusal(request) is None and (name not in TPU_KERNELS or platform() == "tpu")
