"""Similarity of two positions by their distance, up to 100,000, computed with the hooks of each position scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._parts import RotaryScaling
from transformer.nn._positions import ALiBi, Learned, NoPosition, PositionScheme, Rotary, Sinusoidal, T5Bias

FARTHEST = 100_000
"""largest distance"""
D_MODEL, HEAD_DIM, HEADS, LEARNED_LENGTH = 512, 64, 8, 512
"""width of sinusoids, size of a rotary head, number of ALiBi heads, rows of a learned table"""
WIDTHS = (4, 8, 16, 32, 64, 128, 512)
"""widths of sinusoids whose repetition is measured"""
ALIKE = 0.95
"""similarity from which two positions count as almost equal"""
LATE = 1_000
"""smallest distance at which almost equal positions are searched"""
_AT_ONCE = 9_091  # encodings computed per call; 11 x 9,091 = 100,001, so that all calls have the same shape


@dataclass(frozen=True, kw_only=True)
class SimilarityRow:
    """Similarity of two positions at each distance of the study, for one scheme."""

    scheme: str
    """name and sizes of the scheme"""
    similarity: tuple[float, ...]
    """similarity at each distance; 1: the positions are equal"""


@dataclass(frozen=True, kw_only=True)
class CodesRow:
    """Distances (learned scheme: positions) that a scheme with a finite number of codes can distinguish."""

    scheme: str
    """name and sizes of the scheme"""
    codes: int
    """number of distinct codes among all distances"""
    single_below: int
    """every distance below this one has a unique code"""
    alike_from: int
    """all distances from this one on share one code, or have none"""


@dataclass(frozen=True, kw_only=True)
class RepeatRow:
    """Distances at which sinusoids of one width repeat."""

    features: int
    """width of a sinusoidal encoding, or size of a rotary head"""
    shortest_wavelength: float
    """shortest wavelength in positions: 2 pi"""
    longest_wavelength: float
    """longest wavelength in positions: 2 pi base^(1 - 2 / features)"""
    returns_at: int | None
    """first distance after the first minimum with a similarity of at least `ALIKE`; None: there is none"""
    highest: float
    """maximum similarity over all distances from `LATE` on"""
    highest_at: int
    """distance of that maximum"""


@dataclass(frozen=True, kw_only=True)
class PositionStudy:
    """Tables of the study, and the similarity at each distance 0, 1, 2, ... from which they are computed."""

    distances: tuple[int, ...]
    """distances of the similarity table: 1, 10, 100, ..."""
    similarities: tuple[SimilarityRow, ...]
    """rows for the schemes with a similarity"""
    codes: tuple[CodesRow, ...]
    """rows for the schemes that map distances or positions to codes"""
    repeats: tuple[RepeatRow, ...]
    """rows for sinusoids of several widths"""
    curves: Mapping[str, np.ndarray]
    """similarity of each scheme at each distance"""
    width_curves: Mapping[int, np.ndarray]
    """similarity of sinusoids of each width at each distance"""


def position_study(farthest: int = FARTHEST) -> PositionStudy:
    """Compare all schemes over the distances 0 to `farthest`, which must be above `LATE`."""
    distances = np.arange(farthest + 1)
    shown = tuple(10**power for power in range(len(str(farthest))))
    widths = {width: encoding_similarity(Sinusoidal(), width, distances) for width in WIDTHS}
    stretched = RotaryScaling(kind="linear", factor=8.0)
    yarn = RotaryScaling(kind="yarn", factor=8.0, original_length=4_096)
    llama3 = RotaryScaling(kind="llama3", factor=8.0, original_length=8_192)  # as in Llama 3.1
    rotary = {
        "rotary, base 10,000": Rotary(),
        "rotary, base 500,000": Rotary(base=500_000.0),
        "rotary, base 10,000, linear x 8": Rotary(scaling=stretched),
        "rotary, base 10,000, yarn x 8": Rotary(scaling=yarn),
        "rotary, base 500,000, llama3 x 8": Rotary(base=500_000.0, scaling=llama3),
    }
    curves = {"sinusoidal, d_model 512": widths[D_MODEL]}
    curves |= {name: rotation_similarity(scheme, HEAD_DIM, distances) for name, scheme in rotary.items()}
    factors = bias_factors(ALiBi(num_heads=HEADS), distances)
    curves |= {"ALiBi, steepest of 8 heads": factors[0], "ALiBi, flattest of 8 heads": factors[-1]}
    curves["none"] = rotation_similarity(NoPosition(), HEAD_DIM, distances)
    return PositionStudy(
        distances=shown,
        similarities=tuple(
            SimilarityRow(scheme=name, similarity=tuple(float(curve[distance]) for distance in shown))
            for name, curve in curves.items()
        ),
        codes=(
            _codes("T5, decoder", bias_codes(T5Bias(num_heads=1, bidirectional=False), distances)),
            _codes("T5, encoder (each side)", bias_codes(T5Bias(num_heads=1), distances)),
            _codes(f"learned, {LEARNED_LENGTH} rows", learned_codes(LEARNED_LENGTH, distances)),
            _codes("none", np.zeros(len(distances))),
        ),
        repeats=tuple(_repeats(width, curve) for width, curve in widths.items()),
        curves=curves,
        width_curves=widths,
    )


def encoding_similarity(scheme: Sinusoidal, features: int, distances: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the cosine similarity of the encodings at `start` and at `start` + each distance (n,), as (n,) float64."""
    encode = jax.jit(lambda row: scheme.encoding(row, features)[0])

    def unit(positions):
        encoding = np.asarray(encode(_row(positions)), np.float64)
        return encoding / np.linalg.norm(encoding, axis=-1, keepdims=True)

    (first,) = unit(np.array([start]))
    parts = range(0, len(distances), _AT_ONCE)
    return np.concatenate([unit(start + distances[part : part + _AT_ONCE]) @ first for part in parts])


def rotation_similarity(scheme: PositionScheme, size: int, distances: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the normalized score of a query at `start` and an equal key at `start` + each distance (n,), as (n,)."""
    # All entries are 1, so that all pairs have equal weight: for rotary embeddings it is the mean of cos(distance x
    # frequency) over the pairs (Su et al. 2021, arXiv 2104.09864, section 3.4.3). The norms cancel the factor of YaRN.
    rotate = jax.jit(lambda row: scheme.rotate(jnp.ones((*row.shape, 1, size)), row)[0, :, 0])

    def unit(positions):
        heads = np.asarray(rotate(_row(positions)), np.float64)
        return heads / np.linalg.norm(heads, axis=-1, keepdims=True)

    (query,) = unit(np.array([start]))
    return unit(start + distances) @ query


def bias_factors(scheme: ALiBi, distances: np.ndarray, start: int = 0) -> np.ndarray:
    """Return exp(bias) of each head, the factor on a softmax weight at each distance (n,), as (N, n) float64."""
    bias = scheme.bias(_row(np.array([start])), _row(start + distances))
    return np.exp(np.asarray(bias, np.float64)[0, :, 0])


def bias_codes(scheme: T5Bias, distances: np.ndarray) -> np.ndarray:
    """Return the bucket of T5's bias (arXiv 1910.10683, section 2.1) for a key at each distance before its query."""
    # A table whose row i contains the value i: the bias of a key is then the index of its bucket.
    table = jnp.broadcast_to(jnp.arange(scheme.buckets, dtype=jnp.float32)[:, None], scheme.table_shape)
    query = int(distances.max())
    return np.asarray(scheme.bias(_row(np.array([query])), _row(query - distances), table))[0, 0, 0]


def learned_codes(max_length: int, positions: np.ndarray) -> np.ndarray:
    """Return the row of a learned table that is added at each position (n,), as (n,); -1: the table has no such row."""
    # A table whose row i contains the value i: the sum with zeros is then the index of the row.
    scheme = Learned(max_length=max_length, features=1)
    table = jnp.arange(max_length, dtype=jnp.float32)[:, None]
    # One position per row of the batch, because `add` rejects a sequence that is longer than the table. Positions
    # outside the table give NaN.
    rows = scheme.add(jnp.zeros((len(positions), 1, 1)), jnp.asarray(positions, jnp.int32)[:, None], table)
    return np.nan_to_num(np.asarray(rows)[:, 0, 0], nan=-1.0)


def _codes(scheme: str, codes: np.ndarray) -> CodesRow:
    shared = np.flatnonzero(codes[1:] == codes[:-1])
    changes = np.flatnonzero(codes[1:] != codes[:-1])
    return CodesRow(
        scheme=scheme,
        codes=len(np.unique(codes[codes >= 0])),
        single_below=int(shared[0]),
        alike_from=int(changes[-1]) + 1 if len(changes) else 0,
    )


def _repeats(features: int, similarity: np.ndarray) -> RepeatRow:
    # Skip the similarity of close positions: start at the first local minimum.
    trough = int(np.flatnonzero(np.diff(similarity) > 0)[0])
    alike = np.flatnonzero(similarity[trough:] >= ALIKE)
    late = similarity[LATE:]
    return RepeatRow(
        features=features,
        shortest_wavelength=2 * math.pi,
        longest_wavelength=2 * math.pi * Sinusoidal().base ** (1 - 2 / features),
        returns_at=trough + int(alike[0]) if len(alike) else None,
        highest=float(late.max()),
        highest_at=LATE + int(late.argmax()),
    )


def _row(positions: np.ndarray) -> jnp.ndarray:
    """Return positions (n,) as a batch with one row, (1, n)."""
    return jnp.asarray(positions, jnp.int32)[None, :]
