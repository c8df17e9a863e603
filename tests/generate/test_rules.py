"""Rules for the texts of a beam search: each against its definition in plain Python, and in a search."""

import functools
import random

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformer.config import ConfigError
from transformer.generate import Beam
from transformer.generate._beam_search import BeamParams, BeamState, choose, length_penalty, ruled
from transformer.generate._rules import RuleParams, Rules, ban_repeated_ngrams, penalize_repeated

VOCABULARY, LONGEST = 5, 9
TEXTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST)


def padded(texts):
    """Return texts of random tokens after the end of each target, (1, Z, L)."""
    noise = np.random.default_rng(0).integers(0, VOCABULARY, (1, len(texts), LONGEST))
    for number, text in enumerate(texts):
        noise[0, number, : len(text)] = text
    return noise.astype(np.int32)


def banned(text, size):
    """Return the tokens that would complete a sequence of the text a second time."""
    known = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    return {token for token in range(VOCABULARY) if (*text[len(text) - size + 1 :], token) in known}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_repeated_n_grams_are_banned(size):
    ban = jax.jit(functools.partial(ban_repeated_ngrams, size=size))

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(TEXTS, st.randoms(use_true_random=False))
    def check(text, draw):
        other = [draw.randrange(VOCABULARY) for _ in text]
        scores, lengths = np.zeros((1, 2, VOCABULARY), np.float32), np.array([len(text)], np.int32)
        found = np.asarray(ban(scores, padded([text, other]), lengths))
        for row, one in zip(found[0], (text, other), strict=True):
            wanted = banned(one, size) if len(one) >= size else set()
            assert set(np.flatnonzero(np.isneginf(row)).tolist()) == wanted

    check()


def test_the_penalty_applies_to_the_tokens_of_each_target():
    scores = np.array([[[-1.0, 2.0, -3.0, 4.0, -5.0], [-1.0, 2.0, -3.0, 4.0, -5.0]]], np.float32)
    texts, lengths = padded([[1, 2, 2], [4, 4, 4]]), np.array([3], np.int32)
    found = jax.jit(penalize_repeated)(scores, texts, lengths, np.float32(2.0))
    assert found.tolist() == [[[-1.0, 1.0, -6.0, 4.0, -5.0], [-1.0, 2.0, -3.0, 4.0, -10.0]]]


def beam_params(beam, limits=(4, 9), ends=(3,)):
    return BeamParams(
        np.array(ends, np.int32),
        np.zeros(0, np.int32),
        np.array(limits, np.int32),
        np.float32(beam.alpha),
        np.array(beam.norm, np.float32),
        RuleParams.of(beam.rules),
        size=beam.size,
        n_best=None if beam.early_stop else beam.size,
        estimated=beam.estimated,
    )


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("force_end", [False, True])
def test_a_target_respects_minimum_and_maximum_length(step, force_end):
    """Each row at its own maximum length; there the end costs nothing."""
    logits = np.random.default_rng(step).standard_normal((2, 2, VOCABULARY)).astype(np.float32)
    norms = np.log(np.exp(logits).sum(-1))
    params = beam_params(Beam(size=2, rules=Rules(fewest=2, force_end=force_end)))
    found = np.asarray(jax.jit(ruled)(logits, norms, None, np.array([1, 1], np.int32), np.int32(step), params))
    found, plain = found - norms[:, :, None], logits - norms[:, :, None]
    for row, limit in enumerate((4, 9)):
        if force_end and step + 1 >= limit:
            assert np.isneginf(np.delete(found[row], 3, -1)).all()
            np.testing.assert_allclose(found[row, :, 3], 0, atol=1e-6)
        else:
            np.testing.assert_allclose(np.delete(found[row], 3, -1), np.delete(plain[row], 3, -1))
            assert np.isneginf(found[row, :, 3]).all() == (step < 2)


def test_the_length_penalty_equals_transformers():
    beam, draw = Beam(alpha=1.7, norm=(1, 1)), random.Random(0)
    for length in (draw.randint(1, 99) for _ in range(5)):
        assert beam.penalty(length) == pytest.approx((1 + length) ** 1.7)
        compiled = float(jax.jit(length_penalty)(np.float32(length), beam_params(beam)))
        assert compiled == pytest.approx(beam.penalty(length))


@pytest.mark.parametrize(
    ("estimated", "worst", "continues"),
    [(True, -1.2, False), (True, -3.0, True), (False, -1.2, True)],
)
def test_a_search_stops_by_its_stopping_rule(estimated, worst, continues):
    """After two tokens, the best live hypothesis has log P = -4: a score of -2 now, and at most -4/9 later."""
    logits = np.full((1, 2, VOCABULARY), -60, np.float32)
    logits[:, :, 1] = 0
    zeros = np.zeros((1, 2), np.int32)
    found = BeamState(
        tokens=np.zeros((9, 1, 2), np.int32),
        parents=np.zeros((9, 1, 2), np.int32),
        live=np.array([[-4, -50]], np.float32),
        steps_taken=zeros[:, 0],
        scores=np.array([[-1, worst]], np.float32),
        totals=np.array([[-1, worst]], np.float32),
        steps=zeros,
        beam_indices=zeros,
        failed_at=zeros[:, 0] - 1,
    )
    beam = Beam(size=2, alpha=1.0, norm=(0, 1), early_stop=False, estimated=estimated)
    arguments = np.ones(1, bool), logits, np.int32(1), np.array([2], np.int32), beam_params(beam, limits=(9,))
    assert bool(jax.jit(choose)(found, *arguments)[1][0]) == continues


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules(fewest=-1), "fewest must be an integer of at least 0, got -1"),
        (lambda: Rules(no_repeat_ngram=True), "no_repeat_ngram must be an integer"),
        (lambda: Rules(repetition_penalty=0.0), "repetition_penalty must be a finite number above 0"),
        (lambda: Beam(norm=(0, 0)), "norm must be two integers"),
    ],
)
def test_invalid_rules(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
