"""Parameters of 16 bits: updated in float32, and rounded so that small updates have their effect on average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_recipes import start, tiny_batch, tiny_recipe

from transformer.training._step import rounded_like, widened

KEY = jax.device_put(np.array([0, 1], np.uint32))


@functools.partial(jax.jit, static_argnames="dtype")
def rounded(key, values, dtype):
    return rounded_like([jnp.zeros(values.shape, dtype)], [values], key)[0].astype(jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_is_unbiased(dtype):
    """Each value becomes one of its two neighbors; their mean is the value."""
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    values = np.array([1.0 + 1e-4, 1.0 - 1e-4, -1.7342, 3.3e-3, 123.456, 2.0 - 2.0**-12], np.float32)
    draws = np.asarray(rounded(KEY, np.broadcast_to(values, (20_000, values.size)), dtype), np.float64)
    gap = 2.0 ** (np.floor(np.log2(np.abs(values))) + 1 - bits)
    assert (np.abs(draws - values) < gap).all()
    assert ((draws / gap) % 0.5 == 0).all(), "a number of the dtype"
    error = np.abs(draws.mean(0) - values)
    assert (error < 4 * gap / np.sqrt(len(draws))).all()  # the standard deviation of a draw is below gap / 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_representable_and_non_finite_values_are_unchanged(dtype):
    values = np.array([0.0, 1.0, -2.5, 0.15625, np.inf, -np.inf, np.nan], np.float32)
    draws = np.asarray(rounded(KEY, np.broadcast_to(values, (100, values.size)), dtype))
    np.testing.assert_array_equal(draws, np.broadcast_to(values, draws.shape))


def test_other_dtypes_are_returned_unchanged():
    tree = {"weights": np.ones(3, np.float32), "count": np.int32(4)}
    for found in (widened(tree), rounded_like(tree, tree, KEY)):
        assert jax.tree.all(jax.tree.map(lambda a, b: a is b, found, tree))


def narrow_recipe(dtype):
    options = {"learning_rate": 5e-4, "beta2": 0.999}
    return tiny_recipe(model={"parameters.dtype": dtype, "feed_forward.d_ff": 24}, optimizer=options)


def scales_of(state):
    return np.concatenate(
        [
            np.asarray(leaf, np.float32).ravel()
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
            if jax.tree_util.keystr(path).endswith("['scale']")
        ]
    )


def test_small_updates_move_16_bit_parameters():
    """Every norm scale stays 1.0 otherwise: half the distance to its neighbors exceeds the learning rate."""
    state, step = start(narrow_recipe("bfloat16"))
    first, again = step(state, tiny_batch())[0], step(state, tiny_batch())[0]
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)  # a resumed run is the same run
    for _ in range(50):
        state, _ = step(state, tiny_batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert (scales_of(state) != 1).mean() > 0.9


@pytest.mark.slow
def test_small_updates_of_16_bit_parameters_have_the_effect_of_float32():
    found, batch = {}, tiny_batch()
    for dtype in ("bfloat16", "float32"):
        state, step = start(narrow_recipe(dtype))
        for _ in range(150):
            state, _ = step(state, batch)
        found[dtype] = np.abs(scales_of(state) - 1).mean()
    # The rounding is random, and there are few scales: without it, the first value is 0.
    np.testing.assert_allclose(found["bfloat16"], found["float32"], rtol=0.4)


def test_moments_of_16_bits_decay():
    """With beta2 0.999, the second moment of a gradient that has become 0 would never change."""
    state, step = start(narrow_recipe("bfloat16"))
    batch = tiny_batch()
    nothing = batch | {"weights": jax.device_put(np.zeros(batch["weights"].shape, np.float32))}

    def total(state):
        leaves = jax.tree.leaves(state.opt_state[1].nu)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}
        return sum(np.asarray(leaf, np.float64).sum() for leaf in leaves)

    state, _ = step(state, batch)
    first = total(state)
    for _ in range(150):
        state, _ = step(state, nothing)
    np.testing.assert_allclose(total(state) / first, 0.999**150, atol=0.03)
