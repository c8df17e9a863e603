"""The function `generate`: checks its arguments, runs the compiled loop and returns lists of token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any, SupportsIndex

import flax.linen as nn
import jax
import numpy as np

from transformer.generate._continuous import decode_in_slots
from transformer.generate._layers import Params
from transformer.generate._lookup import PromptLookup
from transformer.generate._loop import decode
from transformer.generate._prompts import (
    Ids,
    bucket,
    check_lengths,
    check_new_tokens,
    check_text_model,
    decoding_model,
    end_ids,
    image_rows,
    pad,
    padded_length,
    row_seeds,
    slots_of_prompts,
    source_rows,
    target_rows,
    warn_if_rescaled,
)
from transformer.generate._sampling import PLAIN, SamplerParams, Sampling
from transformer.generate._speculative import Draft, Proposer
from transformer.nn.models._base import first_bad_parameter
from transformer.nn.models._causal_lm import CausalLM


def generate(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Ids] | None = None,
    *,
    max_new_tokens: SupportsIndex,
    sampling: Sampling = PLAIN,
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None = None,
    seed: SupportsIndex | Sequence[SupportsIndex] = 0,
    sources: Sequence[Ids] | np.ndarray | jax.Array | None = None,
    bos_id: SupportsIndex | None = None,
    draft: Draft | PromptLookup | None = None,
    slots: SupportsIndex | None = None,
    images: Sequence[Any] | None = None,
) -> list[list[int]]:
    """Generate a continuation of each prompt.

    Prompts may differ in length, and the result of a row does not depend on the other rows. Compiled programs depend on
    the batch size and on rounded lengths (of prompts, sources and `max_new_tokens`), so a similar length, another seed
    or another temperature needs no new compilation.

    Args:
        model: a `CausalLM`, a `Seq2Seq` or a `SpeechToText`.
        params: its parameters, without the outer "params".
        prompts: token ids of each row. Seq2Seq: the start of each target; None: `[bos_id]` for each source.
        max_new_tokens: maximum number of new tokens per row.
        sampling: how tokens are sampled; `Sampling(temperature=0.0)` is greedy decoding.
        eos_id: id or ids that end a row; None: every row gets `max_new_tokens` tokens.
        seed: row b samples the token at position p with the key `fold_in(fold_in(key(seed), b), p)`. So a text that is
            continued with the same seed continues as if it had not been interrupted. With a list of one seed per row,
            row b uses `fold_in(fold_in(key(seed[b]), 0), p)`: as if it were generated alone with that seed.
        sources: Seq2Seq only: token ids of each source; for a SpeechToText frames, (B, F, M).
        bos_id: Seq2Seq only: the id that starts a target, if there are no prompts.
        draft: CausalLM only: a smaller model with the same vocabulary for speculative decoding, or a `PromptLookup`,
            which proposes tokens from the text itself. It does not change the generated tokens.
        slots: CausalLM only: number of rows that are generated at the same time; when a row ends, the next prompt takes
            its slot. None: all rows.
        images: VisionLanguageModel only: a list of images for each prompt, arrays (height, width, channels) as the
            preprocessing of the model gives them, in the order of their tokens in the prompt.

    Returns:
        The new tokens of each row, without `eos_id`.

    Raises:
        ValueError: if ids are out of range, prompts or sources are empty or missing, a text exceeds a learned position
            table, a draft, slots or images are not supported, a prompt does not have the tokens of its images, or
            logits are not finite (the message names row, position and parameter).
    """
    vocab_size = check_text_model("generate", model, params)
    limit = check_new_tokens(max_new_tokens)
    ends = end_ids(eos_id, vocab_size)
    source = source_rows(model, sources, vocab_size)
    prompt_rows = target_rows(prompts, source, bos_id, vocab_size)
    check_lengths(model.config, prompt_rows, limit)
    if sampling.penalties and (draft is not None or slots is not None):
        raise ValueError("penalties can't be used with slots or a draft. Remove the penalties, or slots and draft.")
    if draft is not None:
        check_draft(model, vocab_size, draft, prompt_rows, limit)

    if slots is not None:
        check_slots(model, slots, draft)
    if images is not None and (draft is not None or slots is not None):
        raise ValueError("images can't be used with slots or a draft. Remove slots and draft.")
    pixels = image_rows(model, prompt_rows, images)

    model = decoding_model(model)
    prompt_slots = slots_of_prompts(prompt_rows, source, model.config.max_length)
    new_slots = bucket(limit)
    keys = row_keys(*row_seeds(seed, len(prompt_rows)))
    how = SamplerParams.of(sampling, vocab_size), np.array(ends or [-1], np.int32), np.int32(limit)
    room = {"cache_slots": prompt_slots + new_slots, "new_slots": new_slots}
    if slots is not None and slots < len(prompt_rows):
        each = [pad([row], padded_length([row], model.config.max_length)) for row in prompt_rows]
        result = decode_in_slots(model, params, each, keys, *how, slots=int(slots), **room)
    else:
        room["cache_slots"] += 0 if draft is None else bucket(draft.tokens)
        proposals = {"proposer": Proposer.of(draft), "draft_params": draft.params if isinstance(draft, Draft) else None}
        rows = dataclasses.replace(pad(prompt_rows, prompt_slots), images=pixels)
        result = decode(model, params, rows, source, keys, *how, **room, **proposals)
    result = jax.device_get(result)
    check_finite(result.failed_at, prompt_rows, params, model.config.dtype)
    lengths = np.array(list(map(len, prompt_rows)))
    warn_if_rescaled(model.config, lengths, lengths + np.minimum(result.counts, limit - 1))  # the last one is not read
    return [row[:count].tolist() for row, count in zip(result.tokens, result.counts, strict=True)]


def check_draft(
    model: nn.Module, vocab_size: int, draft: Draft | PromptLookup, prompts: Sequence[np.ndarray], max_new_tokens: int
) -> None:
    """Raise ValueError unless a draft model or a prompt lookup can be used with a model."""
    if not isinstance(model, CausalLM):
        raise ValueError(f"draft is only supported for a CausalLM, got a {type(model).__name__}. Remove draft.")
    for one in (model, draft.model) if isinstance(draft, Draft) else (model,):
        if one.config.has_linear_attention:
            raise ValueError(
                "a draft is not supported for models with linear attention, whose state can't drop rejected tokens. "
                "Remove draft."
            )
    if model.config.reads_lengths:
        raise ValueError(
            "a draft is not supported for models whose rotary scaling depends on the length of the text (dynamic, "
            "longrope): rejected tokens would change it. Remove draft."
        )
    if isinstance(draft, PromptLookup):
        return
    if (size := check_text_model("a draft", draft.model, draft.params)) != vocab_size:
        raise ValueError(
            f"the draft must have the vocabulary of the model ({vocab_size} tokens), got a vocabulary of {size} "
            f"tokens. Use a draft trained with the model's tokenizer."
        )
    check_lengths(draft.model.config, prompts, max_new_tokens)


def check_slots(model: nn.Module, slots: SupportsIndex, draft: Draft | PromptLookup | None) -> None:
    """Raise ValueError unless `slots` is an integer of at least 1, the model is a CausalLM, and there is no draft."""
    if not isinstance(slots, Integral) or isinstance(slots, bool) or slots < 1:
        raise ValueError(f"slots must be an integer of at least 1, or None for all rows at once, got {slots!r}.")
    if not isinstance(model, CausalLM):
        raise ValueError(f"slots needs a CausalLM, got a {type(model).__name__}. Use beam_search_all, or remove slots.")
    if draft is not None:
        raise ValueError("slots and draft can't be used together. Remove one of them.")


@jax.jit
def row_keys(seeds, rows):
    return jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(seeds, rows)


def check_finite(failed_at: np.ndarray, prompts: Sequence[np.ndarray], params: Params, dtype: str) -> None:
    """Raise ValueError for the first row whose logits were not finite, at position `failed_at`; -1: they were."""
    failed = np.flatnonzero(failed_at >= 0)
    if not failed.size:
        return
    row, position = failed[0], failed_at[failed[0]]
    broken = first_bad_parameter(params)
    if broken is None:
        cause = f"All parameters are finite, so a value overflowed in {dtype}, or an id or position was out of range."
    else:
        cause = f"The parameter {broken} holds NaN or infinity. Use an earlier checkpoint."
    raise ValueError(
        f"the logits of row {row} are not finite at position {position} (after {len(prompts[row])} prompt tokens "
        f"and {position - len(prompts[row])} new tokens), so no token can be chosen. {cause}"
    )
