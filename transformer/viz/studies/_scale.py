"""Variance of attention scores and gradient of the softmax, with and without the division by sqrt(d_k)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn.kernels._reference import masked_softmax

SIZES = (4, 16, 64, 256, 1024, 4096)
"""values of d_k"""
QUERIES, KEYS = 256, 64
"""number of queries and keys per round"""
LEAST_ROUNDS = 64
"""minimum number of rounds; a small d_k gets more rounds, so that the error of a variance is below 1 %"""


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """Statistics of the scores for one head size, with or without scaling."""

    d_k: int
    """size of queries and keys"""
    scaled: bool
    """True: a score is q.k / sqrt(d_k); False: q.k"""
    mean: float
    """mean of the scores; expected value: 0"""
    variance: float
    """variance of the scores; expected value: 1 with scaling, d_k without"""
    largest_weight: float
    """largest softmax weight over 64 keys, mean over the queries"""
    gradient: float
    """Frobenius norm of the Jacobian of the softmax, mean over the queries"""


def scale_study(sizes: Sequence[int] = SIZES, least_rounds: int = LEAST_ROUNDS, seed: int = 0) -> tuple[ScaleRow, ...]:
    """Return two rows per d_k, without and with scaling, for queries and keys with independent N(0, 1) entries.

    q.k is a sum of d_k products with mean 0 and variance 1, and therefore has variance d_k (Vaswani et al. 2017,
    section 3.2.1, footnote 4). With large scores the softmax saturates and its gradient vanishes.
    """
    rows = []
    for d_k in sizes:
        products = _products(d_k, max(least_rounds, 32 * least_rounds // d_k), np.random.default_rng(seed))
        for scaled in (False, True):
            scores = products / np.sqrt(d_k) if scaled else products
            weights = masked_softmax(scores, None)
            # In float64: the variance of float32 scores would lose digits in a sum of this length.
            values = np.asarray(scores, np.float64)
            row = ScaleRow(
                d_k=d_k,
                scaled=scaled,
                mean=float(values.mean()),
                variance=float(values.var()),
                largest_weight=float(weights.max(-1).mean()),
                gradient=float(softmax_gradient(np.asarray(weights)).mean()),
            )
            rows.append(row)
    return tuple(rows)


def softmax_gradient(weights: np.ndarray) -> np.ndarray:
    """Return the Frobenius norm of the softmax Jacobian diag(p) - p p^T for weights p (..., S), as (...,) float64.

    The diagonal entries are p_i (1 - p_i), the other entries -p_i p_j. The norm is 0 if one weight is 1.
    """
    p = weights.astype(np.float64)
    squares = p**2
    # sum_i (p_i (1 - p_i))^2
    diagonal = (squares * (1 - p) ** 2).sum(-1)
    # sum_(i != j) (p_i p_j)^2 = (sum_i p_i^2)^2 - sum_i p_i^4, which rounding could make slightly negative
    rest = np.maximum(squares.sum(-1) ** 2 - (squares**2).sum(-1), 0.0)
    return np.sqrt(diagonal + rest)


def _products(d_k: int, rounds: int, draw: np.random.Generator) -> jax.Array:
    """Return q.k of every query with every key of its round, (rounds, 1, 256, 64)."""

    def normal(rows):
        return draw.standard_normal((rows, d_k), np.float32)

    # One round at a time: the queries of all rounds with d_k = 4096 would take a gigabyte.
    return jnp.asarray(np.stack([normal(QUERIES) @ normal(KEYS).T for _ in range(rounds)]))[:, None]
