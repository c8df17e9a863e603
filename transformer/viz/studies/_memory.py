"""What attention needs beside its inputs and outputs, over length and kernel, asked of the compiler: nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.nn._attention import dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn.kernels import KERNELS

LENGTHS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
"""tokens of the one sequence"""
HEADS, HEAD_DIM = 4, 64
"""heads, and entries of each"""


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Temporary memory of one kernel at one length."""

    kernel: str
    """its name in `KERNELS`"""
    length: int
    """tokens"""
    temporary_bytes: int
    """forward and backward pass, one sequence"""
    growth: float | None
    """times that of the length before; None: the first"""


def memory_study(lengths: Sequence[int] = LENGTHS) -> tuple[MemoryRow, ...]:
    """A row for each kernel and length: causal attention of one sequence, 4 heads of 64, float32, as compiled for CPU.

    Whole scores take O(n^2); blocks with a running softmax O(n) (Dao et al. 2022, arXiv 2205.14135).
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
    """Bytes that forward and backward causal attention of one sequence holds beside its inputs and gradients."""

    def attend(query, key, value):
        return dot_product_attention(query, key, value, mask=Mask.causal(), implementation=kernel)

    shape = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
    # For CPU everywhere: the same figures on any machine, and a compiler for GPU would try out its products there.
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = forward_and_backward(attend).lower(shape, shape, shape).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def forward_and_backward(attend: Callable[..., jax.Array]) -> Callable:
    """The jitted gradients of sum(attend(query, key, value)) by all three."""
    return jax.jit(jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
