"""Position schemes: pure objects with three hooks, which add to embeddings, rotate heads, or bias a block of scores.

Attention calls all hooks and does not depend on the kind of scheme. Positions are arguments, so packing, padding and
decoding use the same call, and no table is cached. A scheme with parameters only gives the shape of its table; the
stack owns the table and passes it in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._parts import QueryTemperature, RotaryScaling
from transformer.nn._axes import Array, Coordinates, Float, Hidden, Int, Lengths, Positions, Query
from transformer.nn._partitioning import lookup, platform


@dataclass(frozen=True, kw_only=True)
class PositionScheme:
    """Base class of position schemes, with three hooks: `add`, `rotate` and `bias`. By default, none has an effect."""

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the learned table, or None."""
        return None

    @property
    def adds(self) -> bool:
        """Whether the scheme uses `add`, on embeddings, and has no effect inside attention."""
        return type(self).add is not PositionScheme.add

    @property
    def by_length(self) -> bool:
        """Whether `rotate` depends on the length of the text, which is then its third argument."""
        return False

    def add(self, x: Hidden, positions: Coordinates, table: Float[Array, "R W"] | None = None) -> Hidden:
        """Return embeddings (B, T, D) plus an encoding of their `positions` (B, T)."""
        return x

    def rotate(self, heads: Query, positions: Coordinates, lengths: Lengths | None = None) -> Query:
        """Return queries or keys (B, T, N, H), rotated by their `positions` (B, T), or (B, T, A).

        `lengths` (B,) are the lengths of the texts, for schemes that depend on them; None: the largest position + 1.
        """
        return heads

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        """Return the bias added to the scores between these query and key positions, (B, N, t, s), or None."""
        return None

    def bias_of_scores(
        self, num_heads: int, positions: Positions, key_positions: Int[Array, "B S"], table: Array | None
    ) -> Callable[[Array, Array], Array] | None:
        """Return the bias as a function of query and key indices; None if the scheme has no bias.

        Raises:
            ValueError: the bias is for another number of heads.
        """
        # Tracing the bias of one query and one key gives its shape without computing anything.
        probe = jax.eval_shape(lambda: self.bias(positions[:, :1], key_positions[:, :1], table))
        if probe is None:
            return None
        if probe.shape[1] not in (1, num_heads):
            raise ValueError(
                f"{type(self).__name__} has a bias for {probe.shape[1]} heads, but num_heads is "
                f"{num_heads}. Create it with num_heads={num_heads}."
            )
        # A Partial is a pytree: positions and table are its leaves, so they pass through jit, and the table gets a
        # gradient.
        return jax.tree_util.Partial(functools.partial(_position_bias, self), positions, key_positions, table)

    def check_attention(self, with_context: bool) -> None:
        """Check that attention can apply the scheme.

        Raises:
            ValueError: a scheme that is added to embeddings, or attention to a context.
        """
        if with_context and type(self) is not NoPosition:
            raise ValueError(
                f"{type(self).__name__} is for self-attention, but a context is given: positions of x and of "
                f"the context have no common origin. Leave the context out to attend from x to itself, or "
                f"use position=NoPosition()."
            )
        if self.adds:
            scheme = type(self).__name__
            raise ValueError(
                f"{scheme} is added to embeddings; attention only rotates queries and keys or biases scores, so it "
                f"would have no effect here. Add it to x before ({scheme}.add), or use Rotary, ALiBi or T5Bias."
            )


@dataclass(frozen=True, kw_only=True)
class NoPosition(PositionScheme):
    """No position information. A causal decoder can still learn the order of tokens (Haviv et al. 2022, arXiv
    2203.16634).
    """


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(PositionScheme):
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)), added to embeddings (Vaswani et al.
    2017, section 3.5).
    """

    base: float = 10_000.0

    def add(self, x: Hidden, positions: Positions, table: Float[Array, "R W"] | None = None) -> Hidden:
        return x + self.encoding(positions, x.shape[-1]).astype(x.dtype)

    def encoding(self, positions: Positions, features: int) -> Float[Array, "B T D"]:
        """Return the encodings (B, T, features), float32: sines at even and cosines at odd indices."""
        # base^(-2i/d) = exp(-(2i/d) ln(base)), one frequency for each pair of features.
        frequencies = np.exp(-np.arange(0, features, 2) / features * math.log(self.base))
        angle = angles(positions, frequencies)  # (B, T, features / 2)
        # Stacking on a new last axis and flattening interleaves: sin, cos, sin, cos, ...
        return jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1).reshape(*positions.shape, features)


@dataclass(frozen=True, kw_only=True)
class SinusoidalHalves(Sinusoidal):
    """The same values as `Sinusoidal`, with all sines before all cosines: the order of tensor2tensor (Vaswani et al.
    2018, arXiv 1803.07416) and Marian.
    """

    def encoding(self, positions: Positions, features: int) -> Float[Array, "B T D"]:
        """Return the encodings (B, T, features), float32: sines in the first half and cosines in the second half."""
        pairs = super().encoding(positions, features)
        return jnp.concatenate([pairs[..., ::2], pairs[..., 1::2]], -1)


@dataclass(frozen=True, kw_only=True)
class Learned(PositionScheme):
    """One learned vector per position, added to embeddings (Gehring et al. 2017; Devlin et al. 2018).

    The table has a row of `features` numbers for each of the first `max_length` positions, except those of the range
    `without`: nothing is added there (registers of images). A position outside gives NaN.

    Raises:
        ValueError: an input longer than the table.
    """

    max_length: int
    features: int
    without: range = range(0)

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.max_length - len(self.without), self.features

    def add(self, x: Hidden, positions: Positions, table: Float[Array, "R W"] | None = None) -> Hidden:
        if isinstance(x.shape[1], int) and x.shape[1] > self.max_length:
            raise ValueError(
                f"{x.shape[1]} positions don't fit a learned table of {self.max_length} (max_length). "
                f"Shorten the input, or train a model with a larger max_length or another position scheme."
            )
        if not self.without:
            return x + lookup(table, positions).astype(x.dtype)
        # The rows of later positions are further to the front of the table.
        first, end = self.without.start, self.without.stop
        rows = jnp.where(positions < end, jnp.minimum(positions, first), positions - len(self.without))
        skipped = ((positions >= first) & (positions < end))[..., None]
        return jnp.where(skipped, x, x + lookup(table, rows).astype(x.dtype))


@dataclass(frozen=True, kw_only=True)
class Rotary(PositionScheme):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    Rotates each pair of dimensions (i, i + size/2) among the first `size` dimensions of a head by position x
    frequency_i, so that scores depend only on the distance of two tokens. The pairing is that of GPT-NeoX and Llama;
    the paper pairs neighbors. `size` None: all dimensions. Wavelengths range from 2 pi to about 2 pi `base` positions.

    Two kinds of `scaling`, dynamic and longrope, rotate by frequencies that depend on the length of the text. Caches
    then store keys before their rotation, and all of them are rotated again when the text grows. Keys and values
    themselves stay those of the length at which they were computed; encode the whole text again to renew them.

    With `sections`, a position has several coordinates, such as time, row and column: positions are (B, T, A), and
    coordinate a rotates `sections[a]` pairs, after those of the coordinates before it (M-RoPE, Wang et al. 2024, arXiv
    2409.12191, section 2.1). Positions (B, T) mean that all coordinates are equal, which is `Rotary` without sections.
    All pairs share one range of frequencies; with `restart_frequencies`, the frequencies of each section are those of
    a separate head.

    Raises:
        ValueError: a size that is odd, or larger than the head; positions with another number of coordinates.
    """

    base: float = 10_000.0
    size: int | None = None
    scaling: RotaryScaling | None = None
    sections: tuple[int, ...] | None = None
    restart_frequencies: bool = False

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return self.scaling is not None and self.scaling.by_length

    def frequencies(self, size: int, *, long: bool = False) -> np.ndarray:
        """Return radians per position for each of the F = size / 2 pairs, (F,), float64, including the scaling.

        With dynamic and longrope, these are the frequencies of texts of at most `original_length` positions; with
        `long`, those of longrope for longer texts.
        """
        plain = self.base ** (-np.arange(0, size, 2) / size)  # theta_i = base^(-2i / size)
        if self.restart_frequencies:
            plain = np.concatenate([self.base ** (-np.arange(pairs) / pairs) for pairs in self.sections])
        scaling = self.scaling
        if scaling is None or scaling.kind == "dynamic":
            return plain
        if scaling.kind == "proportional":  # the other pairs keep their angle
            return np.where(np.arange(size // 2) < int(scaling.share * size // 2), plain / scaling.factor, 0.0)
        if scaling.kind == "longrope":
            return plain / np.asarray(scaling.long_factors if long else scaling.short_factors)
        if scaling.kind == "linear":  # position interpolation: theta / factor at pos equals theta at pos / factor
            return plain / scaling.factor
        # Rotations within the original context length. A pair with many of them has seen all angles in training and
        # keeps its frequency; one with few would reach unseen angles and is interpolated, that is, divided by factor.
        turns = scaling.original_length * plain / (2 * np.pi)
        if scaling.kind == "llama3":
            low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
            # Equal factors (Llama 4) leave no interval to interpolate in.
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns > low).astype(float)
        else:
            # YaRN (section 3.2) ramps over the index of the pair instead, between the pairs with beta_fast and with
            # beta_slow rotations. pair(beta) solves original_length base^(-2i / size) = 2 pi beta for i.
            def pair(beta):
                return size * np.log(scaling.original_length / (beta * 2 * np.pi)) / (2 * np.log(self.base))

            first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
            if scaling.truncate:
                first, last = np.floor(first), np.ceil(last)
            first, last = max(first, 0), min(last, size - 1)
            keep = 1.0 - np.clip((np.arange(size // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
        return plain * keep + plain / scaling.factor * (1 - keep)  # keep 1: unchanged; keep 0: interpolated

    @property
    def magnitude(self) -> float:
        """Factor on rotated queries and keys: `attention_factor` or, for YaRN, 0.1 ln(factor) + 1 (section 3.4), and
        for LongRoPE sqrt(1 + ln(factor) / ln(original_length)) (Ding et al. 2024, section 3.3); else 1.

        Scores are products of a query and a key, so they are multiplied by its square.
        """
        scaling = self.scaling
        if scaling is None or scaling.kind not in ("yarn", "longrope"):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.kind == "longrope":
            return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_length))
        return 0.1 * math.log(scaling.factor) + 1.0

    def rotate(self, heads: Query, positions: Coordinates, lengths: Lengths | None = None) -> Query:
        size = heads.shape[-1] if self.size is None else self.size
        if size % 2 or size > heads.shape[-1]:
            raise ValueError(
                f"Rotary rotates pairs of dimensions, but can't rotate {size} dimensions of a head of size "
                f"{heads.shape[-1]}. Choose an even size of at most the head size, or change the head size."
            )
        if self.by_length:
            angle = self._angles_by_length(positions, size, positions.max(1) + 1 if lengths is None else lengths)
        else:
            angle = angles(self._of_pairs(positions), self.frequencies(size))
        angle = angle[:, :, None, :]  # (B, T, 1, size / 2), the same for all heads
        cos, sin = jnp.cos(angle) * self.magnitude, jnp.sin(angle) * self.magnitude
        return jnp.concatenate([_rotate_pairs(heads[..., :size], cos, sin), heads[..., size:]], axis=-1)

    def _of_pairs(self, positions: Coordinates) -> Coordinates:
        """Return the coordinate that rotates each pair, (B, T, F), of positions (B, T, A); (B, T) stay as they are."""
        if positions.ndim == 2:
            return positions
        sections = self.sections or ()
        if positions.shape[2] != len(sections):
            raise ValueError(
                f"positions of {positions.shape[2]} coordinates need as many sections, got {len(sections)}. Set "
                f"sections (position.sections), or pass positions (batch, length)."
            )
        return jnp.repeat(positions, np.asarray(sections), axis=2, total_repeat_length=sum(sections))

    def _angles_by_length(self, positions: Positions, size: int, lengths: Lengths) -> Float[Array, "B T F"]:
        scaling, short = self.scaling, self.frequencies(size)
        if scaling.kind == "longrope":
            long = jnp.asarray(_turn_units(self.frequencies(size, long=True)))[None]
        else:
            # The base is raised by stretch^(size / (size - 2)), so theta_i is multiplied by stretch^(-2i / (size - 2)):
            # theta_0 stays, and the last one is divided by the stretch. The length is known only when the program runs,
            # so this is float32, with a relative error of 1e-7.
            stretch = scaling.factor * lengths / scaling.original_length - (scaling.factor - 1.0)
            powers = jnp.asarray(-np.arange(0, size, 2) / (size - 2), jnp.float32)
            scaled = jnp.asarray(short / (2 * np.pi) * 2**32, jnp.float32)[None] * stretch[:, None] ** powers[None]
            long = jnp.round(scaled).astype(jnp.uint32)
        units = jnp.where((lengths > scaling.original_length)[:, None], long, jnp.asarray(_turn_units(short))[None])
        return _angles_of_units(positions, units[:, None, :])  # (B, 1, F)


@dataclass(frozen=True, kw_only=True)
class RotaryGrid(PositionScheme):
    """Rotary positions of image patches, by row and column (DINOv3, Siméoni et al. 2025, arXiv 2508.10104).

    Rotates each pair of dimensions (i, i + H/2): the first half of the pairs by the row of the patch, the second half
    by its column. Both are coordinates of the center of the patch, from -1 to 1 over the image. Positions below
    `first` are learned tokens, which are not rotated; then those of the `grid` (rows, columns) follow, row by row.

    Raises:
        ValueError: a head size that is not a multiple of 4.
    """

    grid: tuple[int, int]
    first: int
    base: float = 100.0

    def rotate(self, heads: Query, positions: Positions, lengths: Lengths | None = None) -> Query:
        size, (rows, columns) = heads.shape[-1], self.grid
        if size % 4:
            raise ValueError(
                f"RotaryGrid rotates half of the pairs of dimensions by the row and half by the column: expected a "
                f"head size that is a multiple of 4, got {size}. Change the head size."
            )
        # radians per unit of the coordinate: 2 pi / base^(4i / H), i = 0, ..., H/4 - 1
        frequencies = jnp.asarray(2 * np.pi * self.base ** (-np.arange(0, size, 4) / size), jnp.float32)
        patch = positions - self.first
        row, column = (patch // columns + 0.5) / rows, (patch % columns + 0.5) / columns
        coordinates = 2 * jnp.stack([row, column], -1) - 1  # (B, T, 2)
        angle = (coordinates[..., None] * frequencies[None, None, None, :]).reshape(*positions.shape, size // 2)
        angle = jnp.where((patch < 0)[..., None], 0.0, angle)[:, :, None, :]  # (B, T, 1, H / 2)
        return _rotate_pairs(heads, jnp.cos(angle), jnp.sin(angle))


@dataclass(frozen=True, kw_only=True)
class ALiBi(PositionScheme):
    """ALiBi: adds -slope |distance| to the scores (Press et al. 2021, arXiv 2108.12409).

    The slopes are 2^(-8/N), 2^(-16/N), ..., 2^(-8) with N = `num_heads`.
    """

    num_heads: int

    @property
    def slopes(self) -> np.ndarray:
        """One slope per head, (N,).

        If N is not a power of two: the slopes of the next lower power, then every other slope of the next higher one,
        as in the authors' released code.
        """
        below = 2 ** math.floor(math.log2(self.num_heads))

        def powers(heads):
            return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)

        return np.concatenate([powers(below), powers(2 * below)[::2][: self.num_heads - below]])

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        # (B, 1, t, 1) - (B, 1, 1, s) -> (B, 1, t, s)
        distance = jnp.abs(queries[:, None, :, None] - keys[:, None, None, :]).astype(jnp.float32)
        return -jnp.asarray(self.slopes, jnp.float32)[None, :, None, None] * distance


@dataclass(frozen=True, kw_only=True)
class T5Bias(PositionScheme):
    """T5's relative position bias: one learned number per head and bucket of distances, added to the scores (Raffel et
    al. 2019, arXiv 1910.10683, section 2.1).

    The first half of the buckets is for single distances, the second half for ranges that grow logarithmically up to
    `max_distance`. With `bidirectional`, half of all `buckets` is for keys after the query. The table is `buckets` x
    `num_heads`.

    Raises:
        ValueError: the table is missing.
    """

    num_heads: int
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.buckets, self.num_heads

    def bucket(self, distance: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the bucket of key position - query position, of any shape.

        Bidirectional: keys after the query use the upper half of the buckets. Otherwise they are all in bucket 0.
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
        # The bucket of d >= exact is exact + floor(log(d / exact) / log(max_distance / exact) (side - exact)), at most
        # side - 1. Float32 logarithms can round to the wrong bucket. Therefore compute the first distance of
        # each of these buckets in float64, and count those that are at most d. 1e-9: an integer must not round up.
        steps = np.arange(exact, side)
        bounds = exact * (self.max_distance / exact) ** ((steps - exact) / (side - exact))
        bounds = np.ceil(bounds - 1e-9).astype(np.int32)
        far = exact - 1 + sum((distance >= bound).astype(distance.dtype) for bound in bounds)  # at most side - 1
        return start + jnp.where(distance < exact, distance, far)

    def bias(
        self, queries: Int[Array, "B t"], keys: Int[Array, "B s"], table: Float[Array, "R W"] | None = None
    ) -> Float[Array, "B N t s"] | None:
        if table is None:
            raise ValueError(
                f"T5Bias needs its learned table: pass position_table=, of shape {self.table_shape}. A stack owns one."
            )
        buckets = self.bucket(keys[:, None, :] - queries[:, :, None])  # (B, t, s)
        # (B, t, s, N) -> (B, N, t, s)
        return jnp.take(table, buckets, axis=0).astype(jnp.float32).transpose(0, 3, 1, 2)


def _rotate_pairs(
    x: Float[Array, "B T N R"], cos: Float[Array, "B T 1 F"], sin: Float[Array, "B T 1 F"]
) -> Float[Array, "B T N R"]:
    """Rotate each pair (a, b) = (x_i, x_(i+F)) to (a cos_i - b sin_i, b cos_i + a sin_i), in float32; R = 2 F."""
    if platform() == "tpu":
        # The same sums as x cos + swapped sin, where `swapped` has the halves in exchanged order, and the first half of
        # sin is negative. A TPU stores arrays in rows of 128 values, so two halves of 64 would take the memory of two
        # whole heads. Written like this, the compiler reads x and writes the result, and stores nothing in between.
        half = cos.shape[-1]
        swapped = jnp.concatenate([x, x], axis=-1)[..., half : 3 * half]
        cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        return (x.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def angles(positions: Coordinates, frequencies: np.ndarray) -> Float[Array, "B T F"]:
    """Compute positions (B, T) x frequencies (F,) modulo 2 pi, in [-pi, pi): (B, T, F), float32.

    Positions can also be (B, T, F), one for each frequency. `frequencies` are radians per position, float64. A float32
    multiplication would lose 6e-3 rad at position 100,000.
    Fixed-point arithmetic has an error below |position| x 7.4e-10 rad + 4e-7 rad.
    """
    return _angles_of_units(positions, _turn_units(frequencies)[None, None, :])


def _turn_units(frequencies: np.ndarray) -> np.ndarray:
    """Return frequencies (F,), radians per position, in units of 1 / 2^32 of a full turn, uint32."""
    return np.round(frequencies / (2 * np.pi) * 2**32).astype(np.uint64).astype(np.uint32)


def _angles_of_units(positions: Coordinates, units: Array | np.ndarray) -> Float[Array, "B T F"]:
    """Return `angles` for `units`, frequencies (1 or B, 1, F) in 1 / 2^32 of a full turn, uint32."""
    # The uint32 multiplication wraps modulo 2^32, that is, modulo full turns, and loses nothing else: the only errors
    # are rounding the frequency to half a unit and the final float32 conversion.
    # Reading the bits as int32 maps angles of [pi, 2 pi) to [-pi, 0). Negative positions work too (two's complement).
    positions = positions[..., None] if positions.ndim == 2 else positions
    phase = jax.lax.bitcast_convert_type(positions.astype(jnp.uint32) * units, jnp.int32)
    return phase.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)


def largest_coordinate(coordinates: Coordinates) -> Positions:
    """Return one number per token, (B, T), for caches and biases: the next token comes after the largest coordinate."""
    return coordinates if coordinates.ndim == 2 else coordinates.max(2)


def heated(temperature: QueryTemperature, query: Query, positions: Positions) -> Query:
    """Return queries (B, T, N, H) times 1 + scale ln(1 + floor((p + 1) / length)) of their positions p (B, T)."""
    steps = ((positions + 1) // temperature.length).astype(jnp.float32)
    # 1 for the first length - 1 positions; log1p(n) = ln(1 + n)
    factor = 1.0 + temperature.scale * jnp.log1p(steps)
    return query * factor.astype(query.dtype)[:, :, None, None]


def rotated(scheme: PositionScheme, heads: Array, positions: Array, lengths: Lengths | None) -> Array:
    return scheme.rotate(heads, positions) if lengths is None else scheme.rotate(heads, positions, lengths)


def _position_bias(
    scheme: PositionScheme, positions: Array, key_positions: Array, table: Array | None, queries: Array, keys: Array
) -> Array:
    # From indices to positions: they differ with packing, padding and a cache. (B, t), (B, s) -> (B, N or 1, t, s)
    return scheme.bias(positions[:, queries], key_positions[:, keys], table)
