"""More prompts than are written at once: where a row has ended, the next prompt begins, while the others go on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from transformer.generate._decoding import Batch, DecodeResult, decode_step, prefill
from transformer.generate._layers import separate, separated
from transformer.generate._sampling import SamplerParams, choose
from transformer.nn._axes import Array, Bool, Int, Leaf, PRNGKey
from transformer.nn._caches import cache_length
from transformer.nn.models._causal_lm import CausalLM


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """S rows being written; a slot whose row has ended waits for another."""

    tokens: Leaf
    """(S,), the last token of each row, in no cache yet"""
    running: Leaf
    """(S,)"""
    keys: PRNGKey
    """(S,), of the rows"""
    cache: Any
    """of S rows, each layer's apart"""
    written: DecodeResult


_separate = jax.jit(separate, static_argnums=0)


def decode_in_slots(
    model: CausalLM,
    params: Any,
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
    """What `decode` writes of all prompts (one row each), never more than `slots` of them at once.

    The longest prompts come first, so that those that follow fit the shapes that were compiled. New rows are read as
    soon as any has ended; those whose padded lengths are alike share a call (continuous batching: Yu et al. 2022, Orca,
    OSDI, section 4). Each layer's parameters are copied once, as `with_separate_layers` does.
    """
    order = sorted(range(len(prompts)), key=lambda number: -prompts[number].tokens.shape[1])
    params = {**params, "decoder": _separate(model, params["decoder"])}
    model = separated(model)
    state = Slots(
        tokens=jnp.zeros((slots,), jnp.int32),
        running=jnp.zeros((slots,), bool),
        keys=jnp.broadcast_to(keys[:1], (slots,)),
        cache=model.init_cache(slots, cache_slots),
        written=DecodeResult.blank(slots, new_slots),
    )
    found = jax.tree.map(np.array, DecodeResult.blank(len(prompts), new_slots))
    rows_of: dict[int, int] = {}  # slot -> number of the prompt that is written there
    while order or rows_of:
        free = [slot for slot in range(slots) if slot not in rows_of]
        while order and free:
            width = prompts[order[0]].tokens.shape[1]
            alike = [number for number in order[: len(free)] if prompts[number].tokens.shape[1] == width]
            count = 1 << (len(alike).bit_length() - 1)  # few sizes to compile
            numbers, taken = order[:count], free[:count]
            order, free = order[count:], free[count:]
            rows_of |= dict(zip(taken, numbers, strict=True))
            rows = jax.tree.map(lambda *parts: np.concatenate(parts), *(prompts[number] for number in numbers))
            given = state, rows, keys[np.array(numbers)], choice, eos_ids, limit, np.array(taken)
            state = fill(model, params, *given, cache_slots=cache_slots)
        state = go_on(model, params, state, choice, eos_ids, limit, bool(order))
        running, written = jax.device_get((state.running, state.written))
        for slot in [slot for slot in rows_of if not running[slot]]:
            number = rows_of.pop(slot)
            for whole, part in zip(jax.tree.leaves(found), jax.tree.leaves(written), strict=True):
                whole[number] = part[slot]
            if written.failed_at[slot] >= 0:
                return found
    return found


@functools.partial(jax.jit, static_argnames=("model", "cache_slots"), donate_argnames="state")
def fill(
    model: CausalLM,
    params: Any,
    state: Slots,
    prompts: Batch,
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    slots: Int[Array, " R"],
    *,
    cache_slots: int,
) -> Slots:
    """Reads prompts, R rows, into the slots (R,), and draws the first token of each."""
    logits, cache = prefill(model, params, prompts, None, cache_slots)

    def put(whole, part):
        return whole.at[slots].set(part)

    fresh = Slots(
        tokens=jnp.zeros_like(prompts.lengths),
        running=jnp.ones_like(prompts.lengths, bool),
        keys=keys,
        cache=cache,
        written=DecodeResult.blank(len(prompts.lengths), state.written.tokens.shape[1]),
    )
    fresh = _record(fresh, logits, prompts.lengths, choice, eos_ids, limit)
    return jax.tree.map(put, state, fresh)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def go_on(
    model: CausalLM,
    params: Any,
    state: Slots,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    others_wait: Bool[Array, ""],
) -> Slots:
    """One token after the other until a row has ended, if others wait for its slot, or else until all have."""

    def unfinished(state):
        wanted = jnp.where(others_wait, state.running.all(), state.running.any())  # while others wait, no slot is free
        return wanted & (state.written.failed_at < 0).all()

    def advance(state):
        logits, cache = decode_step(model, params, jnp.maximum(state.tokens, 0), state.cache, None)
        grown = Slots(state.tokens, state.running, state.keys, cache, state.written)
        return _record(grown, logits, cache_length(cache), choice, eos_ids, limit)

    return jax.lax.while_loop(unfinished, advance, state)


def _record(state, logits, positions, choice, eos_ids, limit):
    """Draws a token of each running row and writes it down, unless it ends the row."""
    tokens = choose(logits, jax.vmap(jax.random.fold_in)(state.keys, positions), choice)
    failed, ended = state.running & (tokens < 0), (tokens[:, None] == eos_ids[None, :]).any(1)
    running, written = state.running & ~failed & ~ended, state.written
    columns = jnp.where(running, written.counts, written.tokens.shape[1])
    counts = written.counts + running
    written = DecodeResult(
        tokens=written.tokens.at[jnp.arange(tokens.shape[0]), columns].set(tokens, mode="drop"),
        counts=counts,
        failed_at=jnp.where(failed, positions, written.failed_at),
    )
    return Slots(tokens, running & (counts < limit), state.keys, state.cache, written)
