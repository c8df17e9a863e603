"""Attention kernels under one contract, and the choice among them."""

from __future__ import annotations

import jax

from transformer.config import ConfigError, nearest
from transformer.kernels.chunked import chunked_attention
from transformer.kernels.contract import BiasFunction, Kernel, Request
from transformer.kernels.reference import reference_attention

__all__ = ["KERNELS", "BiasFunction", "Kernel", "Request", "choose", "chunked_attention", "reference_attention"]

KERNELS: dict[str, Kernel] = {
    "reference": Kernel(run=reference_attention, refusal=lambda request: None),
    "chunked": Kernel(
        run=chunked_attention,
        refusal=lambda request: "it never holds all weights at once" if request.return_weights else None,
    ),
}
"""kernels by name"""

WHOLE_SCORES = {"cpu": 224 * 224, "gpu": 1024 * 1024, "tpu": 1024 * 1024}
"""auto: up to so many scores a head, holding all of them is faster than looping over blocks (docs/benchmarks.md:
measured on CPU; elsewhere a guess on the side of few, large operations)"""


def choose(implementation: str, request: Request) -> str:
    """The name of the kernel that serves a request: the one asked for, or for "auto" the fastest that can.

    Raises:
        ConfigError: an unknown name, or a kernel that can't do what is asked; the message names those that can.
    """
    if implementation == "auto":
        if not isinstance(request.num_queries, int) or not isinstance(request.num_keys, int):
            return "reference"  # a length left open (jax.export) can't be cut into blocks
        scores = request.num_queries * request.num_keys
        small = scores <= WHOLE_SCORES.get(jax.default_backend(), 0) or request.num_queries == 1
        return "reference" if small or request.return_weights else "chunked"
    if implementation not in KERNELS:
        names = ["auto", *KERNELS]
        raise ConfigError(
            f"attention kernel must be one of {', '.join(names)}, got {implementation!r}."
            f"{nearest(implementation, names)}"
        )
    reason = KERNELS[implementation].refusal(request)
    if reason is not None:
        able = [name for name, kernel in KERNELS.items() if kernel.refusal(request) is None]
        raise ConfigError(
            f"the {implementation} attention kernel can't return attention weights: {reason}. "
            f"Use {' or '.join(able)}, or auto."
        )
    return implementation
