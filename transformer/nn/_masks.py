"""Which query may attend which key, as one structured value. True attends. `&` joins.

A dense mask of 32k tokens is 1 GiB, so a `Mask` keeps facts (causal, window) and short arrays (lengths, segments) and
makes only the block that a kernel asks for.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, Bool, Int, Leaf


def _static(default):
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """An attention mask by structure. Make one with the constructors below and join them: `Mask.causal() &
    Mask.lengths(n)`.

    A frozen pytree: `is_causal` and `window_size` are static facts, the rest are arrays or None. Queries and keys are
    numbered by their index in the sequence; `offset` is the index that the first query has among the keys (while
    decoding with a cache: how many came before).
    """

    is_causal: bool = _static(False)
    window_size: int | None = _static(None)
    offset: Leaf | None = None
    """() or (B,)"""
    key_lengths: Leaf | None = None
    """(B,)"""
    query_segments: Leaf | None = None
    """(B, T)"""
    key_segments: Leaf | None = None
    """(B, S)"""
    dense_part: Leaf | None = None
    """(B or 1, N or 1, T or 1, S or 1)"""
    query_places: Leaf | None = None
    """(B, T), in place of index and offset, for causality and windows"""
    key_places: Leaf | None = None
    """(B, S)"""

    @staticmethod
    def causal() -> Mask:
        """A query attends itself and what came before it."""
        return Mask(is_causal=True)

    @staticmethod
    def window(size: int) -> Mask:
        """A query attends keys closer than `size`: with `causal()` the last `size` ones, itself included.

        Raises:
            ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a window must hold at least 1 position, got {size}.")
        return Mask(window_size=size)

    @staticmethod
    def lengths(lengths: Int[Array, " B"]) -> Mask:
        """Of each row, only the first `lengths[b]` keys are attended (right padding)."""
        return Mask(key_lengths=jnp.asarray(lengths))

    @staticmethod
    def segments(query: Int[Array, "B T"], key: Int[Array, "B S"] | None = None) -> Mask:
        """Only keys of the query's own segment are attended (packing, or left padding as a segment of its own)."""
        query = jnp.asarray(query)
        return Mask(query_segments=query, key_segments=query if key is None else jnp.asarray(key))

    @staticmethod
    def array(allowed: Array | np.ndarray) -> Mask:
        """A mask of any form: a boolean array that broadcasts to (B, N, T, S), such as (T, S), a padding mask
        (B, 1, 1, S), or what `nn.make_causal_mask(x, dtype=bool)` gives.

        An array of another type is accepted outside `jit`, if it holds 0 and 1 alone and at least one 1 (as Flax's
        `nn.make_causal_mask` and `nn.make_attention_mask` give by default).

        Raises:
            ValueError: another type whose values are unknown inside `jit`, or may be meant to be added to the scores;
                fewer than two axes.
        """
        allowed = _boolean(allowed)
        if allowed.ndim < 2:
            raise ValueError(
                f"a mask array must end in the axes (T, S), got shape {allowed.shape}. Add axes: a padding mask (B, S) "
                f"is mask[:, None, None, :]."
            )
        return Mask(dense_part=allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape))

    @staticmethod
    def places(query: Int[Array, "B T"], key: Int[Array, "B S"]) -> Mask:
        """Hides nothing, but says where queries and keys stand, for causality and windows, where that is not their
        index: hypotheses that share a cache have keys for one place in several slots.
        """
        return Mask(query_places=jnp.asarray(query), key_places=jnp.asarray(key))

    def shifted(self, offset: Int[Array, "..."] | int) -> Mask:
        """The same mask for queries that begin at key `offset`, () or (B,)."""
        return dataclasses.replace(self, offset=jnp.asarray(offset))

    def __and__(self, other: Mask) -> Mask:
        def join(name, both=None):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            if both is None:
                if mine is theirs:
                    return mine
                raise ValueError(f"both masks give {name}: join them into one array before, or pass Mask.array(...).")
            return both(mine, theirs)

        return Mask(
            is_causal=self.is_causal or other.is_causal,
            window_size=join("window_size", min),
            offset=join("offset"),
            key_lengths=join("key_lengths", jnp.minimum),
            query_segments=join("query_segments"),
            key_segments=join("key_segments"),
            dense_part=join("dense_part", jnp.logical_and),
            query_places=join("query_places"),
            key_places=join("key_places"),
        )

    def with_padding_as_segments(self, num_queries: int) -> Mask:
        """The same mask for `num_queries` T, with a padding array (B, 1, 1, S) as segments, which more kernels serve:
        padding is a segment without queries.
        """
        part = self.dense_part
        if part is None or part.shape[1:3] != (1, 1) or num_queries == 1 or self.query_segments is not None:
            return self
        return dataclasses.replace(
            self,
            dense_part=None,
            query_segments=jnp.ones((part.shape[0], num_queries), jnp.int32),
            key_segments=part[:, 0, 0].astype(jnp.int32),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is hidden."""
        arrays = (self.key_lengths, self.query_segments, self.dense_part)
        return not self.is_causal and self.window_size is None and all(array is None for array in arrays)

    @property
    def facts(self) -> dict[str, bool]:
        """What of it decides which kernels can serve (`kernels.OPTIONS`)."""
        return {
            "has_dense_mask": self.dense_part is not None or self.query_places is not None,
            "has_offset": self.offset is not None,
            "has_segments": self.query_segments is not None,
            "has_two_sided_window": self.window_size is not None and not self.is_causal,
        }

    def block(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, "b n t s"]:
        """The part for these query and key indices: boolean, (B or 1, N or 1, t, s)."""
        indices = keys[None, None, None, :]
        if self.query_places is None:
            rows, columns = self._offset_rows()[:, None, None, None] + queries[None, None, :, None], indices
        else:
            rows, columns = self.query_places[:, None, queries, None], self.key_places[:, None, None, keys]
        allowed = jnp.ones((1, 1, queries.shape[0], keys.shape[0]), bool)
        if self.is_causal:
            allowed = allowed & (rows >= columns)
        if self.window_size is not None:
            allowed = allowed & (jnp.abs(rows - columns) < self.window_size)
        if self.key_lengths is not None:
            allowed = allowed & (indices < self.key_lengths[:, None, None, None])
        if self.query_segments is not None:
            ours, theirs = self.query_segments[:, queries], self.key_segments[:, keys]
            allowed = allowed & (ours[:, None, :, None] == theirs[:, None, None, :])
        if self.dense_part is not None:
            allowed = allowed & self._dense_block(queries, keys)
        return allowed

    def dense(self, num_queries: int, num_keys: int) -> Bool[Array, "b n T S"]:
        """The whole mask, (B or 1, N or 1, T, S): for looking at, and for the reference kernel."""
        return self.block(jnp.arange(num_queries), jnp.arange(num_keys))

    def block_visible(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, ""]:
        """Whether any query of a block may attend any key of another. Indices rise; never False where one may."""
        first_query, last_query = queries[0] + self._offset_rows(), queries[-1] + self._offset_rows()
        visible = jnp.ones((1,), bool)
        in_order = self.query_places is None
        if self.is_causal and in_order:
            visible = visible & (last_query >= keys[0])
        if self.window_size is not None and in_order:
            visible = visible & (first_query - keys[-1] < self.window_size) & (keys[0] - last_query < self.window_size)
        if self.key_lengths is not None:
            visible = visible & (keys[0] < self.key_lengths)
        if self.query_segments is not None:
            ours, theirs = self.query_segments[:, queries], self.key_segments[:, keys]
            visible = visible & (ours.min(-1) <= theirs.max(-1)) & (theirs.min(-1) <= ours.max(-1))
        if self.dense_part is not None:
            visible = visible & self._dense_block(queries, keys).any((1, 2, 3))
        return visible.any()

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raises ValueError when an array of the mask doesn't fit attention of these sizes."""
        fits = {
            "offset": [(), (1,), (batch,)],
            "key_lengths": [(1,), (batch,)],
            "query_segments": [(1, num_queries), (batch, num_queries)],
            "key_segments": [(1, num_keys), (batch, num_keys)],
            "query_places": [(1, num_queries), (batch, num_queries)],
            "key_places": [(1, num_keys), (batch, num_keys)],
            "dense_part": list(itertools.product((1, batch), (1, num_heads), (1, num_queries), (1, num_keys))),
        }
        for name, shapes in fits.items():
            array = getattr(self, name)
            if array is not None and array.shape not in shapes:
                raise ValueError(
                    f"the mask's {name} has shape {array.shape}, but attention of {batch} rows, {num_heads} heads, "
                    f"{num_queries} queries and {num_keys} keys takes {shapes[-1]}."
                )

    @staticmethod
    def of(mask: Mask | Array | np.ndarray | None) -> Mask:
        """`mask` itself; of an array that broadcasts to (B, N, T, S), `Mask.array(mask)`, with its errors; None hides
        nothing.
        """
        return Mask() if mask is None else mask if isinstance(mask, Mask) else Mask.array(mask)

    def _dense_block(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, "..."]:
        part = self.dense_part
        part = part if part.shape[2] == 1 else part[:, :, queries]
        return part if part.shape[3] == 1 else part[:, :, :, keys]

    def _offset_rows(self) -> Int[Array, " b"]:
        return jnp.zeros((1,), jnp.int32) if self.offset is None else jnp.atleast_1d(self.offset)


def _boolean(mask: Array | np.ndarray) -> Bool[Array, "..."]:
    """The mask as a boolean array; see `Mask.array`."""
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if mask.dtype == jnp.bool_:
        return jnp.asarray(mask)
    convert = (
        "If nonzero means that a query attends, convert it: mask.astype(bool), or nn.make_causal_mask(x, dtype=bool). "
        "An additive mask is a bias: pass it as bias=."
    )
    if isinstance(mask, jax.core.Tracer):
        raise ValueError(
            f"a mask array must be boolean (True attends) inside jit, where values are unknown, got {mask.dtype} of "
            f"shape {mask.shape}. {convert}"
        )
    values = np.asarray(mask)
    ones = values == 1
    # All zeros is ambiguous: as a mask it hides every key, added to the scores it hides none.
    if not (ones.any() and (ones | (values == 0)).all()):
        found = f"values from {values.min()} to {values.max()}" if values.size else "no values"
        raise ValueError(
            f"a mask array must be boolean (True attends), or hold 0 and 1 and at least one 1, got {mask.dtype} of "
            f"shape {mask.shape} with {found}. {convert}"
        )
    return jnp.asarray(ones)
