"""One step of ring attention on one device: a chunk of queries attends to a chunk of keys, in plain JAX or in splash.

Both classes have the same methods. Each returns, for one pair of chunks, the output O and the logsumexp L of its own
softmax, which the ring combines with those of the other pairs; and for the logsumexp of the complete rows, this pair's
share of the gradients (Liu et al. 2023, arXiv 2310.01889, section 3). Each class chooses the order of the axes in which
the ring holds its arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, PyTree
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.kernels import _blockwise as blockwise
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels._contract import NO_WEIGHT, AttentionSpec


@dataclass(frozen=True, eq=False)
class BlockwisePairs:
    """Pairs of chunks by the blockwise kernel (Dao et al. 2022, arXiv 2205.14135), on any device.

    Queries and outputs are (B, t, K, G, H or Hv), keys and values (B, s, K, H or Hv), logsumexps (B, t, K, G).
    """

    plan: blockwise.Blocks
    norm_axes = (0, 1, 2)
    """axes of an array of logsumexps, (chunks, B, t, K, G), other than those of the heads"""

    def arranged(self, x: Array) -> Array:
        """Reorder the axes of (chunks, B, t, K, ...) for this kernel."""
        return x

    def restored(self, x: Array) -> Array:
        """Undo `arranged`."""
        return x

    def forward(self, query: Array, key: Array, value: Array, mask: Mask) -> tuple[Array, Array]:
        """Compute the output, float32, and the logsumexp: `NO_WEIGHT` for a query that sees no key of this chunk."""
        # Indices of the mask start at 0 in both chunks.
        # With a sink of no weight, a query that sees no key of this pair gets L = NO_WEIGHT, so that the pair adds
        # nothing to the sum over pairs. Without a sink the kernel would give L = 0.
        no_sink = jnp.full(query.shape[2:4], NO_WEIGHT)
        out, (*_, norm) = blockwise.forward(self.plan, query, key, value, [], no_sink, mask, None)
        # (query blocks, B, K, G, block) -> (query blocks, B, block, K, G) -> (B, t, K, G)
        return out, self.plan.join(norm.transpose(0, 1, 4, 2, 3), self.plan.num_queries)

    def backward(
        self, query: Array, key: Array, value: Array, mask: Mask, out: Array, norm: Array, out_grad: Array
    ) -> tuple[Array, Array, Array]:
        """Compute this pair's share of the gradients of query, key and value, from O, L and dO of the complete rows."""
        # (B, t, K, G) -> (query blocks, B, K, G, block), as the blockwise kernel stores it.
        norm = self.plan.split(norm, self.plan.query_blocks).transpose(0, 1, 3, 4, 2)
        saved = (query, key, value, [], None, mask, None, out, norm)
        return blockwise.backward(self.plan, saved, out_grad)[:3]


@dataclass(frozen=True, eq=False)
class SplashPairs:
    """Pairs of chunks by the splash kernels (Dao 2023, arXiv 2307.08691): scores never leave the chip.

    Queries and outputs are (B, K, G, t, H or Hv), keys and values (B, K, s, H or Hv), logsumexps (B, K, G, t). The
    library's kernel for a whole sequence finds the blocks that a mask hides during tracing. Here they depend on the
    position of the device in the ring, so this class computes them at run time, and calls the functions below that
    kernel: its forward kernel, and its two backward kernels with the logsumexp of the complete rows.
    """

    softcap: float | None
    blocks: splash.SplashBlocks
    """sizes that divide the chunks"""
    mask_function: Callable[[Array, Array], Array] | None
    """(query positions, key positions) -> where the causal mask and the window let queries attend; None: everywhere"""
    norm_axes = (0, 1, 4)
    """axes of an array of logsumexps, (chunks, B, K, G, t), other than those of the heads"""

    def arranged(self, x: Array) -> Array:
        """Reorder the axes of (chunks, B, t, K, ...) for this kernel: the length is the last axis but one."""
        return jnp.moveaxis(x, 2, -2)

    def restored(self, x: Array) -> Array:
        """Undo `arranged`."""
        return jnp.moveaxis(x, -2, 2)

    def forward(self, query: Array, key: Array, value: Array, mask: Mask) -> tuple[Array, Array]:
        """Compute the forward pass; see `BlockwisePairs.forward`. The queries must be scaled."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

        info = self._infos(mask, query.shape[3], key.shape[2], self.blocks.forward)

        def one_row(query, key, value, ids, places):
            out, (norm,) = library._splash_attention_forward(
                info(places),
                query,
                key,
                value,
                library.SegmentIds(*ids) if ids else None,
                jnp.full(query.shape[0], NO_WEIGHT),  # a sink: see BlockwisePairs.forward
                mask_value=library.DEFAULT_MASK_VALUE,
                is_mqa=False,
                block_sizes=self.blocks.for_library(),
                residual_checkpoint_name=None,
                save_residuals=True,
                mask_function=self.mask_function,
                attn_logits_soft_cap=self.softcap,
                interpret=platform() != "tpu",
            )
            return out, norm

        out, norm = self._over_rows(one_row, mask, (_flat(query), key, value))
        return out.astype(jnp.float32).reshape(*query.shape[:-1], -1), norm.reshape(query.shape[:-1])

    def backward(
        self, query: Array, key: Array, value: Array, mask: Mask, out: Array, norm: Array, out_grad: Array
    ) -> tuple[Array, Array, Array]:
        """Compute this pair's share of the gradients; see `BlockwisePairs.backward`."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

        lengths = query.shape[3], key.shape[2]
        forms = {
            "is_mqa": False,
            "mask_value": library.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": self.softcap,
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), library.QKVLayout.HEAD_DIM_MINOR),
            "mask_function": self.mask_function,
            "interpret": platform() != "tpu",
        }
        keys_info = self._infos(mask, *lengths, self.blocks.backward_keys, for_keys=True)
        queries_info = self._infos(mask, *lengths, self.blocks.backward_queries)

        def one_row(query, key, value, norm, out_grad, delta, ids, places):
            ids = library.SegmentIds(*ids) if ids else None
            given = (query, key, value, ids, None, norm, out_grad, delta)
            (bq, bkv), (bq_dq, bkv_dq) = self.blocks.backward_keys, self.blocks.backward_queries
            sizes = {"bq": bq, "bkv": bkv, "bkv_compute": bkv}
            _, key_grad, value_grad = library._splash_attention_bwd_dkv(
                *given, **sizes, mask_info=keys_info(places), use_fused_bwd_kernel=False, **forms
            )
            query_grad = library._splash_attention_bwd_dq(
                *given, bq=bq_dq, bkv=bkv_dq, mask_info=queries_info(places), **forms
            )
            return query_grad, key_grad, value_grad

        # D = dO O, one number per query: see the blockwise kernel.
        delta = (out_grad.astype(jnp.float32) * out).sum(-1)
        rows = [_flat(query), key, value, _flat(norm, 1), _flat(out_grad), _flat(delta, 1)]
        query_grad, key_grad, value_grad = self._over_rows(one_row, mask, rows)
        return query_grad.reshape(query.shape), key_grad, value_grad

    def _over_rows(self, one_row: Callable[..., PyTree], mask: Mask, arrays: Sequence[Array]) -> PyTree:
        """Apply a kernel for one row to arrays (B, ...), with the row's segment ids and query positions."""
        batch, queries, keys = arrays[0].shape[0], arrays[0].shape[2], arrays[1].shape[2]
        ids = splash.segment_ids(mask, batch, (queries, keys), (queries, keys))
        # The position of each query relative to the first key of the chunk. If all rows have the same, they share it.
        places = jnp.atleast_1d(mask.offset)[:, None] + jnp.arange(queries)[None]
        axis = 0 if len(places) == batch > 1 else None
        places = places if axis == 0 else places[0]
        return jax.vmap(one_row, in_axes=(*[0] * len(arrays), 0, axis))(*arrays, ids, places)

    def _infos(
        self, mask: Mask, queries: int, keys: int, sizes: tuple[int, int], for_keys: bool = False
    ) -> Callable[[Array], Any]:
        """Return query positions -> the library's description of a mask with blocks of `sizes` queries and keys."""
        # The kernel runs the blocks of its grid one after another, without those that are hidden in all rows. While it
        # skips a block, it loads the next block that it will need: of keys, or with `for_keys` of queries.
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

        starts = [jnp.arange(length).reshape(-1, size) for length, size in zip((queries, keys), sizes, strict=True)]
        over_keys = jax.vmap(mask.block_visible, in_axes=(None, 0))
        visible = jax.vmap(over_keys, in_axes=(0, None))(*starts)  # (query blocks, key blocks)
        # The grid runs over keys for each query block, or over queries for each key block.
        order = visible.T if for_keys else visible
        number = jnp.arange(order.size)
        # The number of the next visible block, from each block on; order.size: there is none
        following = jax.lax.cummin(jnp.where(order.reshape(-1), number, order.size), reverse=True)
        # Its index along the inner loop, of keys (or of queries)
        load = (jnp.where(following == order.size, 0, following) % order.shape[1]).reshape(order.shape)
        load = (load.T if for_keys else load).astype(jnp.int32)
        return lambda places: infos.MaskInfo(
            data_next=load[None],
            mask_next=None,
            block_mask=visible[None].astype(jnp.int32),  # 0: skip the block
            partial_mask_blocks=None,
            q_sequence=None if self.mask_function is None else places,
        )


def _flat(x: Array, rest: int = 2) -> Array:
    # (B, K, G, ...) -> (B, K G, ...), with `rest` axes at the end
    return x.reshape(x.shape[0], -1, *x.shape[-rest:])


def splash_pairs_refusal(spec: AttentionSpec, chunk: int) -> str | None:
    """Return why the ring can't use the splash kernels for chunks of this length, or None; follows "can't"."""
    if chunk % splash.LANES:
        return f"split {chunk} positions, a device's share of half the length, into blocks of {splash.LANES}"
    if (refused := splash.splash_limits(spec) or splash.splash_compiler_refusal(spec)) is not None:
        return refused
    if not _library_has_the_kernels():
        return f"call the kernels of this jax ({jax.__version__}), which have other arguments"
    return None


def _library_has_the_kernels() -> bool:
    """Return whether the library's private functions have the arguments that `SplashPairs` passes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    wanted = {
        "_splash_attention_forward": {"sinks", "save_residuals", "mask_function", "block_sizes"},
        "_splash_attention_bwd_dkv": {"sinks", "logsumexp", "di", "mask_info", "bkv_compute", "use_fused_bwd_kernel"},
        "_splash_attention_bwd_dq": {"sinks", "logsumexp", "di", "mask_info", "bkv"},
    }
    return all(
        hasattr(library, name) and arguments <= inspect.signature(getattr(library, name)).parameters.keys()
        for name, arguments in wanted.items()
    )


def splash_pairs(spec: AttentionSpec, chunk: int) -> SplashPairs:
    """Return the computation of pairs of chunks with splash."""
    causal, window = spec.mask.is_causal, spec.mask.window_size

    def allowed(queries, keys):
        """Return which positions may attend to which, like `Mask.block`: of this chunk, or relative to it."""
        visible = queries >= keys if causal else None
        if window is not None:
            # |i - j| < w, as in `Mask.block`
            near = jnp.abs(queries - keys) < window
            visible = near if visible is None else visible & near
        return visible

    shapes = spec.shapes
    blocks = splash.block_limits(max(shapes.head_dim, shapes.value_dim), shapes.dtype).dividing(chunk)
    return SplashPairs(spec.softcap, blocks, allowed if causal or window is not None else None)
