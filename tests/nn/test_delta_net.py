"""Gated DeltaNet: chunks and single tokens, cached and whole rows, padding, packing, and the reference's module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.nn._delta_net import GatedDeltaNet, StateCache
from transformer.nn._delta_rule import gated_delta_rule, recurrent_gated_delta_rule
from transformer.nn._masks import Mask

SIZES = {"num_heads": 4, "num_key_heads": 2, "key_dim": 3, "value_dim": 5, "conv_width": 4}


def rule_inputs(length):
    random = np.random.default_rng(length)
    query, key = random.normal(size=(2, 2, length, 3, 4))
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    value, decay = random.normal(size=(2, length, 3, 5)), -random.exponential(size=(2, length, 3))
    beta, state = random.random((2, length, 3)), random.normal(size=(2, 3, 4, 5))
    return [one.astype(np.float32) for one in (query, key, value, decay, beta, state)]


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (7, 4), (8, 4), (9, 64), (13, 1)])
def test_chunked_equals_recurrent(length, chunk):
    inputs = rule_inputs(length)
    chunked = jax.jit(lambda *inputs: gated_delta_rule(*inputs, chunk=chunk))(*inputs)
    for got, expected in zip(chunked, jax.jit(recurrent_gated_delta_rule)(*inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_chunked_gradients_equal_recurrent_gradients():
    inputs = rule_inputs(10)

    def loss(rule):
        return lambda *inputs: sum(jnp.sum(jnp.sin(one)) for one in rule(*inputs))

    numbers = tuple(range(6))
    chunked = jax.jit(jax.grad(loss(lambda *inputs: gated_delta_rule(*inputs, chunk=4)), numbers))(*inputs)
    single = jax.jit(jax.grad(loss(recurrent_gated_delta_rule), numbers))(*inputs)
    for got, expected in zip(chunked, single, strict=True):
        np.testing.assert_allclose(got, expected, atol=5e-5)


def test_the_state_stores_and_corrects_the_value_of_a_key():
    """With beta 1 and no decay, reading a key gives the last value that was written for it."""
    key = np.eye(4, dtype=np.float32)[[0, 1, 0]][None, :, None]  # orthogonal keys of length 1
    value = np.random.default_rng(0).normal(size=(1, 3, 1, 5)).astype(np.float32)
    zeros = np.zeros((1, 3, 1), np.float32)
    start = np.zeros((1, 1, 4, 5), np.float32)
    state = np.asarray(jax.jit(gated_delta_rule)(key, key, value, zeros, zeros + 1, start)[1])
    np.testing.assert_allclose(state[0, 0, 0], value[0, 2, 0], atol=1e-6)
    np.testing.assert_allclose(state[0, 0, 1], value[0, 1, 0], atol=1e-6)


@pytest.fixture(scope="module")
def layer():
    """The module, its parameters and inputs (2, 11, 6)."""
    module = GatedDeltaNet(**SIZES)
    x = np.random.default_rng(0).normal(size=(2, 11, 6)).astype(np.float32)
    return module, random_params(module, x), x


def empty(rows=2):
    return StateCache.create(rows, (2, 4, 3, 5), 4, jnp.float32)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("widths", [(1,) * 11, (1, 10), (7, 3, 1), (2, 9)])
def test_cached_is_uncached(layer, widths):
    module, params, x = layer

    @jax.jit
    def step(params, x, cache):
        return module.apply(params, x, cache=cache)

    whole, none = step(params, x, None)
    assert none is None
    cache, parts, start = jax.jit(empty)(), [], 0
    for width in widths:
        out, cache = step(params, x[:, start : start + width], cache)
        parts.append(out)
        start += width
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)
    assert cache.length.tolist() == [11, 11]


@pytest.mark.parametrize("by_lengths", [True, False])
def test_padding_on_the_right_does_not_change_the_state(layer, by_lengths):
    module, params, x = layer

    @jax.jit
    def run(params, x):
        mask = Mask.segments(jnp.array([[1] * 11, [1] * 5 + [0] * 6]))
        mask = Mask.lengths(jnp.array([11, 5])) if by_lengths else mask
        padded = module.apply(params, x, mask=mask, cache=empty())
        return padded, module.apply(params, x[1:, :5], cache=empty(1))

    (padded, cache), (alone, expected) = jax.tree.map(np.asarray, run(params, x))
    np.testing.assert_allclose(padded[1:, :5], alone, atol=1e-5)
    np.testing.assert_allclose(cache.state[1:], expected.state, atol=1e-5)
    np.testing.assert_allclose(cache.inputs[1:], expected.inputs, atol=1e-6)


def test_padding_on_the_left_does_not_change_the_output(layer):
    module, params, x = layer

    @jax.jit
    def run(params, x):
        segments = Mask.segments(jnp.array([[1] * 11, [0] * 4 + [1] * 7]))
        padded = module.apply(params, x, mask=segments, cache=empty())
        return padded, module.apply(params, x[1:, 4:], cache=empty(1))

    (padded, cache), (alone, expected) = jax.tree.map(np.asarray, run(params, x))
    np.testing.assert_allclose(padded[1:, 4:], alone, atol=1e-5)
    np.testing.assert_allclose(cache.state[1:], expected.state, atol=1e-5)


def test_packed_sequences_are_independent(layer):
    module, params, x = layer
    run = jax.jit(lambda x, mask=None: module.apply(params, x, mask=mask)[0])
    packed = np.asarray(run(x, Mask.segments(jax.device_put(np.array([[1] * 4 + [2] * 2 + [3] * 5] * 2, np.int32)))))
    for first, last in ((0, 4), (4, 6), (6, 11)):
        np.testing.assert_allclose(packed[:, first:last], run(x[:, first:last]), atol=2e-5)


def test_a_row_of_length_0_resets_the_state(layer):
    module, params, x = layer

    @jax.jit
    def run(params, x):
        _, used = module.apply(params, x, cache=empty())
        again, _ = module.apply(params, x, cache=StateCache(used.state, used.inputs, jnp.array([0, 11])))
        return again, module.apply(params, x)[0]

    again, fresh = map(np.asarray, run(params, x))
    np.testing.assert_allclose(again[0], fresh[0], atol=1e-6)
    assert np.abs(again[1] - fresh[1]).max() > 1e-3


def test_masks_that_select_keys_are_refused(layer):
    module, params, x = layer

    def apply(mask):
        return jax.eval_shape(lambda params, x: module.apply(params, x, mask=mask), params, x)

    with pytest.raises(ValueError, match="expected a mask of lengths and segments"):
        apply(Mask.array(jax.device_put(np.tri(11, dtype=bool))))
    with pytest.raises(ValueError, match="expected a mask of lengths and segments"):
        apply(Mask.window(3))
    with pytest.raises(ValueError, match=r"num_heads \(4\).*num_key_heads \(3\)"):
        random_params(GatedDeltaNet(**SIZES | {"num_key_heads": 3}), x)


@pytest.mark.parametrize("width", [2, 5])
def test_the_convolution_is_initialized_by_its_width(width):
    """Its values are uniform between -1 / sqrt(W) and 1 / sqrt(W), for any number of channels."""
    module = GatedDeltaNet(**SIZES | {"conv_width": width})
    params = jax.jit(module.init)(jax.random.key(0), np.zeros((1, 3, 6), np.float32))["params"]
    assert 0.8 < np.abs(params["convolution"]).max() * width**0.5 <= 1.0
