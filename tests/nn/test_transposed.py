"""Kernels with one row per output compute the products of the kernels that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import MLA, TransformerConfig
from transformer.generate import Sampling, TokenStream, generate
from transformer.generate import _layers as generate_layers
from transformer.generate._layers import decoding_params
from transformer.nn import quantize
from transformer.nn._transposed import Transposed, Widened, bfloat16_product, row_product, transposed
from transformer.nn.models import CausalLM


def values(shape, dtype, seed=0):
    drawn = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(np.round(drawn * 40).clip(-127, 127) if dtype == jnp.int8 else drawn, dtype)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_products_are_those_of_the_numbers(rows, dtype):
    """Rows of unlike size, one of them zeros."""
    for inputs in (5, 901):
        x = np.random.default_rng(1).normal(size=(rows, inputs)).astype(np.float32) * 10.0 ** np.arange(rows)[:, None]
        x = np.minimum(np.abs(x), 1e30) * np.sign(x)
        x[rows - 1] = 0.0
        kernel, scale = values((3, inputs), dtype), jnp.array([0.5, 2.0, 1.0])
        found = jax.jit(row_product)(jnp.asarray(x), kernel, scale)
        exact = (x.astype(np.float64) @ np.asarray(kernel, np.float64).T) * np.asarray(scale, np.float64)
        size = (
            np.abs(x).max(1, keepdims=True) * np.linalg.norm(np.asarray(kernel, np.float64), axis=1) * np.asarray(scale)
        )
        assert (np.abs(found - exact) <= 5e-5 * size + 1e-30).all()


def test_integers_have_the_derivative_of_the_product_before_rounding():
    kernel, x = values((4, 6), jnp.int8), jnp.asarray(np.random.default_rng(2).normal(size=(3, 6)), jnp.float32)
    weights = jnp.arange(12.0).reshape(3, 4)
    found = jax.grad(lambda x: (row_product(x, kernel) * weights).sum())(x)
    np.testing.assert_allclose(found, weights @ kernel.astype(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_a_kernel_keeps_its_shape_and_its_numbers(num_inputs):
    kernel = values((3, 4, 5), jnp.int8)
    scale = jnp.arange(1.0, 1 + np.prod(kernel.shape[num_inputs:])).reshape(
        (1,) * num_inputs + kernel.shape[num_inputs:]
    )
    stored = transposed(kernel, scale, num_inputs)
    assert stored.shape == (3, 4, 5)
    assert stored.values.shape == ((20, 3) if num_inputs == 1 else (5, 12))
    np.testing.assert_array_equal(stored.array(), kernel * scale)
    x = jnp.ones((2, 1, *kernel.shape[:num_inputs]))
    np.testing.assert_allclose(stored.product(x, num_inputs), jnp.tensordot(x, kernel * scale, num_inputs), rtol=1e-4)


SIZES = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "d_ff": 20, "num_heads": 4, "initializer_range": 0.4}


def build(**fields):
    model = CausalLM(TransformerConfig(**SIZES, position="rotary").replace(**fields))
    return model, jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]


@pytest.fixture
def converts_bfloat16(monkeypatch):
    """XLA as in releases that multiply no bfloat16 on a CPU."""
    monkeypatch.setattr(generate_layers, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_of_bfloat16_have_sums_in_float32(rows):
    random = np.random.default_rng(0)
    x, kernel = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in ((rows, 300), (300, 7)))
    given = jax.jit(bfloat16_product)(x, kernel)
    assert (given.shape, given.dtype) == ((rows, 7), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(np.asarray(given, np.float64), exact, atol=2**-8 * np.abs(exact).max())
    slopes = jax.grad(lambda *given: bfloat16_product(*given).astype(jnp.float32).sum(), (0, 1))(x, kernel)
    sums = np.asarray(kernel, np.float64).sum(1)
    np.testing.assert_allclose(slopes[0].astype(jnp.float32), np.tile(sums, (rows, 1)), rtol=0.02, atol=0.02)
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16] * 2


def test_kernels_of_bfloat16_stay_if_they_are_multiplied_directly(monkeypatch):
    model, params = build(dtype="bfloat16", param_dtype="bfloat16")
    monkeypatch.setattr(generate_layers, "multiplies_bfloat16", lambda: True)
    assert not converted(decoding_params(model, params))
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    assert converted(decoding_params(model, half))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.usefixtures("converts_bfloat16")
def test_texts_are_the_likeliest_of_the_weights(tie, bits):
    """Decoding reads the small weights; each token has the best logit of a whole pass, up to rounding."""
    fields = {"dtype": "bfloat16", "param_dtype": "bfloat16"} if bits == 16 else {}
    model, params = build(**{"embedding.tie": tie}, **fields)
    if bits == 8:
        params, _ = quantize(params)
    kind = Transposed if bits == 8 else Widened
    nodes = jax.tree.leaves(decoding_params(model, params), is_leaf=lambda node: isinstance(node, kind))
    # 6 kernels of each of the 2 layers, and the output
    assert sum(isinstance(node, kind) for node in nodes) == 12 + (not tie)
    greedy, prompts = Sampling(temperature=0.0), [[3, 1, 4], [5, 9, 2, 6, 5]]
    texts = generate(model, params, prompts, max_new_tokens=6, sampling=greedy)
    for prompt, text in zip(prompts, texts, strict=True):
        whole = jnp.array([[*prompt, *text]])
        logits = np.asarray(model.apply({"params": params}, whole), np.float64)[0, len(prompt) - 1 : -1]
        chosen = logits[np.arange(6), text]
        np.testing.assert_allclose(chosen, logits.max(-1), atol=1e-3 if bits == 8 else 0.1)
        pieces = TokenStream(model, params).generate(prompt, max_new_tokens=6, sampling=greedy)
        assert len([token for piece in pieces for token in piece.tokens]) == 6


def converted(params):
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, Transposed | Widened))
    return {jax.tree_util.keystr(path[-2:]) for path, leaf in leaves if isinstance(leaf, Transposed | Widened)}


def test_kernels_of_float32_stay():
    assert not converted(decoding_params(*build()))


@pytest.mark.usefixtures("converts_bfloat16")
def test_latent_attention_keeps_the_kernels_that_it_multiplies_in_another_order():
    latent = MLA(kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3)
    kept = decoding_params(*build(**{"attention.mla": latent}, dtype="bfloat16", param_dtype="bfloat16"))
    names = {"query", "latent", "rotary_key", "out", "up", "down"}
    assert converted(kept) == {f"['{name}']['kernel']" for name in names}
