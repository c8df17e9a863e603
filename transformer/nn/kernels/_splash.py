"""Attention on TPU with splash attention, the fused Pallas kernel of JAX: scores never leave the chip.

The library kernel takes a mask that is known during tracing (causal, window), and a segment id per token: a query
attends only to keys with its own id. Lengths, segments and the padding to whole blocks are expressed as segment ids. On
other platforms the kernel runs in interpret mode: slowly, for tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, Attended, DType, Int, Key, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._partitioning import device_kind, num_shards, platform, shard_map, unmapped_reason
from transformer.nn._probing import tpu_compiler_refusal, tpu_dtype_refusal
from transformer.nn.kernels._contract import AttentionSpec, attention_example

LANES = 128
"""number of lanes of a TPU vector register; block sizes of the kernel are multiples of it"""


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """Sizes of the blocks that the three kernels compute at a time: (queries, keys), multiples of `LANES`.

    Raises:
        ConfigError: a size is not a positive multiple of `LANES`.
    """

    forward: tuple[int, int] = (512, 512)
    """of the forward kernel"""
    backward_keys: tuple[int, int] = (512, 512)
    """of the kernel that computes dK and dV"""
    backward_queries: tuple[int, int] = (512, 512)
    """of the kernel that computes dQ"""

    def __post_init__(self):
        for field in fields(self):
            for size in (sizes := getattr(self, field.name)):
                if size < 1 or size % LANES:
                    near = sorted({max(size // LANES, 1) * LANES, (max(size, 0) // LANES + 1) * LANES})
                    raise ConfigError(
                        f"block sizes of splash must be multiples of {LANES}, got {field.name}={sizes}. Use "
                        f"{' or '.join(map(str, near))} instead of {size}."
                    )

    def fitted(self, num_queries: int, num_keys: int) -> SplashBlocks:
        """Return blocks of at most these sizes for a call, such that the padded lengths are multiples of all of them.

        Lengths are padded to whole blocks of the smallest size, all alike, so that there is little padding: a length of
        640 gives 2 blocks of 384 if at most 512 are allowed.
        """

        def axis(length, which):
            least = min(getattr(self, field.name)[which] for field in fields(self))
            # `count` equal blocks, at most as large as the smallest size, cover the length. A kernel with larger blocks
            # takes k of them at once, where k divides the count.
            count = math.ceil(length / least)
            block = LANES * math.ceil(length / count / LANES)
            return lambda most: block * max(k for k in range(1, count + 1) if count % k == 0 and block * k <= most)

        return self._resized(axis(num_queries, 0), axis(num_keys, 1))

    def dividing(self, length: int) -> SplashBlocks:
        """Return the largest blocks of at most these sizes that divide a length, which is a multiple of `LANES`."""

        def largest(most):
            return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)

        return self._resized(largest, largest)

    def _resized(self, queries: Callable[[int], int], keys: Callable[[int], int]) -> SplashBlocks:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return SplashBlocks(**{name: (queries(size[0]), keys(size[1])) for name, size in sizes.items()})

    def padding_units(self) -> tuple[int, int]:
        """Return the numbers of queries and of keys whose multiples are whole blocks for all three kernels."""
        sizes = [getattr(self, field.name) for field in fields(self)]
        return math.lcm(*(size[0] for size in sizes)), math.lcm(*(size[1] for size in sizes))

    def for_library(self) -> Any:
        """Return these sizes as the `BlockSizes` of JAX's splash attention."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

        kernels = {"": self.forward, "_dkv": self.backward_keys, "_dq": self.backward_queries}
        sizes = {
            f"block_{axis}{name}": size
            for name, both in kernels.items()
            for axis, size in zip(("q", "kv"), both, strict=True)
        }
        return library.BlockSizes(**sizes)


SMALL_BLOCKS = SplashBlocks()
"""sizes that fit in the fast memory (VMEM) of every TPU in `training.chips`, with gradients, for head sizes up to
`HEAD_SIZE` in float32 (checked with the TPU compiler)"""

LARGE_BLOCKS = SplashBlocks(forward=(1024, 1024), backward_keys=(1024, 1024), backward_queries=(1024, 1024))
"""sizes for chips with 32 MiB or more of fast memory for a kernel, and heads of at most `LARGE_BLOCK_BYTES`"""

LARGE_BLOCK_BYTES = 512
"""maximum size of a head of a query in bytes, for the sizes of `BLOCKS`: 256 values in bfloat16, 128 in float32"""

MEDIUM_BLOCKS = SplashBlocks(forward=(1024, 1024), backward_keys=(512, 1024), backward_queries=(1024, 1024))
"""sizes for chips whose compiler gives a kernel 16 MiB of fast memory: the kernel of dK and dV needs the most"""

BLOCKS = {
    "TPU v5 lite": MEDIUM_BLOCKS,
    "TPU v5e": MEDIUM_BLOCKS,
    "TPU v5": MEDIUM_BLOCKS,
    "TPU v5p": MEDIUM_BLOCKS,
    "TPU v6 lite": LARGE_BLOCKS,
    "TPU v6e": LARGE_BLOCKS,
    "TPU7x": LARGE_BLOCKS,
}
"""Device kind -> maximum sizes of blocks; `SMALL_BLOCKS` for other kinds. Large blocks mean few steps of the kernel's
loop, and few reads of the HBM: in bfloat16 the forward kernel computes as many FLOPs per byte of keys and values that
it reads as a block has queries. A v6e computes 574 FLOPs in the time in which its HBM reads a byte, so blocks of 512
queries would wait for the HBM; the other chips compute 166 (v5p) to 313 (tpu7x) FLOPs (`training.chips`).

Sources: libtpu 0.0.51 compiles these sizes with softcap, segments and gradients, for many rows; a few rows need less
VMEM, because the compiler stores their segment ids elsewhere. For lack of VMEM it refuses 1,024 queries in the kernel
of dK and dV for v5e and v5p (with softcap, segments and heads of 128), all of these sizes for v4, and 2,048 for all
chips (on a v6e it accepts 2,048 only without softcap and segments). Nothing here was timed on a TPU."""

HEAD_SIZE = 256
"""maximum head dimension"""

HIDDEN = -(2**31)
"""segment id of keys that no query may attend to"""


RESIDUALS = "splash_residuals"
"""checkpoint name of the output and the logsumexp of the forward kernel: a remat policy that stores them does not run
the forward kernel again in the backward pass"""

REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "scores never leave the kernel",
    "dropout": "it does not generate random numbers",
    "mask array": "it would store the whole array. Mask.causal, lengths, segments and window are supported",
    "offset": "the blocks that it skips are fixed during tracing",
}
"""options that splash does not support, and why"""


def splash_limits(spec: AttentionSpec) -> str | None:
    """Return why splash (FlashAttention-2, Dao 2023, arXiv 2307.08691) does not support a call; None if it does."""
    if platform() not in ("tpu", "cpu"):
        return f"run on {platform()}: it is a kernel for TPUs, with interpret mode on CPU for tests"
    if (refused := unmapped_reason()) is not None:
        return refused
    shapes = spec.shapes
    if shapes.is_symbolic:
        return "handle a symbolic length: the blocks that it skips are fixed during tracing"
    if (size := max(shapes.head_dim, shapes.value_dim)) > HEAD_SIZE:
        return f"use a head size of {size}: blocks with more than {HEAD_SIZE} do not fit in the fast memory of a TPU"
    if spec.mask.chunk_size is not None and not spec.mask.is_causal:
        return "attend in chunks that are not causal: its masks of chunks are causal"
    return tpu_dtype_refusal(shapes.dtype)


def splash_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why the installed TPU compiler can't compile splash (Dao 2023, arXiv 2307.08691); None if it can."""
    return tpu_compiler_refusal(_example, spec.shapes.dtype)


def _example(dtype: DType) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    return attention_example(splash_attention, (1, LANES, 1, LANES), dtype)


def splash_attention(
    query: Query, key: Key, value: Value, spec: AttentionSpec, blocks: SplashBlocks | None = None
) -> tuple[Attended, None]:
    """Compute splash attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691) in Pallas, without fully masked blocks.

    The arguments are those of `dot_product_attention`, except for the options that `OPTIONS` excludes, and `blocks`:
    maximum sizes of the blocks; None: those for the chip, `block_limits`. The compiler can't partition a Pallas kernel:
    over a mesh each device runs it on its own batch rows, heads and queries, with all keys.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    # Imported here because the import of Pallas is slow, and most programs do not need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads, value_dim = value.shape[1:]
    # If the key heads can't be divided among the devices, each query head gets a copy of its key head.
    if kv_heads % num_shards("kv_heads"):
        key, value = (jnp.repeat(array, num_heads // kv_heads, axis=2) for array in (key, value))
        kv_heads = num_heads
    parts = num_shards("length")
    limits = block_limits(max(head_dim, value_dim), jnp.result_type(query, key, value)) if blocks is None else blocks
    blocks = limits.fitted(math.ceil(num_queries / parts), num_keys)
    units = blocks.padding_units()
    # The library kernel has no scale argument, so the queries are scaled. The queries of each device fill whole blocks.
    query = _padded((query * spec.scale).astype(query.dtype), parts * units[0])
    key, value = _padded(key, units[1]), _padded(value, units[1])
    lengths = query.shape[1], key.shape[1]
    ids = segment_ids(spec.mask, batch, (num_queries, num_keys), lengths)
    # Sinks are passed even if the call has none (as `NO_WEIGHT`): a query that sees no key then gives zeros. Without a
    # sink, the kernel's large negative mask value would make all its weights equal, and the output a mean of values.
    logits = _with_gradient_in_float32(spec.sink_logits(num_heads))
    mask = spec.mask
    kernel = _kernel(
        lengths, blocks, parts, mask.is_causal, mask.window_size, mask.chunk_size, spec.softcap, platform() != "tpu"
    )
    # The kernel holds arrays: the blocks to compute, (1, query blocks, key blocks), and query indices, (T,). They are
    # passed through shard_map, so that each device gets the part for its own queries.
    arrays, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, kernel))

    def on_each_device(query, key, value, logits, *arrays):
        rows, length, kv_heads, groups, _ = query.shape
        kernel = jax.tree.unflatten(structure, arrays[len(ids) :])

        def one_row(query, key, value, *ids):
            return kernel(query, key, value, library.SegmentIds(*ids) if ids else None, logits.reshape(-1))

        # The library takes one row, (N, T, H): (B, T, K, G, H) -> (B, N, T, H), and vmap over the batch.
        heads = query.reshape(rows, length, kv_heads * groups, head_dim)
        heads = [array.swapaxes(1, 2) for array in (heads, key, value)]
        out = jax.vmap(one_row)(*heads, *arrays[: len(ids)]).swapaxes(1, 2)
        return out.reshape(rows, length, kv_heads, groups, value_dim)

    # Logical axes for shard_map. Queries are split along rows, length and heads; keys and values keep their whole
    # length.
    grouped, whole = ("batch", "length", "kv_heads", None, None), ("batch", None, "kv_heads", None)
    names = [grouped, whole, whole, ("kv_heads", None)] + [("batch", "length"), ("batch", None)][: len(ids)]
    names += [(None, "length", None) if array.ndim == 3 else ("length",) for array in arrays]
    query = query.reshape(batch, -1, kv_heads, num_heads // kv_heads, head_dim)
    out = shard_map(on_each_device, names, grouped)(query, key, value, logits.reshape(kv_heads, -1), *ids, *arrays)
    return out.reshape(batch, -1, num_heads, value_dim)[:, :num_queries].astype(value.dtype), None


@jax.custom_vjp
def _with_gradient_in_float32(logits):
    """Return the logits unchanged, and convert their gradient from the library's dtype (of the output) to float32."""
    return logits


_with_gradient_in_float32.defvjp(lambda logits: (logits, None), lambda _, grad: (grad.astype(jnp.float32),))


def block_limits(head_size: int, dtype: DType) -> SplashBlocks:
    """Return the maximum sizes of the blocks on the current chip; `head_size` is the larger one of keys and values."""
    if head_size * jnp.dtype(dtype).itemsize > LARGE_BLOCK_BYTES:
        return SMALL_BLOCKS
    return BLOCKS.get(device_kind(), SMALL_BLOCKS)


def _padded(array: Array, block: int) -> Array:
    # (B, L, ...) -> (B, n block, ...), with zeros at the end
    return jnp.pad(array, [(0, 0), (0, -array.shape[1] % block)] + [(0, 0)] * (array.ndim - 2))


def segment_ids(
    mask: Mask, batch: int, lengths: tuple[int, int], padded: tuple[int, int]
) -> tuple[()] | tuple[Int[Array, "B t"], Int[Array, "B s"]]:
    """Return an id for each query and key, with padding; a query attends to its own id. (): the call needs none."""
    (num_queries, num_keys), (_, padded_keys) = lengths, padded
    if mask.query_segments is None and mask.key_lengths is None and num_keys == padded_keys:
        return ()
    queries, keys = jnp.zeros((1, num_queries), jnp.int32), jnp.zeros((1, num_keys), jnp.int32)
    if mask.query_segments is not None:
        queries, keys = mask.query_segments.astype(jnp.int32), mask.key_segments.astype(jnp.int32)
    # Keys after the end of a row get an id that no query has.
    if mask.key_lengths is not None:
        keys = jnp.where(jnp.arange(num_keys)[None] < mask.key_lengths[:, None], keys, HIDDEN)
    # Padded keys get the id HIDDEN, which no real query has. Padded queries have it too, but their results are removed.
    both = [
        jnp.pad(ids, [(0, 0), (0, length - ids.shape[1])], constant_values=HIDDEN)
        for ids, length in zip((queries, keys), padded, strict=True)
    ]
    return tuple(jnp.broadcast_to(ids, (batch, ids.shape[1])) for ids in both)


@functools.lru_cache(maxsize=64)
def _kernel(
    lengths: tuple[int, int],
    blocks: SplashBlocks,
    parts: int,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    interpret: bool,
) -> Any:
    """Return the library's kernel for one batch row, with NumPy arrays; queries are split over `parts` devices."""
    # This does the same as the library's make_splash_mha, but without JAX arrays: a traced array would not outlive its
    # trace, and a concrete one would be placed on the devices of the active mesh, which need not exist on this machine.
    # The result is cached because finding the masked blocks takes seconds at length 32k.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

    # The library's window is inclusive: (w - 1) keys before the query and as many after it, or none if causal.
    if window is not None:
        static = masks.LocalMask(lengths, (window - 1, 0 if is_causal else window - 1), offset=0)
    elif is_causal:
        static = masks.CausalMask(lengths)
    else:
        static, parts = masks.FullMask(lengths), 1  # nothing is masked: the same for all query shards
    if chunk is not None:  # the limits require a causal mask
        chunked = masks.ChunkedCausalMask(lengths, chunk)
        static = chunked if window is None else masks.LogicalAnd(static, chunked)
    heads = masks.MultiHeadMask([static])  # one mask for all heads
    forward, function = infos.process_mask(heads, blocks.forward, q_seq_shards=parts)
    backward_keys, _ = infos.process_mask_dkv(heads, blocks.backward_keys, q_seq_shards=parts)
    backward_queries, _ = infos.process_mask(heads, blocks.backward_queries, q_seq_shards=parts)
    return library.SplashAttentionKernel(
        forward,
        backward_queries,
        backward_keys,
        block_sizes=blocks.for_library(),
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=RESIDUALS,
        mask_function=function,
        interpret=interpret,
    )
