"""Attention through a latent: keys and values of all heads are made of one short vector a token.

Letters beside those of axes.py: R numbers of the latent of keys and values, Rq of that of queries; Hp or h dimensions
of a head that don't turn, Hr that do, H = Hp + Hr; W = R + Hr numbers that are kept of a token.
"""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from transformer.config._parts import MLA
from transformer.nn._attention import AttentionModule, dot_product_attention
from transformer.nn._axes import Array, DType, Float, Hidden, Positions
from transformer.nn._caches import KVCache
from transformer.nn._int8 import Int8
from transformer.nn._layers import Initializer, Linear, RMSNorm, as_matrix, glorot_uniform, linear
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain
from transformer.nn._positions import PositionScheme, Rotary
from transformer.nn.kernels._contract import BiasFunction


class LatentAttention(AttentionModule):
    """Self-attention whose heads have keys [c W_k, r] and values c W_v, of one latent c = norm(x W_c) and one turned
    key r = rotate(x W_r) a token, which are all that a cache holds (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Parameters: `latent` (D, R), `latent_norm` (R,), `rotary_key` (D, Hr), `key` (R, N, Hp), `value` (R, N, Hv) and
    `out` (N, Hv, D); queries are made by `query` (D, N, H) or, of a latent of their own, by `query_latent` (D, Rq),
    `query_norm` (Rq,) and `query` (Rq, N, H). Maps have a `kernel`; with `use_bias` those from x into a latent, of the
    turned key, and onto D have a `bias`. `num_heads` is N. Further fields are those of `AttentionModule`; `position`
    turns Hr dimensions of each query, and the turned key.
    """

    parameter_axes = declare(
        {
            "query_latent/kernel": "embed -> _",
            "query/kernel": "embed -> heads _",
            "latent/kernel": "embed -> _",
            "rotary_key/kernel": "embed -> _",
            "key/kernel": "embed -> heads _",
            "value/kernel": "embed -> heads _",
            "out/kernel": "heads _ -> embed",
            "out/bias": "embed",
        }
    )

    num_heads: int
    mla: MLA
    use_bias: bool = False
    position: PositionScheme = dataclasses.field(default=Rotary(), kw_only=True)

    @nn.compact
    def __call__(
        self,
        x: Hidden,
        *,
        mask: Mask | Array | None = None,
        positions: Positions | None = None,
        cache: KVCache | None = None,
        bias: BiasFunction | Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> tuple[Hidden, KVCache | None]:
        """Attends from x (B, T, D) to itself and to what the cache holds; returns (B, T, D) and the cache.

        Args:
            mask: which query attends which key, a `Mask` or an array that broadcasts to (B, N, T, S); causality is not
                implied.
            positions: (B, T); None: 0, 1, 2, ... after what the cache holds.
            cache: of one head of latent and turned key (B, S, 1, R + Hr), and of values of no width.
            bias: added to the scores, as in `dot_product_attention`.
            deterministic: True evaluates; False drops weights (rng "dropout"). Required if `dropout_rate` is above 0.
            sow_weights: as in `MultiHeadAttention`.

        Raises:
            ValueError: tokens that don't fit the cache.
        """
        mla, mask = self.mla, Mask.of(mask)
        if positions is None:
            positions = jnp.arange(x.shape[1])[None, :]
            positions = positions if cache is None else positions + cache.length[:, None]
        positions = jnp.broadcast_to(positions, x.shape[:2])

        source = x
        if mla.q_lora_rank is not None:
            source = self._norm("query_norm")(self._project("query_latent", x, mla.q_lora_rank))
        query = linear(source.astype(self.dtype), self._heads("query", source.shape[-1], mla.head_dim))
        query = constrain(query, "batch", "length", "heads", "head_dim")
        plain, turned = jnp.split(query, [mla.qk_nope_head_dim], axis=-1)
        query = jnp.concatenate([plain, self.position.rotate(turned, positions)], axis=-1)

        latent = self._norm("latent_norm")(self._project("latent", x, mla.kv_lora_rank))
        rotary_key = self._project("rotary_key", x, mla.qk_rope_head_dim)[:, :, None]
        kv_latent = jnp.concatenate([latent[:, :, None], self.position.rotate(rotary_key, positions)], axis=-1)
        if cache is not None:
            start = cache.length
            cache = cache.append(kv_latent, kv_latent[..., :0], positions)
            kv_latent, mask = cache.whole()[0].astype(self.dtype), mask.shifted(start) & Mask.lengths(cache.length)

        out = self.attended(
            absorbed_attention if absorbs(x.shape[1], kv_latent.shape[1], mla) else expanded_attention,
            query,
            kv_latent,
            self._heads("key", mla.kv_lora_rank, mla.qk_nope_head_dim),
            self._heads("value", mla.kv_lora_rank, mla.v_head_dim),
            scale=mla.head_dim**-0.5 if self.scale is None else self.scale,
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )
        init = self.output_init or self.kernel_init
        return self._linear("out", x.shape[-1], init, contract=2)(out), cache

    def _project(self, name: str, x: Array, features: int) -> Array:
        return self._linear(name, features, self.kernel_init)(x)

    def _linear(self, name: str, features: int, init: Initializer | None, contract: int = 1) -> Linear:
        return Linear((features,), contract, self.use_bias, init, self.dtype, self.param_dtype, name=name)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.mla.norm_epsilon, self.dtype, self.param_dtype, name=name)

    def _heads(self, name: str, inputs: int, size: int) -> Array:
        shape = (inputs, self.num_heads, size)
        return _Kernel(shape, self.kernel_init, self.dtype, self.param_dtype, name=name)()


class _Kernel(nn.Module):
    """Owns the `kernel` of a map into heads, for two orders of products; a call gives it, in `dtype`."""

    shape: tuple[int, int, int]
    kernel_init: Initializer | None
    dtype: DType
    param_dtype: DType

    @nn.compact
    def __call__(self) -> Array:
        init = as_matrix(self.kernel_init or glorot_uniform())
        kernel = self.param("kernel", init, self.shape, self.param_dtype)
        return kernel.array(self.dtype) if isinstance(kernel, Int8) else kernel.astype(self.dtype)


def expanded_attention(
    query: Float[Array, "B T N H"],
    kv_latent: Float[Array, "B S 1 W"],
    key_kernel: Float[Array, "R N h"],
    value_kernel: Float[Array, "R N Hv"],
    **options,
) -> Array | tuple[Array, Array]:
    """Keys and values of every head are made of the latents, then attended to: (B, T, N, Hv), as the formula is written
    (arXiv 2405.04434, equations 9 to 11). `kv_latent` (B, S, 1, R + Hr) is latents and turned keys, `options` those of
    `dot_product_attention`.
    """
    latent, turned = jnp.split(kv_latent[:, :, 0], [key_kernel.shape[0]], axis=-1)
    key, value = linear(latent, key_kernel), linear(latent, value_kernel)
    turned = jnp.broadcast_to(turned[:, :, None], (*key.shape[:3], turned.shape[-1]))
    return dot_product_attention(query, jnp.concatenate([key, turned], axis=-1), value, **options)


def absorbed_attention(
    query: Float[Array, "B T N H"],
    kv_latent: Float[Array, "B S 1 W"],
    key_kernel: Float[Array, "R N h"],
    value_kernel: Float[Array, "R N Hv"],
    **options,
) -> Array | tuple[Array, Array]:
    """The same (B, T, N, Hv) in another order: q (c W_k)^T = (q W_k^T) c^T and a (c W_v) = (a c) W_v, so that all heads
    attend to the latents themselves, and no key or value is made (arXiv 2405.04434, section 2.1.2).
    """
    rank, _, plain = key_kernel.shape
    asked = jnp.einsum("btnp,rnp->btnr", query[..., :plain], key_kernel)
    query = jnp.concatenate([asked, query[..., plain:]], axis=-1)
    out = dot_product_attention(query, kv_latent, kv_latent[..., :rank], **options)
    out, weights = out if isinstance(out, tuple) else (out, None)
    out = jnp.einsum("btnr,rnv->btnv", out, value_kernel)
    return out if weights is None else (out, weights)


def absorbs(queries: int, keys: int, mla: MLA) -> bool:
    """Whether `absorbed_attention` takes fewer multiplications for so many queries and keys: for the few queries of
    decoding it does, for as many as there are keys hardly ever (arXiv 2405.04434, section 2.1).
    """
    maps = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    expanded = keys * maps + queries * keys * (mla.head_dim + mla.v_head_dim)
    absorbed = queries * maps + queries * keys * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    return absorbed < expanded
