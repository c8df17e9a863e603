"""Attention of a length that is split over devices: by a ring, where it stays split and keys and values go round (Liu
et al. 2023, arXiv 2310.01889), or with keys and values gathered, for what a ring can't do.

In the ring each device works with two chunks of the sequence; what passes by is added with a running softmax. A pair of
chunks is the blockwise kernel's work, forward and backward, so no device ever holds more than its own part, one that
passes by, and a block of scores. The backward pass runs the ring again; gradients of keys and values travel with them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Attended, Key, Query, Value
from transformer.nn._masks import Mask
from transformer.nn._partitioning import constrain, mesh_axes, num_shards, shard_map
from transformer.nn.kernels import _blockwise as blockwise
from transformer.nn.kernels._contract import NO_WEIGHT, AttentionSpec

_NO_MESH = (
    "run here: no mesh is in force (jax.set_mesh) that splits the length, over the axis context or one of axis_rules"
)

RING_REASONS = {
    "weights": "it never holds all weights at once",
    "bias": "what a bias is made from does not go round the ring",
    "dropout": "it draws no random numbers",
    "mask array": "every device would need all of it. Mask.causal, lengths, segments, window are fine",
}
"""options that the ring does not serve, and why"""


def ring_limits(spec: AttentionSpec) -> str | None:
    """What of the sizes of a call the ring can't serve, and why; None: it can (Liu et al. 2023, arXiv 2310.01889)."""
    devices, queries, keys = spec.shapes.length_shards, spec.shapes.num_queries, spec.shapes.num_keys
    if devices == 1:
        return _NO_MESH
    if queries != keys:
        return f"attend from {queries} queries to {keys} keys: the ring is for one length of both"
    if queries % (2 * devices):
        return f"split {queries} positions: on {devices} devices it takes a multiple of {2 * devices}"
    return None


def ring_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
    block: int = blockwise.BLOCK,
) -> tuple[Attended, None]:
    """Attention of a length that is split over the mesh axis "context" (Liu et al. 2023, arXiv 2310.01889), in blocks
    of `block`: the contract of `dot_product_attention` less what `OPTIONS` says, the result (B, T, N, Hv).

    Under a causal mask device i of n works on chunks i and 2n - 1 - i of 2n, so that all have the same number of blocks
    to compute (the purpose of Brandon et al. 2023, arXiv 2311.09431, with chunks for stripes). Gradients are those of
    the blockwise kernel pair by pair, added up in float32.
    """
    mask, (batch, length, num_heads, head_dim) = spec.mask, query.shape
    kv_heads, value_dim = value.shape[2:]
    devices = num_shards("length")
    chunk = length // (2 * devices)
    plan = blockwise.Blocks(spec, chunk, chunk, min(block, chunk))
    ring = _Ring(plan, mesh_axes("length"), devices, zigzag=mask.is_causal)

    start = spec.sink_logits(num_heads)
    arrays, structure = jax.tree.flatten(mask)
    rows = [("batch" if a.ndim and a.shape[0] == batch else None, *[None] * (a.ndim - 1))[: a.ndim] for a in arrays]

    def on_each_device(query, key, value, start, *arrays):
        query, key, value = ring.enter(query), ring.enter(key), ring.enter(value)
        out = _around(ring, query, key, value, start, jax.tree.unflatten(structure, arrays))
        return ring.leave(out.astype(value.dtype))

    grouped = ("batch", "length", "kv_heads", None, None)
    attend = shard_map(
        on_each_device,
        [grouped, ("batch", "length", "kv_heads", None), ("batch", "length", "kv_heads", None), ("kv_heads", None)]
        + rows,
        grouped,
    )
    query = query.reshape(batch, length, kv_heads, num_heads // kv_heads, head_dim)
    out = attend(query, key, value, start.reshape(kv_heads, -1), *arrays)
    return out.reshape(batch, length, num_heads, value_dim), None


@dataclass(frozen=True, eq=False)
class _Ring:
    """The static facts of one call, and who holds what. `plan` is for a pair of chunks; the mesh axes `axes` split the
    length.
    """

    plan: blockwise.Blocks
    axes: tuple[str, ...]
    devices: int
    zigzag: bool

    def chunks(self, device: Array) -> Array:
        """The numbers of the two chunks that a device works on, (2,)."""
        if self.zigzag:
            return jnp.stack([device, 2 * self.devices - 1 - device])
        return 2 * device + jnp.arange(2)

    def enter(self, x: Array) -> Array:
        """A device's part as it lies, (b, 2 chunks, ...) -> the chunks it works on, (2, b, chunk, ...)."""
        halves = jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)
        if not self.zigzag:
            return halves
        # Even chunks (first halves) go to different devices, and so do odd ones.
        come = jnp.stack([jax.lax.ppermute(halves[odd], self.axes, self._homes(odd)) for odd in (0, 1)])
        return self._swapped_on_odd_devices(come)

    def leave(self, x: Array) -> Array:
        """The inverse of `enter`."""
        if self.zigzag:
            x = self._swapped_on_odd_devices(x)
            back = [[(there, here) for here, there in self._homes(odd)] for odd in (0, 1)]
            x = jnp.stack([jax.lax.ppermute(x[odd], self.axes, back[odd]) for odd in (0, 1)])
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def _homes(self, odd: int) -> list[tuple[int, int]]:
        """(device that chunk 2 device + odd lies on, device that works on it)."""
        numbers = [(device, 2 * device + odd) for device in range(self.devices)]
        return [(device, min(number, 2 * self.devices - 1 - number)) for device, number in numbers]

    def _swapped_on_odd_devices(self, x: Array) -> Array:
        """The lower chunk of an even device is an even one, that of an odd device an odd one."""
        return jnp.where(jax.lax.axis_index(self.axes) % 2 == 0, x, x[::-1])

    def passed_on(self, tree: Any) -> Any:
        """What the device before in the ring holds."""
        circle = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, circle), tree)

    def each_pair(self, mask: Mask, step: Array, body: Callable, carry: Any) -> Any:
        """Folds body(a, b, mask of the pair, carry) over those pairs of own query chunk a and key chunk b here at this
        step that see each other.
        """
        here = jax.lax.axis_index(self.axes)
        size, index = self.plan.num_queries, jnp.arange(self.plan.num_queries)
        queries = self.chunks(here) * size
        keys = self.chunks((here - step) % self.devices) * size

        def one(pair, carry):
            a, b = pair // 2, pair % 2
            part = _part(mask, queries[a], keys[b], size)
            visible = part.block_visible(index, index)
            return jax.lax.cond(visible, functools.partial(body, a, b, part), lambda same: same, carry)

        return jax.lax.fori_loop(0, 4, one, carry)


def _part(mask: Mask, query_start: Array, key_start: Array, size: int) -> Mask:
    """The mask as a chunk of queries and a chunk of keys have it, both numbered from 0."""
    own = _own_queries(mask, query_start, size)
    keys = mask.key_segments
    return dataclasses.replace(
        own,
        offset=own.offset - key_start,
        key_lengths=None if mask.key_lengths is None else mask.key_lengths - key_start,
        key_segments=None if keys is None else jax.lax.dynamic_slice_in_dim(keys, key_start, size, 1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(ring, query, key, value, start, mask):
    return _forward(ring, query, key, value, start, mask)[0]


def _forward(ring, query, key, value, start, mask):
    """Output (2, B, t, K, G, Hv) float32, and what the backward pass needs."""
    plan = ring.plan
    norm = jnp.broadcast_to(start, query.shape[:-1])
    nothing = jnp.full(start.shape, NO_WEIGHT)

    def add(a, b, keys, values, part, carry):
        out, norm = carry
        # A sink without weight gives a row that sees nothing in this pair the norm NO_WEIGHT.
        more, (*_, blocks) = blockwise.forward(plan, query[a], keys[b], values[b], [], nothing, part, None)
        more_norm = plan.join(blocks.transpose(0, 1, 4, 2, 3), plan.num_queries)
        new_norm = jnp.logaddexp(norm[a], more_norm)
        old, new = jnp.exp(norm[a] - new_norm)[..., None], jnp.exp(more_norm - new_norm)[..., None]
        return out.at[a].set(out[a] * old + more * new), norm.at[a].set(new_norm)

    def step(carry, number):
        (keys, values), sums = carry
        following = ring.passed_on((keys, values))  # needs no result of this step: sent while it is computed

        def body(a, b, part, sums):
            return add(a, b, keys, values, part, sums)

        return (following, ring.each_pair(mask, number, body, sums)), None

    sums = (jnp.zeros((*query.shape[:-1], value.shape[-1])), norm)
    (_, (out, norm)), _ = jax.lax.scan(step, ((key, value), sums), jnp.arange(ring.devices))
    return out, (query, key, value, start, mask, out, norm)


def _backward(ring, saved, out_grad):
    query, key, value, start, mask, out, norm = saved
    plan = ring.plan

    def blocks(norm):
        return plan.split(norm, plan.query_blocks).transpose(0, 1, 3, 4, 2)

    def step(carry, number):
        (keys, values), grads, query_grad = carry
        following = ring.passed_on((keys, values))

        def body(a, b, part, sums):
            (keys_grad, values_grad), query_grad = sums
            pair = (query[a], keys[b], values[b], [], None, part, None, out[a], blocks(norm[a]))
            q, k, v, *_ = blockwise.backward(plan, pair, out_grad[a])
            return (keys_grad.at[b].add(k), values_grad.at[b].add(v)), query_grad.at[a].add(q)

        grads, query_grad = ring.each_pair(mask, number, body, (grads, query_grad))
        return (following, ring.passed_on(grads), query_grad), None

    def zeros(array):
        return jnp.zeros(array.shape, jnp.float32)

    carry = ((key, value), (zeros(key), zeros(value)), zeros(query))
    (_, (key_grad, value_grad), query_grad), _ = jax.lax.scan(step, carry, jnp.arange(ring.devices))
    start_grad = -(jnp.exp(start[None, None, None] - norm) * (out_grad * out).sum(-1)).sum((0, 1, 2))
    return (
        query_grad.astype(query.dtype),
        key_grad.astype(key.dtype),
        value_grad.astype(value.dtype),
        start_grad,
        None,
    )


_around.defvjp(_forward, _backward)


def all_gather_kv_limits(spec: AttentionSpec) -> str | None:
    """What of the sizes of a call `all_gather_kv_attention` can't serve, and why; None: it can (Dao et al. 2022, arXiv
    2205.14135).
    """
    devices, queries = spec.shapes.length_shards, spec.shapes.num_queries
    if devices == 1:
        return _NO_MESH
    if queries % devices:
        return f"split {queries} queries: on {devices} devices it takes a multiple of {devices}"
    return None


def all_gather_kv_attention(
    query: Query,
    key: Key,
    value: Value,
    spec: AttentionSpec,
) -> tuple[Attended, None]:
    """Attention of each device's own queries to all keys, by the blockwise kernel (Dao et al. 2022, arXiv 2205.14135).

    The contract is that of `dot_product_attention`; the result is (B, T, N, Hv).

    One program for all devices has no blocks to skip: where it can serve, a ring does half of the work under a causal
    mask. Dropout draws another pattern than the other kernels from the same key: one key a device.
    """
    batch, length = query.shape[:2]
    parts = num_shards("length")
    size = length // parts
    split = query.reshape(batch, parts, size, *query.shape[2:])
    split = constrain(split, "batch", "length", None, "heads", "head_dim")
    keys = None if spec.dropout_key is None else jax.random.split(spec.dropout_key, parts)

    def attend(query, start, key_of_part):
        def shifted(queries, keys):
            return spec.bias(queries + start, keys)

        own = dataclasses.replace(
            spec,
            mask=_own_queries(spec.mask, start, size),
            bias=None if spec.bias is None else shifted,
            dropout_key=key_of_part,
        )
        return blockwise.blockwise_attention(query, key, value, own)[0]

    axes = (1, 0, None if keys is None else 0)
    out = jax.vmap(attend, in_axes=axes, out_axes=1, spmd_axis_name=mesh_axes("length"))(
        split, jnp.arange(parts) * size, keys
    )
    return out.reshape(batch, length, *out.shape[3:]), None


def _own_queries(mask: Mask, start: Array, size: int) -> Mask:
    """The mask as `size` queries from `start` have it, numbered from 0."""

    def cut(array, axis):
        if array is None or array.shape[axis] == 1:  # the same for all queries
            return array
        return jax.lax.dynamic_slice_in_dim(array, start, size, axis)

    return dataclasses.replace(
        mask,
        offset=start + (0 if mask.offset is None else mask.offset),
        query_segments=cut(mask.query_segments, 1),
        query_places=cut(mask.query_places, 1),
        dense_part=cut(mask.dense_part, 2),
    )
