"""Gated DeltaNet: a layer with linear attention, and its state between decoding steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Bool, DType, Float, Hidden, Leaf
from transformer.nn._caches import SelfAttentionCache, of_layer
from transformer.nn._delta_rule import gated_delta_rule
from transformer.nn._masks import Mask, real_tokens
from transformer.nn._parameter_axes import declare
from transformer.nn._partitioning import constrain
from transformer.nn.layers._layers import Initializer, projection
from transformer.nn.layers._norms import RMSNorm
from transformer.nn.quantization._schemes import Quantization

FORGET = -100.0
"""logarithm of the factor on the state at the start of a packed sequence: exp(-100) is 0 next to any other number"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCache(SelfAttentionCache):
    """The state of a `GatedDeltaNet` between decoding steps. Its size does not depend on the number of tokens.

    It can't go back to fewer tokens, except to none: a row of length 0 starts with an empty state.
    """

    state: Leaf
    """(B, N, H, Hv), float32"""
    inputs: Leaf
    """(B, W - 1, C), the last inputs of the convolution of width W over C channels"""
    length: Leaf
    """(B,), number of tokens in each row"""
    layer: Leaf | None = None
    """(), index of the layer that is read and written, if all arrays have a leading axis of layers; otherwise None"""

    @staticmethod
    def create(batch: int, heads: tuple[int, int, int, int], conv_width: int, dtype: DType) -> StateCache:
        """Return an empty state for each of `batch` rows.

        `heads` are the numbers of key heads K and of value heads N, the size of a key head H and of a value head Hv;
        `dtype` is that of the inputs of the convolution.
        """
        key_heads, value_heads, key_dim, value_dim = heads
        # queries and keys of K heads, values of N heads
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return StateCache(
            state=jnp.zeros((batch, value_heads, key_dim, value_dim), jnp.float32),
            inputs=jnp.zeros((batch, conv_width - 1, channels), dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def read(self) -> tuple[Float[Array, "B N H Hv"], Float[Array, "B W C"]]:
        """Return state and inputs of this layer; those of a row without tokens are zeros."""
        # The arrays of a row without tokens may be left over from an earlier text.
        empty = self.row_lengths == 0
        state, inputs = of_layer(self.state, self.layer), of_layer(self.inputs, self.layer)
        return jnp.where(empty[:, None, None, None], 0.0, state), jnp.where(empty[:, None, None], 0.0, inputs)

    def updated(self, state: Array, inputs: Array, tokens: int) -> StateCache:
        """Return the cache with a new state and inputs of this layer, after `tokens` more tokens in each row."""
        return dataclasses.replace(
            self,
            state=self.state.at[*self.place, :].set(state),
            inputs=self.inputs.at[*self.place, :].set(inputs.astype(self.inputs.dtype)),
            length=self.length.at[*self.place, :].add(tokens),
        )


class GatedDeltaNet(nn.Module, kw_only=True):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3).

    Queries, keys and values pass a causal convolution of each channel and SiLU, and queries and keys are scaled to
    length 1. The state S (H, Hv) of a value head decays by exp(-exp(a_log) softplus(x W_decay + dt_bias)) and is
    corrected with strength sigmoid(x W_beta) (`gated_delta_rule`). The output is norm(S^T q / sqrt(H)) silu(x W_gate),
    projected by `out`. Each key head serves N / K value heads.

    Parameters: `query` and `key` (D, K, H), `value` and `output_gate` (D, N, Hv), `beta` and `decay` (D, N), and `out`
    (N, Hv, D), each with a `kernel`; `convolution` (W, 2 K H + N Hv), for queries, keys and values in this order;
    `a_log` and `dt_bias` (N,), and `norm/scale` (Hv,). `norm_epsilon` is that of `norm`, an RMSNorm. `kernel_init` and
    `output_init` initialize the kernels as in `MultiHeadAttention`.

    Raises:
        ValueError: a number of heads N that is not a multiple of K, or a mask with more than lengths and segments.
    """

    parameter_axes = declare(
        dict.fromkeys(("query/kernel", "key/kernel", "value/kernel", "output_gate/kernel"), "embed -> heads _")
        | dict.fromkeys(("beta/kernel", "decay/kernel"), "embed -> heads")
        | {"out/kernel": "heads _ -> embed", "convolution": "_ _", "a_log": "heads", "dt_bias": "heads"}
    )

    num_heads: int
    """number N of value heads"""
    num_key_heads: int
    """number K of query and key heads"""
    key_dim: int
    """size H of a query or key head"""
    value_dim: int
    """size Hv of a value head"""
    conv_width: int = 4
    """tokens W that the convolution reads: the token itself and those before it"""
    norm_epsilon: float = 1e-6
    kernel_init: Initializer | None = None
    output_init: Initializer | None = None
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32
    quantization: Quantization | None = None

    @nn.compact
    def __call__(
        self, x: Hidden, *, mask: Mask | Array | None = None, cache: StateCache | None = None
    ) -> tuple[Hidden, StateCache | None]:
        """Apply the layer to x (B, T, D).

        Args:
            x: (B, T, D).
            mask: lengths and segments mark padding, which does not change the state, and packed sequences. The layer
                is causal with any mask.
            cache: the state after the previous tokens, or None.

        Returns:
            The output (B, T, D), and the new state.
        """
        self._check(mask := Mask.of(mask))
        start = None if cache is None else cache.row_lengths
        real = real_tokens(mask, x.shape[:2], start)
        state = jnp.zeros((x.shape[0], self.num_heads, self.key_dim, self.value_dim), jnp.float32)
        before = jnp.zeros((x.shape[0], self.conv_width - 1, self._channels), self.dtype)
        if cache is not None:
            state, before = cache.read()

        sizes = {"query": (self.num_key_heads, self.key_dim), "key": (self.num_key_heads, self.key_dim)}
        sizes |= dict.fromkeys(("value", "output_gate"), (self.num_heads, self.value_dim))
        heads = {name: constrain(self._project(name, x, of), *_HEAD_AXES) for name, of in sizes.items()}
        # (B, T, N). In float32, because an error in a factor on the state acts on all later tokens.
        beta = jax.nn.sigmoid(self._project("beta", x, (self.num_heads,)).astype(jnp.float32))
        decay = self._decay(self._project("decay", x, (self.num_heads,)))

        gate, segments = heads.pop("output_gate"), mask.query_segments
        heads, before = self._convolved(heads, before, real, segments)
        # Padding corrects nothing and forgets nothing; a new packed sequence forgets everything before it.
        beta, decay = (jnp.where(real[:, :, None], one, 0.0) for one in (beta, decay))
        if segments is not None:
            # The first token of a call is no start: the state before it is empty, or belongs to its text.
            first = (jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0) & real
            decay = jnp.where(first[:, :, None], FORGET, decay)
        query, key = (_unit(heads[name]) for name in ("query", "key"))
        # (B, T, K, H) -> (B, T, N, H): value head n has the query and key of head n // (N / K).
        query, key = (jnp.repeat(one, self.num_heads // self.num_key_heads, axis=2) for one in (query, key))
        out, state = gated_delta_rule(query * self.key_dim**-0.5, key, heads["value"], decay, beta, state)
        # Over the Hv numbers of each head
        out = RMSNorm(self.norm_epsilon, self.dtype, self.param_dtype, name="norm")(out)
        out = (out * jax.nn.silu(gate.astype(jnp.float32))).astype(self.dtype)
        cache = None if cache is None else cache.updated(state, before, x.shape[1])
        return self._project("out", constrain(out, *_HEAD_AXES), x.shape[-1:], contract=2), cache

    @property
    def _channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def _check(self, mask: Mask) -> None:
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_key_heads ({self.num_key_heads}): all keys "
                f"serve the same number of values. Change one of them."
            )
        found = [name for name in ("dense_part", "query_places", "query_groups") if getattr(mask, name) is not None]
        if found or mask.window_size is not None or mask.chunk_size is not None:
            raise ValueError(
                "linear attention reads every earlier token through its state: expected a mask of lengths and segments "
                "(padding and packing), got one that selects single keys, a window, chunks or groups. Remove that "
                "part; beam search needs a model without linear attention."
            )

    def _decay(self, x: Float[Array, "B T N"]) -> Float[Array, "B T N"]:
        # ln(alpha) = -exp(a_log) softplus(x W_decay + dt_bias) <= 0, so the factor alpha is at most 1 for all
        # parameters. This is the parametrization of Mamba-2 (Dao & Gu 2024, arXiv 2405.21060). Float32, as exp turns
        # absolute errors of ln(alpha) into relative errors of the state.
        rate = self.param("a_log", _initial_rate, (self.num_heads,), self.param_dtype).astype(jnp.float32)
        bias = self.param("dt_bias", nn.initializers.ones, (self.num_heads,), self.param_dtype).astype(jnp.float32)
        return -jnp.exp(rate)[None, None] * jax.nn.softplus(x.astype(jnp.float32) + bias[None, None])

    def _convolved(
        self, heads: dict[str, Array], before: Array, real: Bool[Array, "B T"], segments: Array | None
    ) -> tuple[dict[str, Array], Array]:
        """Apply the convolution and SiLU to heads; also return the inputs (B, W - 1, C) that the next tokens need."""
        # y_t = sum_b kernel_(W - 1 - b) x_(t - b) over b = 0, ..., W - 1, for each channel separately
        width, (batch, length) = self.conv_width, real.shape
        shape = (width, self._channels)
        kernel = self.param("convolution", _CONVOLUTION_INIT, shape, self.param_dtype)
        kernel = kernel.astype(self.dtype)
        joined = jnp.concatenate([one.reshape(batch, length, -1) for one in heads.values()], -1)
        joined = jnp.where(real[:, :, None], joined, 0)
        padded = jnp.concatenate([before.astype(joined.dtype), joined], axis=1)  # (B, W - 1 + T, C)
        total = jnp.zeros_like(joined)
        for back in range(width):  # `back` tokens ago; the last row of the kernel is for the token itself
            part = padded[:, width - 1 - back : width - 1 - back + length] * kernel[width - 1 - back][None, None]
            if segments is not None and back:
                # No input of another packed sequence. Inputs before the row belong to the cache, and count as the same
                # sequence.
                same = segments[:, back:] == segments[:, :-back]
                same = jnp.pad(same, [(0, 0), (min(back, length), 0)], constant_values=True)[:, :length]
                part = jnp.where(same[:, :, None], part, 0)
            total = total + part
        # The inputs up to the last token that is no padding. Without one, they are those before.
        # Token t is row W - 1 + t of `padded`, so the W - 1 inputs up to token last - 1 are the rows last, ..., last +
        # W - 2.
        last = jnp.where(real, jnp.arange(length)[None] + 1, 0).max(1)
        index = last[:, None, None] + jnp.arange(width - 1)[None, :, None]
        before = jnp.take_along_axis(padded, index, axis=1)
        sizes = [one.shape[2] * one.shape[3] for one in heads.values()]
        parts = jnp.split(jax.nn.silu(total), [sizes[0], sizes[0] + sizes[1]], axis=-1)
        return {name: part.reshape(heads[name].shape) for name, part in zip(heads, parts, strict=True)}, before

    def _project(self, name: str, x: Array, features: tuple[int, ...], contract: int = 1) -> Array:
        return projection(self, name, features, contract)(x)


_HEAD_AXES = ("batch", "length", "heads", "head_dim")

# Uniform between -1 / sqrt(W) and 1 / sqrt(W), as in the authors' code. Each output of a channel is a sum over W tokens
# of this channel alone, so the fan-in is W (axis 0) and not the number of channels.
_CONVOLUTION_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=0, out_axis=1)


def _initial_rate(key: Array, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return the logarithm of rates between 0.01 and 16, as in the authors' code."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def _unit(heads: Array) -> Array:
    # The state is multiplied by I - beta k k^T, whose eigenvalues are 1 and 1 - beta |k|^2. With |k| = 1 and beta from
    # 0 to 1 they are in [0, 1], so the state does not grow. 1e-6: a zero vector stays zero.
    heads = heads.astype(jnp.float32)
    return heads * jax.lax.rsqrt(jnp.square(heads).sum(-1, keepdims=True) + 1e-6)
