"""Beam search: find the most probable hypotheses with a search of bounded width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import SupportsIndex

import flax.linen as nn
import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._model import TransformerConfig
from transformer.generate._beam_search import BeamParams, BeamState, search
from transformer.generate._decoding import Batch
from transformer.generate._generation import check_finite
from transformer.generate._layers import Params
from transformer.generate._prompts import (
    Ids,
    bucket,
    check_id,
    check_lengths,
    check_new_tokens,
    check_text_model,
    decoding_model,
    end_ids,
    pad,
    slots_of_prompts,
    source_rows,
    target_rows,
    warn_if_rescaled,
)
from transformer.generate._rules import NO_RULES, RuleParams, Rules
from transformer.generate._sampling import check_number

MOST_ALPHA = 8
"""largest exponent of the length penalty: of 100,000 tokens, the penalty is then 6e33"""
MOST_RATIO = 10_000
"""largest factor of the length of a source"""


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Settings of beam search.

    A target has at most `length_ratio` * (source tokens) + `length_extra` tokens, rounded down, including the end
    token. The defaults 1 and 50 are those of Vaswani et al. 2017, section 6.1.

    Raises:
        ConfigError: if a value is out of range.
    """

    size: int = 4
    """beam size: the number of hypotheses that are extended at each step"""
    alpha: float = 0.6
    """exponent of the length penalty: the score of a hypothesis Y is log P(Y | X) / ((5 + |Y|) / 6)^alpha, where |Y|
    counts its tokens with the end token (Wu et al. 2016, arXiv 1609.08144, equation 14); 0 means log P(Y | X)"""
    norm: tuple[int, int] = (5, 6)
    """5 and 6 of the length penalty; (0, 1): the score is log P(Y | X) / |Y|^alpha, as in transformers"""
    n_best: int = 1
    """number of hypotheses to return, at most `size`"""
    early_stop: bool = True
    """whether a row stops as soon as `size` hypotheses have ended. False: it stops when no live hypothesis can reach a
    better score than the worst of the `n_best`, even if it kept its probability up to the maximum length"""
    estimated: bool = False
    """with `early_stop=False`: whether a row stops when no live hypothesis has a better score at its present length
    than the worst of `size` finished ones, as in transformers; then a better, longer hypothesis can be missed"""
    rules: Rules = NO_RULES
    """rules for the hypotheses"""
    length_ratio: float = 1.0
    length_extra: int = 50

    def __post_init__(self):
        check_number(self, "size", Integral, "an integer of at least 1", lambda x: x >= 1)
        expected = f"a number from 0 to {MOST_ALPHA} (0: no length penalty)"  # the penalty must be a float32
        check_number(self, "alpha", Real, expected, lambda x: 0 <= x <= MOST_ALPHA)
        if len(self.norm) != 2 or self.norm[0] < 0 or self.norm[1] < 1:
            raise ConfigError(f"norm must be two integers, of at least 0 and 1, got {self.norm!r}.")
        check_number(
            self, "n_best", Integral, f"an integer from 1 to size ({self.size})", lambda x: 1 <= x <= self.size
        )
        check_number(self, "length_ratio", Real, f"a number from 0 to {MOST_RATIO}", lambda x: 0 <= x <= MOST_RATIO)
        check_number(self, "length_extra", Integral, "an integer of at least 0", lambda x: x >= 0)
        if self.length_ratio == self.length_extra == 0:
            raise ConfigError("length_ratio and length_extra are both 0: no target could have a token. Increase one.")

    def penalty(self, length: int) -> float:
        """Return the divisor of the log-probability of `length` tokens, including the end token."""
        return ((self.norm[0] + length) / self.norm[1]) ** self.alpha

    def longest(self, source_tokens: int) -> int:
        """Return the maximum number of target tokens, including the end token, for a source; at least 1."""
        return max(1, math.floor(self.length_ratio * source_tokens) + self.length_extra)


USUAL = Beam()
"""default settings: beam size 4 and length penalty 0.6, as in Vaswani et al. 2017, section 6.1"""


@dataclass(frozen=True)
class Hypothesis:
    """A generated sequence and its score."""

    tokens: list[int]
    """new tokens, without the end token"""
    score: float
    """log_probability divided by the length penalty"""
    log_probability: float
    """log-probability of the tokens and the end token, in nats"""
    ended: bool
    """False if the hypothesis was cut at the maximum length"""


def beam_search(
    model: nn.Module,
    params: Params,
    sources: Sequence[Ids] | np.ndarray | jax.Array | None = None,
    *,
    prompts: Sequence[Ids] | None = None,
    bos_id: SupportsIndex | None = None,
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None,
    beam: Beam = USUAL,
    max_new_tokens: SupportsIndex | None = None,
    suppress: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Search the best hypotheses of each row.

    At each step the `2 size` most probable continuations of a row's hypotheses are considered. Continuations that end
    and are among the first `size` become finished hypotheses, of which the best `size` are kept; the first `size` that
    don't end are extended further. So a beam of size 1 without length penalty is greedy decoding. With several `eos_id`
    all ends count as one continuation with the sum of their probabilities, so that no two hypotheses are equal. The
    result of a row does not depend on the other rows. Compiled programs depend on batch size, beam and rounded lengths.

    Args:
        model: a `CausalLM`, a `Seq2Seq` or a `SpeechToText`, whose source tokens are its encoder's positions.
        params: its parameters, without the outer "params".
        sources: Seq2Seq only: token ids of each source; for a SpeechToText frames, (B, F, M).
        prompts: token ids that each row starts with; None: `[bos_id]` for each source.
        bos_id: the id that starts a target, if there are no prompts.
        eos_id: id or ids that end a hypothesis; None: nothing does.
        beam: size of the beam and how hypotheses are scored.
        max_new_tokens: maximum number of new tokens per row, including the end token; None: the limit that `beam` sets
            for the source. With a source the smaller limit applies, and also that of a learned position table.
        suppress: ids that are never chosen; the probabilities of other ids do not change.

    Returns:
        For each row up to `n_best` hypotheses: first those that ended, then those that were cut, both by decreasing
        score; with `Rules.ranks_cut` together.

    Raises:
        ValueError: as `generate`, or if `max_new_tokens` is missing without sources.
    """
    vocab_size = check_text_model("beam_search", model, params)
    ends = end_ids(eos_id, vocab_size)
    for token in suppress:
        check_id("suppress", token, vocab_size)
    source = source_rows(model, sources, vocab_size)
    rows = target_rows(prompts, source, bos_id, vocab_size)
    if source is None and max_new_tokens is None:
        raise ValueError("max_new_tokens is missing: without a source, nothing else limits the length. Pass it.")
    most = None if max_new_tokens is None else check_new_tokens(max_new_tokens)
    check_lengths(model.config, rows, most if source is None else 1)

    model = decoding_model(model)
    prompt_slots = slots_of_prompts(rows, source, model.config.max_length)
    limits, longest = _limits(beam, rows, source, most, model.config)
    beam_params = BeamParams(
        np.array(ends, np.int32),
        np.array(suppress, np.int32),
        limits,
        np.float32(beam.alpha),
        np.array(beam.norm, np.float32),
        RuleParams.of(beam.rules),
        size=int(beam.size),
        n_best=None if beam.early_stop else int(beam.size if beam.estimated else beam.n_best),
        estimated=beam.estimated,
    )
    found = search(model, params, pad(rows, prompt_slots), source, beam_params, bucket(longest))
    found = jax.device_get(found)
    check_finite(found.failed_at, rows, params, model.config.dtype)
    lengths = np.array(list(map(len, rows)))
    warn_if_rescaled(model.config, lengths, lengths + found.steps_taken - 1)  # the last token is not read
    return [_hypotheses(found, row, beam, int(limit)) for row, limit in enumerate(limits)]


def _limits(
    beam: Beam, rows: Sequence[np.ndarray], source: Batch | None, most: int | None, config: TransformerConfig
) -> tuple:
    """Return the maximum number of new tokens of each row, (B,), and a bound for all rows of this source shape."""
    # The bound depends on the padded source length, so that sources with the same shape share compiled programs.
    most = math.inf if most is None else most
    if source is None:
        return np.full(len(rows), most, np.int32), most
    room = [math.inf if config.max_length is None else config.max_length - len(row) for row in rows]
    limits = [min(most, r, beam.longest(int(n))) for r, n in zip(room, source.lengths, strict=True)]
    slots = max(int(source.lengths.max()), source.tokens.shape[1] if source.tokens.ndim == 2 else 0)
    return np.array(limits, np.int32), int(min(most, max(room), beam.longest(slots)))


def _hypotheses(found: BeamState, row: int, beam: Beam, limit: int) -> list[Hypothesis]:
    """Return the hypotheses of a row, which has at most `limit` new tokens."""

    # Each step stores, for each beam index, the chosen token and the index of the parent hypothesis one step before. A
    # hypothesis of `step` tokens is read from its end to its start by following the parents.
    def trace(step: int, index: int) -> list[int]:
        tokens = []
        for before in reversed(range(step)):
            tokens.append(int(found.tokens[before, row, index]))
            index = int(found.parents[before, row, index])
        return tokens[::-1]

    ended = [
        Hypothesis(trace(int(step), int(index)), float(score), float(total), ended=True)
        for score, total, step, index in zip(
            *(array[row] for array in (found.scores, found.totals, found.steps, found.beam_indices)), strict=True
        )
        if np.isfinite(score)  # -inf marks an unused entry
    ]
    step = int(found.steps_taken[row])
    cut = [
        Hypothesis(trace(step, index), float(total) / beam.penalty(step), float(total), ended=False)
        for index, total in enumerate(found.live[row])
        if np.isfinite(total)
    ]
    if beam.rules.ranks_cut and step == limit:  # sorted keeps the order of equal scores
        return sorted(ended + cut, key=lambda one: -one.score)[: beam.n_best]
    return (ended + cut)[: beam.n_best]
