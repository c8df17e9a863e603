"""Norms: layer normalization, RMSNorm and their variants, computed in float32."""

from __future__ import annotations

import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.nn import _few_rows as few_rows
from transformer.nn._axes import Array, DType, Float
from transformer.nn._parameter_axes import declare


class LayerNorm(nn.Module):
    """gamma (x - mean) / sqrt(variance + epsilon) + beta over the last axis (Ba et al. 2016, arXiv 1607.06450).

    Computed in float32; `epsilon` avoids a division by 0.
    """

    parameter_axes = declare({"scale": "norm", "bias": "norm"})

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize (..., D) -> (..., D), in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype)
        # In float32: the 8 significant bits of bfloat16 are too few for a mean of D squares.
        x = x.astype(jnp.float32)
        # Variance of the centered x: mean(x^2) - mean^2 would cancel where the mean is large.
        x = x - x.mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (y * _row(scale, x) + _row(bias, x)).astype(self.dtype)


def unscaled_rms_norm(x: Float[Array, "..."], epsilon: float) -> Float[Array, "..."]:
    """Compute x / sqrt(mean(x^2) + epsilon) over the last axis, in float32; shape and dtype stay the same."""
    wide = x.astype(jnp.float32)
    # x / RMS(x), RMS = sqrt(mean(x^2)): rsqrt(a) is 1 / sqrt(a)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


class RMSNorm(nn.Module):
    """gamma x / sqrt(mean(x^2) + epsilon) over the last axis, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    parameter_axes = declare({"scale": "norm"})
    shift: ClassVar[float] = 0.0
    """added to the parameter, whose initial value is 1 - shift"""

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize (..., D) -> (..., D), in `dtype`."""
        init = nn.initializers.zeros if self.shift else nn.initializers.ones
        scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        if few_rows.apply_to(x, math.prod(x.shape[:-1])):
            rows = few_rows.rms_norm(x.reshape(-1, x.shape[-1]), scale, self.epsilon, self.shift, self.dtype)
            return rows.reshape(x.shape)
        x, factor = x.astype(jnp.float32), _row(scale, x)
        # Round once, after multiplying by gamma.
        factor = self.shift + factor if self.shift else factor
        return (unscaled_rms_norm(x, self.epsilon) * factor).astype(self.dtype)


class LayerNormWithoutBias(RMSNorm):
    """gamma (x - mean) / sqrt(variance + epsilon), without beta, as in ModernBERT (Warner et al. 2024, arXiv
    2412.13663, section 2.1.1). It equals RMSNorm of x - mean.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize (..., D) -> (..., D), in `dtype`."""
        x = x.astype(jnp.float32)
        return super().__call__(x - x.mean(-1, keepdims=True))


class ZeroCenteredRMSNorm(RMSNorm):
    """(1 + gamma) x / sqrt(mean(x^2) + epsilon) over the last axis, as in Gemma (Gemma Team 2024, arXiv 2403.08295).

    Gamma is initialized to 0, so weight decay pulls the factor toward 1 rather than toward 0. 1 + gamma is computed in
    float32: in bfloat16 it would round away a small gamma.
    """

    shift = 1.0


class FrozenBatchNorm(nn.Module):
    """gamma (x - mean) / sqrt(variance + epsilon) + beta with a stored `mean` and `variance` for each feature.

    This is batch normalization in inference mode (Ioffe & Szegedy 2015, arXiv 1502.03167, algorithm 2), in float32.
    `mean` and `variance` get no gradient, and training does not update them. Their initial values, 0 and 1, normalize
    nothing; they are meant to be loaded from a trained model.
    """

    parameter_axes = declare({"scale": "norm", "bias": "norm", "mean": "norm", "variance": "norm"})

    epsilon: float = 1e-6
    dtype: DType = jnp.float32
    param_dtype: DType = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize (..., D) -> (..., D), in `dtype`."""
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        initial = {"scale": ones, "bias": zeros, "mean": zeros, "variance": ones}
        rows = {name: _row(self.param(name, init, x.shape[-1:], self.param_dtype), x) for name, init in initial.items()}
        mean, variance = jax.lax.stop_gradient((rows["mean"], rows["variance"]))
        y = (x.astype(jnp.float32) - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return (y * rows["scale"] + rows["bias"]).astype(self.dtype)


def _row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """Return a vector (D,) in float32 with the rank of `like`, (1, ..., 1, D)."""
    return vector.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


NORMS: dict[str, type[nn.Module]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "zero_centered_rms_norm": ZeroCenteredRMSNorm,
    "layer_norm_without_bias": LayerNormWithoutBias,
    "frozen_batch_norm": FrozenBatchNorm,
}
"""normalization layers by name"""
