"""How the next token is chosen from logits: one frozen value that says it, one pure function that does it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose a token. Filters work in the order of the fields, each on what the one before it left.

    Exact ties are broken towards the lower id: `top_k=1` is greedy, and `top_k` keeps exactly k tokens.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    """logits are divided by it; 0: greedy, always the likeliest token"""
    top_k: int | None = None
    """keep the k likeliest tokens (Fan et al. 2018, arXiv 1805.04833)"""
    top_p: float | None = None
    """keep the fewest likeliest tokens that together have at least this probability (Holtzman et al. 2019,
    arXiv 1904.09751)"""
    min_p: float | None = None
    """keep tokens at least this share as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)"""

    suppress: tuple[int, ...] = ()
    """ids of tokens that are never chosen, greedily neither; before all filters"""

    def __post_init__(self):
        if any(not isinstance(i, Integral) or isinstance(i, bool) or i < 0 for i in self.suppress):
            raise ConfigError(f"suppress must be ids of tokens, whole numbers from 0, got {self.suppress!r}.")
        self._check("temperature", Real, "a finite number of at least 0 (0 is greedy)", lambda x: 0 <= x < math.inf)
        self._check("top_k", Integral, "an integer of at least 1, or None to keep all tokens", lambda x: x >= 1)
        self._check("top_p", Real, "above 0 and at most 1, or None to keep all tokens", lambda x: 0 < x <= 1)
        self._check("min_p", Real, "at least 0 and at most 1, or None to keep all tokens", lambda x: 0 <= x <= 1)

    def _check(self, name, kind, expected, fits):
        value = getattr(self, name)
        if value is None and name != "temperature":
            return
        if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
            raise ConfigError(f"{name} must be {expected}, got {value!r}.")


PLAIN = Sampling()
"""draw from the model's own distribution"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerParams:
    """What a compiled program is told of a `Sampling`: numbers are arrays, so that only which filters are on, and how
    many logits have to be sorted, decides what is compiled.
    """

    temperature: Leaf | None
    """(); None: greedy"""
    top_k: Leaf | None
    """()"""
    top_p: Leaf | None
    """()"""
    log_min_p: Leaf | None
    """()"""
    suppressed: Leaf | None = None
    """(S,), ids"""
    candidates: int | None = field(default=None, metadata={"static": True})
    """how many of the highest logits are sorted; None: none"""

    @staticmethod
    def of(sampling: Sampling, vocab_size: int) -> SamplerParams:
        """The choice that `sampling` makes among `vocab_size` tokens. Filters that keep everything are left out.

        Raises:
            ConfigError: a suppressed token that is none of them.
        """
        if beyond := [i for i in sampling.suppress if i >= vocab_size]:
            raise ConfigError(f"suppress must be ids below {vocab_size}, the size of the vocabulary, got {beyond[0]}.")
        suppressed = np.array(sampling.suppress, np.int32) if sampling.suppress else None
        if sampling.temperature == 0:
            return SamplerParams(None, None, None, None, suppressed)
        top_k = None if sampling.top_k is None or sampling.top_k >= vocab_size else int(sampling.top_k)
        top_p = None if sampling.top_p is None or sampling.top_p == 1 else np.float32(sampling.top_p)
        candidates = None if top_p is None else vocab_size
        if top_k is not None:
            candidates = min(vocab_size, max(16, 1 << (top_k - 1).bit_length()))
        return SamplerParams(
            temperature=np.maximum(np.float32(sampling.temperature), np.finfo(np.float32).tiny),
            top_k=None if top_k is None else np.int32(top_k),
            top_p=top_p,
            log_min_p=np.float32(math.log(sampling.min_p)) if sampling.min_p else None,
            suppressed=suppressed,
            candidates=candidates,
        )


def sample(logits: Float[Array, "B V"], key: PRNGKey, sampling: Sampling = PLAIN) -> Int[Array, " B"]:
    """Chooses one token a row, (B,), from logits (B, V), in float32; row b draws from `fold_in(key, b)`: the
    highest sum of logit and Gumbel noise (Maddison et al. 2014, arXiv 1411.0030).

    Logits of -inf are never chosen. A row that can't be chosen from (NaN or +inf among its logits, or all of them -inf)
    gives -1, which is no token: argmax would give a plausible one. Greedy uses no randomness.
    """
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return choose(logits, keys, SamplerParams.of(sampling, logits.shape[1]))


def choose(logits: Float[Array, "B V"], keys: PRNGKey, choice: SamplerParams) -> Int[Array, " B"]:
    """As `sample`, with one key a row. A token's noise goes with its id, so a filter changes a draw only by what it
    removes.
    """
    logits = logits.astype(jnp.float32)
    if choice.suppressed is not None:
        logits = logits.at[:, choice.suppressed].set(-jnp.inf)
    top = logits.max(-1, keepdims=True)
    if choice.temperature is None:
        tokens = jnp.argmax(logits, -1)
    else:
        # Highest at 0: no temperature can make it overflow, and min-p needs no softmax.
        scores = (logits - top) / choice.temperature
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
        ids = None
        if choice.candidates is not None:
            scores, ids = jax.lax.top_k(scores, choice.candidates)  # equal ones: the lower id first
            noise = jnp.take_along_axis(noise, ids, axis=-1)
        drawn = jnp.argmax(_filtered(scores, choice) + noise, -1)
        tokens = drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(top[:, 0]), tokens, -1).astype(jnp.int32)


def _filtered(scores: Float[Array, "B C"], choice: SamplerParams) -> Float[Array, "B C"]:
    """Scores with -inf in place of what the filters remove; they fall along C where there is a top-k or top-p."""
    if choice.top_k is not None:
        scores = jnp.where(jnp.arange(scores.shape[1])[None, :] < choice.top_k, scores, -jnp.inf)
    if choice.top_p is not None:
        shares = jax.nn.softmax(scores, -1)
        likelier = jnp.cumsum(shares, -1) - shares
        scores = jnp.where(likelier < choice.top_p, scores, -jnp.inf)
    if choice.log_min_p is not None:
        scores = jnp.where(scores >= choice.log_min_p, scores, -jnp.inf)
    return scores
