"""Attention for a sequence length that is sharded over devices (context parallelism).

`ring_attention` (Liu et al. 2023, arXiv 2310.01889) keeps the length sharded and passes keys and values around a ring
of devices. `all_gather_kv_attention` gathers keys and values on each device, for other options.

In the ring each device holds two chunks of queries and, at each step, two chunks of keys and values. A kernel for one
device computes each pair of a query chunk and a key chunk, and a running softmax combines the pairs: the blockwise
kernel, or on a TPU splash. So a device stores its own shard, one shard that is passed around, and one block of scores.
The backward pass runs the ring again; the gradients of keys and values travel with them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, Attended, Key, PyTree, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._partitioning import constrain, mesh_axes, num_shards, platform, shard_map
from transformer.nn.kernels import _blockwise as blockwise
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec
from transformer.nn.kernels._ring_pairs import BlockwisePairs, SplashPairs, splash_pairs, splash_pairs_refusal

_NO_MESH = (
    "run here: no active mesh (jax.set_mesh) splits the length, over the axis context or an axis given by axis_rules"
)

RING_RESIDUALS = "ring_residuals"
"""checkpoint name of the output and the logsumexp: a remat policy that stores them does not run the forward ring again
in the backward pass"""

RING_REASONS = {
    "weights": "it never stores the full attention matrix",
    "bias": "the arrays of a bias are not passed around the ring",
    "dropout": "it does not generate random numbers",
    "chunks": "its pairs of blocks know the distance of two positions, but not the positions",
    "mask array": "every device would need the whole array. Mask.causal, lengths, segments and window are supported",
}
"""options that the ring does not support, and why"""


def ring_limits(spec: AttentionSpec) -> str | None:
    """Return why the ring (Liu et al. 2023, arXiv 2310.01889) does not support the sizes of a call; None if it does."""
    devices, queries, keys = spec.shapes.length_shards, spec.shapes.num_queries, spec.shapes.num_keys
    if devices == 1:
        return _NO_MESH
    if queries != keys:
        return f"attend from {queries} queries to {keys} keys: the ring needs as many keys as queries"
    if queries % (2 * devices):
        return f"split {queries} positions: on {devices} devices the length must be a multiple of {2 * devices}"
    return None


def ring_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
    block: int = blockwise.BLOCK,
    pair_kernel: Literal["blockwise", "splash"] | None = None,
) -> tuple[Attended, None]:
    """Compute ring attention over the mesh axis "context" (Liu et al. 2023, arXiv 2310.01889).

    Under a causal mask device i of n computes the query chunks i and 2n - 1 - i of 2n chunks ("zigzag" order), so that
    all devices compute the same number of blocks. Striped attention (Brandon et al. 2023, arXiv 2311.09431) balances
    the work for the same reason, with stripes instead of chunks. Gradients are those of the kernel for each pair of
    chunks, summed in float32.

    Args:
        query: (B, T, N, H), as in `dot_product_attention`.
        key: (B, T, K, H).
        value: (B, T, K, Hv).
        spec: the other arguments of `dot_product_attention`, except for the options that `OPTIONS` excludes.
        block: queries and keys per block of the blockwise kernel.
        pair_kernel: kernel for a pair of chunks; None: splash on a TPU if it supports the call, otherwise blockwise.

    Returns:
        The output (B, T, N, Hv), and None for the weights.

    Raises:
        ConfigError: splash is requested and does not support the call.
    """
    mask, (batch, length, num_heads, head_dim) = spec.mask, query.shape
    kv_heads, value_dim = value.shape[2:]
    devices = num_shards("length")
    chunk = length // (2 * devices)
    spec = dataclasses.replace(spec, shapes=AttentionShapes.of(query, key, value))
    pairs = _pairs(spec, chunk, block, pair_kernel)
    ring = _Ring(pairs, chunk, mesh_axes("length"), devices, zigzag=mask.is_causal)
    if isinstance(pairs, SplashPairs):  # the library's kernels have no scale argument
        query = (query * spec.scale).astype(query.dtype)

    # The running softmax starts from a sink, or from a logit of no weight.
    start = spec.sink_logits(num_heads)
    arrays, structure = jax.tree.flatten(mask)
    # Arrays of the mask (lengths, segments, offsets) are split along the batch only: every device needs their whole
    # length, since it meets all keys.
    mask_axes = [
        ("batch" if a.ndim and a.shape[0] == batch else None, *[None] * (a.ndim - 1))[: a.ndim] for a in arrays
    ]

    def on_each_device(query, key, value, start, *arrays):
        query, key, value = (pairs.arranged(ring.enter(x)) for x in (query, key, value))
        out = _ring_attention(ring, query, key, value, start, jax.tree.unflatten(structure, arrays))
        return ring.leave(pairs.restored(out))

    # Logical axes of queries and output, (B, T, K, G, H): each device gets its rows, its part of the length and its
    # heads.
    grouped, heads = ("batch", "length", "kv_heads", None, None), ("batch", "length", "kv_heads", None)
    attend = shard_map(on_each_device, [grouped, heads, heads, ("kv_heads", None), *mask_axes], grouped)
    query = query.reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    out = attend(query, key, value, start.reshape(kv_heads, -1), *arrays)
    return out.reshape(batch, length, num_heads, value_dim), None


def _pairs(spec: AttentionSpec, chunk: int, block: int, kernel: str | None) -> BlockwisePairs | SplashPairs:
    """Return the computation of one pair of chunks: with splash on a TPU, if it supports the call."""
    if kernel == "splash" or (kernel is None and platform() == "tpu"):
        refused = splash_pairs_refusal(spec, chunk)
        if refused is None:
            return splash_pairs(spec, chunk)
        if kernel == "splash":
            raise ConfigError(
                f"splash in the ring attention kernel can't {refused}. Use pair_kernel='blockwise', or None."
            )
    return BlockwisePairs(blockwise.Blocks(spec, chunk, chunk, min(block, chunk)))


@dataclass(frozen=True, eq=False)
class _Ring:
    """Static properties of a call, and the assignment of 2n chunks of `chunk` positions to n `devices` on `axes`.

    `pairs` computes one pair of chunks. With `zigzag`, chunks are assigned in zigzag order.
    """

    pairs: BlockwisePairs | SplashPairs
    chunk: int
    axes: tuple[str, ...]
    devices: int
    zigzag: bool

    def chunks(self, device: Array) -> Array:
        """Return the indices of the two chunks that a device computes, (2,)."""
        # Under a causal mask chunk c attends to chunks 0 to c, so late chunks cost more. An early and a late chunk
        # together cost the same on each device: (i + 1) + (2n - i) = 2n + 1 pairs.
        if self.zigzag:
            return jnp.stack([device, 2 * self.devices - 1 - device])
        return 2 * device + jnp.arange(2)

    def enter(self, x: Array) -> Array:
        """Exchange chunks: the two that the device computes, (2, b, chunk, ...), for its shard (b, 2 chunk, ...)."""
        # (b, 2 chunk, ...) -> (2, b, chunk, ...): device d stores the chunks 2 d and 2 d + 1.
        halves = jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)
        if not self.zigzag:
            return halves
        # ppermute sends one array to one device. No two even chunks (the first halves) have the same destination, nor
        # have two odd chunks, so two permutations are enough.
        received = jnp.stack([jax.lax.ppermute(halves[odd], self.axes, self._routes(odd)) for odd in (0, 1)])
        return self._swapped_on_odd_devices(received)

    def leave(self, x: Array) -> Array:
        """Undo `enter`."""
        if self.zigzag:
            x = self._swapped_on_odd_devices(x)
            back = [[(target, source) for source, target in self._routes(odd)] for odd in (0, 1)]
            x = jnp.stack([jax.lax.ppermute(x[odd], self.axes, back[odd]) for odd in (0, 1)])
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def _routes(self, odd: int) -> list[tuple[int, int]]:
        """Return (device that stores chunk 2 device + odd, device that computes it) for each device."""
        # Chunk c is computed by device c in the first half and by device 2n - 1 - c in the second half (see `chunks`).
        numbers = [(device, 2 * device + odd) for device in range(self.devices)]
        return [(device, min(number, 2 * self.devices - 1 - number)) for device, number in numbers]

    def _swapped_on_odd_devices(self, x: Array) -> Array:
        """Order the two received chunks, (even, odd), by index: the lower one of device i is i, odd if i is odd."""
        return jnp.where(jax.lax.axis_index(self.axes) % 2 == 0, x, x[::-1])

    def rotate(self, tree: PyTree) -> PyTree:
        """Pass arrays to the next device in the ring, and return those of the previous device."""
        circle = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, circle), tree)

    def each_pair(self, mask: Mask, step: Array, body: Callable, carry: PyTree) -> PyTree:
        """Fold body(a, b, mask of the pair, carry) over the visible pairs of query chunk a and key chunk b."""
        # After `step` rotations a device holds the keys of the device `step` places before it.
        here = jax.lax.axis_index(self.axes)
        size, index = self.chunk, jnp.arange(self.chunk)
        queries = self.chunks(here) * size
        keys = self.chunks((here - step) % self.devices) * size

        def one_pair(pair, carry):
            a, b = pair // 2, pair % 2
            pair_mask = _pair_mask(mask, queries[a], keys[b], size)
            visible = pair_mask.block_visible(index, index)
            return jax.lax.cond(visible, functools.partial(body, a, b, pair_mask), lambda carry: carry, carry)

        return jax.lax.fori_loop(0, 4, one_pair, carry)


def _pair_mask(mask: Mask, query_start: Array, key_start: Array, size: int) -> Mask:
    """Return the mask for a chunk of queries and a chunk of keys, both with indices from 0."""
    own = _query_mask(mask, query_start, size)
    keys = mask.key_segments
    # Causality and windows compare offset + query index with the key index, so a shift of the keys is a smaller offset.
    return dataclasses.replace(
        own,
        offset=own.offset - key_start,
        key_lengths=None if mask.key_lengths is None else mask.key_lengths - key_start,
        key_segments=None if keys is None else jax.lax.dynamic_slice_in_dim(keys, key_start, size, 1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(ring, query, key, value, start, mask):
    return _forward(ring, query, key, value, start, mask)[0]


def _forward(ring, query, key, value, start, mask):
    """Compute the output on one device, and the state for the backward pass.

    `start` (K, G) are the sink logits, or `NO_WEIGHT`. Arrays of a chunk have the axes that `ring.pairs` describes; two
    chunks are stacked on a first axis.
    """
    pairs = ring.pairs
    # `norm` is the running logsumexp L. It starts as if a sink had been seen: L = sink, output 0.
    norm = jnp.broadcast_to(jnp.expand_dims(start, pairs.norm_axes), query.shape[:-1])

    def add(a, b, keys, values, part, carry):
        out, norm = carry
        more, more_norm = pairs.forward(query[a], keys[b], values[b], part)
        # Two normalized outputs with logsumexps L1 and L2 combine to O = exp(L1 - L) O1 + exp(L2 - L) O2, where
        # L = log(exp(L1) + exp(L2)).
        new_norm = jnp.logaddexp(norm[a], more_norm)
        old, new = jnp.exp(norm[a] - new_norm)[..., None], jnp.exp(more_norm - new_norm)[..., None]
        return out.at[a].set(out[a] * old + more * new), norm.at[a].set(new_norm)

    def ring_step(carry, number):
        (keys, values), sums = carry
        following = ring.rotate((keys, values))  # independent of this step's results, so sending overlaps with compute

        def body(a, b, part, sums):
            return add(a, b, keys, values, part, sums)

        return (following, ring.each_pair(mask, number, body, sums)), None

    sums = (jnp.zeros((*query.shape[:-1], value.shape[-1])), norm)
    (_, (out, norm)), _ = jax.lax.scan(ring_step, ((key, value), sums), jnp.arange(ring.devices))
    out, norm = (checkpoint_name(x, RING_RESIDUALS) for x in (out.astype(value.dtype), norm))
    return out, (query, key, value, start, mask, out, norm)


def _backward(ring, saved, out_grad):
    query, key, value, start, mask, out, norm = saved

    def ring_step(carry, number):
        (keys, values), grads, query_grad = carry
        following = ring.rotate((keys, values))

        # `grads` is the gradient of the keys and values that are here now; `query_grad` belongs to this device.
        def body(a, b, part, sums):
            (keys_grad, values_grad), query_grad = sums
            # With O and L of the whole row, the backward pass of a pair gives this pair's share of the gradients:
            # P = exp(S - L) and D = dO O are those of the complete softmax. The sink logits are part of L.
            q, k, v = ring.pairs.backward(query[a], keys[b], values[b], part, out[a], norm[a], out_grad[a])
            return (keys_grad.at[b].add(k), values_grad.at[b].add(v)), query_grad.at[a].add(q)

        grads, query_grad = ring.each_pair(mask, number, body, (grads, query_grad))
        # Gradients of keys travel with the keys, and are back on their own device after the last step.
        return (following, ring.rotate(grads), query_grad), None

    def zeros(array):
        return jnp.zeros(array.shape, jnp.float32)

    carry = ((key, value), (zeros(key), zeros(value)), zeros(query))
    (_, (key_grad, value_grad), query_grad), _ = jax.lax.scan(ring_step, carry, jnp.arange(ring.devices))
    # As in the blockwise kernel: dS = -P D for a sink, with P = exp(sink - L), summed over chunks, rows and queries.
    axes = ring.pairs.norm_axes
    delta = (out_grad.astype(jnp.float32) * out).sum(-1)
    start_grad = -(jnp.exp(jnp.expand_dims(start, axes) - norm) * delta).sum(axes)
    grads = zip((query_grad, key_grad, value_grad), (query, key, value), strict=True)
    return *(grad.astype(array.dtype) for grad, array in grads), start_grad, None


_ring_attention.defvjp(_forward, _backward)


def all_gather_kv_limits(spec: AttentionSpec) -> str | None:
    """Return why `all_gather_kv_attention` does not support the sizes of a call; None if it does."""
    devices, queries = spec.shapes.length_shards, spec.shapes.num_queries
    if devices == 1:
        return _NO_MESH
    if queries % devices:
        return f"split {queries} queries: on {devices} devices their number must be a multiple of {devices}"
    if spec.mask.query_groups is not None:
        return "apply a mask with groups of tokens, which it would have to split"
    return None


def all_gather_kv_attention(query: Query, key: Key, value: Value, spec: AttentionSpec) -> tuple[Attended, None]:
    """Compute attention of each device's queries to all keys, with the blockwise kernel.

    The algorithm is that of Dao et al. 2022 (arXiv 2205.14135). The arguments are those of `dot_product_attention`. All
    devices run the same program on different queries, so it can't skip blocks: under a causal mask the ring does half
    the work, where it is supported. Dropout uses one key per device, so its pattern differs from that of other kernels
    for the same key.

    Returns:
        The output (B, T, N, Hv), and None for the weights.
    """
    batch, length = query.shape[:2]
    parts = num_shards("length")
    size = length // parts
    # (B, T, N, H) -> (B, devices, T / devices, N, H), with the second axis sharded: each device has its own queries.
    split = query.reshape(batch, parts, size, *query.shape[2:])
    split = constrain(split, "batch", "length", None, "heads", "head_dim")
    keys = None if spec.dropout_key is None else jax.random.split(spec.dropout_key, parts)

    def attend(query, start, key_of_part):
        # The kernel numbers the queries of a device from 0.
        def shifted(queries, keys):
            return spec.bias(queries + start, keys)

        own = dataclasses.replace(
            spec,
            mask=_query_mask(spec.mask, start, size),
            bias=None if spec.bias is None else shifted,
            dropout_key=key_of_part,
        )
        return blockwise.blockwise_attention(query, key, value, own)[0]

    # vmap over the shards is one program for all devices. It turns the blockwise kernel's `cond` into a `select`, which
    # computes both branches: this is why no blocks are skipped.
    axes = (1, 0, None if keys is None else 0)
    out = jax.vmap(attend, in_axes=axes, out_axes=1, spmd_axis_name=mesh_axes("length"))(
        split, jnp.arange(parts) * size, keys
    )
    return out.reshape(batch, length, *out.shape[3:]), None


def _query_mask(mask: Mask, start: Array, size: int) -> Mask:
    """Return the mask for `size` queries from index `start`, with indices from 0."""

    def cut(array, axis):
        if array is None or array.shape[axis] == 1:  # missing, or the same for all queries
            return array
        return jax.lax.dynamic_slice_in_dim(array, start, size, axis)

    return dataclasses.replace(
        mask,
        offset=start + (0 if mask.offset is None else mask.offset),
        query_segments=cut(mask.query_segments, 1),
        query_places=cut(mask.query_places, 1),
        dense_part=cut(mask.dense_part, 2),
    )
