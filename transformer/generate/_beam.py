"""Beam search: the likeliest rows that a search of bounded width finds, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, SupportsIndex

import jax
import numpy as np

from transformer.config._checks import ConfigError
from transformer.generate._decoding import Batch
from transformer.generate._generation import check_finite
from transformer.generate._prompts import (
    Ids,
    bucket,
    check_id,
    check_lengths,
    check_new_tokens,
    check_writer,
    decoding_model,
    end_ids,
    pad,
    slots_of_prompts,
    source_rows,
    target_rows,
)
from transformer.generate._searching import BeamParams, BeamState, search


@dataclass(frozen=True, kw_only=True)
class Beam:
    """How to search. A target may have `length_ratio` tokens for each of its source and `length_extra` more, rounded
    down, its end included; 1 and 50 are those of Vaswani et al. 2017, section 6.1.

    Raises:
        ConfigError: a value out of range.
    """

    size: int = 4
    """hypotheses that are followed at once"""
    alpha: float = 0.6
    """a hypothesis Y scores log P(Y | X) / ((5 + |Y|) / 6)^alpha, |Y| its tokens with the end (Wu et al. 2016, arXiv
    1609.08144, equation 14); 0: log P(Y | X)"""
    n_best: int = 1
    """hypotheses that are given, at most `size`"""
    early_stop: bool = True
    """a row stops as soon as `size` hypotheses have ended. False: not before none that is followed can still get a
    better score than the last of the `n_best`, at the longest length, without losing any probability"""
    length_ratio: float = 1.0
    length_extra: int = 50

    def __post_init__(self):
        self._check("size", Integral, "an integer of at least 1", lambda x: x >= 1)
        self._check("alpha", Real, "a finite number of at least 0 (0: no length penalty)", lambda x: 0 <= x < math.inf)
        self._check("n_best", Integral, f"an integer from 1 to size ({self.size})", lambda x: 1 <= x <= self.size)
        self._check("length_ratio", Real, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
        self._check("length_extra", Integral, "an integer of at least 0", lambda x: x >= 0)
        if self.length_ratio == self.length_extra == 0:
            raise ConfigError("length_ratio and length_extra are both 0: no target could have a token. Raise one.")

    def _check(self, name, kind, expected, fits):
        value = getattr(self, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
            raise ConfigError(f"{name} must be {expected}, got {value!r}.")

    def penalty(self, length: int) -> float:
        """What the log-probability of so many tokens, with the end, is divided by."""
        return ((5 + length) / 6) ** self.alpha

    def longest(self, source_tokens: int) -> int:
        """Tokens that the target of so many source tokens may have, its end included; at least 1."""
        return max(1, math.floor(self.length_ratio * source_tokens) + self.length_extra)


USUAL = Beam()
"""four hypotheses, and the length penalty of Vaswani et al. 2017, section 6.1"""


@dataclass(frozen=True)
class Hypothesis:
    """One row that the search found."""

    tokens: list[int]
    """new ones, without the end"""
    score: float
    """log_probability over the length penalty"""
    log_probability: float
    """nats, of the tokens and the end"""
    ended: bool
    """False: it was cut at the longest length"""


def beam_search(
    model: Any,
    params: Any,
    sources: Sequence[Ids] | np.ndarray | jax.Array | None = None,
    *,
    prompts: Sequence[Ids] | None = None,
    bos_id: SupportsIndex | None = None,
    eos_id: SupportsIndex | Sequence[SupportsIndex] | None,
    beam: Beam = USUAL,
    max_new_tokens: SupportsIndex | None = None,
    suppress: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """The best hypotheses of each row: those that ended before those that were cut, then by falling score.

    At each step the `2 size` likeliest continuations of a row's hypotheses are looked at. Those that end and are among
    the first `size` are kept, the best `size` of them; the first `size` that don't end are followed. So a beam of 1
    without penalty is greedy. All that end a row (several `eos_id`) are one continuation, of their probabilities' sum:
    no two hypotheses are alike. A row gets what it would get alone, and `n_best` hypotheses or as many as there are.
    What is compiled depends on batch size, beam and rounded lengths.

    Args:
        model: a `CausalLM`, a `Seq2Seq` or a `SpeechToText`, whose source tokens are its encoder's positions.
        params: its parameters, without the outer "params".
        sources: Seq2Seq only: token ids of each source; of a SpeechToText frames, (B, F, M).
        prompts: where each row begins; None: `[bos_id]` for each source.
        eos_id: ends a row, or several of which each does; None: nothing does.
        max_new_tokens: at most so many a row, the end included; None: as the beam says of a row's source. With a
            source, the lesser of both, and no more than a learned position table has room for.
        suppress: ids that are never chosen; the other probabilities stay as they are.

    Raises:
        ValueError: as `generate`; no `max_new_tokens` without sources.
    """
    vocab_size = check_writer("beam_search", model, params)
    ends = end_ids(eos_id, vocab_size)
    for token in suppress:
        check_id("suppress", token, vocab_size)
    source = source_rows(model, sources, vocab_size)
    rows = target_rows(prompts, source, bos_id, vocab_size)
    if source is None and max_new_tokens is None:
        raise ValueError("max_new_tokens is missing: without a source, nothing else says how long a row may become.")
    most = None if max_new_tokens is None else check_new_tokens(max_new_tokens)
    check_lengths(model.config, rows, most if source is None else 1)

    model = decoding_model(model)
    prompt_slots = slots_of_prompts(rows, source, model.config.max_length)
    limits, longest = _limits(beam, rows, source, most, model.config)
    terms = BeamParams(
        np.array(ends, np.int32),
        np.array(suppress, np.int32),
        limits,
        np.float32(beam.alpha),
        size=int(beam.size),
        n_best=None if beam.early_stop else int(beam.n_best),
    )
    found = search(model, params, pad(rows, prompt_slots), source, terms, bucket(longest))
    found = jax.device_get(found)
    check_finite(found.failed_at, rows, params, model.config.dtype)
    return [_hypotheses(found, row, beam) for row in range(len(rows))]


def _limits(beam: Beam, rows: Sequence[np.ndarray], source: Batch | None, most: int | None, config: Any) -> tuple:
    """How many new tokens each row may have, (B,), and how many any row with a source so long may, padding included:
    sources that share a shape share what is compiled.
    """
    most = math.inf if most is None else most
    if source is None:
        return np.full(len(rows), most, np.int32), most
    room = [math.inf if config.max_length is None else config.max_length - len(row) for row in rows]
    limits = [min(most, r, beam.longest(int(n))) for r, n in zip(room, source.lengths, strict=True)]
    slots = max(int(source.lengths.max()), source.tokens.shape[1] if source.tokens.ndim == 2 else 0)
    return np.array(limits, np.int32), int(min(most, max(room), beam.longest(slots)))


def _hypotheses(found: BeamState, row: int, beam: Beam) -> list[Hypothesis]:
    """What was found for a row, its tokens traced back from where it ended."""

    def trace(step: int, place: int) -> list[int]:
        tokens = []
        for before in reversed(range(step)):
            tokens.append(int(found.tokens[before, row, place]))
            place = int(found.parents[before, row, place])
        return tokens[::-1]

    ended = [
        Hypothesis(trace(int(step), int(place)), float(score), float(total), ended=True)
        for score, total, step, place in zip(
            *(array[row] for array in (found.scores, found.totals, found.steps, found.places)), strict=True
        )
        if np.isfinite(score)
    ]
    step = int(found.taken[row])
    cut = [
        Hypothesis(trace(step, place), float(total) / beam.penalty(step), float(total), ended=False)
        for place, total in enumerate(found.live[row])
        if np.isfinite(total)
    ]
    return (ended + cut)[: beam.n_best]
