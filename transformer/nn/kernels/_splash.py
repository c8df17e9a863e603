"""Attention on TPU with splash attention, the fused Pallas kernel of JAX: scores never leave the chip.

The library kernel takes a mask that is known during tracing (causal, window), and a segment id per token: a query
attends only to keys with its own id. Lengths, segments and the padding to whole blocks are expressed as segment ids. On
other platforms the kernel runs in interpret mode: slowly, for tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Int, Key, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._partitioning import num_shards, platform, shard_map, unmapped_reason
from transformer.nn.kernels._contract import AttentionSpec
from transformer.nn.kernels._probing import attention_example, compiler_error, library_version, matching_libtpu

LANES = 128
"""number of lanes of a TPU vector register; block sizes of the kernel are multiples of it"""

BLOCK = 512
"""Maximum number of queries and of keys per block. Large blocks mean few iterations of the kernel's loop; blocks of
this size fit in the fast memory (VMEM) of every TPU in `training.chips`, with gradients, for head sizes up to
`HEAD_SIZE` in float32 (checked with the TPU compiler)."""

HEAD_SIZE = 256
"""maximum head dimension"""

FLOAT32_ALONE = ("TPU v2", "TPU v3")
"""kinds of TPU for which the kernel compiler rejects bfloat16 matrix multiplications"""

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
    """Return why splash (FlashAttention-2, Dao 2023, arXiv 2307.08691) does not support a call; None if it does.

    Checks sizes, data types and devices.
    """
    if platform() not in ("tpu", "cpu"):
        return f"run on {platform()}: it is a kernel for TPUs, with interpret mode on CPU for tests"
    if (refused := unmapped_reason()) is not None:
        return refused
    shapes = spec.shapes
    if not isinstance(shapes.num_queries, int) or not isinstance(shapes.num_keys, int):
        return "handle a symbolic length: the blocks that it skips are fixed during tracing"
    if (size := max(shapes.head_dim, shapes.value_dim)) > HEAD_SIZE:
        return f"use a head size of {size}: blocks with more than {HEAD_SIZE} do not fit in the fast memory of a TPU"
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"compute in {jnp.dtype(shapes.dtype)}: it supports float32 and bfloat16"
    if shapes.dtype == jnp.bfloat16 and (kind := _device_kind()) in FLOAT32_ALONE:
        return f"compute in bfloat16 on {kind}: kernels support only float32 there"
    return None


def splash_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Return why the installed TPU compiler can't compile splash (Dao 2023, arXiv 2307.08691), and what to install.

    JAX emits Mosaic, the intermediate language of TPU kernels, in the version of its own release; an older libtpu
    rejects it.

    Returns:
        The reason; None if splash compiles, or if there is no TPU to compile for.
    """
    if platform() != "tpu" or (error := compiler_error(_example, spec.shapes.dtype, "tpu")) is None:
        return None
    return (
        f"be compiled with {library_version('libtpu')} and {library_version('jax')} ({error}). To use it, run "
        f'pip install "{matching_libtpu()}", which this JAX was released with, and restart Python'
    )


def _example(dtype: Any) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    return attention_example(splash_attention, (1, LANES, 1, LANES), dtype)


def splash_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
) -> tuple[Attended, None]:
    """Compute splash attention: FlashAttention-2 (Dao 2023, arXiv 2307.08691) in Pallas, without fully masked blocks.

    The arguments are those of `dot_product_attention`, except for the options that `OPTIONS` excludes. The compiler
    can't partition a Pallas kernel: over a mesh each device runs it on its own batch rows, heads and queries, with all
    keys.

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
    blocks = _block(math.ceil(num_queries / parts)), _block(num_keys)
    # The library kernel has no scale argument, so the queries are scaled. The queries of each device fill whole blocks.
    query = _padded((query * spec.scale).astype(query.dtype), parts * blocks[0])
    key, value = _padded(key, blocks[1]), _padded(value, blocks[1])
    lengths = query.shape[1], key.shape[1]
    ids = _segment_ids(spec.mask, batch, (num_queries, num_keys), lengths)
    # Sinks are passed even if the call has none (as `NO_WEIGHT`): a query that sees no key then gives zeros. Without a
    # sink, the kernel's large negative mask value would make all its weights equal, and the output a mean of values.
    logits = _with_gradient_in_float32(spec.sink_logits(num_heads))
    kernel = _kernel(
        lengths, blocks, parts, spec.mask.is_causal, spec.mask.window_size, spec.softcap, platform() != "tpu"
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


def _device_kind() -> str:
    """Return the device kind of the active mesh, or of JAX's first device without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


@jax.custom_vjp
def _with_gradient_in_float32(logits):
    """Return the logits unchanged, and convert their gradient from the library's dtype (of the output) to float32."""
    return logits


_with_gradient_in_float32.defvjp(lambda logits: (logits, None), lambda _, grad: (grad.astype(jnp.float32),))


def _block(length: int) -> int:
    """Return the block size for a length: at most `BLOCK`, a multiple of `LANES`.

    All blocks have the same size, chosen so that there is little padding: a length of 640 gives 2 blocks of 384.
    """
    return LANES * math.ceil(length / math.ceil(length / BLOCK) / LANES)


def _padded(array: Array, block: int) -> Array:
    """Pad (B, L, ...) with zeros to a multiple of `block` positions."""
    return jnp.pad(array, [(0, 0), (0, -array.shape[1] % block)] + [(0, 0)] * (array.ndim - 2))


def _segment_ids(
    mask: Mask, batch: int, lengths: tuple[int, int], padded: tuple[int, int]
) -> tuple[()] | tuple[Int[Array, "B t"], Int[Array, "B s"]]:
    """Return a segment id for each query and key, with padding; a query attends to the keys with its own id.

    Returns an empty tuple if the call needs no segment ids.
    """
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
    blocks: tuple[int, int],
    parts: int,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    interpret: bool,
) -> Any:
    """Return the library's kernel for one batch row, with NumPy arrays; queries are split over `parts` devices.

    This does the same as the library's make_splash_mha, but without JAX arrays: a traced array would not outlive its
    trace, and a concrete one would be placed on the devices of the active mesh, which need not exist on this machine.
    The result is cached because finding the masked blocks takes seconds at length 32k.
    """
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
    heads = masks.MultiHeadMask([static])  # one mask for all heads
    forward, function = infos.process_mask(heads, blocks, q_seq_shards=parts)
    backward, _ = infos.process_mask_dkv(heads, blocks, q_seq_shards=parts)
    queries, keys = blocks
    sizes = {"block_q": queries, "block_kv": keys}
    return library.SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=library.BlockSizes(
            # The same sizes for the forward kernel and for the two backward kernels (dK and dV; dQ).
            **{f"{size}{part}": number for size, number in sizes.items() for part in ("", "_dkv", "_dq")}
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=RESIDUALS,
        mask_function=function,
        interpret=interpret,
    )
