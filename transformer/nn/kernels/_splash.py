"""Attention on TPU by the kernel that comes with JAX, splash attention: one fused program, scores never leave the chip.

The library kernel takes a mask that is known when the program is made (causal, window), and one number a token that
must be the same for query and key. Lengths, segments and the filling up to whole blocks become such numbers. Elsewhere
than on a TPU it is interpreted: slowly, for tests.
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
"""the kernel's blocks are multiples of it: numbers in a row of the TPU's vector registers"""

BLOCK = 512
"""at most so many queries and keys a block: few enough turns of the kernel's loop, and blocks that fit the fast memory
of every TPU in `training.chips`, with gradients, at head sizes up to `HEAD_SIZE` in float32 (the compiler says so)"""

HEAD_SIZE = 256
"""of a head at most"""

FLOAT32_ALONE = ("TPU v2", "TPU v3")
"""kinds of TPU for which the compiler of kernels refuses products of bfloat16"""

HIDDEN = -(2**31)
"""the segment of keys that no query attends"""


REASONS = {
    "weights": "it never holds all weights at once",
    "bias": "scores never leave the kernel",
    "dropout": "it draws no random numbers",
    "mask array": "it would hold all of it. Mask.causal, lengths, segments, window are fine",
    "offset": "which blocks it skips is settled when the program is made",
}
"""options that splash does not serve, and why"""


def splash_limits(spec: AttentionSpec) -> str | None:
    """What of the sizes, types and devices of a call splash can't serve, and why; None: it can (Dao 2023, arXiv
    2307.08691).
    """
    if platform() not in ("tpu", "cpu"):
        return f"run on {platform()}: it is written for TPUs, and only a CPU interprets it, for tests"
    if (refused := unmapped_reason()) is not None:
        return refused
    shapes = spec.shapes
    if not isinstance(shapes.num_queries, int) or not isinstance(shapes.num_keys, int):
        return "work on a length left open: which blocks it skips is settled when the program is made"
    if (size := max(shapes.head_dim, shapes.value_dim)) > HEAD_SIZE:
        return f"take heads of {size}: blocks of more than {HEAD_SIZE} do not fit the fast memory of a TPU"
    if shapes.dtype not in (jnp.float32, jnp.bfloat16):
        return f"compute in {jnp.dtype(shapes.dtype)}: it takes float32 and bfloat16"
    if shapes.dtype == jnp.bfloat16 and (kind := _device_kind()) in FLOAT32_ALONE:
        return f"compute in bfloat16 on {kind}: kernels multiply float32 alone there"
    return None


def splash_compiler_refusal(spec: AttentionSpec) -> str | None:
    """Why the TPU compiler at hand can't compile splash (FlashAttention 2, Dao 2023, arXiv 2307.08691), and what to
    install; None: it can, or there is none to ask.

    JAX emits Mosaic, the kernels' intermediate language, in the version of its own release. An older libtpu rejects it.
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
    """Splash attention, FlashAttention 2 (Dao 2023, arXiv 2307.08691) in Pallas with blocks that a static mask hides
    left out: the contract of `dot_product_attention` less what `OPTIONS` says, the result (B, T, N, Hv).

    No compiler splits a kernel: over a mesh each device runs it on its own rows, heads and queries, with all keys.
    """
    # Here, not above: who does not use Pallas need not wait for its import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, kv_heads, value_dim = value.shape[1:]
    if kv_heads % num_shards("kv_heads"):  # a device's query heads may need a part of them: each gets its own
        key, value = (jnp.repeat(array, num_heads // kv_heads, axis=2) for array in (key, value))
        kv_heads = num_heads
    parts = num_shards("length")
    blocks = _block(math.ceil(num_queries / parts)), _block(num_keys)
    query = _filled((query * spec.scale).astype(query.dtype), parts * blocks[0])
    key, value = _filled(key, blocks[1]), _filled(value, blocks[1])
    lengths = query.shape[1], key.shape[1]
    ids = _segment_ids(spec.mask, batch, (num_queries, num_keys), lengths)
    # The kernel takes the logits even where the call has none: a row that sees no key then gives zeros, not a mean
    logits = _with_gradient_in_float32(spec.sink_logits(num_heads))
    kernel = _kernel(
        lengths, blocks, parts, spec.mask.is_causal, spec.mask.window_size, spec.softcap, platform() != "tpu"
    )
    # Which blocks to compute, (1, query blocks, key blocks), and indices of queries, (T,): each device takes its part.
    arrays, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, kernel))

    def on_each_device(query, key, value, logits, *arrays):
        rows, length, kv_heads, groups, _ = query.shape
        kernel = jax.tree.unflatten(structure, arrays[len(ids) :])

        def row(query, key, value, *ids):
            return kernel(query, key, value, library.SegmentIds(*ids) if ids else None, logits.reshape(-1))

        heads = query.reshape(rows, length, kv_heads * groups, head_dim)
        heads = [array.swapaxes(1, 2) for array in (heads, key, value)]
        out = jax.vmap(row)(*heads, *arrays[: len(ids)]).swapaxes(1, 2)
        return out.reshape(rows, length, kv_heads, groups, value_dim)

    grouped, whole = ("batch", "length", "kv_heads", None, None), ("batch", None, "kv_heads", None)
    names = [grouped, whole, whole, ("kv_heads", None)] + [("batch", "length"), ("batch", None)][: len(ids)]
    names += [(None, "length", None) if array.ndim == 3 else ("length",) for array in arrays]
    query = query.reshape(batch, -1, kv_heads, num_heads // kv_heads, head_dim)
    out = shard_map(on_each_device, names, grouped)(query, key, value, logits.reshape(kv_heads, -1), *ids, *arrays)
    return out.reshape(batch, -1, num_heads, value_dim)[:, :num_queries].astype(value.dtype), None


def _device_kind() -> str:
    """Of the devices of the mesh in force, or else of JAX."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


@jax.custom_vjp
def _with_gradient_in_float32(logits):
    """Return the logits; their gradient, which the library gives in the dtype of the output, in float32."""
    return logits


_with_gradient_in_float32.defvjp(lambda logits: (logits, None), lambda _, grad: (grad.astype(jnp.float32),))


def _block(length: int) -> int:
    """Positions a block: at most `BLOCK`, all blocks alike, so that little is filled up (640 are 2 of 384)."""
    return LANES * math.ceil(length / math.ceil(length / BLOCK) / LANES)


def _filled(array: Array, block: int) -> Array:
    """(B, L, ...) with zeros to the end of the last block."""
    return jnp.pad(array, [(0, 0), (0, -array.shape[1] % block)] + [(0, 0)] * (array.ndim - 2))


def _segment_ids(
    mask: Mask, batch: int, lengths: tuple[int, int], filled: tuple[int, int]
) -> tuple[()] | tuple[Int[Array, "B t"], Int[Array, "B s"]]:
    """A number for each query and key, filled up; equal ones see each other. Nothing where nothing is hidden so."""
    (num_queries, num_keys), (_, filled_keys) = lengths, filled
    if mask.query_segments is None and mask.key_lengths is None and num_keys == filled_keys:
        return ()
    queries, keys = jnp.zeros((1, num_queries), jnp.int32), jnp.zeros((1, num_keys), jnp.int32)
    if mask.query_segments is not None:
        queries, keys = mask.query_segments.astype(jnp.int32), mask.key_segments.astype(jnp.int32)
    if mask.key_lengths is not None:
        keys = jnp.where(jnp.arange(num_keys)[None] < mask.key_lengths[:, None], keys, HIDDEN)
    # Queries that fill up are cut off again: they may see anything.
    both = [
        jnp.pad(ids, [(0, 0), (0, length - ids.shape[1])], constant_values=HIDDEN)
        for ids, length in zip((queries, keys), filled, strict=True)
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
    """The library's kernel for one row, its arrays in NumPy; of queries, `parts` devices each take a part.

    What the library's own make_splash_mha does, less JAX: a traced array would not outlive the program it is part of,
    and a real one would be put on the devices of the mesh in force, which need not be here. Kept, because to find out
    which blocks are hidden takes seconds at length 32k.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

    if window is not None:
        static = masks.LocalMask(lengths, (window - 1, 0 if is_causal else window - 1), offset=0)
    elif is_causal:
        static = masks.CausalMask(lengths)
    else:
        static, parts = masks.FullMask(lengths), 1  # of which there is nothing to split
    heads = masks.MultiHeadMask([static])  # the same for all
    forward, function = infos.process_mask(heads, blocks, q_seq_shards=parts)
    backward, _ = infos.process_mask_dkv(heads, blocks, q_seq_shards=parts)
    queries, keys = blocks
    sizes = {"block_q": queries, "block_kv": keys}
    return library.SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=library.BlockSizes(
            **{f"{size}{part}": number for size, number in sizes.items() for part in ("", "_dkv", "_dq")}
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=library.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=None,
        mask_function=function,
        interpret=interpret,
    )
