"""`generate`: checks what it is given, runs the compiled loop, reads the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generate.decoding import Rows, Written, decode
from transformer.generate.prompts import (
    Ids,
    bucket,
    check_id,
    check_lengths,
    check_new_tokens,
    check_rows,
    check_source_lengths,
    frame_rows,
    pad,
    row_seeds,
    vocabulary,
)
from transformer.generate.sampling import PLAIN, Choice, Sampling
from transformer.kernels import SPLIT_KERNELS, TPU_KERNELS
from transformer.models import CausalLM, Seq2Seq, SpeechToText

TRAINING_KERNELS = (*TPU_KERNELS, *SPLIT_KERNELS)
"""kernels for whole sequences"""


def generate(
    model: Any,
    params: Any,
    prompts: Sequence[Ids] | None = None,
    *,
    max_new_tokens: SupportsIndex,
    sampling: Sampling = PLAIN,
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None = None,
    seed: SupportsIndex | Sequence[SupportsIndex] = 0,
    sources: Sequence[Ids] | np.ndarray | jax.Array | None = None,
    bos_id: SupportsIndex | None = None,
) -> list[list[int]]:
    """Continues each prompt: returns the new tokens of each row, without `eos_id`.

    Prompts may differ in length; each row gets what it would get alone. What is compiled depends on the batch size and
    on rounded lengths (of prompts, sources and `max_new_tokens`), so a nearby length, another seed or another
    temperature compiles nothing.

    Args:
        model: a `CausalLM`, a `Seq2Seq` or a `SpeechToText`.
        params: its parameters, without the outer "params".
        prompts: token ids of each row. Seq2Seq: where the target begins; None: `[bos_id]` for each source.
        max_new_tokens: at most so many a row.
        sampling: how tokens are chosen; `Sampling(temperature=0.0)` is greedy.
        eos_id: ends a row, or several of which each does; None: every row gets `max_new_tokens`.
        seed: row b draws the token at position p from the key `fold_in(fold_in(key(seed), b), p)`; so a text that is
            continued with the same seed goes on as if it had not been interrupted. Given one seed a row, row b draws
            from `fold_in(fold_in(key(seed[b]), 0), p)`: as if it were alone with that seed, at whatever place.
        sources: Seq2Seq only: token ids of each source; of a SpeechToText frames, (B, F, M).

    Raises:
        ValueError: ids out of range, empty or missing prompts or sources, too much for a learned position table, or
            logits that are not finite (row, position and the parameter to blame are named).
    """
    if not isinstance(model, CausalLM | Seq2Seq):
        raise ValueError(f"generate takes a CausalLM or a Seq2Seq, got a {type(model).__name__}, which writes no text.")
    if isinstance(params, Mapping) and set(params) == {"params"}:
        raise ValueError('params must be the parameters themselves, got {"params": ...}: pass params["params"].')
    vocab_size = vocabulary(model.config)
    limit = check_new_tokens(max_new_tokens)
    ends = [eos_id] if eos_id is None or isinstance(eos_id, SupportsIndex) else list(eos_id)
    for end in ends:
        check_id("eos_id", end, vocab_size)
    check_id("bos_id", bos_id, vocab_size)
    source = _source(model, sources, vocab_size)
    prompt_rows = check_rows("prompt", _prompts(prompts, source, bos_id), vocab_size)
    if source is not None and len(source.lengths) != len(prompt_rows):
        raise ValueError(f"there must be as many prompts as sources, got {len(prompt_rows)} and {len(source.lengths)}.")
    check_lengths(model.config, prompt_rows, limit)

    if model.execution.attention in TRAINING_KERNELS:  # which refuse a cache: decoding chooses its own
        model = model.clone(execution=dataclasses.replace(model.execution, attention="auto"))
    # Almost every target begins with one token: no 15 more beside it.
    single = source is not None and all(len(row) == 1 for row in prompt_rows)
    prompt_slots = 1 if single else _slots(prompt_rows, model.config.max_length)
    new_slots = bucket(limit)
    written = decode(
        model,
        params,
        pad(prompt_rows, prompt_slots),
        source,
        _row_keys(*row_seeds(seed, len(prompt_rows))),
        Choice.of(sampling, vocab_size),
        np.array([-1 if end is None else end for end in ends or [None]], np.int32),
        np.int32(limit),
        cache_slots=prompt_slots + new_slots,
        new_slots=new_slots,
    )
    written = jax.device_get(written)
    _check_finite(written, prompt_rows, params, model.config.dtype)
    return [row[:count].tolist() for row, count in zip(written.tokens, written.counts, strict=True)]


def _slots(rows: Sequence[np.ndarray], longest: int | None) -> int:
    """How long the padded rows are: no longer than a learned position table, which all of them fit."""
    slots = bucket(max(len(row) for row in rows))
    return slots if longest is None else min(slots, longest)


def _source(model: Any, sources: Any, vocab_size: int) -> Rows | None:
    if isinstance(model, CausalLM):
        if sources is not None:
            raise ValueError("sources are for a Seq2Seq: a CausalLM has no encoder. Put the text into prompts.")
        return None
    if sources is None:
        raise ValueError("sources is missing: a Seq2Seq writes from a source. prompts only say how the target begins.")
    if isinstance(model, SpeechToText):
        return frame_rows(model.config, sources)
    rows = check_rows("source", sources, model.config.source_vocab_size or vocab_size)
    check_source_lengths(model.config, rows)
    return pad(rows, _slots(rows, model.config.longest_source))


def _prompts(prompts: Sequence[Ids] | None, source: Rows | None, bos_id: SupportsIndex | None) -> Sequence[Ids]:
    if prompts is not None:
        return prompts
    if source is None:
        raise ValueError("prompts is missing: give a list of token ids for each row.")
    if bos_id is None:
        raise ValueError("bos_id is missing: give the id that a target begins with, or prompts.")
    return [[bos_id]] * len(source.lengths)


@jax.jit
def _row_keys(seeds, rows):
    return jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(seeds, rows)


def _check_finite(written: Written, prompts: Sequence[np.ndarray], params: Any, dtype: str) -> None:
    failed = np.flatnonzero(written.failed_at >= 0)
    if not failed.size:
        return
    row, position = failed[0], written.failed_at[failed[0]]
    broken = next(
        (path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if not jnp.isfinite(leaf).all()), None
    )
    if broken is None:
        cause = f"All parameters are finite, so a number overflowed in {dtype}, or an id or position was out of range."
    else:
        name = jax.tree_util.keystr(broken, simple=True, separator="/")
        cause = f"The parameter {name} holds NaN or infinity: use an earlier checkpoint."
    raise ValueError(
        f"the logits of row {row} are not finite at position {position} (after {len(prompts[row])} tokens of prompt "
        f"and {position - len(prompts[row])} new ones), so no token can be chosen. {cause}"
    )
