"""Attention kernels under one contract, and the choice among them."""

from __future__ import annotations

from transformer.config import ConfigError, nearest
from transformer.kernels.chunked import chunked_attention
from transformer.kernels.contract import BiasFunction, Kernel, Request
from transformer.kernels.reference import reference_attention
from transformer.kernels.ring import gathered_attention, gathered_refusal, ring_attention, ring_refusal
from transformer.kernels.splash import splash_attention, splash_refusal
from transformer.partitioning import platform

__all__ = [
    "ALL_KERNELS",
    "KERNELS",
    "SPLIT_KERNELS",
    "TPU_KERNELS",
    "BiasFunction",
    "Kernel",
    "Request",
    "choose",
    "chunked_attention",
    "gathered_attention",
    "reference_attention",
    "ring_attention",
    "splash_attention",
]

KERNELS: dict[str, Kernel] = {
    "reference": Kernel(run=reference_attention, refusal=lambda request: None),
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

SPLIT_KERNELS: dict[str, Kernel] = {
    "ring": Kernel(run=ring_attention, refusal=ring_refusal, split_keys=True),
    "gathered": Kernel(run=gathered_attention, refusal=gathered_refusal),
}
"""kernels by name, for queries whose length a mesh splits, and nowhere else"""

ALL_KERNELS: dict[str, Kernel] = KERNELS | TPU_KERNELS | SPLIT_KERNELS
"""every kernel by name"""

WHOLE_SCORES = {"cpu": 224 * 224, "gpu": 1024 * 1024, "tpu": 1024 * 1024}
"""auto: up to so many scores a head, holding all of them is faster than looping over blocks (docs/benchmarks.md:
measured on CPU; elsewhere a guess on the side of few, large operations). Counted is what one device holds."""


def choose(implementation: str, request: Request) -> str:
    """The name of the kernel that serves a request: the one asked for, or for "auto" the fastest that can.

    Raises:
        ConfigError: an unknown name, or a kernel that can't do what is asked; the message names those that can.
    """
    if implementation == "auto":
        if not isinstance(request.num_queries, int) or not isinstance(request.num_keys, int):
            return "reference"  # a length left open (jax.export) can't be cut into blocks
        if _serves("ring", request):
            return "ring"
        scores = request.num_queries * request.num_keys // request.length_ways
        if scores <= WHOLE_SCORES.get(platform(), 0) or request.num_queries == 1 or request.return_weights:
            return "reference"
        return next(name for name in ("splash", "gathered", "chunked") if _serves(name, request))
    if implementation not in ALL_KERNELS:
        names = ["auto", *(ALL_KERNELS if request.length_ways > 1 else KERNELS | TPU_KERNELS)]
        raise ConfigError(
            f"attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    refused = ALL_KERNELS[implementation].refusal(request)
    if refused is not None:
        able = [name for name in ALL_KERNELS if _serves(name, request)]
        raise ConfigError(f"the {implementation} attention kernel can't {refused}. Use {' or '.join(able)}, or auto.")
    return implementation


def _serves(name: str, request: Request) -> bool:
    """Whether a kernel can do what is asked, and is made for what is computed on."""
    return ALL_KERNELS[name].refusal(request) is None and (name not in TPU_KERNELS or platform() == "tpu")
