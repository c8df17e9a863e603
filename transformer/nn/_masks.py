"""Attention masks as structured values: True means that a query attends to a key, and `&` combines masks.

A dense mask of 32k x 32k tokens takes 1 GiB. A `Mask` therefore stores only its structure (causal, window) and short
arrays (lengths, segments), and computes the block that a kernel asks for.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from transformer.nn._axes import Array, Bool, Int, Leaf, static


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A structured attention mask. Combine the constructors below, for example `Mask.causal() & Mask.lengths(n)`.

    It is a frozen pytree: `is_causal`, `window_size` and `chunk_size` are static, all other fields are arrays or None.
    Queries and keys are numbered by their index in the sequence. `offset` is the index of the first query among the
    keys; while decoding with a cache, that is the number of previous tokens.
    """

    is_causal: bool = static(False)
    window_size: int | None = static(None)
    chunk_size: int | None = static(None)
    offset: Leaf | None = None
    """() or (B,), index of the first query among the keys"""
    key_lengths: Leaf | None = None
    """(B,), number of visible keys in each row"""
    query_segments: Leaf | None = None
    """(B, T), segment of each query"""
    key_segments: Leaf | None = None
    """(B, S), segment of each key"""
    dense_part: Leaf | None = None
    """(B or 1, N or 1, T or 1, S or 1), an arbitrary boolean mask"""
    query_places: Leaf | None = None
    """(B, T), positions of queries for causality, windows and chunks, instead of index and offset"""
    key_places: Leaf | None = None
    """(B, S), positions of keys for causality, windows and chunks, instead of their index"""
    query_groups: Leaf | None = None
    """(B, T), group of each query, which is also that of the key with its index; below 0: none"""

    @staticmethod
    def causal() -> Mask:
        """Let each query attend to itself and to previous keys."""
        return Mask(is_causal=True)

    @staticmethod
    def window(size: int) -> Mask:
        """Let each query attend to keys at a distance below `size`; with `causal()`, to the last `size` keys.
        Raises:
            ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a window must contain at least 1 position, got {size}.")
        return Mask(window_size=size)

    @staticmethod
    def chunks(size: int) -> Mask:
        """Let each query attend to keys of its own chunk: positions 0 to `size` - 1, `size` to 2 `size` - 1, and so on.

        With `causal()`, this is the chunked attention of Llama 4.

        Raises:
            ValueError: a size below 1.
        """
        if size < 1:
            raise ValueError(f"a chunk must contain at least 1 position, got {size}.")
        return Mask(chunk_size=size)

    @staticmethod
    def lengths(lengths: Int[Array, " B"]) -> Mask:
        """Hide all but the first `lengths[b]` keys of row b (right padding)."""
        return Mask(key_lengths=jnp.asarray(lengths))

    @staticmethod
    def segments(query: Int[Array, "B T"], key: Int[Array, "B S"] | None = None) -> Mask:
        """Let each query attend to keys of its own segment only (packing, or left padding as a separate segment)."""
        query = jnp.asarray(query)
        return Mask(query_segments=query, key_segments=query if key is None else jnp.asarray(key))

    @staticmethod
    def array(allowed: Array | np.ndarray) -> Mask:
        """Use a boolean array that broadcasts to (B, N, T, S) as a mask.

        Examples are (T, S), a padding mask (B, 1, 1, S), or the result of `nn.make_causal_mask(x, dtype=bool)`. An
        array of another dtype is accepted outside `jit` if it contains only 0 and 1, and at least one 1, as Flax's
        `nn.make_causal_mask` and `nn.make_attention_mask` return by default.

        Raises:
            ValueError: an array of another dtype inside `jit`, where its values are unknown, or with other values,
                because it may be meant as an additive mask; an array with fewer than two axes.
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
        """Set the positions of queries and keys, for causality, windows and chunks, where they differ from indices.

        This hides nothing by itself. In beam search, hypotheses share a cache, and several of its slots contain keys of
        the same position.
        """
        return Mask(query_places=jnp.asarray(query), key_places=jnp.asarray(key))

    @staticmethod
    def groups(groups: Int[Array, "B T"]) -> Mask:
        """Let the tokens of a group attend to one another, although causality and windows hide later or distant keys.

        An entry below 0 is a token without a group. With a cache, the groups are those of the new tokens. Examples are
        the tokens of one image (Gemma 3), and a prompt that is read in both directions (a prefix, PaliGemma).
        """
        return Mask(query_groups=jnp.asarray(groups))

    def shifted(self, offset: Int[Array, "..."] | int) -> Mask:
        """Return the mask for queries that start at key `offset`, () or (B,)."""
        return dataclasses.replace(self, offset=jnp.asarray(offset))

    def __and__(self, other: Mask) -> Mask:
        def join(name, both=None):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            if both is None:
                if mine is theirs:
                    return mine
                raise ValueError(f"both masks set {name}: merge the two arrays first, or pass Mask.array(...).")
            return both(mine, theirs)

        # Each part of the combined mask hides what either mask hides.
        both = {"is_causal": operator.or_, "window_size": min, "chunk_size": self._same_chunk_size}
        both |= {"key_lengths": jnp.minimum, "dense_part": jnp.logical_and}
        return Mask(**{part.name: join(part.name, both.get(part.name)) for part in dataclasses.fields(self)})

    def with_chunks_of_segments(self, size: int, positions: Int[Array, "B T"]) -> Mask:
        """Return the mask with chunks of `size` positions in each of its segments, expressed as shorter segments.

        In packed or padded rows, positions start anew in each segment and differ from the indices of `chunks`.

        With a cache, the position of a key is its distance from the first key of its segment, so positions must start
        at 0 in each segment there.

        Args:
            size: positions of a chunk.
            positions: (B, T), of the queries.

        Raises:
            ValueError: a size below 1.
        """
        size, count = Mask.chunks(size).chunk_size, self.key_segments.shape[1] + 1
        keys = positions if count == positions.shape[1] + 1 else _index_in_segment(self.key_segments)

        def split(ids, positions):  # distinct for each segment and each chunk of it; 0 remains 0: it marks padding
            # The positions of a segment are consecutive, so at most S + 1 chunks in a row differ modulo S + 1.
            return jnp.where(ids == 0, 0, ids * count + positions // size % count)

        return dataclasses.replace(
            self, query_segments=split(self.query_segments, positions), key_segments=split(self.key_segments, keys)
        )

    @staticmethod
    def _same_chunk_size(mine: int, theirs: int) -> int:
        if mine != theirs:
            raise ValueError(f"both masks set chunks, of {mine} and {theirs} positions: use one size.")
        return mine

    def with_padding_as_segments(self, num_queries: int) -> Mask:
        """Return an equivalent mask in which a padding array (B, 1, 1, S) is expressed as segments.

        More kernels support segments than dense masks. All queries get segment 1, real keys 1 and padding 0.

        Args:
            num_queries: T.
        """
        part = self.dense_part
        # A single query needs no conversion: its full mask already has the shape (B, 1, 1, S).
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
        """Whether the mask hides nothing."""
        arrays = (self.key_lengths, self.query_segments, self.dense_part)
        static = self.is_causal or self.window_size is not None or self.chunk_size is not None
        return not static and all(array is None for array in arrays)

    @property
    def facts(self) -> dict[str, bool]:
        """The properties of the mask that decide which kernels support it (`kernels.OPTIONS`)."""
        return {
            "has_dense_mask": any(a is not None for a in (self.dense_part, self.query_places, self.query_groups)),
            "has_offset": self.offset is not None,
            "has_segments": self.query_segments is not None,
            "has_two_sided_window": self.window_size is not None and not self.is_causal,
            "has_chunks": self.chunk_size is not None,
        }

    def block(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, "b n t s"]:
        """Return the block of the mask for these query and key indices: boolean, (B or 1, N or 1, t, s)."""
        indices = keys[None, None, None, :]
        if self.query_places is None:
            rows, columns = self._offset_rows()[:, None, None, None] + queries[None, None, :, None], indices
        else:
            rows, columns = self.query_places[:, None, queries, None], self.key_places[:, None, None, keys]
        # Every part below broadcasts to (b, n, t, s); `rows` are query positions, `columns` key positions.
        allowed = self.by_position(rows, columns, jnp.ones((1, 1, queries.shape[0], keys.shape[0]), bool))
        if self.query_groups is not None:  # group(i) = group(j) >= 0
            allowed = allowed | self._same_group(queries, keys)
        if self.key_lengths is not None:  # j < n_b: padding is defined by slot, not by position
            allowed = allowed & (indices < self.key_lengths[:, None, None, None])
        if self.query_segments is not None:  # segment(i) = segment(j)
            ours, theirs = self.query_segments[:, queries], self.key_segments[:, keys]
            allowed = allowed & (ours[:, None, :, None] == theirs[:, None, None, :])
        if self.dense_part is not None:
            allowed = allowed & self._dense_block(queries, keys)
        return allowed

    def by_position(self, rows: Array, columns: Array, allowed: Array) -> Array:
        """Return `allowed` without the pairs that causality, window or chunks hide, for positions of queries and keys.

        The three arrays broadcast to one another. A `Mask` without arrays has only these rules; kernels call this too.
        """
        if self.is_causal:  # j <= i
            allowed = allowed & (rows >= columns)
        if self.window_size is not None:  # |i - j| < w
            allowed = allowed & (jnp.abs(rows - columns) < self.window_size)
        if self.chunk_size is not None:  # floor(i / c) = floor(j / c)
            allowed = allowed & (rows // self.chunk_size == columns // self.chunk_size)
        return allowed

    def dense(self, num_queries: int, num_keys: int) -> Bool[Array, "b n T S"]:
        """Return the full mask, (B or 1, N or 1, T, S), for inspection and for the reference kernel."""
        return self.block(jnp.arange(num_queries), jnp.arange(num_keys))

    def block_visible(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, ""]:
        """Return whether any of these queries may attend to any of these keys, so that kernels can skip other blocks.

        It may be True for a hidden block, but is never False for a visible one. Indices must be ascending.
        """
        first_query, last_query = queries[0] + self._offset_rows(), queries[-1] + self._offset_rows()
        visible = jnp.ones((1,), bool)
        # Compare only the extreme indices of the two blocks. Positions other than indices have no known order, and
        # groups ignore the order: skip.
        in_order = self.query_places is None and self.query_groups is None
        if self.is_causal and in_order:  # the last query is not before the first key
            visible = visible & (last_query >= keys[0])
        if self.window_size is not None and in_order:  # the blocks are closer than the window, in both directions
            visible = visible & (first_query - keys[-1] < self.window_size) & (keys[0] - last_query < self.window_size)
        if self.chunk_size is not None and in_order:  # the ranges of their chunks overlap
            first, last = first_query // self.chunk_size, last_query // self.chunk_size
            visible = visible & (last >= keys[0] // self.chunk_size) & (first <= keys[-1] // self.chunk_size)
        if self.key_lengths is not None:
            visible = visible & (keys[0] < self.key_lengths)
        if self.query_segments is not None:
            # Segments of the two blocks can only match if their ranges overlap.
            ours, theirs = self.query_segments[:, queries], self.key_segments[:, keys]
            visible = visible & (ours.min(-1) <= theirs.max(-1)) & (theirs.min(-1) <= ours.max(-1))
        if self.dense_part is not None:
            visible = visible & self._dense_block(queries, keys).any((1, 2, 3))
        return visible.any()

    def check(self, batch: int, num_heads: int, num_queries: int, num_keys: int) -> None:
        """Raise a ValueError if an array of the mask doesn't fit attention of these sizes."""
        fits = {
            "offset": [(), (1,), (batch,)],
            "key_lengths": [(1,), (batch,)],
            "query_segments": [(1, num_queries), (batch, num_queries)],
            "key_segments": [(1, num_keys), (batch, num_keys)],
            "query_places": [(1, num_queries), (batch, num_queries)],
            "key_places": [(1, num_keys), (batch, num_keys)],
            "query_groups": [(1, num_queries), (batch, num_queries)],
            "dense_part": list(itertools.product((1, batch), (1, num_heads), (1, num_queries), (1, num_keys))),
        }
        for name, shapes in fits.items():
            array = getattr(self, name)
            if array is not None and array.shape not in shapes:
                raise ValueError(
                    f"the mask's {name} has shape {array.shape}, but attention with {batch} rows, {num_heads} heads, "
                    f"{num_queries} queries and {num_keys} keys requires {shapes[-1]}."
                )

    @staticmethod
    def of(mask: Mask | Array | np.ndarray | None) -> Mask:
        """Convert an argument to a `Mask`: a `Mask` is returned unchanged, and None hides nothing.

        An array is converted by `Mask.array`, with its errors.
        """
        return Mask() if mask is None else mask if isinstance(mask, Mask) else Mask.array(mask)

    def _dense_block(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, "..."]:
        # An axis of size 1 is not indexed: it broadcasts to all queries or keys.
        part = self.dense_part
        part = part if part.shape[2] == 1 else part[:, :, queries]
        return part if part.shape[3] == 1 else part[:, :, :, keys]

    def _same_group(self, queries: Int[Array, " t"], keys: Int[Array, " s"]) -> Bool[Array, "b 1 t s"]:
        # The key at `offset + i` belongs to query i. Keys before the offset, and after the last query, have no group.
        offset = self._offset_rows()
        rows = max(offset.shape[0], self.query_groups.shape[0])
        own = jnp.broadcast_to(keys[None, :] - offset[:, None], (rows, keys.shape[0]))
        groups = jnp.broadcast_to(self.query_groups, (rows, self.query_groups.shape[1]))
        inside = (own >= 0) & (own < groups.shape[1])
        theirs = jnp.where(inside, jnp.take_along_axis(groups, jnp.where(inside, own, 0), axis=1), -1)
        ours = groups[:, queries]
        return ((ours[:, :, None] == theirs[:, None, :]) & (theirs >= 0)[:, None, :])[:, None]

    def _offset_rows(self) -> Int[Array, " b"]:
        return jnp.zeros((1,), jnp.int32) if self.offset is None else jnp.atleast_1d(self.offset)


def real_tokens(mask: Mask, shape: tuple[int, int], start: Int[Array, " B"] | None = None) -> Bool[Array, "B T"]:
    """Return which tokens of `shape` (B, T) are no padding, by the lengths and segments of a mask (0: padding).

    `start` (B,) is the number of tokens in the cache. Without one, a padding array (B, 1, 1, T) marks it too.
    """
    real = jnp.ones(shape, bool)
    if mask.key_lengths is not None:
        index = jnp.arange(shape[1])[None, :] + (0 if start is None else start[:, None])
        real = real & (index < mask.key_lengths[:, None])
    if mask.query_segments is not None:
        real = real & (mask.query_segments != 0)
    part = mask.dense_part
    if start is None and part is not None and part.shape[1:] == (1, 1, shape[1]):
        real = real & part[:, 0, 0]
    return real


def _index_in_segment(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Return the distance of each entry from the first of its segment, which is a run of equal numbers."""
    indices = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    # The running maximum is the index of the last start.
    return indices - jax.lax.cummax(jnp.where(starts, indices, 0), axis=1)


def _boolean(mask: Array | np.ndarray) -> Bool[Array, "..."]:
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
    # All zeros is ambiguous: a boolean mask of zeros hides every key, an additive one hides none.
    if not (ones.any() and (ones | (values == 0)).all()):
        found = f"values from {values.min()} to {values.max()}" if values.size else "no values"
        raise ValueError(
            f"a mask array must be boolean (True attends), or contain only 0 and 1 and at least one 1, got "
            f"{mask.dtype} of shape {mask.shape} with {found}. {convert}"
        )
    return jnp.asarray(ones)
