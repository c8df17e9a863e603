"""Grouped matrix multiplication: consecutive groups of rows, each multiplied by the kernel of its own expert.

Shapes: R rows, sorted by expert; E experts; `group_sizes` (E,) is the number of rows of each expert. Rows after the
last group belong to no expert. Their results are undefined and must not be read, and they give no gradient to a kernel.
`nn._moe` has the third implementation, `blockwise`, a loop that runs on any device.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, DType, Float, Int
from transformer.nn._jax_compat import inside_pmap
from transformer.nn._partitioning import device_kind, has_mesh, platform, unmapped_reason
from transformer.nn._probing import tpu_compiler_refusal, tpu_dtype_refusal

LANES = 128
"""number of lanes of a TPU vector register; tiles are multiples of it"""

ROWS = 256
"""Maximum number of rows per tile. A tile that contains the end of a group is computed once for each of its groups, so
E - 1 tiles are computed a second time: large tiles waste FLOPs, small ones bandwidth, as each reads kernels."""

WIDTH = 1024
"""maximum number of input and of output features per tile; half of it on devices with `SMALL_MEMORY`. The tiles then
fit in the fast memory (VMEM) of v4, v5e, v5p and v6e (checked with the TPU compiler)"""

SMALL_MEMORY = ("TPU v2", "TPU v3", "TPU v4")
"""devices with 16 MiB of VMEM per core"""

WHOLE_INPUT = 4096
"""Up to this number of input features, one tile contains all of them. Consecutive tiles of rows then use the same part
of the kernel, which is read once per expert instead of once per tile of rows."""


class Call(NamedTuple):
    """Properties of a call that decide which implementations support it."""

    rows: int  # number of rows
    num_experts: int
    dtype: DType  # dtype of the rows and the kernels
    quantized: bool  # whether the factors of a multiplication are rounded to 8 bits


def choose_experts(implementation: str, call: Call) -> str:
    """Return the name of the implementation for a call: the given one, or for "auto" the fastest one that supports it.

    "auto" is `ragged` on a TPU, where the compiler has a kernel for it, and `blockwise` elsewhere. It logs its choice
    once per size (logger "transformer.nn.grouped", level INFO). Raises ConfigError, with those that support the call.
    """
    if implementation == "auto":
        refused = _UNSUPPORTED["ragged"](call) or _device_refusal() if platform() == "tpu" else None
        name = "ragged" if platform() == "tpu" and refused is None else "blockwise"
        reason = "" if refused is None else f", because ragged can't {refused}"
        _log_once(f"{call.rows} rows for {call.num_experts} experts on {platform()}: auto selects {name}{reason}")
        return name
    if (refused := _UNSUPPORTED[implementation](call)) is not None:
        able = [name for name in _UNSUPPORTED if name != implementation and _UNSUPPORTED[name](call) is None]
        raise ConfigError(
            f"the {implementation} implementation of experts can't {refused}. Use {' or '.join(able)}, or auto "
            f"(execution.experts)."
        )
    return implementation


@functools.cache
def _log_once(choice: str) -> None:
    logging.getLogger("transformer.nn.grouped").info(choice)


def _device_refusal() -> str | None:
    """Return why no kernel can run without a mesh: only the compiler knows how arrays are sharded. None if one can."""
    if has_mesh() or inside_pmap() or jax.device_count() == 1:
        return None
    return (
        f"know how arrays are sharded over {jax.device_count()} devices without an active mesh. Call inside "
        "`with jax.set_mesh(mesh):`"
    )


def _ragged_unsupported(call: Call) -> str | None:
    if call.quantized:
        return "quantize the factors of a multiplication"
    return _kernel_unsupported(call) if platform() == "tpu" else None


def _megablox_unsupported(call: Call) -> str | None:
    if call.quantized:
        return "quantize the factors of a multiplication"
    if platform() not in ("tpu", "cpu"):
        return f"run on {platform()}: it is a kernel for TPUs, with interpret mode on CPU for tests"
    if (refused := _kernel_unsupported(call)) is not None:
        return refused
    return tpu_compiler_refusal(_example, call.dtype)


def _kernel_unsupported(call: Call) -> str | None:
    return unmapped_reason() or tpu_dtype_refusal(call.dtype)


_UNSUPPORTED: dict[str, Callable[[Call], str | None]] = {
    "blockwise": lambda call: None,
    "ragged": _ragged_unsupported,
    "megablox": _megablox_unsupported,
}
"""for each implementation: returns why it does not support a call, or None"""


def _example(dtype: DType) -> tuple[Callable[..., Array], list[jax.ShapeDtypeStruct]]:
    """Return a small program with the forward and the backward pass of `megablox_linear`, and its arguments."""

    def loss(x, kernel, sizes):
        return megablox_linear(x, kernel, sizes, LANES).astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((2 * LANES, LANES), (2, LANES, LANES))]
    return jax.grad(loss, argnums=(0, 1)), [*shapes, jax.ShapeDtypeStruct((2,), jnp.int32)]


def tile_rows(rows: int, num_experts: int) -> int:
    """Return the number of rows per tile: `ROWS`, or less if E - 1 repeated tiles were over 1/8 of all rows."""
    return ROWS if 8 * num_experts * ROWS <= rows else LANES


def tiling(tile: int, inner: int, out: int, *, whole_input: bool = True) -> tuple[int, int, int]:
    """Return rows, input features and output features of a tile, for rows (R, inner) times kernels (E, inner, out)."""
    width = WIDTH // 2 if device_kind() in SMALL_MEMORY else WIDTH
    if whole_input and width < inner <= WHOLE_INPUT:
        return tile, inner, min(width // 2, out)
    return tile, min(width, inner), min(width, out)


def _dims(lhs: int, rhs: int, ragged: int, groups: list[int]) -> jax.lax.RaggedDotDimensionNumbers:
    """Return the axes of a ragged multiplication that sums over axis `lhs` of one factor and `rhs` of the other."""
    # y = x W has axis 0 of W as the axis of groups. dW = x^T dy has no such factor: it sums over the ragged axis within
    # each group, (R, in), (R, out) -> (E, in, out).
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((lhs,), (rhs,)), ((), ())), lhs_ragged_dimensions=[ragged], rhs_group_dimensions=groups
    )


def _tiled(tile: int | None, inner: int, out: int, *, whole_input: bool = True) -> AbstractContextManager[None]:
    """Return a context in which the TPU compiler uses our tiles for `ragged_dot`; None for `tile`: its own tiles."""
    # Its own tiles have 128 rows and as many input features as fit. Without room for all input features this reads the
    # kernels and the rows far too often: by the bandwidth of the HBM, the backward pass of a Mixtral layer would take
    # 2.6 times as long (calculated, not measured).
    if tile is None or inner % LANES or out % LANES:
        return nullcontext()
    # Imported here because only TPU programs use it.
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(ragged_dot_tiling=",".join(map(str, tiling(tile, inner, out, whole_input=whole_input))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ragged_linear(
    x: Float[Array, "R Di"], kernel: Float[Array, "E Di Do"], group_sizes: Int[Array, "E"], tile: int | None = None
) -> Float[Array, "R Do"]:
    """Multiply each group of rows of x (R, in) by the kernel (E, in, out) of its expert, with `jax.lax.ragged_dot`.

    The TPU compiler has a kernel for it, with `tile` rows per tile (None: the compiler chooses); on other platforms it
    multiplies all rows by all kernels.
    """
    with _tiled(tile, *kernel.shape[1:]):
        return jax.lax.ragged_dot_general(x, kernel, group_sizes, _dims(1, 1, 0, [0]))  # y = x W


def _ragged_backward(tile, saved, dy):
    # The derivatives that JAX would find. They are written out because each multiplication has its own tiles.
    x, kernel, group_sizes = saved
    inner, out = kernel.shape[1:]
    with _tiled(tile, out, inner):
        dx = jax.lax.ragged_dot_general(dy, kernel, group_sizes, _dims(1, 2, 0, [0]))  # dy W^T
    # dW = x^T dy sums over the rows of a group. A tile of dW holds sums in float32, so it never has all input features.
    with _tiled(tile, inner, out, whole_input=False):
        dkernel = jax.lax.ragged_dot_general(x, dy, group_sizes, _dims(0, 0, 0, []))
    return dx, dkernel.astype(kernel.dtype), None


ragged_linear.defvjp(lambda *given: (ragged_linear(*given), given[:3]), _ragged_backward)  # saves the arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def megablox_linear(
    x: Float[Array, "R Di"], kernel: Float[Array, "E Di Do"], group_sizes: Int[Array, "E"], tile: int
) -> Float[Array, "R Do"]:
    """Compute `ragged_linear` with megablox, the Pallas kernel of JAX for TPUs (Gale et al. 2022, arXiv 2211.15841).

    R must be a multiple of `tile`. On other platforms it runs in interpret mode: slowly, for tests.
    """
    gmm, _ = _megablox()
    return gmm(x, kernel, group_sizes, x.dtype, tiling(tile, *kernel.shape[1:]))


def _megablox() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the library's kernels for rows times kernels (`gmm`) and for the sums over rows (`tgmm`)."""
    # Imported here because the import of Pallas is slow.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    interpret = platform() != "tpu"
    return functools.partial(gmm, interpret=interpret), functools.partial(tgmm, interpret=interpret)


def _megablox_backward(tile, saved, dy):
    # Not the library's own derivative, which has the same tiles for all three multiplications.
    x, kernel, group_sizes = saved
    inner, out = kernel.shape[1:]
    gmm, tgmm = _megablox()
    dx = gmm(dy, kernel, group_sizes, x.dtype, tiling(tile, out, inner), transpose_rhs=True)
    tiles = tiling(tile, inner, out, whole_input=False)
    # (in, R), (R, out) -> (E, in, out)
    dkernel = tgmm(x.T, dy, group_sizes, kernel.dtype, tiles)
    return dx, dkernel, None


megablox_linear.defvjp(lambda *given: (megablox_linear(*given), given[:3]), _megablox_backward)


GROUPED: dict[str, Callable[..., Array]] = {"ragged": ragged_linear, "megablox": megablox_linear}
"""implementations for rows without padding between the groups, by name"""


def padded_rows(rows: int, tile: int | None) -> int:
    """Return `rows` rounded up to whole tiles; None: no tiles."""
    return rows if tile is None else tile * math.ceil(rows / tile)


@jax.custom_vjp
def dispatch(x: Float[Array, "N D"], copy_of_row: Int[Array, "R"], row_of_copy: Int[Array, "M"]) -> Float[Array, "R D"]:
    """Set row r to the token of copy `copy_of_row[r]`; token n has the copies k n, ..., k n + k - 1, k = M / N."""
    # The derivative reads the rows of the copies (out of range: none): scattering is much slower on accelerators.
    # Copy c is a copy of token c // k, with k = M / N.
    return x[copy_of_row // (row_of_copy.size // x.shape[0])]


def _dispatch_backward(saved, dy):
    tokens, row_of_copy = saved
    each = dy.at[row_of_copy].get(mode="fill", fill_value=0)  # (M, D)
    # (M, D) -> (N, k, D) -> (N, D): the derivative of a token is the sum over its k copies.
    dx = each.reshape(tokens, -1, dy.shape[1]).sum(1, dtype=jnp.float32)
    return dx.astype(dy.dtype), None, None


dispatch.defvjp(lambda x, copies, rows: (dispatch(x, copies, rows), (x.shape[0], rows)), _dispatch_backward)


@jax.custom_vjp
def collect(y: Float[Array, "R D"], copy_of_row: Int[Array, "R"], row_of_copy: Int[Array, "M"]) -> Float[Array, "M D"]:
    """Return for each copy the row `row_of_copy`, or zeros if it is out of range.

    The derivative reads the copies of the rows; rows that are no copy get an arbitrary one, and must be in no group.
    """
    return y.at[row_of_copy].get(mode="fill", fill_value=0)


collect.defvjp(
    lambda y, copy_of_row, row_of_copy: (collect(y, copy_of_row, row_of_copy), copy_of_row),
    lambda copy_of_row, dy: (dy[copy_of_row], None, None),
)
