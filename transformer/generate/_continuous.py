"""Continuous batching: when a row ends, the next prompt takes its slot while the other rows continue."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generate._decoding import Batch, prefill
from transformer.generate._layers import Params, copied_for_decoding
from transformer.generate._loop import DecodeResult, Slots, Stepper
from transformer.generate._sampling import SamplerParams
from transformer.nn._axes import Array, Bool, Int, PRNGKey
from transformer.nn.models._causal_lm import CausalLM


def decode_in_slots(
    model: CausalLM,
    params: Params,
    prompts: Sequence[Batch],
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[np.ndarray, " E"],
    limit: SupportsIndex,
    *,
    slots: int,
    cache_slots: int,
    new_slots: int,
) -> DecodeResult:
    """Return the result of `decode` for all prompts, batches of one row, with at most `slots` rows at a time."""
    # This is continuous batching (Yu et al. 2022, Orca, OSDI, section 4): new prompts are prefilled as soon as a row
    # has ended. Prompts with the same padded length share a prefill call, and the longest prompts come first. Each
    # layer's parameters are copied once, as in `with_unstacked_layers`.
    order = sorted(range(len(prompts)), key=lambda number: -prompts[number].tokens.shape[1])
    stepper = Stepper(*copied_for_decoding(model, params), choice, eos_ids, limit)
    state = _free_slots(stepper.model, keys, slots, cache_slots, new_slots)
    found = jax.tree.map(lambda leaf: np.repeat(leaf[:1], len(prompts), axis=0), jax.device_get(state.result))
    rows_of: dict[int, int] = {}  # slot -> index of its prompt
    while order or rows_of:
        free = [slot for slot in range(slots) if slot not in rows_of]
        while order and free:
            width = prompts[order[0]].tokens.shape[1]
            same_width = [number for number in order[: len(free)] if prompts[number].tokens.shape[1] == width]
            count = 1 << (len(same_width).bit_length() - 1)  # a power of two: few batch sizes to compile
            numbers, taken = order[:count], free[:count]
            order, free = order[count:], free[count:]
            rows_of |= dict(zip(taken, numbers, strict=True))
            rows = jax.tree.map(lambda *parts: np.concatenate(parts), *(prompts[number] for number in numbers))
            state = fill_slots(stepper, state, rows, keys[np.array(numbers)], np.array(taken), cache_slots=cache_slots)
        state = continue_decoding(stepper, state, bool(order))
        running, result = jax.device_get((state.running, state.result))
        for slot in [slot for slot in rows_of if not running[slot]]:
            number = rows_of.pop(slot)
            for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(result), strict=True):
                whole[number] = part[slot]
            if result.failed_at[slot] >= 0:
                return found
    return found


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _free_slots(model: CausalLM, keys: PRNGKey, slots: int, cache_slots: int, new_slots: int) -> Slots:
    started = Slots.started(
        jnp.broadcast_to(keys[:1], (slots,)), model.init_cache(slots, cache_slots), DecodeResult.blank(slots, new_slots)
    )
    return dataclasses.replace(started, running=jnp.zeros((slots,), bool))


@functools.partial(jax.jit, static_argnames="cache_slots", donate_argnames="state")
def fill_slots(
    stepper: Stepper, state: Slots, prompts: Batch, keys: PRNGKey, slots: Int[Array, " R"], *, cache_slots: int
) -> Slots:
    """Prefill R prompts into the given slots (R,), and sample the first token of each."""
    logits, cache = prefill(stepper.model, stepper.params, prompts, None, cache_slots)
    fresh = stepper.start(keys, cache, logits, state.result.tokens.shape[1])
    return jax.tree.map(lambda whole, part: whole.at[slots].set(part), state, fresh)


@functools.partial(jax.jit, donate_argnames="state")
def continue_decoding(stepper: Stepper, state: Slots, prompts_wait: Bool[Array, ""]) -> Slots:
    """Generate tokens until a row has ended, if other prompts wait; otherwise until all rows have ended."""

    def unfinished(state):
        return state.unfinished() & (state.running.all() | ~prompts_wait)  # stop at a free slot

    return stepper.run(state, unfinished)
