"""How alike two positions are by their distance, up to 100,000, computed through each scheme's own hooks."""

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
"""where distances end"""
D_MODEL, HEAD_DIM, HEADS, LEARNED_LENGTH = 512, 64, 8, 512
"""width of sinusoids, size of a rotary head, heads of ALiBi, rows of a learned table"""
WIDTHS = (4, 8, 16, 32, 64, 128, 512)
"""of sinusoids: where do they repeat?"""
ALIKE = 0.95
"""a similarity from here on makes a late position look like an early one"""
LATE = 1_000
"""where lookalikes are searched: this distance and beyond"""
_AT_ONCE = 9_091  # encodings held at a time; 11 x 9,091 = 100,001, so that all parts have one shape


@dataclass(frozen=True, kw_only=True)
class SimilarityRow:
    """One scheme: how alike two positions at each of the study's distances are."""

    scheme: str
    """name and sizes"""
    similarity: tuple[float, ...]
    """1: the same"""


@dataclass(frozen=True, kw_only=True)
class CodesRow:
    """One scheme that has a number of codes: which distances (learned: positions) it can tell apart."""

    scheme: str
    """name and sizes"""
    codes: int
    """distinct codes among all distances"""
    single_below: int
    """distances below this one each have a code of their own"""
    alike_from: int
    """distances from this one on share one code, or have none"""


@dataclass(frozen=True, kw_only=True)
class RepeatRow:
    """Sinusoids of one width: where they come back."""

    features: int
    """width of a sinusoidal encoding, or size of a rotary head"""
    shortest_wavelength: float
    """in positions: 2 pi"""
    longest_wavelength: float
    """in positions: 2 pi base^(1 - 2 / features)"""
    returns_at: int | None
    """first distance after the first trough with a similarity of at least `ALIKE`; None: none"""
    highest: float
    """highest similarity of any distance from `LATE` on"""
    highest_at: int
    """its distance"""


@dataclass(frozen=True, kw_only=True)
class PositionStudy:
    """The tables, and the similarity at each distance 0, 1, 2, ... that they are made of."""

    distances: tuple[int, ...]
    """1, 10, 100, ..."""
    similarities: tuple[SimilarityRow, ...]
    """schemes with a similarity"""
    codes: tuple[CodesRow, ...]
    """schemes that number distances or positions"""
    repeats: tuple[RepeatRow, ...]
    """sinusoids of several widths"""
    curves: Mapping[str, np.ndarray]
    """similarity of each scheme"""
    width_curves: Mapping[int, np.ndarray]
    """similarity of sinusoids of each width"""


def position_study(farthest: int = FARTHEST) -> PositionStudy:
    """All schemes over distances 0 to `farthest`, which is above `LATE`."""
    distances = np.arange(farthest + 1)
    shown = tuple(10**power for power in range(len(str(farthest))))
    widths = {width: encoding_similarity(Sinusoidal(), width, distances) for width in WIDTHS}
    stretched = RotaryScaling(kind="linear", factor=8.0)
    yarn = RotaryScaling(kind="yarn", factor=8.0, original_length=4_096)
    llama3 = RotaryScaling(kind="llama3", factor=8.0, original_length=8_192)  # Llama 3.1's own
    rotary = {
        "rotary, base 10,000": Rotary(),
        "rotary, base 500,000": Rotary(base=500_000.0),
        "rotary, base 10,000, linear x 8": Rotary(scaling=stretched),
        "rotary, base 10,000, yarn x 8": Rotary(scaling=yarn),
        "rotary, base 500,000, llama3 x 8": Rotary(base=500_000.0, scaling=llama3),
    }
    curves = {"sinusoidal, d_model 512": widths[D_MODEL]}
    curves |= {name: turn_similarity(scheme, HEAD_DIM, distances) for name, scheme in rotary.items()}
    factors = bias_factors(ALiBi(num_heads=HEADS), distances)
    curves |= {"ALiBi, steepest of 8 heads": factors[0], "ALiBi, flattest of 8 heads": factors[-1]}
    curves["none"] = turn_similarity(NoPosition(), HEAD_DIM, distances)
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
    """Cosine of the encodings at `start` and at `start` + each distance (n,); (n,), float64.

    It is the mean of cos(distance x frequency) over the pairs, so it depends on the distance only (Vaswani et al. 2017,
    section 3.5).
    """
    encode = jax.jit(lambda row: scheme.encoding(row, features)[0])

    def unit(positions):
        encoding = np.asarray(encode(_row(positions)), np.float64)
        return encoding / np.linalg.norm(encoding, axis=-1, keepdims=True)

    (first,) = unit(np.array([start]))
    parts = range(0, len(distances), _AT_ONCE)
    return np.concatenate([unit(start + distances[part : part + _AT_ONCE]) @ first for part in parts])


def turn_similarity(scheme: PositionScheme, size: int, distances: np.ndarray, start: int = 0) -> np.ndarray:
    """Score of a query at `start` and an equal key at each distance (n,), over the product of their norms; (n,).

    All entries are 1, so each pair counts the same: for rotary the mean of cos(distance x frequency) over the pairs (Su
    et al. 2021, arXiv 2104.09864, section 3.4.3). YaRN's factor on the scores cancels.
    """
    turn = jax.jit(lambda row: scheme.rotate(jnp.ones((*row.shape, 1, size)), row)[0, :, 0])

    def unit(positions):
        heads = np.asarray(turn(_row(positions)), np.float64)
        return heads / np.linalg.norm(heads, axis=-1, keepdims=True)

    (query,) = unit(np.array([start]))
    return unit(start + distances) @ query


def bias_factors(scheme: ALiBi, distances: np.ndarray, start: int = 0) -> np.ndarray:
    """exp(bias) of each head, the factor on an attention weight at each distance (n,); (N, n), float64.

    Press et al. 2021, arXiv 2108.12409.
    """
    bias = scheme.bias(_row(np.array([start])), _row(start + distances))
    return np.exp(np.asarray(bias, np.float64)[0, :, 0])


def bias_codes(scheme: T5Bias, distances: np.ndarray) -> np.ndarray:
    """Which row of the learnt table biases a key that lies each distance (n,) before its query; (n,).

    Raffel et al. 2019, arXiv 1910.10683, section 2.1.
    """
    table = jnp.broadcast_to(jnp.arange(scheme.buckets, dtype=jnp.float32)[:, None], scheme.table_shape)
    query = int(distances.max())
    return np.asarray(scheme.bias(_row(np.array([query])), _row(query - distances), table))[0, 0, 0]


def learned_codes(max_length: int, positions: np.ndarray) -> np.ndarray:
    """Which row of a learned table is added at each position (n,); -1: none; (n,)."""
    scheme = Learned(max_length=max_length, features=1)
    table = jnp.arange(max_length, dtype=jnp.float32)[:, None]
    # One position a row of the batch: a row longer than the table is refused before it is looked up.
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
    """Positions (n,) as those of one row, (1, n)."""
    return jnp.asarray(positions, jnp.int32)[None, :]
