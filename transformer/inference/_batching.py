"""Batches of token rows for `embed`, `classify` and `score`: little padding, and few array sizes to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._options import Pooling
from transformer.generate._prompts import bucket
from transformer.nn._axes import Array, Float, Hidden, Leaf
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.models._encoders import pool

PACKED = 64
"""slots of a row that several short texts share. On CPU a token costs about the same in rows of 8 to 64 slots, and a
fifth more in rows of 128 (docs/benchmarks.md)"""
SMALLEST = 4
"""slots of a packed row for each text that it may hold: the number of texts is part of the compiled size"""
STEP = 8
"""lengths of a single packed row are multiples of it: one short text takes a third less time in 8 slots than in 16"""
TOKENS = {"cpu": 1024}
"""slots of a batch by platform, padding included; a single row may be longer"""
TOKENS_ELSEWHERE = 16_384
"""slots of a batch on accelerators, which need more work at a time (a guess: not measured)"""

Columns: TypeAlias = tuple[Sequence[int], ...]
"""numbers of one text that run in parallel, such as token ids and token types: equally long"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """R rows of T slots that hold K texts: one in each row (K = R), or packed, several in a row."""

    columns: tuple[Leaf, ...]
    """(R, T) each; 0 in padding"""
    starts: Leaf
    """(K,), where the first token of a text is among the R * T slots"""
    lengths: Leaf
    """(K,), tokens of each text; packed: 0 where there is none"""
    segments: Leaf | None = None
    """(R, T), packed: the number of the slot's text, from 1; 0 is padding"""
    positions: Leaf | None = None
    """(R, T), packed: positions within a text"""

    @property
    def mask(self) -> Mask:
        """Tokens attend to those of their own text."""
        return Mask.lengths(self.lengths) if self.segments is None else Mask.segments(self.segments)


def pool_texts(hidden: Hidden, batch: Batch, pooling: Pooling) -> Float[Array, "K D"]:
    """Hidden states (R, T, D) -> one vector for each text of the batch, (K, D), as `nn.models.encoders.pool` makes
    it.
    """
    if batch.segments is None:
        return pool(hidden, batch.mask, pooling)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if pooling == "mean":
        # A sum over each text's own tokens, not a product with a 0-1 matrix: 0 times a neighbor's infinity is NaN.
        owner, texts = batch.segments.reshape(-1), batch.lengths.shape[0]
        total = jax.ops.segment_sum(flat.astype(jnp.float32), owner, num_segments=texts + 1)[1:]
        return (total / jnp.maximum(batch.lengths, 1)[:, None]).astype(hidden.dtype)
    last = jnp.maximum(batch.lengths - 1, 0)
    return flat[batch.starts if pooling == "first" else batch.starts + last]


def run_batches(
    texts: Sequence[Columns],
    compute: Callable[[Batch], jax.Array],
    *,
    each_token: bool = False,
    longest: int | None = None,
    most: int | None = None,
) -> list[np.ndarray]:
    """Computes batches of texts; returns the results in the order of the texts.

    Texts of up to `PACKED` tokens share rows of as many slots. Longer ones get a row each, padded to a length of
    `bucket`. The number of rows is rounded up by less than a quarter. So the sizes that `compute` has to be compiled
    for are few, however many texts there are and whatever their lengths.

    Args:
        compute: a batch -> (K, ...) one result for each text, or with `each_token` (R, T) one for each slot.
        longest: rows of the model's position table, which no row of one text may exceed; None: no limit.
        most: slots of a batch, padding included; None: `slots_at_once()`.
    """
    results: list[np.ndarray | None] = [None] * len(texts)
    for numbers, batch in _batches(texts, longest, most or slots_at_once()):
        values = np.asarray(compute(batch))
        for place, number in numbers.items():
            if each_token:
                start = batch.starts[place]
                results[number] = values.reshape(-1)[start : start + batch.lengths[place]]
            else:
                results[number] = values[place]
    return results


def run_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    compute: Callable[..., jax.Array],
    *,
    limits: tuple[int | None, int | None],
    most: int,
) -> list[np.ndarray]:
    """Computes batches of (source, target tokens, what follows each of them); returns one number for each target token,
    in the order of the pairs.

    Args:
        compute: source (R, S), its lengths (R,), target tokens (R, T), what follows (R, T) -> (R, T).
        limits: rows of the position tables of sources and targets; None: no limit.
        most: slots of a batch, of sources or targets, padding included.
    """
    results: list[np.ndarray | None] = [None] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda number: (-len(pairs[number][1]), -len(pairs[number][0])))
    while order:
        slots = [_slots(len(pairs[order[0]][part]), limits[part]) for part in (0, 1)]
        count = 0
        for number in order:
            wider = max(slots[0], _slots(len(pairs[number][0]), limits[0]))
            if count and round_up(count + 1) * max(wider, slots[1]) > most:
                break
            slots[0], count = wider, count + 1
        numbers, order = order[:count], order[count:]
        rows = round_up(count)
        source, tokens, follow = (np.zeros((rows, size), np.int32) for size in (*slots, slots[1]))
        lengths = np.ones(rows, np.int32)
        for row, number in enumerate(numbers):
            for table, column in zip((source, tokens, follow), pairs[number], strict=True):
                table[row, : len(column)] = column
            lengths[row] = len(pairs[number][0])
        values = np.asarray(compute(source, lengths, tokens, follow))
        for row, number in enumerate(numbers):
            results[number] = values[row, : len(pairs[number][1])]
    return results


def slots_at_once() -> int:
    """Slots of a batch on this platform, padding included."""
    return TOKENS.get(platform(), TOKENS_ELSEWHERE)


def round_up(count: int) -> int:
    """`count` rounded up to one of few numbers: 1 to 8, then 10, 12, 14, 16, 20, ..., a quarter of a power of two
    apart.
    """
    step = max(1, 1 << max((count - 1).bit_length() - 3, 0))
    return -(-count // step) * step


def round_down(count: int) -> int:
    """The largest number up to `count` that `round_up` leaves as it is: that many rows fit into a batch."""
    return next(number for number in range(count, 0, -1) if round_up(number) == number)


def _batches(texts: Sequence[Columns], longest: int | None, tokens: int) -> Iterator[tuple[dict[int, int], Batch]]:
    """Batches, each with the number of the text at each of its K places."""
    lengths = [len(columns[0]) for columns in texts]
    order = sorted(range(len(texts)), key=lambda number: -lengths[number])
    shared = PACKED if longest is None else min(PACKED, longest)
    long = [number for number in order if lengths[number] > shared]
    while long:
        slots = _slots(lengths[long[0]], longest)
        rows = round_down(max(1, tokens // slots))
        numbers, long = long[:rows], long[rows:]
        yield dict(enumerate(numbers)), _one_each([texts[number] for number in numbers], slots)

    short = [number for number in order if lengths[number] <= shared]
    if not short:
        return
    needed = max(sum(lengths[number] for number in short), SMALLEST * len(short))
    slots = min(shared, -(-needed // STEP) * STEP)  # one row, if it is enough
    rows = _shared(short, lengths, slots)
    most = round_down(max(1, tokens // slots))
    for start in range(0, len(rows), most):
        yield _packed(texts, rows[start : start + most], slots)


def _most_texts(slots: int) -> int:
    """Texts that a packed row of so many slots may hold."""
    return max(1, slots // SMALLEST)


def _slots(length: int, longest: int | None) -> int:
    """Slots of a row for a text of so many tokens: no more than a position table has rows, unless the text has."""
    slots = max(1, bucket(length))
    return slots if longest is None else max(length, min(slots, longest))


def _one_each(texts: Sequence[Columns], slots: int) -> Batch:
    rows = round_up(len(texts))
    lengths = np.ones(rows, np.int32)
    lengths[: len(texts)] = [len(columns[0]) for columns in texts]
    columns = tuple(np.zeros((rows, slots), np.int32) for _ in texts[0])
    for row, text in enumerate(texts):
        for table, column in zip(columns, text, strict=True):
            table[row, : len(column)] = column
    return Batch(columns, np.arange(rows, dtype=np.int32) * slots, lengths)


def _shared(numbers: Iterable[int], lengths: Sequence[int], slots: int) -> list[list[int]]:
    """Numbers of the texts in each row: the longest text first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(slots + 1)]  # rows by how many slots they have left
    for number in numbers:
        length = lengths[number]
        room = next((room for room in range(length, slots + 1) if with_room[room]), None)
        if room is None:
            row, room = len(rows), slots
            rows.append([])
        else:
            row = with_room[room].pop()
        rows[row].append(number)
        if len(rows[row]) < _most_texts(slots):
            with_room[room - length].append(row)
    return rows


def _packed(texts: Sequence[Columns], rows: Sequence[Sequence[int]], slots: int) -> tuple[dict[int, int], Batch]:
    most, count = _most_texts(slots), round_up(len(rows))
    columns = tuple(np.zeros((count, slots), np.int32) for _ in texts[rows[0][0]])
    segments, positions = (np.zeros((count, slots), np.int32) for _ in range(2))
    starts, lengths = (np.zeros(count * most, np.int32) for _ in range(2))
    numbers = {}
    for row, held in enumerate(rows):
        end = 0
        for place, number in enumerate(held, row * most):
            start, end = end, end + len(texts[number][0])
            for table, column in zip(columns, texts[number], strict=True):
                table[row, start:end] = column
            segments[row, start:end] = place + 1
            positions[row, start:end] = np.arange(end - start)
            starts[place], lengths[place] = row * slots + start, end - start
            numbers[place] = number
    return numbers, Batch(columns, starts, lengths, segments, positions)
