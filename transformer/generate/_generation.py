"""`generate`: checks what it is given, runs the compiled loop, reads the result."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generate._continuous import decode_in_slots
from transformer.generate._decoding import decode
from transformer.generate._prompts import (
    Ids,
    bucket,
    check_lengths,
    check_new_tokens,
    check_writer,
    decoding_model,
    end_ids,
    pad,
    padded_length,
    row_seeds,
    slots_of_prompts,
    source_rows,
    target_rows,
)
from transformer.generate._sampling import PLAIN, SamplerParams, Sampling
from transformer.generate._speculative import Draft, decode_with_draft
from transformer.nn.models._causal_lm import CausalLM


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
    draft: Draft | None = None,
    slots: SupportsIndex | None = None,
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
        draft: CausalLM only: a smaller model of the same vocabulary that guesses ahead. The rows stay what they are
            without it.
        slots: CausalLM only: rows that are written at once; when one ends, the next prompt takes its place. None: all.

    Raises:
        ValueError: ids out of range, empty or missing prompts or sources, too much for a learned position table, a
            draft or slots that don't fit, or logits that are not finite (row, position and the parameter to blame are
            named).
    """
    vocab_size = check_writer("generate", model, params)
    limit = check_new_tokens(max_new_tokens)
    ends = end_ids(eos_id, vocab_size)
    source = source_rows(model, sources, vocab_size)
    prompt_rows = target_rows(prompts, source, bos_id, vocab_size)
    check_lengths(model.config, prompt_rows, limit)
    if draft is not None:
        check_draft(model, vocab_size, draft, prompt_rows, limit)

    if slots is not None:
        check_slots(model, slots, draft)

    model = decoding_model(model)
    prompt_slots = slots_of_prompts(prompt_rows, source, model.config.max_length)
    new_slots = bucket(limit)
    keys = _row_keys(*row_seeds(seed, len(prompt_rows)))
    how = SamplerParams.of(sampling, vocab_size), np.array(ends or [-1], np.int32), np.int32(limit)
    room = {"cache_slots": prompt_slots + new_slots, "new_slots": new_slots}
    if slots is not None and slots < len(prompt_rows):
        each = [pad([row], padded_length([row], model.config.max_length)) for row in prompt_rows]
        written = decode_in_slots(model, params, each, keys, *how, slots=int(slots), **room)
    elif draft is not None:
        room["cache_slots"] += bucket(draft.tokens)
        small = Draft(model=decoding_model(draft.model), params=draft.params, tokens=draft.tokens)
        written, _ = decode_with_draft(model, params, small, pad(prompt_rows, prompt_slots), keys, *how, **room)
    else:
        written = decode(model, params, pad(prompt_rows, prompt_slots), source, keys, *how, **room)
    written = jax.device_get(written)
    check_finite(written.failed_at, prompt_rows, params, model.config.dtype)
    return [row[:count].tolist() for row, count in zip(written.tokens, written.counts, strict=True)]


def check_draft(model: Any, vocab_size: int, draft: Draft, prompts: Sequence[np.ndarray], max_new_tokens: int) -> None:
    """Raises ValueError where a draft can't guess for a model: a Seq2Seq, another vocabulary, or a learned position
    table of the draft without room for the text.
    """
    if not isinstance(model, CausalLM):
        raise ValueError(f"a draft guesses for a CausalLM, got a {type(model).__name__}. Leave draft out.")
    if (size := check_writer("a draft", draft.model, draft.params)) != vocab_size:
        raise ValueError(
            f"the draft has a vocabulary of {size} tokens and the model one of {vocab_size}: it must read and write "
            f"the same ids. Take a draft trained with the model's tokenizer."
        )
    check_lengths(draft.model.config, prompts, max_new_tokens)


def check_slots(model: Any, slots: SupportsIndex, draft: Draft | None) -> None:
    """Raises ValueError unless `slots` is an integer of at least 1, for a CausalLM without a draft."""
    if not isinstance(slots, Integral) or isinstance(slots, bool) or slots < 1:
        raise ValueError(f"slots must be an integer of at least 1, or None to write all rows at once, got {slots!r}.")
    if not isinstance(model, CausalLM):
        raise ValueError(
            f"slots are for a CausalLM, got a {type(model).__name__}. Use beam_search_all, or leave it out."
        )
    if draft is not None:
        raise ValueError("slots and draft can't be used together: leave one of them out.")


@jax.jit
def _row_keys(seeds, rows):
    return jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(seeds, rows)


def check_finite(failed_at: np.ndarray, prompts: Sequence[np.ndarray], params: Any, dtype: str) -> None:
    """Raises ValueError where `failed_at` (B,) says that the logits of a row were not finite, and at which position
    (-1: they were): row, position and the parameter to blame are named.
    """
    failed = np.flatnonzero(failed_at >= 0)
    if not failed.size:
        return
    row, position = failed[0], failed_at[failed[0]]
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
