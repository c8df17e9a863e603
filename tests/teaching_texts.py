"""An input, a small model and parameters for the tests of the teaching texts about attention."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config import AttentionOptions, LayerKind, StackOptions, TransformerConfig

KEYS = jax.random.split(jax.random.key(0), 8)
B, T, D = 3, 7, 10
X = jax.random.normal(KEYS[0], (B, T, D))
SMALL = TransformerConfig(
    vocab_size=13,
    d_model=10,
    num_layers=1,
    num_heads=2,
    attention=AttentionOptions(head_dim=6),
    d_ff=7,
    stack=StackOptions(prefix=(LayerKind(),)),
)


def softmax(scores):
    """Return the softmax over the last axis, in NumPy."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kernels(**arrays):
    """Return parameters of attention without biases."""
    return {"params": {name: {"kernel": jnp.asarray(array, jnp.float32)} for name, array in arrays.items()}}


def start(module, *inputs):
    """Return random parameters of a module, with nontrivial biases and gammas, without compiling anything."""
    shapes, rng = jax.eval_shape(module.init, KEYS[1], *inputs), np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 3, leaf.dtype), shapes)


def captured(attention, params, x, **options):
    """Return the output (B, T, D) and the attention weights (B, N, T, S)."""
    (out, _), seen = attention.apply(params, x, sow_weights=True, mutable=["intermediates"], **options)
    return out, seen["intermediates"]["weights"][0]
