"""Batching of texts for `embed`, `classify` and `score`, with little padding and few array shapes to compile.

A slot is one position of a batch, either a token or padding: a batch of R rows and T columns has R * T slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._options import Pooling
from transformer.config._progress import counting
from transformer.generate._prompts import bucket
from transformer.nn._axes import Array, Float, Hidden, Leaf
from transformer.nn._masks import Mask
from transformer.nn._partitioning import platform
from transformer.nn.models._encoders import pool

PACKED = 64
"""Slots of a row that packs several short texts. On CPU, the time per token is about the same in rows of 8 to 64 slots,
and a fifth higher in rows of 128 (docs/benchmarks.md)."""
SMALLEST = 4
"""A packed row has room for one text per this many slots. The number of texts is part of the compiled shape."""
STEP = 8
"""The length of a single packed row is a multiple of this: one short text takes a third less time in 8
slots than in 16."""
TOKENS = {"cpu": 1024}
"""Maximum slots of a batch by platform, including padding. A single row may be longer."""
TOKENS_ELSEWHERE = 16_384
"""Maximum slots of a batch on accelerators, which need larger batches (an estimate, not measured)."""
LOGITS = 2**26
"""Maximum number of logits of a batch that is scored: 256 MiB in float32. A single window of text may exceed it."""

Columns: TypeAlias = tuple[Sequence[int], ...]
"""Parallel sequences of equal length for one text, such as token ids and token types."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """A batch of K texts in R rows of T slots: one text per row (K = R), or several texts packed per row."""

    columns: tuple[Leaf, ...]
    """(R, T) each; padding is 0."""
    starts: Leaf
    """(K,), index of the first token of each text in the flattened R * T slots."""
    lengths: Leaf
    """(K,), number of tokens of each text; 0 for unused entries of a packed batch."""
    segments: Leaf | None = None
    """(R, T), packed batches only: 1 + index of the text in each slot; 0 is padding."""
    positions: Leaf | None = None
    """(R, T), packed batches only: position within the text."""

    @property
    def mask(self) -> Mask:
        """Mask that restricts attention to tokens of the same text."""
        return Mask.lengths(self.lengths) if self.segments is None else Mask.segments(self.segments)


def pool_texts(hidden: Hidden, batch: Batch, pooling: Pooling) -> Float[Array, "K D"]:
    """Pool hidden states (R, T, D) to one vector per text, (K, D), like `nn.models._encoders.pool`, also if packed."""
    if batch.segments is None:
        return pool(hidden, batch.mask, pooling)
    flat = hidden.reshape(-1, hidden.shape[-1])  # (R * T, D)
    if pooling == "mean":
        # Sum only the tokens of each text. A matrix multiplication with a 0-1 matrix would give NaN for all texts if
        # the activations of one text are infinite: 0 * inf is NaN. Segment 0 is padding. Sums in bfloat16 would lose
        # digits, hence float32.
        owner, texts = batch.segments.reshape(-1), batch.lengths.shape[0]
        total = jax.ops.segment_sum(flat.astype(jnp.float32), owner, num_segments=texts + 1)[1:]
        return (total / jnp.maximum(batch.lengths, 1)[:, None]).astype(hidden.dtype)
    # Index of the first or last token in the flattened slots. Unused entries of the batch give an arbitrary vector.
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
    """Run a function on batches of texts, and return its results in the order of the texts.

    Texts of up to `PACKED` tokens are packed into rows of that many slots. Each longer text gets its own row, padded to
    a length of `bucket`. The number of rows is rounded up by less than a quarter. Therefore `compute` is compiled for
    only a few shapes, for any number and lengths of the texts.

    `compute` returns results (K, ...), one per text, or, with `each_token`, (R, T, ...), one per slot. Rows that it
    adds at the end are ignored. `longest` is the number of rows of the model's position table, to which padding is
    limited; `most` is the maximum slots of a batch, including padding (None: `slots_at_once()`).
    """
    results: list[np.ndarray | None] = [None] * len(texts)
    add = counting("texts", len(texts))
    for numbers, batch in _batches(texts, longest, most or slots_at_once()):
        values = np.asarray(compute(batch))
        for place, number in numbers.items():
            if each_token:
                start = batch.starts[place]
                results[number] = values.reshape(-1, *values.shape[2:])[start : start + batch.lengths[place]]
            else:
                results[number] = values[place]
        add(len(numbers))
    return results


def run_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    compute: Callable[..., jax.Array],
    *,
    limits: tuple[int | None, int | None],
    most: int,
) -> list[np.ndarray]:
    """Run a function on batches of pairs: source tokens, decoder input, and as many tokens to predict.

    `compute` is a function of sources (R, S), their lengths (R,), decoder inputs (R, T) and tokens to predict (R, T),
    with result (R, T); one number per target token is returned. `limits` are the numbers of rows of the position tables
    of sources and targets; `most` is the maximum slots of a batch, separately for both, including padding.
    """
    results: list[np.ndarray | None] = [None] * len(pairs)
    add = counting("pairs", len(pairs))
    order = sorted(range(len(pairs)), key=lambda number: (-len(pairs[number][1]), -len(pairs[number][0])))
    # Longest targets first, so that a batch holds pairs of similar lengths. Add pairs while the padded batch fits.
    while order:
        slots = [_slots(len(pairs[order[0]][part]), limits[part]) for part in (0, 1)]
        count = 0
        for number in order:
            # Sources are not sorted by length, so a new pair may widen the source side.
            wider = max(slots[0], _slots(len(pairs[number][0]), limits[0]))
            if count and round_up(count + 1) * max(wider, slots[1]) > most:
                break
            slots[0], count = wider, count + 1
        numbers, order = order[:count], order[count:]
        rows = round_up(count)
        source, tokens, follow = (np.zeros((rows, size), np.int32) for size in (*slots, slots[1]))
        lengths = np.ones(rows, np.int32)  # 1 in unused rows, so that each row has a visible key
        for row, number in enumerate(numbers):
            for table, column in zip((source, tokens, follow), pairs[number], strict=True):
                table[row, : len(column)] = column
            lengths[row] = len(pairs[number][0])
        values = np.asarray(compute(source, lengths, tokens, follow))
        for row, number in enumerate(numbers):
            results[number] = values[row, : len(pairs[number][1])]
        add(count)
    return results


def slots_at_once() -> int:
    """Return the maximum slots of a batch on this platform, including padding."""
    return TOKENS.get(platform(), TOKENS_ELSEWHERE)


def scored_at_once(model: nn.Module) -> int:
    """Return the maximum slots of a batch that is scored, so that its logits (slots, vocabulary) fit into memory."""
    return min(slots_at_once(), max(1, LOGITS // model.config.vocab_size))


def round_up(count: int) -> int:
    """Round `count` up to one of few numbers: 1 to 8, then 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

    The step is a quarter of the next lower power of two, so less than a quarter is added.
    """
    # 1 << (bits - 3) is a quarter of the largest power of two that is at most count - 1.
    step = max(1, 1 << max((count - 1).bit_length() - 3, 0))
    return -(-count // step) * step  # ceil(count / step) * step


def round_down(count: int) -> int:
    """Return the largest number up to `count` that `round_up` does not change."""
    return next(number for number in range(count, 0, -1) if round_up(number) == number)


def _batches(texts: Sequence[Columns], longest: int | None, tokens: int) -> Iterator[tuple[dict[int, int], Batch]]:
    """Yield batches, each with a mapping from the index of a text in the batch (0 to K - 1) to its number."""
    lengths = [len(columns[0]) for columns in texts]
    order = sorted(range(len(texts)), key=lambda number: -lengths[number])
    shared = PACKED if longest is None else min(PACKED, longest)
    long = [number for number in order if lengths[number] > shared]
    while long:
        slots = _slots(lengths[long[0]], longest)
        # The texts are sorted, so the first one determines the length of the batch.
        rows = round_down(max(1, tokens // slots))
        numbers, long = long[:rows], long[rows:]
        yield dict(enumerate(numbers)), _one_each([texts[number] for number in numbers], slots)

    short = [number for number in order if lengths[number] <= shared]
    if not short:
        return
    # Slots for all short texts in one row, by tokens and by the maximum number of texts per row.
    needed = max(sum(lengths[number] for number in short), SMALLEST * len(short))
    slots = min(shared, -(-needed // STEP) * STEP)  # if all texts fit into one row, shorten it
    rows = _shared(short, lengths, slots)
    most = round_down(max(1, tokens // slots))
    for start in range(0, len(rows), most):
        yield _packed(texts, rows[start : start + most], slots)


def _slots(length: int, longest: int | None) -> int:
    """Return the padded length for a text: at most the length of the position table, unless the text is longer."""
    slots = max(1, bucket(length))
    return slots if longest is None else max(length, min(slots, longest))


def _one_each(texts: Sequence[Columns], slots: int) -> Batch:
    """Build a batch with one text per row."""
    rows = round_up(len(texts))
    lengths = np.ones(rows, np.int32)  # 1 in unused rows, so that each row has a visible key
    lengths[: len(texts)] = [len(columns[0]) for columns in texts]
    columns = tuple(np.zeros((rows, slots), np.int32) for _ in texts[0])
    for row, text in enumerate(texts):
        for table, column in zip(columns, text, strict=True):
            table[row, : len(column)] = column
    return Batch(columns, np.arange(rows, dtype=np.int32) * slots, lengths)


def _shared(numbers: Iterable[int], lengths: Sequence[int], slots: int) -> list[list[int]]:
    """Distribute texts, sorted by decreasing length, over packed rows; return the numbers of the texts in each row.

    Best-fit decreasing bin packing: each text goes into the fullest row that has room for it.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(slots + 1)]  # rows by number of free slots
    for number in numbers:
        length = lengths[number]
        room = next((room for room in range(length, slots + 1) if with_room[room]), None)
        if room is None:
            row, room = len(rows), slots
            rows.append([])
        else:
            row = with_room[room].pop()
        rows[row].append(number)
        if len(rows[row]) < max(1, slots // SMALLEST):
            with_room[room - length].append(row)
    return rows


def _packed(texts: Sequence[Columns], rows: Sequence[Sequence[int]], slots: int) -> tuple[dict[int, int], Batch]:
    """Build a batch with several texts per row. Text i of row r has the index r * most + i in the batch."""
    most, count = max(1, slots // SMALLEST), round_up(len(rows))
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
