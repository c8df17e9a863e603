"""An Encoder inside an NNX model through Flax's bridge, trained with nnx.Optimizer.

Usage: python -m examples.nnx_encoder
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from transformer import Encoder, FeedForwardOptions, Mask, TransformerConfig


class Centerer(nnx.Module):
    """Subtract the mean of each set from its numbers: (B, T, 1) -> (B, T, 1). This task requires attention."""

    def __init__(self, config, *, rngs):
        self.embed = nnx.Linear(1, config.d_model, rngs=rngs)
        self.encoder = nnx.bridge.ToNNX(Encoder(config), rngs=rngs)
        self.encoder.lazy_init(jnp.zeros((1, 1, config.d_model)))  # creates the parameters
        self.output = nnx.Linear(config.d_model, 1, rngs=rngs)

    def __call__(self, x, lengths):
        hidden, _, _ = self.encoder(self.embed(x), mask=Mask.lengths(lengths))  # no cache, no auxiliary losses
        return self.output(hidden)


def batch(key):
    """Return numbers (16, 9, 1), lengths (16,), the mask of non-padding numbers (16, 9, 1), and targets (16, 9, 1)."""
    x = 1.0 + jax.random.normal(key, (16, 9, 1)) + jax.random.normal(jax.random.fold_in(key, 1), (16, 1, 1))
    lengths = jax.random.randint(jax.random.fold_in(key, 2), (16,), 3, 10)
    real = jnp.arange(9)[None, :, None] < lengths[:, None, None]
    return x, lengths, real, x - x.mean(axis=1, keepdims=True, where=real)


@nnx.jit
def train_step(model, optimizer, key):
    def loss(model):
        x, lengths, real, answer = batch(key)
        return jnp.square(model(x, lengths) - answer).mean(where=real)

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def main():
    layer = FeedForwardOptions(activation="gelu_tanh")
    config = TransformerConfig(d_model=32, num_layers=2, num_heads=4, position=None, feed_forward=layer)
    model = Centerer(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    losses = [train_step(model, optimizer, jax.random.key(step)) for step in range(60)]
    print(f"parameters: {sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))}")
    print(f"squared error: {losses[0]:.3f} at first, {sum(losses[-5:]) / 5:.3f} in steps 56 to 60")
    return {"losses": losses, "model": model, "config": config}


if __name__ == "__main__":
    main()
