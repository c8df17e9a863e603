"""Kernels for NVIDIA GPUs that compute one decoding step of few rows with few launches, written in Pallas (Triton).

A decoding step reads every parameter once for a handful of rows, so it takes as long as reading them, plus about two
microseconds for each kernel that is launched. XLA multiplies a single row by a small matrix with sums over columns, at
a seventh of the memory bandwidth, and computes norms and attention in several kernels. On other devices, for more rows,
over a mesh and in float32 the same functions are computed by XLA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, DType, Float
from transformer.nn._jax_compat import inside_pmap
from transformer.nn._partitioning import explicit_spec, has_mesh, platform
from transformer.nn._probing import compiler_error

MAX_ROWS = 16
"""maximum number of rows: the height of the tiles that tensor cores multiply"""

BLOCK = 64
"""rows and columns of the tiles of a matrix; of the sizes tried on an H200, the fastest or within 3 % of it"""

LEAST_PROGRAMS = 256
"""number of programs (thread blocks) up to which the inputs of a product are split: two for each multiprocessor"""

SPLIT_INPUTS = 128
"""minimum number of inputs that a program sums over"""

INTERPRET = False
"""run the kernels in Pallas' interpreter, on any device; for tests"""


def apply_to(x: Array, rows: Any) -> bool:
    """Return whether the kernels of this file compute a function of `rows` rows with the dtype of the array `x`."""
    # A symbolic number of rows (jax.export) is no int.
    if not isinstance(rows, int) or rows > MAX_ROWS or x.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if INTERPRET or platform() != "gpu":
        return INTERPRET
    return on_one_device() and explicit_spec(x) is None and compiler_error(_example, x.dtype, "gpu") is None


def on_one_device() -> bool:
    """Return whether the computation runs on one device: the compiler can't partition a kernel."""
    if has_mesh():
        return math.prod(jax.sharding.get_abstract_mesh().shape.values()) == 1
    return inside_pmap() or jax.device_count() == 1


def _example(dtype: DType) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    shapes = [(1, 128), (128, 128), (128,)]

    def run(x, kernel, scale):
        (y,) = products(rms_norm(x, scale, 1e-6, 0.0, dtype), (kernel,))
        return y

    return run, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@jax.custom_jvp
def products(x: Float[Array, "R Di"], kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Compute x @ kernel, (R, Do), for each of several kernels (Di, Do), in one launch; sums are in float32.

    Do may differ. Kernels of int8 are converted to the dtype of x on the chip, so that half as many bytes are read.
    """
    outputs = [kernel.shape[1] for kernel in kernels]
    blocks = [-(-size // BLOCK) for size in outputs]
    splits = _splits(x.shape[1], sum(blocks))

    def body(x_ref, *refs):
        block, split = (pallas().program_id(axis) for axis in (0, 1))
        kernel_refs, out_refs, first = refs[: len(kernels)], refs[len(kernels) :], 0
        for kernel_ref, out_ref, count in zip(kernel_refs, out_refs, blocks, strict=True):
            # Each program computes one block of columns of one of the matrices.
            run = functools.partial(_block, x_ref, (kernel_ref,), out_ref, block - first, split, splits, _only)
            pallas().when((block >= first) & (block < first + count))(run)
            first += count

    dtype = x.dtype if splits == 1 else jnp.float32
    shapes = [jax.ShapeDtypeStruct((splits, x.shape[0], size), dtype) for size in outputs]
    parts = launch(body, (sum(blocks), splits), shapes, stages=5)(x, *kernels)
    # XLA adds the parts in the kernel that uses the result, such as the addition of the residual.
    return tuple(part.sum(0).astype(x.dtype) if splits > 1 else part[0] for part in parts)


@products.defjvp
def _products_jvp(primals, tangents):
    (x, kernels), (dx, dkernels) = primals, tangents

    def slope(kernel, d):
        by_x = dx @ kernel.astype(x.dtype)
        return by_x if d.dtype == jax.dtypes.float0 else (by_x + x @ d).astype(x.dtype)  # integers have no derivative

    return products(x, kernels), tuple(map(slope, kernels, dkernels))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def gated_product(
    x: Float[Array, "R D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], combine: Callable[[Array, Array], Array]
) -> Float[Array, "R F"]:
    """Compute combine(x @ gate, x @ up), such as silu(x @ gate) * (x @ up), in one launch, rounded once."""
    size = up.shape[1]

    def body(x_ref, gate_ref, up_ref, out_ref):
        _block(x_ref, (gate_ref, up_ref), out_ref, pallas().program_id(0), pallas().program_id(1), 1, combine)

    shape = jax.ShapeDtypeStruct((1, x.shape[0], size), x.dtype)
    return launch(body, (-(-size // BLOCK), 1), shape, stages=5)(x, gate, up)[0]


@gated_product.defjvp
def _gated_product_jvp(combine, primals, tangents):
    def reference(x, gate, up):
        return combine(x @ gate, x @ up).astype(x.dtype)

    _, slope = jax.jvp(reference, primals, tangents)
    return gated_product(*primals, combine), slope


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def rms_norm(
    x: Float[Array, "R D"], scale: Float[Array, " D"], epsilon: float, shift: float, dtype: DType
) -> Float[Array, "R D"]:
    """Compute (shift + scale) x / sqrt(mean(x^2) + epsilon) of each row in one launch, in float32."""
    width = x.shape[1]
    padded = tile_size(width)

    def body(x_ref, scale_ref, out_ref):
        pl, tl = pallas(), triton()
        row = pl.program_id(0)
        columns = past_end(row, padded)
        inside = jnp.arange(padded) < width
        values = tl.load(x_ref.at[row, columns], mask=inside, other=0.0).astype(jnp.float32)
        factor = shift + tl.load(scale_ref.at[columns], mask=inside, other=0.0).astype(jnp.float32)
        # x / RMS(x), RMS = sqrt(mean(x^2)); the zeros past the end add nothing to the sum.
        scaled = values * jax.lax.rsqrt((values * values).sum() / width + epsilon) * factor
        tl.store(out_ref.at[row, columns], scaled.astype(out_ref.dtype), mask=inside)

    shape = jax.ShapeDtypeStruct(x.shape, dtype)
    return launch(body, (x.shape[0],), shape, warps=8, stages=1)(x, scale)


@rms_norm.defjvp
def _rms_norm_jvp(epsilon, shift, dtype, primals, tangents):
    def reference(x, scale):
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
        return (scaled * (shift + scale.astype(jnp.float32))[None]).astype(dtype)

    _, slope = jax.jvp(reference, primals, tangents)
    return rms_norm(*primals, epsilon, shift, dtype), slope


def _splits(inputs: int, blocks: int) -> int:
    """Return into how many parts the inputs of a product are split, for `blocks` blocks of columns."""
    # A program for each block of columns would leave most multiprocessors without work for a narrow matrix.
    splits = 1
    while splits * blocks < LEAST_PROGRAMS and inputs % (2 * splits * BLOCK) == 0 and inputs // splits > SPLIT_INPUTS:
        splits *= 2
    return min(splits, 16)


def _only(product: Array) -> Array:
    return product


def _block(
    x_ref: Any,
    kernel_refs: Sequence[Any],
    out_ref: Any,
    block: Array,
    split: Array,
    splits: int,
    combine: Callable[..., Array],
) -> None:
    """Write a block of columns of combine(x @ kernel, ...); with several splits, of part `split` of the sum."""
    pl, tl = pallas(), triton()
    rows, inputs = x_ref.shape
    columns = kernel_refs[0].shape[1]
    part = inputs // splits if splits > 1 else inputs
    start = block * BLOCK
    row, column, index = jnp.arange(MAX_ROWS)[:, None], start + jnp.arange(BLOCK), jnp.arange(BLOCK)

    def add(step, sums):
        # Tiles (16, 64) of x and (64, 64) of a matrix; rows, inputs and columns past the end are zeros.
        at = split * part + step * BLOCK
        inside = (at + index) < inputs
        place = x_ref.at[past_end(split, MAX_ROWS), pl.ds(at, BLOCK)]
        tile = tl.load(place, mask=(row < rows) & inside[None, :], other=0.0)
        return tuple(total + dot(tile, weights(ref, at, inside)) for total, ref in zip(sums, kernel_refs, strict=True))

    def weights(ref, at, inside):
        place = ref.at[pl.ds(at, BLOCK), pl.ds(start, BLOCK)]
        if inputs % BLOCK == 0 and columns % BLOCK == 0:  # loads without a mask are faster
            return tl.load(place).astype(x_ref.dtype)
        mask = inside[:, None] & (column < columns)[None, :]
        return tl.load(place, mask=mask, other=0).astype(x_ref.dtype)

    zeros = (jnp.zeros((MAX_ROWS, BLOCK), jnp.float32),) * len(kernel_refs)
    out = combine(*jax.lax.fori_loop(0, -(-part // BLOCK), add, zeros))
    place = out_ref.at[split, past_end(split, MAX_ROWS), pl.ds(start, BLOCK)]
    tl.store(place, out.astype(out_ref.dtype), mask=(row < rows) & (column < columns)[None, :])


def dot(x: Array, y: Array, axes: tuple[int, int] = (1, 0)) -> Array:
    """Multiply two tiles of a kernel, summed over the given axis of each, in float32."""
    return jax.lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)


def tile_size(size: int) -> int:
    """Return the size of a tile for `size` elements: a power of two, at least 16, as Triton's products need."""
    return max(16, 1 << (size - 1).bit_length())


def past_end(program: Array, size: int) -> Any:
    """Return the slice of the first `size` elements of an axis that may be shorter; `program` is any program id."""
    # Pallas rejects a slice from a constant past the end of an axis, also for loads and stores with a mask.
    return pallas().ds(program * 0, size)


def launch(body: Callable[..., None], grid: tuple[int, ...], shapes: Any, *, warps: int = 4, stages: int) -> Any:
    """Return the function that runs `body` once for each index of the grid."""
    options = {} if INTERPRET else {"compiler_params": triton().CompilerParams(num_warps=warps, num_stages=stages)}
    return pallas().pallas_call(body, grid=grid, out_shape=shapes, interpret=INTERPRET, **options)


def pallas() -> Any:
    from jax.experimental import pallas  # imported late: it takes a third of a second, and few programs need it

    return pallas


def triton() -> Any:
    from jax.experimental.pallas import triton

    return triton
