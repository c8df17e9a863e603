"""Multi-head latent attention (MLA): keys and values of all heads are computed from one short vector per token.

Axis letters in addition to those of `_axes.py`: R size of the key/value latent, Rq size of the query latent; Hp (or h)
head dimensions without rotation, Hr rotated head dimensions, H = Hp + Hr; W = R + Hr numbers cached per token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from transformer.config._parts import MLA
from transformer.nn._attention import AttentionModule, attend
from transformer.nn._axes import Array, Attended, DType, Float, Hidden, Positions, Query, Weights
from transformer.nn._caches import SelfAttentionCache, nan_without_room
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain
from transformer.nn._positions import PositionScheme, Rotary
from transformer.nn.kernels._contract import AttentionSpec, BiasFunction
from transformer.nn.layers._layers import Initializer, as_matrix, glorot_uniform, projection
from transformer.nn.layers._norms import RMSNorm
from transformer.nn.quantization._adapted import dense, kernel_parameter
from transformer.nn.quantization._linear import linear
from transformer.nn.quantization._schemes import Scheme


class LatentAttention(AttentionModule):
    """Multi-head latent attention, a form of self-attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    Each token has a latent c = norm(x W_c) and a rotated key r = rotate(x W_r), which all heads share. The key of a
    head is [c W_k, r] and its value c W_v. The cache stores only c and r.

    Parameters: `latent` (D, R), `latent_norm` (R,), `rotary_key` (D, Hr), `key` (R, N, Hp), `value` (R, N, Hv) and
    `out` (N, Hv, D). Queries are computed by `query` (D, N, H) or, through a query latent, by `query_latent` (D, Rq),
    `query_norm` (Rq,) and `query` (Rq, N, H). All maps have a `kernel`; with `use_bias`, `query_latent`, `latent`,
    `rotary_key` and `out` also have a `bias`. `num_heads` is N. The other fields are those of `AttentionModule`;
    `position` rotates the last Hr dimensions of each query, and the shared key.
    """

    parameter_axes = declare(
        dict.fromkeys(("query_latent/kernel", "latent/kernel", "rotary_key/kernel"), "embed -> _")
        | dict.fromkeys(("query/kernel", "key/kernel", "value/kernel"), "embed -> heads _")
        | {"out/kernel": "heads _ -> embed", "out/bias": "embed"}
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
        cache: SelfAttentionCache | None = None,
        bias: BiasFunction | Array | None = None,
        deterministic: bool | None = None,
        sow_weights: bool = False,
    ) -> tuple[Hidden, SelfAttentionCache | None]:
        """Attend from x (B, T, D) to x itself and to the tokens in the cache; arguments as in `MultiHeadAttention`.

        The cache is a `KVCache` or `PagedKVCache` with one head: its keys (B, S, 1, R + Hr) are [c, r], its values have
        width 0. Returns the output (B, T, D), and the updated cache. Tokens that don't fit it are a ValueError outside
        jit, and NaN in the output inside.
        """
        mla, mask = self.mla, Mask.of(mask)
        if cache is not None:
            cache.check_room(x.shape[1])
        if positions is None:
            positions = jnp.arange(x.shape[1])[None, :]
            positions = positions if cache is None else positions + cache.row_lengths[:, None]
        positions = jnp.broadcast_to(positions, x.shape[:2])

        # Queries, through a latent of size Rq where the config has one (equations 12 to 14). (B, T, N, H)
        source = x
        if mla.q_lora_rank is not None:
            source = self._norm("query_norm")(self._project("query_latent", x, mla.q_lora_rank))
        kernel = self._heads("query", source.shape[-1], mla.head_dim)
        query = linear(source.astype(self.dtype), kernel, quantization=self._scheme("query"))
        query = constrain(query, "batch", "length", "heads", "head_dim")
        nope, rope = jnp.split(query, [mla.qk_nope_head_dim], axis=-1)
        query = jnp.concatenate([nope, self.position.rotate(rope, positions)], axis=-1)

        # [c, r] (B, T, 1, R + Hr): the latent (equation 9) and the rotated key that all heads share (equation 15).
        # Only r is rotated. A rotation of c W_k would depend on the position and could not be absorbed into the query.
        latent = self._norm("latent_norm")(self._project("latent", x, mla.kv_lora_rank))
        rotary_key = self._project("rotary_key", x, mla.qk_rope_head_dim)[:, :, None]
        kv_latent = jnp.concatenate([latent[:, :, None], self.position.rotate(rotary_key, positions)], axis=-1)
        fits, given = None, mask
        if cache is not None:
            # W = R + Hr numbers per token instead of N (H + Hv): this is why MLA has a small cache.
            start, fits = cache.row_lengths, cache.fits(x.shape[1])
            cache = cache.append(kv_latent, kv_latent[..., :0], positions)
            kv_latent, mask = cache.whole()[0].astype(self.dtype), mask.shifted(start) & Mask.lengths(cache.row_lengths)

        latents = Latents(
            kv_latent,
            self._heads("key", mla.kv_lora_rank, mla.qk_nope_head_dim),
            self._heads("value", mla.kv_lora_rank, mla.v_head_dim),
            (self._scheme("key"), self._scheme("value")),
        )
        out = self.attended(
            latents.absorbed if absorbs(x.shape[1], kv_latent.shape[1], mla) else latents.expanded,
            query,
            # H, not the size R + Hr of the absorbed query: both orders must compute the same scores.
            scale=mla.head_dim**-0.5 if self.scale is None else self.scale,
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            sow_weights=sow_weights,
        )
        out = projection(self, "out", x.shape[-1:], 2, self.use_bias)(out)
        return out if fits is None else nan_without_room(out, fits, given), cache

    def _project(self, name: str, x: Array, features: int) -> Array:
        return projection(self, name, (features,), use_bias=self.use_bias)(x)

    def _scheme(self, name: str) -> Scheme | None:
        return None if self.quantization is None else self.quantization.at(*self.path, name, "kernel")

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.mla.norm_epsilon, self.dtype, self.param_dtype, name=name)

    def _heads(self, name: str, inputs: int, size: int) -> Array:
        shape = (inputs, self.num_heads, size)
        return _Kernel(shape, self.kernel_init, self.dtype, self.param_dtype, name=name)()


class _Kernel(nn.Module):
    """Owns the `kernel` of a map into heads and returns it, in `dtype`: `Latents` multiplies in different orders."""

    shape: tuple[int, int, int]
    kernel_init: Initializer | None
    dtype: DType
    param_dtype: DType

    @nn.compact
    def __call__(self) -> Array:
        init = as_matrix(self.kernel_init or glorot_uniform())
        return dense(kernel_parameter(self, init, self.shape, self.param_dtype), self.dtype)


@dataclass(frozen=True)
class Latents:
    """Latents of all tokens, and the kernels that map them to keys and values: what the queries attend to."""

    kv_latent: Float[Array, "B S 1 W"]
    """[c, r] of each token, W = R + Hr"""
    key_kernel: Float[Array, "R N h"]
    """W_k, h = Hp"""
    value_kernel: Float[Array, "R N Hv"]
    """W_v"""
    quantization: tuple[Scheme | None, Scheme | None] = (None, None)
    """how to quantize the factors of c W_k and of c W_v in `expanded`"""

    def expanded(self, query: Query, spec: AttentionSpec, implementation: str) -> tuple[Attended, Weights | None]:
        """Attend as the paper writes it: k = [c W_k, r], v = c W_v in N heads (arXiv 2405.04434, equations 10, 11)."""
        latent, rope = jnp.split(self.kv_latent[:, :, 0], [self.key_kernel.shape[0]], axis=-1)
        key = linear(latent, self.key_kernel, quantization=self.quantization[0])  # (B, S, N, Hp)
        value = linear(latent, self.value_kernel, quantization=self.quantization[1])  # (B, S, N, Hv)
        rope = jnp.broadcast_to(rope[:, :, None], (*key.shape[:3], rope.shape[-1]))  # the same for all heads
        return attend(query, jnp.concatenate([key, rope], axis=-1), value, spec, implementation)

    def absorbed(self, query: Query, spec: AttentionSpec, implementation: str) -> tuple[Attended, Weights | None]:
        """Compute the same result as `expanded` without computing keys and values."""
        # Because matrix multiplication is associative, q (c W_k)^T = (q W_k^T) c^T and a (c W_v) = (a c) W_v, with
        # attention weights a: W_k is absorbed into the query and W_v is applied to the output. All heads attend to the
        # latents themselves, with a single key/value head (arXiv 2405.04434, section 2.1.2). Nothing is quantized: a
        # decoding step is bound by memory, not by its multiplications.
        rank, _, nope_dim = self.key_kernel.shape
        latent_query = jnp.einsum("btnp,rnp->btnr", query[..., :nope_dim], self.key_kernel)  # q W_k^T: (B, T, N, R)
        query = jnp.concatenate([latent_query, query[..., nope_dim:]], axis=-1)  # (B, T, N, R + Hr), matches [c, r]
        out, weights = attend(query, self.kv_latent, self.kv_latent[..., :rank], spec, implementation)  # a c
        return jnp.einsum("btnr,rnv->btnv", out, self.value_kernel), weights  # (a c) W_v: (B, T, N, Hv)


def absorbs(queries: int, keys: int, mla: MLA) -> bool:
    """Return whether `Latents.absorbed` needs fewer multiplications than `expanded`: for few queries and many keys."""
    # Multiplications per head. Expanded: two maps per key, then scores of width H and a weighted sum of width Hv per
    # pair. Absorbed: two maps per query, then scores of width R + Hr and a weighted sum of width R per pair.
    maps = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    expanded = keys * maps + queries * keys * (mla.head_dim + mla.v_head_dim)
    absorbed = queries * maps + queries * keys * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    return absorbed < expanded
