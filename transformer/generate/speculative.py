"""Several tokens a step: a small model guesses them, the model itself reads all guesses at once and keeps what it would
have written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config import ConfigError
from transformer.generate.decoding import Rows, Written, looping, prefill, read
from transformer.generate.sampling import Choice, choose
from transformer.nn.axes import Array, Int, Leaf, PRNGKey
from transformer.nn.caches import cache_length, set_cache_length
from transformer.nn.models import CausalLM


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A small model that guesses what a large one writes (Leviathan et al. 2023, arXiv 2211.17192).

    Raises:
        ConfigError: not a CausalLM, or no whole number of tokens.
    """

    model: Any
    """a `CausalLM`"""
    params: Any
    """its parameters, without the outer "params\""""
    tokens: int = 4
    """guesses at a time"""

    def __post_init__(self):
        if not isinstance(self.model, CausalLM):
            raise ConfigError(f"a draft must be a CausalLM, got a {type(self.model).__name__}.")
        if not isinstance(self.tokens, Integral) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ConfigError(f"tokens of a draft must be a whole number of at least 1, got {self.tokens!r}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    tokens: Leaf
    """(B,), the last of each row, in no cache yet"""
    running: Leaf
    """(B,)"""
    cache: Any
    guessed: Any
    """the draft's cache"""
    written: Written
    rounds: Leaf
    """()"""


def decode_with_draft(model: CausalLM, params: Any, draft: Draft, *given: Any, **room: int) -> tuple[Written, Array]:
    """What `decode` writes, to the rounding of reading several tokens at once, and the rounds that it took, (); the
    arguments are those of `decode` without a source.

    A draw depends on the logits and on the key of its row and position alone, so the draft draws with the model's own
    noise, and a guess is right where both draw the same: the text is the model's for every way of sampling, and not
    only its distribution. A round is `draft.tokens` + 1 steps of the draft and one of the model, and gives 1 to
    `draft.tokens` + 1 tokens a row. What was guessed wrong leaves the caches as padding does: their lengths are set
    back.
    """
    return _decode(model, params, draft.model, draft.params, *given, guesses=int(draft.tokens), **room)


@functools.partial(jax.jit, static_argnames=("model", "draft", "guesses", "cache_slots", "new_slots"))
def _decode(
    model: CausalLM,
    params: Any,
    draft: CausalLM,
    draft_params: Any,
    prompts: Rows,
    keys: PRNGKey,
    choice: Choice,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    *,
    guesses: int,
    cache_slots: int,
    new_slots: int,
) -> tuple[Written, Int[Array, ""]]:
    batch = prompts.lengths.shape[0]
    logits, cache = prefill(model, params, prompts, None, cache_slots)
    _, guessed = prefill(draft, draft_params, prompts, None, cache_slots)
    model, params, cache = looping(model, params, cache)
    draft, draft_params, guessed = looping(draft, draft_params, guessed)
    places = jnp.arange(guesses + 1)[None, :]

    def draw(logits, positions):
        """(B, n, V) and (B, n) -> (B, n)."""
        drawn_with = jax.vmap(lambda key, row: jax.vmap(lambda p: jax.random.fold_in(key, p))(row))(keys, positions)
        return choose(logits.reshape(-1, logits.shape[-1]), drawn_with.reshape(-1), choice).reshape(positions.shape)

    def guess(carry, _):
        tokens, cache = carry
        logits, cache = read(draft, draft_params, jnp.maximum(tokens, 0)[:, None], cache)
        tokens = draw(logits, cache_length(cache)[:, None])[:, 0]
        return (tokens, cache), tokens

    def record(state, drawn, most, positions):
        """Takes at most `most` (B,) of the tokens drawn (B, n), up to the first that ends the row; which rows go on."""
        ends = (drawn[..., None] == eos_ids[None, None]).any(-1) | (drawn < 0)
        first = jnp.where(ends.any(1), jnp.argmax(ends, 1), drawn.shape[1])
        most = jnp.where(state.running, jnp.minimum(most, limit - state.written.counts), 0)
        taken = jnp.minimum(most, first)
        ended = state.running & (first < most)
        last = jnp.minimum(first, drawn.shape[1] - 1)[:, None]
        failed = ended & (jnp.take_along_axis(drawn, last, 1)[:, 0] < 0)
        columns = jnp.where(places[:, : drawn.shape[1]] < taken[:, None], state.written.counts[:, None], new_slots)
        columns = columns + places[:, : drawn.shape[1]]
        counts = state.written.counts + taken
        written = Written(
            tokens=state.written.tokens.at[jnp.arange(batch)[:, None], columns].set(drawn, mode="drop"),
            counts=counts,
            failed_at=jnp.where(failed, jnp.take_along_axis(positions, last, 1)[:, 0], state.written.failed_at),
        )
        tokens = jnp.take_along_axis(drawn, jnp.maximum(taken - 1, 0)[:, None], 1)[:, 0]
        return tokens, state.running & ~ended & (counts < limit), written

    def unfinished(state):
        return state.running.any() & (state.written.failed_at < 0).all()

    def advance(state):
        before = cache_length(state.cache)
        (_, guessed), tokens = jax.lax.scan(guess, (state.tokens, state.guessed), None, length=guesses + 1)
        tokens = jnp.concatenate([state.tokens[:, None], tokens[:-1].T], axis=1)  # the last was only read, not needed
        logits, cache = read(model, params, jnp.maximum(tokens, 0), state.cache)
        positions = before[:, None] + 1 + places
        drawn = draw(logits, positions)
        right = jnp.cumprod(drawn[:, :-1] == tokens[:, 1:], axis=1).sum(1)
        last, running, written = record(state, drawn, right + 1, positions)
        lengths = jnp.where(running, before + right + 1, before)
        return _State(
            tokens=jnp.where(running, last, state.tokens),
            running=running,
            cache=set_cache_length(cache, lengths),
            guessed=set_cache_length(guessed, lengths),
            written=written,
            rounds=state.rounds + 1,
        )

    first = _State(
        tokens=jnp.zeros((batch,), jnp.int32),
        running=jnp.ones((batch,), bool),
        cache=cache,
        guessed=guessed,
        written=Written.blank(batch, new_slots),
        rounds=jnp.int32(0),
    )
    positions = prompts.lengths[:, None]
    tokens, running, written = record(first, draw(logits[:, None], positions), jnp.ones((batch,), jnp.int32), positions)
    first = _State(tokens, running, cache, guessed, written, first.rounds)
    state = jax.lax.while_loop(unfinished, advance, first)
    return state.written, state.rounds
