"""Calls of a model with a KV cache: prefill, and reading one or several more tokens, as pure functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer.generate._layers import (
    Cache,
    Params,
    decoding_params,
    unstack_layers,
    unstacked_model,
    uses_unstacked_layers,
)
from transformer.nn._axes import Array, Float, Int, Leaf, Tokens
from transformer.nn._caches import ContextCache, cache_length, set_cache_length, with_shared_places
from transformer.nn._masks import Mask
from transformer.nn._paged import paged_cache, set_rows
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._dynamic_images import ImagePatches
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
    params: Params,
    prompts: Batch,
    source: Batch | None,
    cache_slots: int,
    *,
    paged: bool = False,
) -> tuple[Float[Array, "B V"], Cache]:
    """Read complete prompts, and sources, in one call; return the logits after each prompt, and the (paged) cache."""
    rows = prompts.tokens.shape[0]
    if paged:  # each row has its own pages in order
        each = -(-cache_slots // PAGE_SIZE)
        cache = paged_cache(model, rows=rows, pages_per_row=each, num_pages=rows * each, page_size=PAGE_SIZE)
        cache = set_rows(cache, page_table=jnp.arange(rows * each).reshape(rows, each))
    else:
        cache = model.init_cache(rows, cache_slots)
    # Tokens of an image can attend to later ones of their prompt, so the mask must hide the padding.
    masked = prompts.images is not None or model.config.reads_lengths
    mask = Mask.lengths(prompts.lengths) if masked else None
    hidden, cache = _hidden(model, params, source, prompts.tokens, cache, source, mask=mask, images=prompts.images)
    # The cache also holds keys of the padding. A length that excludes them hides them, and later tokens overwrite them.
    return last_logits(model, params, hidden, prompts.lengths), set_cache_length(cache, prompts.lengths)


def last_logits(
    model: CausalLM | Seq2Seq, params: Params, hidden: Float[Array, "B T D"], counts: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Return the logits (B, V) after the first `counts` of the T tokens of each row; the others are padding."""
    # The last token of row b is at index counts[b] - 1: (B, T, D) -> (B, 1, D). Only these positions go through the
    # head, which avoids logits of shape (B, T, V).
    last = jnp.take_along_axis(hidden, counts[:, None, None] - 1, axis=1)
    return model.apply({"params": params}, last, method=type(model).head)[:, 0]


def decode_step(
    model: CausalLM | Seq2Seq, params: Params, tokens: Int[Array, " B"], cache: Cache, source: Batch | None
) -> tuple[Float[Array, "B V"], Cache]:
    """Read one more token per row, (B,), and return the logits (B, V) after it, and the cache with it."""
    # Only the lengths of the source are used: its keys and values are in the cache.
    logits, cache = decode_hypotheses(model, params, tokens[:, None], with_shared_places(cache), source)
    return logits[:, 0], cache


def decode_hypotheses(
    model: CausalLM | Seq2Seq,
    params: Params,
    tokens: Int[Array, "B Z"],
    cache: Cache,
    source: Batch | None,
    positions: Int[Array, "B Z"] | None = None,
    mask: Mask | None = None,
) -> tuple[Float[Array, "B Z V"], Cache]:
    """Read one more token for each of Z hypotheses per row, which share the cache of the row, as `decode_step`.

    Without `positions`, these are the next tokens in the cache. The mask selects the cache slots that each hypothesis
    may attend to; None: all tokens of the row so far.
    """
    hidden, grown = _hidden(model, params, None, tokens, cache, source, positions, mask)
    logits = model.apply({"params": params}, hidden, method=type(model).head)
    return logits, _with_context(grown, cache)


def read_tokens(
    model: CausalLM,
    params: Params,
    tokens: Tokens,
    cache: Cache,
    mask: Mask | None = None,
    images: Float[Array, "B I ..."] | ImagePatches | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Read T more tokens per row, also beyond the end of a position table; return hidden vectors, and the cache."""
    positions = None  # they continue those in the cache
    if model.config.max_length is not None:
        positions = cache_length(cache)[:, None] + jnp.arange(tokens.shape[1])[None, :]
        positions = jnp.minimum(positions, model.config.max_length - 1)  # NaN past the table
    return _hidden(model, params, None, tokens, cache, None, positions, mask, images)


def decode_chunk(model: CausalLM, params: Params, tokens: Tokens, cache: Cache) -> tuple[Float[Array, "B T V"], Cache]:
    """Return the logits (B, T, V) after each of the tokens of `read_tokens`, and the cache with them."""
    hidden, cache = read_tokens(model, params, tokens, cache)
    return model.apply({"params": params}, hidden, method=CausalLM.head), cache


def with_unstacked_layers(
    model: CausalLM | Seq2Seq, params: Params, cache: Cache
) -> tuple[CausalLM | Seq2Seq, Params, Cache]:
    """Prepare a loop over tokens: one tree of parameters and of cache per layer if `uses_unstacked_layers`."""
    if not uses_unstacked_layers(model, params):
        return model, params, cache
    return unstacked_model(model), decoding_params(model, params), unstack_layers(model, cache)


def _hidden(model, params, new_source, tokens: Tokens, cache, source, positions=None, mask=None, images=None):
    variables, given = {"params": params}, {"positions": positions, "mask": mask, "cache": cache}
    if images is not None:
        given["images"] = images
    if isinstance(model, CausalLM):
        return model.apply(variables, tokens, **given, method=CausalLM.hidden)
    given["source_mask"] = Mask.lengths(source.lengths)
    new = None if new_source is None else new_source.tokens
    return model.apply(variables, new, tokens, **given, method=Seq2Seq.hidden)


def _with_context(cache: Cache, before: Cache) -> Cache:
    """Return the cache with the old cross-attention part."""
    # Cross-attention keys and values do not change, but a scan over layers returns a copy of them at each step. Keeping
    # the old ones lets the compiler remove that copy.

    def is_context(node):
        return isinstance(node, ContextCache)

    return jax.tree.map(lambda new, old: old if is_context(new) else new, cache, before, is_leaf=is_context)
