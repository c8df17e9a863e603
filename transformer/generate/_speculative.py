"""Speculative decoding: a draft model or a lookup proposes several tokens, which the model verifies in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch, DecodeResult, decode_chunk, prefill, with_unstacked_layers
from transformer.generate._lookup import PromptLookup, looked_up
from transformer.generate._sampling import SamplerParams, choose
from transformer.nn._axes import Array, Bool, Float, Int, Leaf, PRNGKey
from transformer.nn._caches import cache_length, set_cache_length
from transformer.nn.models._causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A small draft model for speculative decoding (Leviathan et al. 2023, arXiv 2211.17192).

    Raises:
        ConfigError: if the model is no `CausalLM`, or `tokens` is no integer of at least 1.
    """

    model: Any
    """a `CausalLM`"""
    params: Any
    """its parameters, without the outer "params\""""
    tokens: int = 4
    """number of tokens to propose per round"""

    def __post_init__(self):
        if not isinstance(self.model, CausalLM):
            raise ConfigError(
                f"a draft must be a CausalLM, got a {type(self.model).__name__}. Use a decoder-only model."
            )
        if not isinstance(self.tokens, Integral) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ConfigError(f"tokens of a draft must be an integer of at least 1, got {self.tokens!r}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    tokens: Leaf
    """(B,), the last token of each row, not yet in a cache"""
    running: Leaf
    """(B,), whether the row has not ended"""
    cache: Any
    """KV cache of the model"""
    memory: Any
    """what proposals come from: the KV cache of the draft, or (B, S) the tokens of each row"""
    result: DecodeResult
    """tokens generated so far"""
    rounds: Leaf
    """(), number of rounds so far"""


def decode_with_draft(
    model: CausalLM, params: Any, draft: Draft | PromptLookup, *given: Any, **room: int
) -> tuple[DecodeResult, Array]:
    """Generate the tokens of `decode` with the help of proposals; the other arguments are those of `decode`.

    Leviathan et al. accept a proposed token with probability min(1, p / q), which preserves the distribution of the
    model. Here a sample is a function of the logits and of a random key for its row and position. So draft and model
    sample with the same noise, and a proposed token is accepted if it equals the token that the model samples. The text
    itself is that of `decode`, with every sampling method, except for rounding differences between reading one token
    and reading several tokens.

    A round is `draft.tokens` + 1 steps of the draft and one step of the model, and generates 1 to `draft.tokens` + 1
    tokens per row. Rejected tokens are removed from the caches by resetting the cache lengths. A `PromptLookup` takes
    the place of the steps of a draft; its proposals are accepted by the same rule.

    Returns:
        The generated tokens, and the number of rounds, ().
    """
    parts = (draft, None) if isinstance(draft, PromptLookup) else (draft.model, draft.params)
    return _decode(model, params, *parts, *given, guesses=int(draft.tokens), **room)


@functools.partial(jax.jit, static_argnames=("model", "draft", "guesses", "cache_slots", "new_slots"))
def _decode(
    model: CausalLM,
    params: Any,
    draft: CausalLM | PromptLookup,
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
    if isinstance(draft, PromptLookup):
        memory = jnp.pad(prompts.tokens, ((0, 0), (0, cache_slots - prompts.tokens.shape[1])))
    else:  # The caches of model and draft always hold the same tokens, with separate keys and values.
        _, memory = prefill(draft, draft_params, prompts, None, cache_slots)
        draft, draft_params, memory = with_unstacked_layers(draft, draft_params, memory)
    model, params, cache = with_unstacked_layers(model, params, cache)
    draw = functools.partial(_draw, keys, choice)
    record = functools.partial(_record, eos_ids, limit)

    def unfinished(state):
        return state.running.any() & (state.result.failed_at < 0).all()

    def advance(state):
        """Run one round: propose tokens, verify them in one pass, and record the accepted ones and one more token."""
        before = cache_length(state.cache)  # (B,)
        tokens, memory = _guess(draft, draft_params, draw, state, guesses)
        logits, cache = decode_chunk(model, params, jnp.maximum(tokens, 0), state.cache)
        # The logits after input token i predict the token at position before + 1 + i, (B, guesses + 1).
        positions = before[:, None] + 1 + jnp.arange(guesses + 1)[None, :]
        drawn = draw(logits, positions)  # the tokens that the model samples, (B, guesses + 1)
        # Accept proposals up to the first one that differs: cumprod of matches is 1 until then, so its sum counts them.
        # The model's own token after the last accepted proposal is valid too, whether or not a proposal was rejected.
        right = jnp.cumprod(drawn[:, :-1] == tokens[:, 1:], axis=1).sum(1)
        last, running, result = record(state, drawn, right + 1, positions)
        # The cache keeps the previous last token and the accepted proposals; the next round reads the new last token.
        lengths = jnp.where(running, before + right + 1, before)
        return _State(
            tokens=jnp.where(running, last, state.tokens),
            running=running,
            cache=set_cache_length(cache, lengths),
            memory=_remember(memory, lengths, drawn, positions),
            result=result,
            rounds=state.rounds + 1,
        )

    first = _State(
        tokens=jnp.zeros((batch,), jnp.int32),
        running=jnp.ones((batch,), bool),
        cache=cache,
        memory=memory,
        result=DecodeResult.blank(batch, new_slots),
        rounds=jnp.int32(0),
    )
    positions = prompts.lengths[:, None]
    # The first token comes from the prefill logits of the model: no round is needed for it.
    drawn = draw(logits[:, None], positions)
    tokens, running, result = record(first, drawn, jnp.ones((batch,), jnp.int32), positions)
    memory = _remember(memory, prompts.lengths, drawn, positions)
    first = _State(tokens, running, cache, memory, result, first.rounds)
    state = jax.lax.while_loop(unfinished, advance, first)
    return state.result, state.rounds


def _draw(
    keys: PRNGKey, choice: SamplerParams, logits: Float[Array, "B Z V"], positions: Int[Array, "B Z"]
) -> Int[Array, "B Z"]:
    """Sample a token for each position of each row, (B, Z), with the key of the row folded with the position."""
    # The same key as in `decode` for the same row and position: this makes draft and model sample with the same noise.
    fold = jax.vmap(lambda key, row: jax.vmap(lambda position: jax.random.fold_in(key, position))(row))
    drawn = choose(logits.reshape(-1, logits.shape[-1]), fold(keys, positions).reshape(-1), choice)
    return drawn.reshape(positions.shape)


def _guess(
    draft: CausalLM | PromptLookup, params: Any, draw: Callable[..., Array], state: _State, guesses: int
) -> tuple[Int[Array, "B Z"], Any]:
    """Propose tokens.

    Returns:
        The last token of each row and the proposals, (B, 1 + guesses), and the new `_State.memory`. A proposal of -1,
        which a lookup without a match makes, is never accepted.
    """
    if isinstance(draft, PromptLookup):
        found = looked_up(state.memory, cache_length(state.cache) + 1, draft)
        return jnp.concatenate([state.tokens[:, None], found], axis=1), state.memory

    def one_more(carry, _):
        tokens, cache = carry
        logits, cache = decode_chunk(draft, params, jnp.maximum(tokens, 0)[:, None], cache)
        tokens = draw(logits, cache_length(cache)[:, None])[:, 0]
        return (tokens, cache), tokens

    (_, cache), tokens = jax.lax.scan(one_more, (state.tokens, state.memory), None, length=guesses + 1)
    # The last step only adds the last proposal to the cache, in case it is accepted; its sample is not used.
    return jnp.concatenate([state.tokens[:, None], tokens[:-1].T], axis=1), cache


def _remember(memory: Any, lengths: Int[Array, " B"], drawn: Int[Array, "B Z"], positions: Int[Array, "B Z"]) -> Any:
    """Return the memory of rows with `lengths` tokens in the cache, after the model has sampled `drawn`.

    All sampled tokens are stored in a text; those after the last token of its row are not read, and overwritten later.
    """
    if isinstance(memory, jax.Array):
        return memory.at[jnp.arange(drawn.shape[0])[:, None], positions].set(drawn, mode="drop")
    return set_cache_length(memory, lengths)


def _record(
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    state: _State,
    drawn: Int[Array, "B Z"],
    most: Int[Array, " B"],
    positions: Int[Array, "B Z"],
) -> tuple[Int[Array, " B"], Bool[Array, " B"], DecodeResult]:
    """Record at most `most` (B,) of the sampled tokens of each row, up to the first one that ends it.

    A negative token marks logits that were not finite: it ends the row at its position, `DecodeResult.failed_at`.

    Returns:
        The last recorded token of each row, which rows continue, and the result with the new tokens.
    """
    rows, columns = jnp.arange(drawn.shape[0])[:, None], jnp.arange(drawn.shape[1])[None, :]
    ends = (drawn[..., None] == eos_ids[None, None]).any(-1) | (drawn < 0)
    # Index of the first end token, or the number of tokens if there is none.
    first = jnp.where(ends.any(1), jnp.argmax(ends, 1), drawn.shape[1])
    # Rows that have ended record nothing, and no row exceeds `limit`.
    most = jnp.where(state.running, jnp.minimum(most, limit - state.result.counts), 0)
    taken = jnp.minimum(most, first)
    ended = state.running & (first < most)  # an end token within the allowed ones; it is not recorded
    last = jnp.minimum(first, drawn.shape[1] - 1)[:, None]
    failed = ended & (jnp.take_along_axis(drawn, last, 1)[:, 0] < 0)
    # Tokens that are not taken go to columns past the end, which mode="drop" ignores.
    new_slots = state.result.tokens.shape[1]
    slots = jnp.where(columns < taken[:, None], state.result.counts[:, None], new_slots) + columns
    counts = state.result.counts + taken
    result = DecodeResult(
        tokens=state.result.tokens.at[rows, slots].set(drawn, mode="drop"),
        counts=counts,
        failed_at=jnp.where(failed, jnp.take_along_axis(positions, last, 1)[:, 0], state.result.failed_at),
    )
    tokens = jnp.take_along_axis(drawn, jnp.maximum(taken - 1, 0)[:, None], 1)[:, 0]
    return tokens, state.running & ~ended & (counts < limit), result
