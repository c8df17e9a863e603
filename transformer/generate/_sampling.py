"""Sampling of the next token from logits: the settings, and a pure function that applies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.generate._penalties import History, Penalties, penalized
from transformer.nn._axes import Array, Float, Int, Leaf, PRNGKey

LARGEST = 1000.0
"""largest temperature and penalty"""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. Filters apply in the order of the fields, each to the tokens that the previous one kept.

    Ties go to the lower id: `top_k=1` is greedy decoding, and `top_k` keeps exactly k tokens.

    Raises:
        ConfigError: if a value is out of range.
    """

    temperature: float = 1.0
    """divisor of the logits; 0 is greedy decoding, which always takes the most probable token"""
    top_k: int | None = None
    """keep the k most probable tokens (Fan et al. 2018, arXiv 1805.04833)"""
    top_p: float | None = None
    """nucleus sampling: keep the smallest set of most probable tokens with at least this total probability (Holtzman et
    al. 2019, arXiv 1904.09751)"""
    min_p: float | None = None
    """keep tokens with at least this fraction of the highest probability (Nguyen et al. 2024, arXiv 2407.01082)"""

    suppress: tuple[int, ...] = ()
    """token ids that are never chosen, even in greedy decoding; applied before all filters"""

    repetition_penalty: float = 1.0
    """values above 1 penalize tokens of the prompt and of the generated text (Keskar et al. 2019, arXiv
    1909.05858); applied before all filters, even in greedy decoding, like the next two"""
    presence_penalty: float = 0.0
    """subtracted from the logits of generated tokens"""
    frequency_penalty: float = 0.0
    """subtracted from the logits of generated tokens, once for each time that they occur"""

    def __post_init__(self):
        if any(not isinstance(i, Integral) or isinstance(i, bool) or i < 0 for i in self.suppress):
            raise ConfigError(f"suppress must be token ids (integers of at least 0), got {self.suppress!r}.")
        most, least = LARGEST, 1 / LARGEST  # in float32, a larger value overflows, and gives logits of inf or NaN
        check_number(self, "temperature", Real, f"a number from 0 to {most:g} (0 is greedy)", lambda x: 0 <= x <= most)
        check_number(self, "top_k", Integral, "an integer of at least 1, or None to keep all tokens", lambda x: x >= 1)
        check_number(self, "top_p", Real, "above 0 and at most 1, or None to keep all tokens", lambda x: 0 < x <= 1)
        check_number(self, "min_p", Real, "at least 0 and at most 1, or None to keep all tokens", lambda x: 0 <= x <= 1)
        expected = f"a number from {least:g} to {most:g} (1 is no penalty)"
        check_number(self, "repetition_penalty", Real, expected, lambda x: least <= x <= most)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(
                self, name, Real, f"a number from {-most:g} to {most:g} (0 is no penalty)", lambda x: abs(x) <= most
            )

    @property
    def penalties(self) -> Penalties | None:
        """The penalties as arguments of a compiled program; None: a choice depends on the logits only."""
        values = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return None if values == (1, 0, 0) else Penalties(*(np.float32(value) for value in values))


def check_number(owner: object, name: str, kind: type, expected: str, fits: Callable[[float], bool]) -> None:
    """Raise ConfigError unless a field is a number of this kind that fits; the filters of a `Sampling` may be None."""
    value = getattr(owner, name)
    if value is None and name in ("top_k", "top_p", "min_p"):
        return
    if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
        raise ConfigError(f"{name} must be {expected}, got {value!r}.")


PLAIN = Sampling()
"""default settings: sample from the model's distribution without filters"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerParams:
    """The settings of a `Sampling` as arguments of a compiled program.

    Numbers are arrays, so that a new value needs no new compilation. Only the set of active filters and the number of
    logits to sort are static.
    """

    temperature: Leaf | None
    """(), divisor of the logits; None: greedy decoding"""
    top_k: Leaf | None
    """(); None: no filter"""
    top_p: Leaf | None
    """(); None: no filter"""
    log_min_p: Leaf | None
    """(), logarithm of min_p; None: no filter"""
    suppressed: Leaf | None = None
    """(S,), ids that are never chosen"""
    penalties: Penalties | None = None
    """None: no penalty, so that `choose` needs no history"""
    candidates: int | None = field(default=None, metadata={"static": True})
    """number of highest logits to sort; None: no filter needs sorted logits"""

    @staticmethod
    def of(sampling: Sampling, vocab_size: int) -> SamplerParams:
        """Convert `sampling` for a vocabulary of `vocab_size` tokens. Filters that keep all tokens are omitted."""
        if beyond := [i for i in sampling.suppress if i >= vocab_size]:
            raise ConfigError(f"suppress must be ids below {vocab_size}, the size of the vocabulary, got {beyond[0]}.")
        suppressed = np.array(sampling.suppress, np.int32) if sampling.suppress else None
        if sampling.temperature == 0:
            return SamplerParams(None, None, None, None, suppressed, sampling.penalties)
        top_k = None if sampling.top_k is None or sampling.top_k >= vocab_size else int(sampling.top_k)
        top_p = None if sampling.top_p is None or sampling.top_p == 1 else _not_zero(sampling.top_p)
        candidates = None if top_p is None else vocab_size
        if top_k is not None:
            # Top-k needs only the k highest logits, and so does a top-p after it. A power of two: few sizes to compile.
            candidates = min(vocab_size, max(16, 1 << (top_k - 1).bit_length()))
        return SamplerParams(
            temperature=_not_zero(sampling.temperature),
            top_k=None if top_k is None else np.int32(top_k),
            top_p=top_p,
            log_min_p=np.float32(math.log(sampling.min_p)) if sampling.min_p else None,
            suppressed=suppressed,
            penalties=sampling.penalties,
            candidates=candidates,
        )


def _not_zero(value: float) -> np.float32:
    """Return a positive value in float32, where a tiny one must not round to 0: a temperature of 0 would divide 0 by 0,
    and a top-p of 0 would remove all tokens.
    """
    return np.maximum(np.float32(value), np.finfo(np.float32).tiny)


def sample(logits: Float[Array, "B V"], key: PRNGKey, sampling: Sampling = PLAIN) -> Int[Array, " B"]:
    """Sample one token per row.

    A token is the argmax of logits plus Gumbel noise, which is a sample of the softmax (Maddison et al. 2014, arXiv
    1411.0030). Tokens with a logit of -inf are never chosen.

    Args:
        logits: (B, V); converted to float32.
        key: random key; row b uses `fold_in(key, b)`. Greedy decoding uses no randomness.
        sampling: temperature and filters.

    Returns:
        (B,), token ids. A row without a valid distribution (a logit is NaN or +inf, or all are -inf) gives -1, where a
        plain argmax would give a plausible id.

    Raises:
        ConfigError: `sampling` has penalties, which need the tokens so far: use `generate`.
    """
    if sampling.penalties:
        raise ConfigError("sample can't apply penalties, which need the tokens so far. Use generate, or remove them.")
    # One key per row, so that the sample of a row does not depend on the batch size.
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return choose(logits, keys, SamplerParams.of(sampling, logits.shape[1]))


def choose(
    logits: Float[Array, "B V"], keys: PRNGKey, choice: SamplerParams, history: History | None = None
) -> Int[Array, " B"]:
    """Sample one token per row as `sample` does, with one key per row; penalties need the `history` of the rows.

    Noise is drawn per token id. So a filter changes a sample only if it removes the token that would be sampled without
    it.
    """
    # In bfloat16, differences between logits and the tails of the noise would be too coarse.
    logits = logits.astype(jnp.float32)
    if choice.penalties is not None:
        logits = penalized(logits, history, choice.penalties)
    if choice.suppressed is not None:
        logits = logits.at[:, choice.suppressed].set(-jnp.inf)
    top = logits.max(-1, keepdims=True)
    if choice.temperature is None:
        tokens = jnp.argmax(logits, -1)
    else:
        # scores = (logits - max) / temperature. The maximum is 0, so that a small temperature can't overflow to +inf,
        # and score = log(p / p_max), which is what min-p compares, without a softmax.
        scores = (logits - top) / choice.temperature
        # Gumbel-max: argmax_i (score_i + g_i), with independent Gumbel noise g_i, has the distribution softmax(score).
        noise = jax.vmap(lambda key: gumbel_noise(key, scores.shape[1:]))(keys)
        ids = None
        if choice.candidates is not None:
            scores, ids = jax.lax.top_k(scores, choice.candidates)  # sorted; for ties the lower id first
            noise = jnp.take_along_axis(noise, ids, axis=-1)
        # The filters set scores to -inf, which noise can't change. `drawn` is an index into the sorted scores, so it is
        # mapped back to a token id.
        drawn = jnp.argmax(_filtered(scores, choice) + noise, -1)
        tokens = drawn if ids is None else jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0]
    # The maximum is NaN if any logit is NaN, +inf if any is +inf, and -inf if all are -inf.
    return jnp.where(jnp.isfinite(top[:, 0]), tokens, -1).astype(jnp.int32)


def gumbel_noise(key: PRNGKey, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return independent Gumbel noise: -ln E, where E = -ln(1 - u) is exponential and u uniform."""
    # Rare tokens need large noise, which is that of u near 0. There, float32 has all values of 32 random bits, so that
    # tokens with a probability of 1e-9 are sampled as often as they should be. `jax.random.gumbel` uses 23 bits, and of
    # u near 1: its noise is at most 16, so that tokens below 1e-7 are almost never sampled, which together can have a
    # percent of the probability of a large vocabulary.
    bits = jax.random.bits(key, shape, jnp.uint32)
    # The middle of each of the 2^32 intervals of u, so that u is not 0; and not 1, to which float32 would round.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _filtered(scores: Float[Array, "B C"], choice: SamplerParams) -> Float[Array, "B C"]:
    """Set to -inf the scores of tokens that the filters remove; top-k and top-p need descending scores along C."""
    if choice.top_k is not None:  # scores are sorted: the first k are the highest
        scores = jnp.where(jnp.arange(scores.shape[1])[None, :] < choice.top_k, scores, -jnp.inf)
    if choice.top_p is not None:
        # Keep a token if the tokens before it do not have probability p yet. So the token that reaches p is kept, and
        # at least one token always is. Probabilities are those after top-k.
        probabilities = jax.nn.softmax(scores, -1)
        before = jnp.cumsum(probabilities, -1) - probabilities
        scores = jnp.where(before < choice.top_p, scores, -jnp.inf)
    if choice.log_min_p is not None:  # p >= min_p p_max, since score = log(p / p_max)
        scores = jnp.where(scores >= choice.log_min_p, scores, -jnp.inf)
    return scores
