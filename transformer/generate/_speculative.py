"""Speculative decoding: a draft model or a lookup proposes several tokens, which the model verifies in one pass.

Leviathan et al. accept a proposed token with probability min(1, p / q), which preserves the distribution of the model.
Here a sample is a function of the logits and of a random key for its row and position. So draft and model sample with
the same noise, and a proposed token is accepted if it equals the token that the model samples. The text itself is that
of decoding without proposals, with every sampling method, except for rounding differences between reading one token and
reading several tokens. Rejected tokens are removed from the caches by resetting the cache lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch, prefill
from transformer.generate._layers import Params
from transformer.generate._lookup import PromptLookup
from transformer.generate._prompts import decoding_model
from transformer.nn._axes import Array, Int, Leaf
from transformer.nn._caches import set_cache_length
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


@dataclass(frozen=True)
class Proposer:
    """How rows propose tokens; a static argument of compiled programs."""

    source: CausalLM | PromptLookup | None
    """a draft model, a lookup in the text, or None"""
    tokens: int
    """Z, maximum number of tokens to propose per step"""

    @staticmethod
    def of(draft: Draft | PromptLookup | None) -> Proposer:
        """Return the proposer of a draft model, which is prepared for decoding, or of a lookup."""
        if draft is None:
            return NO_PROPOSER
        return Proposer(decoding_model(draft.model) if isinstance(draft, Draft) else draft, int(draft.tokens))

    @property
    def draft(self) -> CausalLM | None:
        """The draft model; None: there is none."""
        return self.source if isinstance(self.source, CausalLM) else None


NO_PROPOSER = Proposer(None, 0)
"""no proposals: each step generates one token per row"""


def first_memory(proposer: Proposer, draft_params: Params | None, prompts: Batch, cache_slots: int) -> Leaf | None:
    """Return the source of proposals after the prompts: the KV cache of the draft, or the tokens (B, S) of each row."""
    # The caches of model and draft always hold the same tokens, with separate keys and values.
    if proposer.draft is not None:
        return prefill(proposer.draft, draft_params, prompts, None, cache_slots)[1]
    if proposer.source is None:
        return None
    return jnp.pad(prompts.tokens, ((0, 0), (0, cache_slots - prompts.tokens.shape[1])))


def next_memory(
    memory: Leaf, lengths: Int[Array, " B"], drawn: Int[Array, "B Z"], positions: Int[Array, "B Z"]
) -> Leaf:
    """Return the memory of rows with `lengths` tokens in the cache, after the model has sampled `drawn`."""
    # All sampled tokens are stored in a text; those after the last token of its row are overwritten before a read.
    if isinstance(memory, jax.Array):
        return memory.at[jnp.arange(drawn.shape[0])[:, None], positions].set(drawn, mode="drop")
    return set_cache_length(memory, lengths)
