"""One pure object for each position scheme, with three hooks: add to embeddings, rotate heads, bias a block of scores.

The attention never asks which scheme it has. Positions are arguments, so packing, padding and decoding are the same
call; no table is cached anywhere. A scheme that learns says the shape of its table; the stack owns it and passes it in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._parts import RotaryScaling
from transformer.nn._axes import Array, Float, Hidden, Int, Positions
from transformer.nn._partitioning import lookup


@dataclass(frozen=True, kw_only=True)
class PositionScheme:
    """The base class of position schemes: three hooks, `add`, `rotate` and `bias`, none of which does anything here."""

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the learnt table, or None."""
        return None

    @property
    def adds(self) -> bool:
        """Whether the scheme works by `add`, on embeddings, and does nothing inside attention."""
        return type(self).add is not PositionScheme.add

    def add(self, x: Hidden, positions: Positions, table: Float[Array, "R W"] | None = None) -> Hidden:
        """Embeddings (B, T, D) plus what the scheme adds at `positions` (B, T)."""
        return x

    def rotate(self, heads: Float[Array, "B T N H"], positions: Positions) -> Float[Array, "B T N H"]:
        """Queries or keys (B, T, N, H) turned by their `positions` (B, T)."""
        return heads

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        """What is added to the scores between these query and key positions, (B, N, t, s); None: nothing."""
        return None


@dataclass(frozen=True, kw_only=True)
class NoPosition(PositionScheme):
    """No position information. A causal decoder still learns the order of tokens (Haviv et al. 2022, arXiv
    2203.16634).
    """


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(PositionScheme):
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(same), added (Vaswani et al. 2017, section 3.5)."""

    base: float = 10_000.0

    def add(self, x: Hidden, positions: Positions, table: Float[Array, "R W"] | None = None) -> Hidden:
        return x + self.encoding(positions, x.shape[-1]).astype(x.dtype)

    def encoding(self, positions: Positions, features: int) -> Float[Array, "B T D"]:
        """The encodings themselves, (B, T, features), float32; sines at even and cosines at odd places."""
        frequencies = np.exp(-np.arange(0, features, 2) / features * math.log(self.base))
        angle = angles(positions, frequencies)
        return jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1).reshape(*positions.shape, features)


@dataclass(frozen=True, kw_only=True)
class SinusoidalHalves(Sinusoidal):
    """The same numbers, all sines first and then all cosines: the layout of tensor2tensor (Vaswani et al. 2018, arXiv
    1803.07416) and Marian.
    """

    def encoding(self, positions: Positions, features: int) -> Float[Array, "B T D"]:
        """The encodings themselves, (B, T, features), float32; sines in the first and cosines in the second half."""
        pairs = super().encoding(positions, features)
        return jnp.concatenate([pairs[..., ::2], pairs[..., 1::2]], -1)


@dataclass(frozen=True, kw_only=True)
class Learned(PositionScheme):
    """One learnt row a position, added (Gehring et al. 2017; Devlin et al. 2018): a table `max_length` x `features`. An
    input longer than it is a ValueError; a single position that it has not gives NaN.
    """

    max_length: int
    features: int

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.max_length, self.features

    def add(self, x: Hidden, positions: Positions, table: Float[Array, "R W"] | None = None) -> Hidden:
        if isinstance(x.shape[1], int) and x.shape[1] > self.max_length:
            raise ValueError(
                f"{x.shape[1]} positions don't fit a learned table of {self.max_length} (max_length). "
                f"Shorten the input, or train a model with a larger max_length or another position scheme."
            )
        return x + lookup(table, positions).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Rotary(PositionScheme):
    """Turns pairs (i, i + size/2) of the first `size` dimensions of each head by position x frequency, so that scores
    depend on distance only (Su et al. 2021, arXiv 2104.09864; the pairing of GPT-NeoX and Llama). `size` None: all.
    Wavelengths run from 2 pi to 2 pi `base` positions. ValueError: a size that is odd, or larger than the head.
    """

    base: float = 10_000.0
    size: int | None = None
    scaling: RotaryScaling | None = None

    def frequencies(self, size: int) -> np.ndarray:
        """Radians a position for each of the F = size / 2 pairs, (F,), float64, scaling included."""
        plain = self.base ** (-np.arange(0, size, 2) / size)
        scaling = self.scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        turns = scaling.original_length * plain / (2 * np.pi)  # within the length trained on
        if scaling.kind == "llama3":
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        else:
            # YaRN (section 3.2) ramps over the index of the pair, between the two pairs that turn beta times.
            def pair(beta):
                return size * np.log(scaling.original_length / (beta * 2 * np.pi)) / (2 * np.log(self.base))

            first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
            if scaling.truncate:
                first, last = np.floor(first), np.ceil(last)
            first, last = max(first, 0), min(last, size - 1)
            keep = 1.0 - np.clip((np.arange(size // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
        return plain * keep + plain / scaling.factor * (1 - keep)

    @property
    def magnitude(self) -> float:
        """Factor on turned queries and keys: YaRN's 0.1 ln(factor) + 1 (section 3.4) or what it is given, else 1."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1.0

    def rotate(self, heads: Float[Array, "B T N H"], positions: Positions) -> Float[Array, "B T N H"]:
        size = heads.shape[-1] if self.size is None else self.size
        if size % 2 or size > heads.shape[-1]:
            raise ValueError(
                f"Rotary turns pairs of dimensions: {size} of a head of {heads.shape[-1]} can't be turned. Give it an "
                f"even size of at most the head size, or change that."
            )
        angle = angles(positions, self.frequencies(size))[:, :, None, :]
        cos, sin = jnp.cos(angle) * self.magnitude, jnp.sin(angle) * self.magnitude
        first, second = jnp.split(heads[..., :size].astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([turned.astype(heads.dtype), heads[..., size:]], axis=-1)


@dataclass(frozen=True, kw_only=True)
class ALiBi(PositionScheme):
    """-slope |distance| added to the scores, slopes 2^(-8/N), 2^(-16/N), ... with N = `num_heads` (Press et al. 2021,
    arXiv 2108.12409).
    """

    num_heads: int

    @property
    def slopes(self) -> np.ndarray:
        """One a head, (N,). For N no power of two: those of the power below, then every other of the power above (the
        authors' released code).
        """
        below = 2 ** math.floor(math.log2(self.num_heads))

        def powers(heads):
            return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)

        return np.concatenate([powers(below), powers(2 * below)[::2][: self.num_heads - below]])

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        distance = jnp.abs(queries[:, None, :, None] - keys[:, None, None, :]).astype(jnp.float32)
        return -jnp.asarray(self.slopes, jnp.float32)[None, :, None, None] * distance


@dataclass(frozen=True, kw_only=True)
class T5Bias(PositionScheme):
    """A learnt bias for each head and bucket of distances, added to the scores (Raffel et al. 2019, arXiv 1910.10683,
    section 2.1): single distances up to half the buckets (of a side), then logarithmic ones up to `max_distance`. The
    table is `buckets` x `num_heads`, and ValueError says when it is missing; `bidirectional`: keys after the query have
    half of the buckets.
    """

    num_heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.buckets, self.num_heads

    def bucket(self, distance: Int[Array, "..."]) -> Int[Array, "..."]:
        """Bucket of key position - query position, of any shape. Bidirectional: keys after the query have the upper
        half to themselves; else they all fall into bucket 0.
        """
        side = self.buckets
        start = jnp.zeros_like(distance)
        if self.bidirectional:
            side //= 2
            start = jnp.where(distance > 0, side, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        exact = side // 2
        # Where a logarithmic bucket begins is fixed, so the bounds are computed once, exactly, and counted.
        steps = np.arange(exact, side)
        bounds = exact * (self.max_distance / exact) ** ((steps - exact) / (side - exact))
        bounds = np.ceil(bounds - 1e-9).astype(np.int32)
        far = exact - 1 + sum((distance >= bound).astype(distance.dtype) for bound in bounds)
        return start + jnp.where(distance < exact, distance, far)

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        if table is None:
            raise ValueError(
                f"T5Bias needs its learnt table: pass position_table=, of shape {self.table_shape}. (A stack owns one.)"
            )
        buckets = self.bucket(keys[:, None, :] - queries[:, :, None])
        return jnp.take(table, buckets, axis=0).astype(jnp.float32).transpose(0, 3, 1, 2)


def angles(positions: Int[Array, "B T"], frequencies: np.ndarray) -> Float[Array, "B T F"]:
    """positions (B, T) x frequencies (F,), radians a position, float64 -> (B, T, F) modulo 2 pi, in [-pi, pi), float32.

    A float32 product loses 6e-3 rad at position 100,000. Here a turn is 2^32 units and whole turns drop out in wrapping
    integer arithmetic, which leaves an error below |position| x 7.4e-10 rad + 4e-7.
    """
    units = np.round(frequencies / (2 * np.pi) * 2**32).astype(np.uint64).astype(np.uint32)
    phase = jax.lax.bitcast_convert_type(positions[..., None].astype(jnp.uint32) * units[None, None, :], jnp.int32)
    return phase.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
