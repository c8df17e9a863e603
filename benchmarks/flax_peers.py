"""Baseline models of benchmarks.train_step, written with the layers of Flax and Optax, without this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Layer(nn.Module):
    """A pre-norm layer as in GPT-2, without biases."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        """(B, T, D) -> (B, T, D)."""
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False)
        x = x + attention(nn.LayerNorm(use_bias=False)(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * width, use_bias=False)(nn.LayerNorm(use_bias=False)(x)), approximate=False)
        return x + nn.Dense(width, use_bias=False)(hidden)


class GPT(nn.Module):
    """A decoder-only model with learned positions and tied embeddings."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int

    @nn.compact
    def __call__(self, tokens, targets):
        """Return the mean cross-entropy of tokens and targets (B, T)."""
        table = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        positions = nn.Embed(self.context, self.width, embedding_init=nn.initializers.normal(0.02))
        x, mask = table(tokens) + positions(jnp.arange(tokens.shape[1]))[None], nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Layer(self.heads)(x, mask)
        logits = table.attend(nn.LayerNorm(use_bias=False)(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class PaperLayer(nn.Module):
    """A post-norm layer of Vaswani et al. 2017, with cross-attention if a context is given."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, mask=None, context=None):
        """(B, T, D) -> (B, T, D)."""

        def add(y):
            return nn.LayerNorm()(x + nn.Dropout(0.1, deterministic=False)(y))

        x = add(nn.MultiHeadDotProductAttention(self.heads)(x, mask=mask))
        if context is not None:
            x = add(nn.MultiHeadDotProductAttention(self.heads)(x, context))
        return add(nn.Dense(x.shape[-1])(nn.relu(nn.Dense(self.hidden)(x))))


class Translator(nn.Module):
    """The encoder-decoder of Vaswani et al. 2017, with one embedding table for source, target and logits."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    hidden: int

    @nn.compact
    def __call__(self, source, tokens, targets):
        """Return the mean cross-entropy with smoothed labels, for source (B, S), tokens and targets (B, T)."""
        table = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(self.width**-0.5))

        def embed(ids):
            indices, numbers = jnp.arange(ids.shape[1]), jnp.arange(0, self.width, 2)
            # Sinusoidal positions (section 3.5): angle of position p and dimension pair i is p / 10000^(2i / d_model).
            angles = indices[:, None] / 10_000 ** (numbers / self.width)[None]
            positions = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(1, len(indices), -1)
            return nn.Dropout(0.1, deterministic=False)(table(ids) * self.width**0.5 + positions)

        context, x = embed(source), embed(tokens)
        for _ in range(self.layers):
            context = PaperLayer(self.heads, self.hidden)(context)
        for _ in range(self.layers):
            x = PaperLayer(self.heads, self.hidden)(x, nn.make_causal_mask(tokens), context)
        labels = optax.smooth_labels(jax.nn.one_hot(targets, self.vocabulary), 0.1)
        return optax.softmax_cross_entropy(table.attend(x), labels).mean()


def training_step(model: nn.Module, batch: tuple[Any, ...], *, betas: tuple[float, float]) -> Callable[[], jax.Array]:
    """Return a function that updates the model on the batch once and returns the loss."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    inputs = [jnp.asarray(array) for array in batch]
    params = jax.jit(model.init)(keys, *inputs)

    def decayed(tree):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)  # no weight decay for norms and biases

    adamw = optax.adamw(1e-3, *betas, weight_decay=0.1, mask=decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    state = [params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32)]

    def update(params, moments, number, *inputs):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(2), number)}
        loss, gradients = jax.value_and_grad(lambda params: model.apply(params, *inputs, rngs=rngs))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, number + 1, loss

    compiled = jax.jit(update, donate_argnums=(0, 1, 2))

    def step():
        *state[:], loss = compiled(*state, *inputs)
        return loss

    return step
