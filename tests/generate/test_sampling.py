"""Sampling: which tokens can be sampled, how often, and which settings are errors."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import ConfigError
from transformer.generate import Sampling, sample
from transformer.generate._rows import RowSampling
from transformer.generate._sampling import gumbel_noise

ROWS = 4096
LOGITS = np.random.default_rng(0).normal(0.0, 1.5, 23).astype(np.float32)
TIED = np.round(LOGITS)  # many exact ties


def expected(logits, sampling):
    """Return the probability of each token after the filters, with a simple implementation in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    shares = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    order = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    if sampling.top_p is not None:
        total, kept = shares[order].sum(), []
        for i in order:
            kept.append(i)
            if shares[kept].sum() / total >= sampling.top_p:
                break
        order = kept
    if sampling.min_p is not None:
        order = [i for i in order if shares[i] >= sampling.min_p * shares[order[0]]]
    left = np.where(np.isin(np.arange(len(shares)), order), shares, 0.0)
    return left / left.sum()


@functools.partial(jax.jit, static_argnums=2)
def sampled(logits, seed, sampling):
    return sample(logits, jax.random.key(seed), sampling)


def drawn(logits, sampling, seed=0):
    tokens = sampled(np.broadcast_to(np.asarray(logits), (ROWS, len(logits))), seed, sampling)
    chex.assert_shape(tokens, (ROWS,))
    chex.assert_type(tokens, jnp.int32)
    return np.asarray(tokens)


@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["distinct", "tied"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=5),
        Sampling(top_k=500, top_p=1.0, min_p=0.0),
        Sampling(top_p=0.63),
        Sampling(top_p=1e-9),
        Sampling(min_p=0.17),
        Sampling(temperature=1.7, top_k=9, top_p=0.77, min_p=0.21),
    ],
    ids=str,
)
def test_samples_have_the_expected_support_and_frequencies(sampling, logits):
    """Exactly the tokens that the filters keep are sampled, with the expected frequency (5 standard deviations)."""
    want = expected(logits, sampling)
    got = np.bincount(drawn(logits, sampling), minlength=len(logits)) / ROWS
    assert (got[want == 0] == 0).all()
    assert (got[want > 0.005] > 0).all()
    np.testing.assert_array_less(np.abs(got - want), 5 * np.sqrt(want * (1 - want) / ROWS) + 1e-9)


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(top_k=2, top_p=0.55), {0}),  # top-p after top-k: 4/7 is enough; before top-k, two would remain
        (Sampling(temperature=3.0, top_p=0.38), {0, 1}),  # temperature first: the most probable token has only 0.32
        (Sampling(top_p=0.95, min_p=0.3), {0, 1, 2}),
        (Sampling(temperature=0.25, min_p=0.3), {0, 1}),  # (3/4)^4 = 0.316 of the maximum, (2/4)^4 is below 0.3
    ],
    ids=str,
)
def test_filters_are_applied_in_their_documented_order(sampling, support):
    assert set(drawn(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), sampling)) == support


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=1e-30, top_k=1)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_takes_the_first_of_equal_logits(sampling, seed):
    logits = np.array([1.0, 3.0, 2.0, 3.0, 3.0], np.float32)
    assert set(drawn(logits, sampling, seed)) == {1}


def test_noise_is_fine_enough_for_rare_tokens():
    """With 23 random bits, the largest of a million values repeat, and tokens below 1e-7 are almost never sampled."""
    count = 2**20
    noise = np.asarray(jax.jit(gumbel_noise, static_argnums=1)(jax.random.key(0), (count,)))
    assert np.isfinite(noise).all()
    high = noise[noise > 9.0]
    assert len(set(high.tolist())) >= len(high) - 1
    for limit in (-2.0, 0.0, 2.0, 5.0, 9.0):  # P(noise > x) = 1 - exp(-exp(-x))
        share = -math.expm1(-math.exp(-limit))
        assert abs((noise > limit).sum() - count * share) < 4 * math.sqrt(count * share * (1 - share))


def test_a_tiny_temperature_is_greedy_and_finite():
    logits = np.array([80.0, -90.0, 81.0, 3.0], np.float32)
    for temperature in (1e-3, 1e-20, 1e-60):
        assert set(drawn(logits, Sampling(temperature=temperature))) == {2}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3, top_p=0.9, min_p=0.1)])
def test_rows_without_allowed_tokens_give_no_token(sampling):
    """NaN, +inf or only -inf never give token 0. A single -inf marks a token that is never chosen."""
    nan, inf = np.nan, np.inf
    logits = np.array(
        [[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [nan, nan, nan], [-inf, 0.0, -inf], [-inf, -inf, 5.0]],
        np.float32,
    )
    for seed in range(5):
        tokens = sampled(logits, seed, sampling)
        assert tokens.tolist() == [-1, -1, -1, -1, 1, 2]


def test_a_row_draws_the_same_in_any_batch():
    logits = np.random.default_rng(1).normal(size=(7, 23)).astype(np.float32)
    for sampling in (Sampling(), Sampling(top_k=6), Sampling(top_p=0.8)):
        whole = np.asarray(sampled(logits, 3, sampling))
        np.testing.assert_array_equal(sampled(logits[:3], 3, sampling), whole[:3])
        assert (np.asarray(sampled(logits, 4, sampling)) != whole).any()


def test_a_filter_changes_only_the_draws_it_forbids():
    free = drawn(LOGITS, Sampling())
    for sampling in (Sampling(top_k=7), Sampling(top_p=0.8), Sampling(min_p=0.1)):
        allowed = expected(LOGITS, sampling)[free] > 0
        assert 0 < allowed.sum() < ROWS
        np.testing.assert_array_equal(drawn(LOGITS, sampling)[allowed], free[allowed])


def test_low_precision_logits_are_drawn_in_float32():
    """The difference of the logits, -4.0234, is above the threshold of -4.027; in bfloat16 it would be -4.03125."""
    rows = np.full((ROWS, 2), [1 + 2**-7, -3.015625], jnp.bfloat16)
    assert set(np.asarray(sampled(rows, 0, Sampling(min_p=math.exp(-4.027))))) == {0, 1}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature.*0 \(0.*greedy\).*got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"top_k": 0}, r"top_k.*1.*got 0"),
        ({"top_k": True}, r"top_k"),
        ({"top_p": 0.0}, r"top_p.*0.*1.*got 0.0"),
        ({"top_p": 1.01}, r"top_p.*0.*1.* got 1.01"),
        ({"min_p": -0.5}, r"min_p.*0.*1.* got -0.5"),
        ({"min_p": float("nan")}, r"min_p.*0.*1"),
    ],
)
def test_rejects_values_out_of_range(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suppressed_tokens_are_never_chosen(temperature):
    logits = np.array([[5.0, 4.0, 3.0, 9.0]] * 2, np.float32)
    greedy = sampled(logits, 0, Sampling(temperature=0.0, suppress=(3, 0)))
    assert greedy.tolist() == [1, 1]
    drawn = [sampled(logits, i, Sampling(temperature=temperature, suppress=(3,))) for i in range(20)]
    assert 3 not in np.stack(drawn)
    with pytest.raises(ConfigError, match="ids below 4, the size of the vocabulary, got 4"):
        sampled(logits, 0, Sampling(suppress=(4,)))
    with pytest.raises(ConfigError, match="suppress must be token ids"):
        Sampling(suppress=(-1,))


def test_row_settings_without_filters_change_nothing():
    row = RowSampling.of(Sampling(temperature=0.0), 11, top=True)
    assert (row.greedy, row.is_sorted, row.top) == (True, False, True)
    assert (row.temperature, row.top_k, row.top_p, row.log_min_p) == (1, 11, math.inf, -math.inf)
    row = RowSampling.of(Sampling(temperature=0.5, top_k=3, min_p=0.25), 11, top=False)
    assert (row.greedy, row.is_sorted, row.top) == (False, True, False)
    assert (row.temperature, row.top_k, row.top_p) == (0.5, 3, math.inf)
    assert row.log_min_p == pytest.approx(math.log(0.25))
