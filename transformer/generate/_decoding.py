"""Compiled decoding: prefill, the one-token step and the loop, as pure functions of model, parameters and arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer.generate._layers import decoding_params, unstack_layers, unstacked_model, uses_unstacked_layers
from transformer.generate._penalties import History
from transformer.generate._sampling import SamplerParams, choose
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey, Tokens
from transformer.nn._caches import ContextCache, cache_length, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._paged import paged_cache, set_rows
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq

PAGE_SIZE = 128
"""number of tokens per page of a cache for `generate`"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of token ids with different lengths, padded on the right."""

    tokens: Leaf
    """(B, T), token ids; padding must be ids that the row may contain. For a SpeechToText's source: frames (B, F, M)"""
    lengths: Leaf
    """(B,), number of tokens; for frames, number of encoder positions"""
    images: Leaf | None = None
    """(B, I, height, width, channels), or `ImagePatches`: images of the prompts of a VisionLanguageModel; None: none"""


def prefill(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Batch,
    source: Batch | None,
    cache_slots: int,
    *,
    paged: bool = False,
) -> tuple[Float[Array, "B V"], Any]:
    """Read complete prompts, and sources, in one call; with `paged`, into a cache of pages.

    Returns:
        The logits (B, V) after the last token of each prompt, and the KV cache with the prompts.
    """
    cache = new_cache(model, prompts.tokens.shape[0], cache_slots, paged=paged)
    if prompts.images is None:
        mask = Mask.lengths(prompts.lengths) if model.config.reads_lengths else None
        hidden, cache = _hidden(model, params, source, prompts.tokens, cache, source, mask=mask)
    else:
        # Tokens can attend to later ones of their prompt, so the mask must hide the padding.
        given = {"mask": Mask.lengths(prompts.lengths), "cache": cache, "images": prompts.images}
        hidden, cache = model.apply({"params": params}, prompts.tokens, **given, method=type(model).hidden)
    # Prompts are padded on the right, so the last token of row b is at index lengths[b] - 1: (B, T, D) -> (B, 1, D).
    # Only these positions go through the head, which avoids logits of shape (B, T, V).
    last = jnp.take_along_axis(hidden, prompts.lengths[:, None, None] - 1, axis=1)
    # The cache also holds keys of the padding. A length that excludes them hides them, and later tokens overwrite them.
    return _logits(model, params, last), set_cache_length(cache, prompts.lengths)


def new_cache(model: CausalLM | Seq2Seq, rows: int, slots: int, *, paged: bool = False) -> Any:
    """Return an empty cache of `slots` positions for each row; with `paged`, each row has its own pages in order."""
    if not paged:
        return model.init_cache(rows, slots)
    each = -(-slots // PAGE_SIZE)
    cache = paged_cache(model, rows=rows, pages_per_row=each, num_pages=rows * each, page_size=PAGE_SIZE)
    return set_rows(cache, page_table=jnp.arange(rows * each).reshape(rows, each))


def decode_step(
    model: CausalLM | Seq2Seq, params: Any, tokens: Int[Array, " B"], cache: Any, source: Batch | None
) -> tuple[Float[Array, "B V"], Any]:
    """Read one more token per row, (B,).

    Only the lengths of the source are used: its keys and values are in the cache.

    Returns:
        The logits (B, V) after the token, and the cache with it.
    """
    logits, cache = decode_hypotheses(model, params, tokens[:, None], None, None, cache, source)
    return logits[:, 0], cache


def decode_hypotheses(
    model: CausalLM | Seq2Seq,
    params: Any,
    tokens: Int[Array, "B Z"],
    positions: Int[Array, "B Z"] | None,
    mask: Mask | None,
    cache: Any,
    source: Batch | None,
) -> tuple[Float[Array, "B Z V"], Any]:
    """Read one more token for each of Z hypotheses per row, (B, Z).

    Args:
        model: a `CausalLM` or a `Seq2Seq`.
        params: its parameters.
        tokens: (B, Z).
        positions: (B, Z), of the tokens; None: the next ones in the cache.
        mask: which cache slots each hypothesis may attend to; None: all tokens of the row so far.
        cache: the KV cache, shared by the hypotheses of a row.
        source: only its lengths are used, as in `decode_step`.

    Returns:
        The logits (B, Z, V) after each token, and the cache with the tokens.
    """
    hidden, grown = _hidden(model, params, None, tokens, cache, source, positions, mask)
    logits = model.apply({"params": params}, hidden, method=type(model).head)
    return logits, _with_context(grown, cache)


def decode_chunk(model: CausalLM, params: Any, tokens: Tokens, cache: Any) -> tuple[Float[Array, "B T V"], Any]:
    """Read T more tokens per row, (B, T), some of which may be beyond the end of a learned position table.

    Returns:
        The logits (B, T, V) after each token, and the cache with the tokens.
    """
    # Token t of a row is at position (tokens in the cache) + t, (B, T).
    positions = cache_length(cache)[:, None] + jnp.arange(tokens.shape[1])[None, :]
    if model.config.position == "learned":
        positions = jnp.minimum(positions, model.config.max_length - 1)  # NaN past the table
    variables = {"params": params}
    hidden, cache = model.apply(variables, tokens, positions, cache=cache, method=CausalLM.hidden)
    return model.apply(variables, hidden, method=CausalLM.head), cache


def with_unstacked_layers(model: CausalLM | Seq2Seq, params: Any, cache: Any) -> tuple[CausalLM | Seq2Seq, Any, Any]:
    """Prepare model, parameters and cache for a loop over tokens.

    If `uses_unstacked_layers` holds, each layer gets a separate tree of parameters and of cache.
    """
    if not uses_unstacked_layers(model, params):
        return model, params, cache
    return unstacked_model(model), decoding_params(model, params), unstack_layers(model, cache)


def _hidden(model, params, new_source, tokens: Tokens, cache, source, positions=None, mask=None):
    variables, given = {"params": params}, {"positions": positions, "mask": mask, "cache": cache}
    if isinstance(model, CausalLM):
        return model.apply(variables, tokens, **given, method=CausalLM.hidden)
    return model.apply(
        variables,
        None if new_source is None else new_source.tokens,
        tokens,
        source_mask=Mask.lengths(source.lengths),
        **given,
        method=Seq2Seq.hidden,
    )


def _logits(model, params, hidden: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
    return model.apply({"params": params}, hidden, method=type(model).head)[:, 0]


def _with_context(cache: Any, before: Any) -> Any:
    """Return the cache with the old cross-attention part.

    Cross-attention keys and values do not change, but a scan over layers returns a copy of them at each step. Keeping
    the old ones lets the compiler remove that copy.
    """

    def is_context(node):
        return isinstance(node, ContextCache)

    return jax.tree.map(lambda new, old: old if is_context(new) else new, cache, before, is_leaf=is_context)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeResult:
    """The tokens that a decoding loop generated."""

    tokens: Leaf
    """(B, new_slots), new tokens; entries from `counts` on are undefined"""
    counts: Leaf
    """(B,), number of new tokens per row, without the end token"""
    failed_at: Leaf
    """(B,), position with non-finite logits, or -1; the loop stops for all rows at the first such position"""

    @staticmethod
    def blank(batch: int, new_slots: int) -> DecodeResult:
        """Return a result without tokens."""
        return DecodeResult(
            tokens=jnp.zeros((batch, new_slots), jnp.int32),
            counts=jnp.zeros((batch,), jnp.int32),
            failed_at=jnp.full((batch,), -1, jnp.int32),
        )


@functools.partial(jax.jit, static_argnames=("model", "cache_slots", "new_slots", "paged"))
def decode(
    model: CausalLM | Seq2Seq,
    params: Any,
    prompts: Batch,
    source: Batch | None,
    keys: PRNGKey,
    choice: SamplerParams,
    eos_ids: Int[Array, " E"],
    limit: Int[Array, ""],
    *,
    cache_slots: int,
    new_slots: int,
    paged: bool = False,
) -> DecodeResult:
    """Prefill the prompts, then generate until every row has ended or has `limit` new tokens.

    Compiled once per model, array shapes and kind of `choice`.

    Args:
        model: a `CausalLM` or a `Seq2Seq`.
        params: its parameters.
        prompts: B rows of token ids.
        source: B sources of a Seq2Seq, or None.
        keys: (B,), one random key per row; the token at position p is drawn with `fold_in(key, p)`.
        choice: how tokens are sampled.
        eos_ids: (E,), ids that end a row; -1: none.
        limit: maximum number of new tokens, at most `new_slots`.
        cache_slots: positions per row in the KV cache.
        new_slots: size of the output.
        paged: store keys and values of a `CausalLM` in pages.
    """
    logits, cache = prefill(model, params, prompts, source, cache_slots, paged=paged)
    model, params, cache = with_unstacked_layers(model, params, cache)
    batch = prompts.lengths.shape[0]

    # With the row's key folded with the position, a sample depends neither on the other rows nor on the number of
    # steps.
    def draw(logits, positions, history):
        return choose(logits, jax.vmap(jax.random.fold_in)(keys, positions), choice, history)

    def record(result, step, running, tokens, positions, history):
        # `choose` marks non-finite logits with the token -1.
        failed, ended = running & (tokens < 0), (tokens[:, None] == eos_ids[None, :]).any(1)
        running = running & ~failed & ~ended
        result = DecodeResult(
            tokens=jax.lax.dynamic_update_slice(result.tokens, tokens[:, None], (jnp.int32(0), step)),
            counts=result.counts + running,
            failed_at=jnp.where(failed, positions, result.failed_at),
        )
        return result, running, None if history is None else history.add(tokens, running)

    def unfinished(state):
        step, _, running, _, result, _ = state
        return (step < limit) & running.any() & (result.failed_at < 0).all()

    def advance(state):
        step, tokens, running, cache, result, history = state
        # All rows take part in each step, since shapes are fixed. The tokens of ended rows are not counted; the -1 of a
        # failed row is replaced by a valid id.
        logits, cache = decode_step(model, params, jnp.maximum(tokens, 0), cache, source)
        positions = cache_length(cache)
        tokens = draw(logits, positions, history)
        result, running, history = record(result, step, running, tokens, positions, history)
        return step + 1, tokens, running, cache, result, history

    history = None  # only penalties need the tokens so far
    if choice.penalties is not None:
        history = History.of(prompts.tokens, prompts.lengths, logits.shape[-1])
    tokens = draw(logits, prompts.lengths, history)
    blank, running = DecodeResult.blank(batch, new_slots), jnp.ones((batch,), bool)
    result, running, history = record(blank, jnp.int32(0), running, tokens, prompts.lengths, history)
    return jax.lax.while_loop(unfinished, advance, (jnp.int32(1), tokens, running, cache, result, history))[-2]
