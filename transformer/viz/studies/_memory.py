"""Temporary memory of each attention kernel by sequence length, as reported by the compiler; nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn.kernels import KERNELS

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
"""sequence lengths in tokens"""
HEADS, HEAD_DIM = 4, 64
"""number of heads, and size of each head"""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Temporary memory of one kernel at one length."""

    kernel: str
    """name of the kernel in `KERNELS`"""
    length: int
    """sequence length in tokens"""
    temporary_bytes: int
    """bytes of temporaries in the forward and backward pass of one sequence"""
    growth: float | None
    """ratio to the value at the previous length; None for the first length"""


def memory_study(lengths: Sequence[int] = LENGTHS) -> tuple[MemoryRow, ...]:
    """Return one row per kernel and length, for causal attention of one sequence with 4 heads of size 64 in float32.

    The full attention matrix takes O(n^2) memory. Blockwise attention with a running softmax takes O(n) (Dao et al.
    2022, arXiv 2205.14135).
    """
    rows = []
    for kernel in KERNELS:
        before = None
        for length in lengths:
            size = temporary_bytes(kernel, length)
            growth = None if before is None else size / before
            rows.append(MemoryRow(kernel=kernel, length=length, temporary_bytes=size, growth=growth))
            before = size
    return tuple(rows)


def temporary_bytes(kernel: str, length: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> int:
    """Return the temporary bytes of causal attention, forward and backward pass, without inputs and gradients."""

    def attend(query, key, value):
        return dot_product_attention(query, key, value, mask=Mask.causal(), implementation=kernel)

    shape = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
    # Compile for CPU on every machine, so that the figures are comparable. A compiler for GPU would also run
    # matrix multiplications to select their algorithms.
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = forward_and_backward(attend).lower(shape, shape, shape).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def forward_and_backward(attend: Callable[..., jax.Array]) -> Callable:
    """Return a jitted function for the gradients of sum(attend(query, key, value)) with respect to all three."""
    return jax.jit(jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
