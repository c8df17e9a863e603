"""Multi-head attention with rotary positions inside your own Linen module: a forecaster of time series.

Usage: python -m examples.linen_module
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer import Mask, MultiHeadAttention, Rotary


class Forecaster(nn.Module):
    """Predict the value after each step: (B, T, channels) -> (B, T, channels). Only the attention is not from Flax."""

    width: int = 32

    @nn.compact
    def __call__(self, series, lengths=None):
        x = nn.Dense(self.width)(series)
        attention = MultiHeadAttention(num_heads=4, num_kv_heads=2, position=Rotary(base=1000.0))
        mask = Mask.causal() if lengths is None else Mask.causal() & Mask.lengths(lengths)
        y, _ = attention(nn.LayerNorm()(x), mask=mask)  # the second result is the KV cache, here None
        x = x + y
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(series.shape[-1])(x)


def waves(key, batch, length):
    """Return sines and cosines of random frequency and phase, (B, T, 2)."""
    frequency, phase = jax.random.uniform(key, (2, batch, 1), minval=0.2, maxval=1.0)
    angle = frequency * jnp.arange(length)[None, :] + 6.28 * phase
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def main():
    model, series = Forecaster(), waves(jax.random.key(0), batch=16, length=24)
    params = jax.jit(model.init)(jax.random.key(1), series)["params"]

    @jax.jit
    def loss(params):
        return jnp.square(model.apply({"params": params}, series[:, :-1]) - series[:, 1:]).mean()

    before, gradient = jax.value_and_grad(loss)(params)
    after = loss(jax.tree.map(lambda p, g: p - 0.02 * g, params, gradient))
    print(f"attention parameters: {jax.tree.map(jnp.shape, params['MultiHeadAttention_0'])}")
    print(f"squared error {before:.3f}, after one step of gradient descent {after:.3f}")

    predict = jax.jit(lambda series: model.apply({"params": params}, series))
    changed = predict(series.at[:, 20:].set(0.0)) - predict(series)
    print(f"predictions that depend on steps 20 to 23: {jnp.flatnonzero(jnp.abs(changed).max((0, 2)) > 0)}")
    return {"before": before, "after": after, "gradient": gradient, "changed": changed}


if __name__ == "__main__":
    main()
