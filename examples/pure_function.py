"""Attention as a pure function, without Flax: causal mask, padding, grouped heads and a bias, under jit, grad and vmap.

Usage: python -m examples.pure_function
"""

import jax
import jax.numpy as jnp

from transformer import Mask, dot_product_attention

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 7, 6, 3, 8


def nearer_is_better(queries, keys):
    """Return a bias from the indices of queries (t,) and keys (s,). It must broadcast to (B, N, t, s)."""
    return -0.1 * jnp.abs(queries[:, None] - keys[None, :]).astype(jnp.float32)


@jax.jit
def attend(query, key, value, lengths):
    """query (B, T, N, H); key and value (B, S, K, H), N / K query heads per KV head; lengths (B,) without padding."""
    mask = Mask.causal() & Mask.lengths(lengths)
    return dot_product_attention(query, key, value, mask=mask, bias=nearer_is_better)


@jax.jit
def formula(query, key, value, lengths):
    """Compute the same with the textbook formula, softmax(Q K^T / sqrt(H) + bias) V."""
    key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    index = jnp.arange(LENGTH)
    allowed = (index[:, None] >= index[None, :])[None] & (index[None, None, :] < lengths[:, None, None])

    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / SIZE**0.5 + nearer_is_better(index, index)[None, None]
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (BATCH, LENGTH, HEADS, SIZE))
    key, value = (jax.random.normal(k, (BATCH, LENGTH, KV_HEADS, SIZE)) for k in keys[1:])
    lengths = jnp.array([7, 4])

    y = attend(query, key, value, lengths)
    difference = jnp.abs(y - formula(query, key, value, lengths)).max()
    print(f"query {query.shape}, key {key.shape} -> {y.shape}; difference from the formula: {difference:.1e}")

    gradient = jax.grad(lambda key: jnp.square(attend(query, key, value, lengths)).sum())(key)
    print(f"gradient of the 4 non-padding keys of row 1: {jnp.abs(gradient[1, :4]).max():.2f}")
    print(f"gradient of the 3 padding keys: {jnp.abs(gradient[1, 4:]).max()}")

    queries = jnp.stack([query, 2 * query, 3 * query])  # three queries for the same keys
    mapped = jax.vmap(attend, in_axes=(0, None, None, None))(queries, key, value, lengths)
    print(f"vmap over {queries.shape} -> {mapped.shape}")
    return {"difference": difference, "gradient": gradient, "y": y, "mapped": mapped}


if __name__ == "__main__":
    main()
