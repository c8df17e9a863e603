"""Any number of sources in batches of like lengths: little padding, few shapes to compile, results in their order."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any, SupportsIndex

import jax
import numpy as np

from transformer.generate._beam import USUAL, Beam, Hypothesis, beam_search
from transformer.generate._prompts import Ids, check_rows, check_source_lengths, check_writer, padded_length
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import SpeechToText

MOST_AT_ONCE = 4
"""batches that are searched side by side: each holds a cache"""


def beam_search_all(
    model: Any,
    params: Any,
    sources: Sequence[Ids],
    *,
    begin: Sequence[SupportsIndex],
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None,
    beam: Beam = USUAL,
    max_new_tokens: SupportsIndex | None = None,
    suppress: Sequence[int] = (),
    batch_tokens: SupportsIndex = 1024,
) -> list[list[Hypothesis]]:
    """`beam_search` of many sources: the hypotheses of each, in the order of the sources.

    Args:
        model: a `Seq2Seq` that reads tokens.
        sources: token ids of each; there may be none of them.
        begin: ids with which every target begins.
        batch_tokens: source tokens in a batch, padding included; one source may have more.

    Raises:
        ValueError: as `beam_search`; batch_tokens below 1. All sources are looked at before the first is searched.
    """
    vocab_size = check_writer("beam_search_all", model, params)
    if not isinstance(model, Seq2Seq) or isinstance(model, SpeechToText):
        raise ValueError(
            f"beam_search_all takes a Seq2Seq that reads tokens, got a {type(model).__name__}. Use beam_search."
        )
    if not isinstance(batch_tokens, Integral) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise ValueError(f"batch_tokens must be an integer of at least 1, got {batch_tokens!r}.")
    if not len(sources):
        return []
    rows = check_rows("source", sources, model.config.embedding.source_vocab_size or vocab_size)
    check_source_lengths(model.config, rows)

    batches = _batches(rows, model.config.longest_source, int(batch_tokens))

    def search(batch: tuple[list[int], int]) -> list[list[Hypothesis]]:
        # The batch filled up to a size that is compiled anyway, with what takes no longer than the rest.
        numbers, count = batch
        return beam_search(
            model,
            params,
            [rows[number] for number in [*numbers, *numbers[:1] * (count - len(numbers))]],
            prompts=[begin] * count,
            eos_id=eos_id,
            beam=beam,
            max_new_tokens=max_new_tokens,
            suppress=suppress,
        )

    found: dict[int, list[Hypothesis]] = {}
    count = _at_once()
    with ThreadPoolExecutor(count) as threads:
        searched = map(search, batches) if count == 1 else threads.map(search, batches)  # a mesh is this thread's alone
        for (numbers, _), hypotheses in zip(batches, searched, strict=True):
            found |= dict(zip(numbers, hypotheses, strict=False))
    return [found[number] for number in range(len(rows))]


def _at_once() -> int:
    """How many batches are searched side by side. The operations of one step are too small to keep several cores busy
    (docs/benchmarks.md), and an accelerator would wait while what it found is traced back. With a mesh or beside other
    processes, one by one: they have to agree on the order.
    """
    if has_mesh() or jax.process_count() > 1:
        return 1
    return min(os.cpu_count() or 1, MOST_AT_ONCE) if platform() == "cpu" else 2


def _batches(rows: Sequence[np.ndarray], longest: int | None, batch_tokens: int) -> list[tuple[list[int], int]]:
    """Numbers of the rows of each batch, the shortest first, and how many rows it is to have: as many as batch_tokens
    allows for rows so long, or a power of two where there are no more.
    """
    groups = defaultdict(list)
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        groups[padded_length([rows[number]], longest)].append(number)
    batches = []
    for slots, numbers in groups.items():
        most = max(1, batch_tokens // slots)
        for start in range(0, len(numbers), most):
            batch = numbers[start : start + most]
            batches.append((batch, min(most, 1 << (len(batch) - 1).bit_length())))
    return batches
