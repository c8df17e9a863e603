"""Rules for the texts of a beam search, with the meaning that generation_config.json has in transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._checks import ConfigError
from transformer.generate._penalties import without_repetition
from transformer.nn._axes import Array, Float, Int, Leaf


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the authors of a model prescribe for generated texts.

    Raises:
        ConfigError: a value is out of range.
    """

    fewest: int = 0
    """number of new tokens before which a text can't end"""
    force_end: bool = False
    """a text of the maximum length ends with the end token, which does not change its log-probability"""
    no_repeat_ngram: int = 0
    """no sequence of this many tokens occurs twice in a target (Paulus et al. 2018, arXiv 1705.04304, section 2.5); 0:
    no limit"""
    repetition_penalty: float = 1.0
    """factor of the log-probabilities of tokens that the target contains; with a beam of 1 it is applied to logits
    (Keskar et al. 2019, arXiv 1909.05858)"""
    ranks_cut: bool = False
    """whether hypotheses that were cut at the maximum length are ranked together with those that ended, not after
    them"""

    def __post_init__(self):
        for name in ("fewest", "no_repeat_ngram"):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, got {value!r}.")
        if not 0 < self.repetition_penalty < np.inf:
            raise ConfigError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty!r}.")


NO_RULES = Rules()
"""no rule: all texts are possible"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RuleParams:
    """The settings of `Rules` as arguments of a compiled search."""

    fewest: Leaf
    """(), number of new tokens before which a text can't end"""
    repetition: Leaf | None
    """(), factor of log-probabilities of tokens that the target contains; None: no penalty"""
    no_repeat_ngram: int = field(metadata={"static": True})
    """number of tokens of a sequence that can't occur twice; 0: no limit"""
    force_end: bool = field(metadata={"static": True})
    """whether a text of the maximum length ends with the end token"""

    @property
    def reads_targets(self) -> bool:
        """Whether a rule reads the tokens of the targets."""
        return self.no_repeat_ngram > 0 or self.repetition is not None

    @staticmethod
    def of(rules: Rules) -> RuleParams:
        """Convert rules; those without effect need no computation."""
        penalty = None if rules.repetition_penalty == 1 else np.float32(rules.repetition_penalty)
        return RuleParams(np.int32(rules.fewest), penalty, rules.no_repeat_ngram, rules.force_end)


def penalize_repeated(
    scores: Float[Array, "B Z V"], texts: Int[Array, "B Z L"], lengths: Int[Array, " B"], penalty: Float[Array, ""]
) -> Float[Array, "B Z V"]:
    """Lower the scores of the tokens of each target: the first `lengths` (B,) tokens of `texts`."""
    _, _, vocab_size = scores.shape
    known = jnp.arange(texts.shape[2])[None, None, :] < lengths[:, None, None]
    columns = jnp.where(known, texts, vocab_size)  # other entries go to a column that mode="drop" ignores
    return without_repetition(scores, _marked(columns, scores.shape), penalty)


def ban_repeated_ngrams(
    scores: Float[Array, "B Z V"], texts: Int[Array, "B Z L"], lengths: Int[Array, " B"], size: int
) -> Float[Array, "B Z V"]:
    """Set scores to -inf for tokens that would repeat `size` tokens of a target, `lengths` (B,) tokens of `texts`."""
    batch, beam, vocab_size = scores.shape
    longest = texts.shape[2]
    starts = jnp.arange(longest)[None, None, :]
    # A sequence may start where its last token is before the end of the target.
    matches = jnp.broadcast_to(starts + size <= lengths[:, None, None], (batch, beam, longest))
    for offset in range(size - 1):
        place = jnp.clip(lengths - (size - 1) + offset, 0)[:, None, None]
        last = jnp.take_along_axis(texts, jnp.broadcast_to(place, (batch, beam, 1)), axis=2)
        matches &= jnp.roll(texts, -offset, axis=2) == last
    following = jnp.roll(texts, -(size - 1), axis=2)
    banned = _marked(jnp.where(matches, following, vocab_size), scores.shape)
    return jnp.where(banned, -jnp.inf, scores)


def extended(
    texts: Int[Array, "B Z L"], parents: Int[Array, "B Z"], tokens: Int[Array, "B Z"], places: Int[Array, " B"]
) -> Int[Array, "B Z L"]:
    """Return the tokens of the targets that extend those of their parents by one token, at these places."""
    texts = jnp.take_along_axis(texts, parents[:, :, None], axis=1)
    is_new = jnp.arange(texts.shape[2])[None, None, :] == places[:, None, None]
    return jnp.where(is_new, tokens[:, :, None], texts)


def _marked(columns: Int[Array, "B Z L"], shape: tuple[int, ...]) -> Array:
    """Return which columns (B, Z, V) are listed; a column past the last is none."""
    batch, beam, _ = shape
    rows, beams = jnp.arange(batch)[:, None, None], jnp.arange(beam)[None, :, None]
    return jnp.zeros(shape, bool).at[rows, beams, columns].set(True, mode="drop")
