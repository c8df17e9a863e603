"""Why scores are divided by sqrt(d_k): their variance, and what is left of softmax's gradient, with and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn.kernels._reference import masked_softmax

SIZES = (4, 16, 64, 256, 1024, 4096)
"""d_k of the rows"""
QUERIES, KEYS = 256, 64
"""of one draw"""
LEAST_ROUNDS = 64
"""draws; more where d_k is small, so that a variance errs by less than 1 %"""


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """Scores of one head size, with or without the scale."""

    d_k: int
    """entries of a query and of a key"""
    scaled: bool
    """whether a score is q.k / sqrt(d_k), or q.k"""
    mean: float
    """of the scores; expected: 0"""
    variance: float
    """of the scores; expected: d_k, scaled 1"""
    largest_weight: float
    """softmax's largest weight over 64 keys, mean over the queries"""
    gradient: float
    """Frobenius norm of the derivative of softmax by its scores, mean over the queries"""


def scale_study(sizes: Sequence[int] = SIZES, least_rounds: int = LEAST_ROUNDS, seed: int = 0) -> tuple[ScaleRow, ...]:
    """Two rows for each d_k, without and with scale, for queries and keys of independent N(0, 1) entries.

    A sum of d_k products of mean 0 and variance 1 has variance d_k (Vaswani et al. 2017, section 3.2.1, footnote 4).
    """
    rows = []
    for d_k in sizes:
        products = _products(d_k, max(least_rounds, 32 * least_rounds // d_k), np.random.default_rng(seed))
        for scaled in (False, True):
            scores = products / np.sqrt(d_k) if scaled else products
            weights = masked_softmax(scores, None)
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
    """Frobenius norm of softmax's Jacobian diag(p) - p p^T for weights p (..., S); (...,), float64.

    The squares of the diagonal p_i (1 - p_i) and of the rest, p_i p_j. It is 0 where one weight is 1.
    """
    p = weights.astype(np.float64)
    squares = p**2
    diagonal = (squares * (1 - p) ** 2).sum(-1)
    rest = np.maximum(squares.sum(-1) ** 2 - (squares**2).sum(-1), 0.0)
    return np.sqrt(diagonal + rest)


def _products(d_k: int, rounds: int, draw: np.random.Generator) -> jax.Array:
    """q.k of every query with every key of a round, (rounds, 1, 256, 64)."""

    def normal(rows):
        return draw.standard_normal((rows, d_k), np.float32)

    # A round at a time: all queries of d_k = 4096 at once are a gigabyte.
    return jnp.asarray(np.stack([normal(QUERIES) @ normal(KEYS).T for _ in range(rounds)]))[:, None]
