"""Linear maps, norms, feed-forward and embedding, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from transformer.nn._layers import (
    ACTIVATIONS,
    NORMS,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    RMSNorm,
    ZeroCenteredRMSNorm,
    linear,
)

X = jax.random.normal(jax.random.key(0), (2, 3, 5))


def test_linear_contracts_and_makes_any_number_of_axes():
    kernel = jax.random.normal(jax.random.key(1), (3, 5, 2, 7))
    bias = jax.random.normal(jax.random.key(2), (2, 7))
    expected = np.einsum("btd,tdnh->bnh", X, kernel) + bias[None]
    np.testing.assert_allclose(linear(X, kernel, bias, contract=2), expected, rtol=1e-5, atol=1e-5)


def test_linear_is_one_product_over_flattened_rows_on_cpu():
    jaxpr = jax.make_jaxpr(linear)(X, jnp.ones((5, 2, 7)))
    products = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [[v.aval.shape for v in product.invars] for product in products] == [[(6, 5), (5, 14)]]


def test_linear_computes_in_its_dtype_and_keeps_its_parameters():
    layer = Linear((4,), dtype=jnp.bfloat16)
    params = layer.init(jax.random.key(0), X)
    assert params["params"]["kernel"].dtype == jnp.float32
    assert layer.apply(params, X).dtype == jnp.bfloat16


def test_glorot_uniform_spreads_over_all_inputs_and_outputs():
    kernel = Linear((8, 16), contract=2).init(jax.random.key(0), jnp.ones((1, 32, 32)))["params"]["kernel"]
    limit = np.sqrt(6 / (32 * 32 + 8 * 16))
    assert kernel.shape == (32, 32, 8, 16)
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_are_their_formulas(dtype):
    scale, bias = np.arange(1.0, 6.0), np.arange(5.0)
    x = np.asarray(X, np.float64)
    centered = x - x.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * scale + bias
    got = LayerNorm(epsilon=1e-3, dtype=dtype).apply(
        {"params": {"scale": jnp.asarray(scale), "bias": jnp.asarray(bias)}}, X
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    got = RMSNorm(epsilon=1e-3, dtype=dtype).apply({"params": {"scale": jnp.asarray(scale)}}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    rms, unbiased = NORMS["zero_centered_rms_norm"], NORMS["layer_norm_without_bias"]
    got = rms(epsilon=1e-3, dtype=dtype).apply({"params": {"scale": jnp.asarray(scale - 1)}}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * scale
    got = unbiased(epsilon=1e-3, dtype=dtype).apply({"params": {"scale": jnp.asarray(scale)}}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "norm", [name for name in NORMS if name != "frozen_batch_norm"]
)  # its mean and variance are stored, not computed from the input
def test_every_norm_starts_as_the_plain_one(norm):
    params = NORMS[norm]().init(jax.random.key(0), X)["params"]
    plain = X - X.mean(-1, keepdims=True) if "layer" in norm else X
    plain = plain / jnp.sqrt(jnp.square(plain).mean(-1, keepdims=True))
    np.testing.assert_allclose(NORMS[norm]().apply({"params": params}, X), plain, rtol=1e-4, atol=1e-4)
    assert sorted(params) == (["bias", "scale"] if norm == "layer_norm" else ["scale"])


def test_a_zero_centered_scale_is_summed_before_it_is_rounded():
    """bfloat16 can represent a scale of 2^-10 but not 1 + 2^-10, so the sum must be in float32."""
    norm = ZeroCenteredRMSNorm(epsilon=0.0, param_dtype=jnp.bfloat16)
    got = norm.apply({"params": {"scale": jnp.full(5, 2**-10, jnp.bfloat16)}}, jnp.ones((1, 5)))
    np.testing.assert_array_equal(got, np.full((1, 5), 1 + 2**-10, np.float32))


def test_norms_are_computed_in_float32_whatever_comes_in():
    """A bfloat16 mean of 1,000 + small values would lose the small values."""
    x = (1000.0 + jnp.arange(8.0))[None, None, :].astype(jnp.bfloat16)
    norm = LayerNorm(dtype=jnp.bfloat16)
    exact = norm.apply(norm.init(jax.random.key(0), x), x.astype(jnp.float32))
    np.testing.assert_array_equal(norm.apply(norm.init(jax.random.key(0), x), x), exact)


def test_activations_are_their_formulas():
    x = jnp.linspace(-4, 4, 33)
    exact = np.asarray(x, np.float64)
    gelu = exact * (1 + erf(exact / np.sqrt(2))) / 2
    tanh = exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3))) / 2
    np.testing.assert_allclose(ACTIVATIONS["relu"](x), np.maximum(exact, 0))
    np.testing.assert_allclose(ACTIVATIONS["relu2"](x), np.maximum(exact, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(ACTIVATIONS["gelu_erf"](x), gelu, atol=2e-6)
    np.testing.assert_allclose(ACTIVATIONS["gelu_tanh"](x), tanh, atol=2e-6)
    np.testing.assert_allclose(ACTIVATIONS["tanh"](x), np.tanh(exact), atol=2e-6)
    np.testing.assert_allclose(ACTIVATIONS["silu"](x), exact / (1 + np.exp(-exact)), atol=2e-6)
    assert np.abs(gelu - tanh).max() > 1e-4


def test_the_slope_of_gelu_is_its_formula():
    """Also in half precision, and as a Jacobian-vector product."""
    x = jnp.linspace(-6, 6, 49)
    exact = np.asarray(x, np.float64)
    slope = (1 + erf(exact / np.sqrt(2))) / 2 + exact * np.exp(-(exact**2) / 2) / np.sqrt(2 * np.pi)
    gelu = ACTIVATIONS["gelu_erf"]
    np.testing.assert_allclose(jax.grad(lambda x: gelu(x).sum())(x), slope, atol=2e-6)
    np.testing.assert_allclose(jax.jvp(gelu, (x,), (2 * jnp.ones(49),))[1], 2 * slope, atol=4e-6)
    half = jax.grad(lambda x: gelu(x).sum())(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), slope, atol=1e-2)


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_is_its_formula(gated):
    layer = FeedForward(width=7, gated=gated)
    params = layer.init(jax.random.key(0), X)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # nonzero biases, so that they have an effect
    p = {name: (leaf["kernel"], leaf["bias"][None, None]) for name, leaf in params["params"].items()}
    up = X @ p["up"][0] + p["up"][1]
    hidden = jnp.maximum(X @ p["gate"][0] + p["gate"][1], 0) * up if gated else jnp.maximum(up, 0)
    np.testing.assert_allclose(layer.apply(params, X), hidden @ p["down"][0] + p["down"][1], rtol=1e-5, atol=1e-5)


def test_embedding_looks_up_and_turns_back():
    table = Embedding(vocab_size=7, features=5)
    tokens = jnp.array([[0, 6, 3]])
    params = table.init(jax.random.key(0), tokens)
    rows = params["params"]["embedding"]
    np.testing.assert_array_equal(table.apply(params, tokens)[0], rows[tokens[0]])
    np.testing.assert_allclose(table.apply(params, X, method="attend"), X @ rows.T, rtol=1e-5, atol=1e-6)
    for beyond in (7, -1, -100):
        assert np.isnan(jax.jit(table.apply)(params, jnp.array([[beyond]]))).all()
