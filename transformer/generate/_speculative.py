"""Several tokens a step: a small model guesses them, the model itself reads all guesses at once and keeps what it would
have written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch, DecodeResult, prefill, read, with_separate_layers
from transformer.generate._sampling import SamplerParams, choose
from transformer.nn._axes import Array, Bool, Float, Int, Leaf, PRNGKey
from transformer.nn._caches import cache_length, set_cache_length
from transformer.nn.models._causal_lm import CausalLM


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
            raise ConfigError(f"tokens of a draft must be an integer of at least 1, got {self.tokens!r}.")


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
    written: DecodeResult
    rounds: Leaf
    """()"""


def decode_with_draft(
    model: CausalLM, params: Any, draft: Draft, *given: Any, **room: int
) -> tuple[DecodeResult, Array]:
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
    prompts: Batch,
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    *,
    guesses: int,
    cache_slots: int,
    new_slots: int,
) -> tuple[DecodeResult, Int[Array, ""]]:
    batch = prompts.lengths.shape[0]
    logits, cache = prefill(model, params, prompts, None, cache_slots)
    _, guessed = prefill(draft, draft_params, prompts, None, cache_slots)
    model, params, cache = with_separate_layers(model, params, cache)
    draft, draft_params, guessed = with_separate_layers(draft, draft_params, guessed)
    draw = functools.partial(_draw, keys, choice)
    record = functools.partial(_record, eos_ids, limit)

    def unfinished(state):
        return state.running.any() & (state.written.failed_at < 0).all()

    def advance(state):
        """One round: guess, verify all guesses at once, record those that are right and one token more."""
        before = cache_length(state.cache)
        tokens, guessed = _guess(draft, draft_params, draw, state, guesses)
        logits, cache = read(model, params, jnp.maximum(tokens, 0), state.cache)
        positions = before[:, None] + 1 + jnp.arange(guesses + 1)[None, :]
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
        written=DecodeResult.blank(batch, new_slots),
        rounds=jnp.int32(0),
    )
    positions = prompts.lengths[:, None]
    tokens, running, written = record(first, draw(logits[:, None], positions), jnp.ones((batch,), jnp.int32), positions)
    first = _State(tokens, running, cache, guessed, written, first.rounds)
    state = jax.lax.while_loop(unfinished, advance, first)
    return state.written, state.rounds


def _draw(
    keys: PRNGKey, choice: SamplerParams, logits: Float[Array, "B Z V"], positions: Int[Array, "B Z"]
) -> Int[Array, "B Z"]:
    """A token for each position of each row, drawn with the key of the row folded with the position."""
    fold = jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))
    drawn = choose(logits.reshape(-1, logits.shape[-1]), fold(keys, positions).reshape(-1), choice)
    return drawn.reshape(positions.shape)


def _guess(
    draft: CausalLM, params: Any, draw: Callable[..., Array], state: _State, guesses: int
) -> tuple[Int[Array, "B Z"], Any]:
    """The last token of each row and the draft's guesses of the next ones, (B, 1 + guesses), and the draft's cache."""

    def one_more(carry, _):
        tokens, cache = carry
        logits, cache = read(draft, params, jnp.maximum(tokens, 0)[:, None], cache)
        tokens = draw(logits, cache_length(cache)[:, None])[:, 0]
        return (tokens, cache), tokens

    (_, cache), tokens = jax.lax.scan(one_more, (state.tokens, state.guessed), None, length=guesses + 1)
    # The last step only puts the last guess into the cache; its own guess is not used.
    return jnp.concatenate([state.tokens[:, None], tokens[:-1].T], axis=1), cache


def _record(
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    state: _State,
    drawn: Int[Array, "B Z"],
    most: Int[Array, " B"],
    positions: Int[Array, "B Z"],
) -> tuple[Int[Array, " B"], Bool[Array, " B"], DecodeResult]:
    """Record at most `most` of the drawn tokens of each row, up to the first that ends it: the last token recorded,
    whether the row continues, and all that is written.

    A negative token marks logits that were not finite: it ends the row at its position, `DecodeResult.failed_at`.
    """
    rows, columns = jnp.arange(drawn.shape[0])[:, None], jnp.arange(drawn.shape[1])[None, :]
    ends = (drawn[..., None] == eos_ids[None, None]).any(-1) | (drawn < 0)
    first = jnp.where(ends.any(1), jnp.argmax(ends, 1), drawn.shape[1])
    most = jnp.where(state.running, jnp.minimum(most, limit - state.written.counts), 0)
    taken = jnp.minimum(most, first)
    ended = state.running & (first < most)
    last = jnp.minimum(first, drawn.shape[1] - 1)[:, None]
    failed = ended & (jnp.take_along_axis(drawn, last, 1)[:, 0] < 0)
    # Tokens that are not taken go to columns past the end, which mode="drop" ignores.
    new_slots = state.written.tokens.shape[1]
    slots = jnp.where(columns < taken[:, None], state.written.counts[:, None], new_slots) + columns
    counts = state.written.counts + taken
    written = DecodeResult(
        tokens=state.written.tokens.at[rows, slots].set(drawn, mode="drop"),
        counts=counts,
        failed_at=jnp.where(failed, jnp.take_along_axis(positions, last, 1)[:, 0], state.written.failed_at),
    )
    tokens = jnp.take_along_axis(drawn, jnp.maximum(taken - 1, 0)[:, None], 1)[:, 0]
    return tokens, state.running & ~ended & (counts < limit), written
