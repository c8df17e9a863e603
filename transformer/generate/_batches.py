"""Beam search of any number of sources, in batches of similar lengths: little padding, and few shapes to compile."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import SupportsIndex

import flax.linen as nn
import jax
import numpy as np

from transformer.generate._beam import USUAL, Beam, Hypothesis, beam_search
from transformer.generate._layers import Params
from transformer.generate._prompts import Ids, check_rows, check_source_lengths, check_text_model, padded_length
from transformer.nn._partitioning import has_mesh, platform
from transformer.nn.models._kinds import kind_of

MAX_PARALLEL_BATCHES = 4
"""maximum number of batches that are searched in parallel, since each has a KV cache"""


def beam_search_all(
    model: nn.Module,
    params: Params,
    sources: Sequence[Ids],
    *,
    begin: Sequence[SupportsIndex],
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None,
    beam: Beam = USUAL,
    max_new_tokens: SupportsIndex | None = None,
    suppress: Sequence[int] = (),
    batch_tokens: SupportsIndex = 1024,
) -> list[list[Hypothesis]]:
    """Run `beam_search` on many sources, and return the hypotheses of each in the order of the sources.

    Args:
        model: a `Seq2Seq` that reads tokens.
        params: its parameters, without the outer "params".
        sources: token ids of each source; the list may be empty.
        begin: ids that every target starts with.
        eos_id: id or ids that end a hypothesis; None: nothing does.
        beam: size of the beam and how hypotheses are scored.
        max_new_tokens: maximum number of new tokens per source; None: the limit of `beam`.
        suppress: ids that are never generated.
        batch_tokens: maximum number of source tokens per batch, including padding; a single longer source is allowed.

    Raises:
        ValueError: as `beam_search`, or if batch_tokens is below 1. All sources are checked before the first search.
    """
    vocab_size = check_text_model("beam_search_all", model, params)
    if kind_of(model).writes != "translation":
        raise ValueError(
            f"beam_search_all needs a Seq2Seq that reads tokens, got a {type(model).__name__}. Use beam_search."
        )
    if not isinstance(batch_tokens, Integral) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise ValueError(f"batch_tokens must be an integer of at least 1, got {batch_tokens!r}.")
    if not len(sources):
        return []
    rows = check_rows("source", sources, model.config.embedding.source_vocab_size or vocab_size)
    check_source_lengths(model.config, rows)

    batches = _batches(rows, model.config.longest_source, int(batch_tokens))

    def search(batch: tuple[list[int], int]) -> list[list[Hypothesis]]:
        # The batch is padded to `count` rows, a size that other batches use too, so that fewer shapes are compiled. The
        # extra rows repeat the first source, which is one of the shortest, and their results are dropped below.
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
    count = _num_parallel_batches()
    with ThreadPoolExecutor(count) as threads:
        # An active mesh applies to one thread only, so with a mesh (count 1) the search stays in this thread.
        searched = map(search, batches) if count == 1 else threads.map(search, batches)
        for (numbers, _), hypotheses in zip(batches, searched, strict=True):
            found |= dict(zip(numbers, hypotheses, strict=False))
    return [found[number] for number in range(len(rows))]


def _num_parallel_batches() -> int:
    """Return how many batches to search in parallel."""
    # The operations of one step are too small to keep several CPU cores busy (docs/benchmarks.md), and an accelerator
    # would be idle while the host traces back the hypotheses. With a mesh or several processes the number is 1, because
    # all devices must run the batches in the same order.
    if has_mesh() or jax.process_count() > 1:
        return 1
    return min(os.cpu_count() or 1, MAX_PARALLEL_BATCHES) if platform() == "cpu" else 2


def _batches(rows: Sequence[np.ndarray], longest: int | None, batch_tokens: int) -> list[tuple[list[int], int]]:
    """Group rows into batches of the same padded length, shortest first.

    Each batch is the indices of its rows, and its number of rows after padding: the maximum that batch_tokens allows
    for this length, or the next power of two for a smaller batch.
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
