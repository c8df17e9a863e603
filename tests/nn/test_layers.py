"""Linear maps, norms, feed-forward and embedding, compared with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params
from scipy.special import erf

from transformer.nn.layers._layers import ACTIVATIONS, Embedding, FeedForward, Linear, linear
from transformer.nn.layers._norms import NORMS, LayerNorm, RMSNorm, ZeroCenteredRMSNorm


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def apply(module, params, *inputs, **options):
    """Return the outputs, computed by one program."""
    call = jax.jit(lambda params, *inputs: module.apply({"params": params}, *inputs, **options))
    return np.asarray(call(params, *inputs))


X = normal(0, 2, 3, 5)


def test_linear_contracts_and_creates_any_number_of_axes():
    kernel, bias = normal(1, 3, 5, 2, 7), normal(2, 2, 7)
    expected = np.einsum("btd,tdnh->bnh", X, kernel) + np.asarray(bias)[None]
    np.testing.assert_allclose(
        jax.jit(functools.partial(linear, contract=2))(X, kernel, bias), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.cpu_only("the CPU's program")
def test_linear_is_one_matrix_multiplication_over_flattened_rows_on_cpu():
    jaxpr = jax.make_jaxpr(linear)(X, normal(1, 5, 2, 7))
    products = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [[v.aval.shape for v in product.invars] for product in products] == [[(6, 5), (5, 14)]]


def test_linear_computes_in_its_dtype_and_keeps_its_parameters():
    layer = Linear((4,), dtype=jnp.bfloat16)
    out, params = jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), X))
    assert params["params"]["kernel"].dtype == jnp.float32
    assert out.dtype == jnp.bfloat16


def test_glorot_uniform_spreads_over_all_inputs_and_outputs():
    start = jax.jit(lambda: Linear((8, 16), contract=2).init(jax.random.key(0), jnp.ones((1, 32, 32))))
    kernel = np.asarray(start()["params"]["kernel"])
    limit = np.sqrt(6 / (32 * 32 + 8 * 16))
    assert kernel.shape == (32, 32, 8, 16)
    assert 0.99 * limit < np.abs(kernel).max() <= limit
    assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_equal_their_formulas(dtype):
    scale, bias = np.arange(1, 6, dtype=np.float32), np.arange(5, dtype=np.float32)
    x = np.asarray(X, np.float64)
    centered = x - x.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * scale + bias
    got = apply(LayerNorm(epsilon=1e-3, dtype=dtype), {"scale": scale, "bias": bias}, X)
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale
    got = apply(RMSNorm(epsilon=1e-3, dtype=dtype), {"scale": scale}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    rms, unbiased = NORMS["zero_centered_rms_norm"], NORMS["layer_norm_without_bias"]
    got = apply(rms(epsilon=1e-3, dtype=dtype), {"scale": scale - 1}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3) * scale
    got = apply(unbiased(epsilon=1e-3, dtype=dtype), {"scale": scale}, X)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "norm", [name for name in NORMS if name != "frozen_batch_norm"]
)  # its mean and variance are stored, not computed from the input
def test_every_norm_starts_with_unit_scale(norm):
    out, variables = jax.jit(lambda: NORMS[norm]().init_with_output(jax.random.key(0), X))()
    params, x = variables["params"], np.asarray(X, np.float64)
    plain = x - x.mean(-1, keepdims=True) if "layer" in norm else x
    plain = plain / np.sqrt(np.square(plain).mean(-1, keepdims=True))
    np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-4)
    assert sorted(params) == (["bias", "scale"] if norm == "layer_norm" else ["scale"])


def test_a_zero_centered_scale_is_added_before_rounding():
    """bfloat16 can represent a scale of 2^-10 but not 1 + 2^-10, so the sum must be in float32."""
    norm = ZeroCenteredRMSNorm(epsilon=0.0, param_dtype=jnp.bfloat16)
    got = apply(norm, {"scale": np.full(5, 2**-10, jnp.bfloat16)}, np.ones((1, 5), np.float32))
    np.testing.assert_array_equal(got, np.full((1, 5), 1 + 2**-10, np.float32))


def test_norms_are_always_computed_in_float32():
    """A bfloat16 mean of 1,000 + small values would lose the small values."""
    x = (1000.0 + np.arange(8, dtype=np.float32))[None, None, :].astype(jnp.bfloat16)
    norm, params = LayerNorm(dtype=jnp.bfloat16), {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    np.testing.assert_array_equal(apply(norm, params, x), apply(norm, params, x.astype(np.float32)))


def test_activations_equal_their_formulas():
    x = np.linspace(-4, 4, 33, dtype=np.float32)
    names = ["relu", "relu2", "gelu_erf", "gelu_tanh", "tanh", "silu"]
    found = jax.jit(lambda x: {name: ACTIVATIONS[name](x) for name in names})(x)
    exact = np.asarray(x, np.float64)
    gelu = exact * (1 + erf(exact / np.sqrt(2))) / 2
    tanh = exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3))) / 2
    np.testing.assert_allclose(found["relu"], np.maximum(exact, 0))
    np.testing.assert_allclose(found["relu2"], np.maximum(exact, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(found["gelu_erf"], gelu, atol=2e-6)
    np.testing.assert_allclose(found["gelu_tanh"], tanh, atol=2e-6)
    np.testing.assert_allclose(found["tanh"], np.tanh(exact), atol=2e-6)
    np.testing.assert_allclose(found["silu"], exact / (1 + np.exp(-exact)), atol=2e-6)
    assert np.abs(gelu - tanh).max() > 1e-4


def test_the_derivative_of_gelu_equals_its_formula():
    """Also in half precision, and as a Jacobian-vector product."""
    x = np.linspace(-6, 6, 49, dtype=np.float32)
    exact = np.asarray(x, np.float64)
    slope = (1 + erf(exact / np.sqrt(2))) / 2 + exact * np.exp(-(exact**2) / 2) / np.sqrt(2 * np.pi)
    gelu = ACTIVATIONS["gelu_erf"]

    @jax.jit
    def run(x):
        slope = jax.grad(lambda x: gelu(x).sum())
        return slope(x), jax.jvp(gelu, (x,), (2 * jnp.ones(49),))[1], slope(x.astype(jnp.bfloat16))

    single, product, half = map(np.asarray, run(x))
    np.testing.assert_allclose(single, slope, atol=2e-6)
    np.testing.assert_allclose(product, 2 * slope, atol=4e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), slope, atol=1e-2)


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_equals_its_formula(gated):
    layer = FeedForward(width=7, gated=gated)
    params = random_params(layer, X)["params"]
    x = np.asarray(X, np.float64)
    p = {name: (np.asarray(leaf["kernel"]), np.asarray(leaf["bias"])[None, None]) for name, leaf in params.items()}
    up = x @ p["up"][0] + p["up"][1]
    hidden = np.maximum(x @ p["gate"][0] + p["gate"][1], 0) * up if gated else np.maximum(up, 0)
    np.testing.assert_allclose(apply(layer, params, X), hidden @ p["down"][0] + p["down"][1], rtol=1e-5, atol=1e-5)


def test_embedding_looks_up_and_projects_to_logits():
    table = Embedding(vocab_size=7, features=5)
    tokens = np.array([[0, 6, 3]], np.int32)
    params = random_params(table, tokens)["params"]
    rows = np.asarray(params["embedding"])
    look_up = jax.jit(lambda tokens: table.apply({"params": params}, tokens))
    np.testing.assert_array_equal(np.asarray(look_up(tokens))[0], rows[tokens[0]])
    scores = apply(table, params, X, method="attend")
    np.testing.assert_allclose(scores, np.asarray(X) @ rows.T, rtol=1e-5, atol=1e-6)
    for beyond in (7, -1, -100):
        assert np.isnan(look_up(np.array([[beyond]], np.int32))).all()
