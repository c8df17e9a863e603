"""The gated delta rule, a linear attention: by chunks of tokens, and token by token.

A row has a state instead of a cache of keys: a matrix (H, Hv) for each head, whose size does not depend on the number
of tokens. Shapes in addition to those of `_axes.py`: N value heads, C chunks of Q tokens.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from transformer.nn._axes import Array, Float

CHUNK = 64
"""tokens per chunk of `gated_delta_rule`"""

_multiply = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # the state sums over all tokens: float32


def recurrent_gated_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N Hv"],
    decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N H Hv"],
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N H Hv"]]:
    """Apply the gated delta rule token by token (Yang et al. 2024, arXiv 2412.06464, section 3.1).

    For each token, S = exp(decay) S, then S = S + beta k (v - S^T k)^T, and the output is S^T q: the state forgets, and
    is corrected where its value for the key k differs from v. Keys have length 1 for a stable state, `decay` is the
    logarithm of the factor on the state, at most 0, and `beta` the strength of the correction, from 0 to 1.

    Returns the outputs and the state after the last token, both float32.
    """

    def step(state, token):
        query, key, value, decay, beta = token
        state = state * jnp.exp(decay)[:, :, None, None]
        correction = (value - _multiply("bnhv,bnh->bnv", state, key)) * beta[:, :, None]
        state = state + _multiply("bnh,bnv->bnhv", key, correction)
        return state, _multiply("bnhv,bnh->bnv", state, query)

    tokens = [one.astype(jnp.float32).swapaxes(0, 1) for one in (query, key, value, decay, beta)]
    state, out = jax.lax.scan(step, state.astype(jnp.float32), tuple(tokens))
    return out.swapaxes(0, 1), state


def gated_delta_rule(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T N H"],
    value: Float[Array, "B T N Hv"],
    decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    state: Float[Array, "B N H Hv"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B N H Hv"]]:
    """Compute `recurrent_gated_delta_rule` by products over chunks of tokens (arXiv 2412.06464, section 3.3)."""
    length = query.shape[1]
    if length == 1:  # a decoding step
        return recurrent_gated_delta_rule(query, key, value, decay, beta, state)
    size = min(chunk, length)
    # (B, T, N, ...) -> (C, B, N, Q, ...). Added tokens have beta 0 and decay 0, so they don't change the state.
    query, key, value, decay, beta = (_chunks(one, size) for one in (query, key, value, decay, beta))
    total = jnp.cumsum(decay, axis=-1)  # of the tokens of the chunk up to each one
    # exp(total_i - total_j), the decay from token j to token i. Later tokens j would overflow: mask before exp.
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(jnp.tri(size, dtype=bool)[None, None, None], between, -jnp.inf))
    # Within a chunk, the corrections u solve u_i + beta_i sum_(j < i) (k_i . k_j) exp(total_i - total_j) u_j =
    # beta_i (v_i - exp(total_i) S^T k_i), a triangular system that is linear in the state S before the chunk. Solve it
    # for both terms on the right at once: u = from_values - from_state S.
    scaled = key * beta[..., None]
    system = _multiply("cbnih,cbnjh->cbnij", scaled, key) * between
    right = jnp.concatenate([value * beta[..., None], scaled * jnp.exp(total)[..., None]], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    from_values, from_state = jnp.split(solved, [value.shape[-1]], axis=-1)
    inside = _multiply("cbnih,cbnjh->cbnij", query, key) * between
    # The keys' share of the state after the chunk, and the queries' share of the state before it.
    key = key * jnp.exp(total[..., -1:] - total)[..., None]
    query = query * jnp.exp(total)[..., None]

    def step(state, parts):
        query, key, inside, from_values, from_state, kept = parts
        corrections = from_values - _multiply("bnih,bnhv->bniv", from_state, state)
        out = _multiply("bnih,bnhv->bniv", query, state) + _multiply("bnij,bnjv->bniv", inside, corrections)
        return state * kept[:, :, None, None] + _multiply("bnih,bniv->bnhv", key, corrections), out

    parts = query, key, inside, from_values, from_state, jnp.exp(total[..., -1])
    state, out = jax.lax.scan(step, state.astype(jnp.float32), parts)
    # (C, B, N, Q, Hv) -> (B, C, Q, N, Hv) -> (B, T, N, Hv)
    out = out.transpose(1, 0, 3, 2, 4)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], state


def _chunks(array: Array, size: int) -> Array:
    """Return an array (B, T, N, ...) in chunks, (C, B, N, Q, ...), float32, with zeros after the last token."""
    batch, length, *rest = array.shape
    count = -(-length // size)
    padded = jnp.pad(array.astype(jnp.float32), [(0, 0), (0, count * size - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(padded.reshape(batch, count, size, *rest), (1, 3), (0, 2))
