"""An input, a small model and parameters for the tests of the teaching texts about attention."""

import jax
import numpy as np

from transformer.config import AttentionOptions, FeedForwardOptions, LayerKind, StackOptions, TransformerConfig

KEYS = [jax.device_put(np.array([0, number], np.uint32)) for number in range(8)]
"""random keys, in the old format, because `jax.random.key` compiles a program"""
B, T, D = 3, 7, 10


def normal(seed, *shape):
    """Return normally distributed numbers from NumPy, which compiles nothing."""
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, B, T, D)
SMALL = TransformerConfig(
    vocab_size=13,
    d_model=10,
    num_layers=1,
    num_heads=2,
    attention=AttentionOptions(head_dim=6),
    feed_forward=FeedForwardOptions(d_ff=7),
    stack=StackOptions(prefix=(LayerKind(),)),
)


def softmax(scores):
    """Return the softmax over the last axis, in NumPy."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kernels(**arrays):
    """Return parameters of attention without biases."""
    return {"params": {name: {"kernel": np.asarray(array, np.float32)} for name, array in arrays.items()}}


def start(module, *inputs):
    """Return random parameters of a module, with nontrivial biases and gammas, without compiling anything."""
    shapes, rng = jax.eval_shape(module.init, KEYS[1], *inputs), np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jax.device_put((rng.normal(size=leaf.shape) / 3).astype(leaf.dtype)), shapes)


def captured(attention, params, x, **options):
    """Return the output (B, T, D) and the attention weights (B, N, T, S)."""

    @jax.jit
    def run(params, x):
        (out, _), seen = attention.apply(params, x, sow_weights=True, mutable=["intermediates"], **options)
        return out, seen["intermediates"]["weights"][0]

    return run(params, x)
