"""Kernels with one row per output compute the products of the original kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import MLA, RotaryOptions, TransformerConfig
from transformer.generate import Sampling, TokenStream, generate
from transformer.generate import _layers as generate_layers
from transformer.generate._layers import decoding_params
from transformer.nn import quantize
from transformer.nn.models import CausalLM
from transformer.nn.quantization._linear import bfloat16_product
from transformer.nn.quantization._transposed import Transposed, Widened, row_product, transposed


def values(shape, dtype, seed=0):
    drawn = np.random.default_rng(seed).normal(size=shape)
    return (np.round(drawn * 40).clip(-127, 127) if dtype == jnp.int8 else drawn).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_transposed_kernels_give_the_same_products(rows, dtype):
    """Rows of unlike size, one of them zeros."""
    for inputs in (5, 901):
        x = np.random.default_rng(1).normal(size=(rows, inputs)).astype(np.float32) * 10.0 ** np.arange(rows)[:, None]
        x = np.minimum(np.abs(x), 1e30) * np.sign(x)
        x[rows - 1] = 0.0
        kernel, scale = values((3, inputs), dtype), np.array([0.5, 2.0, 1.0], np.float32)
        found = np.asarray(jax.jit(row_product)(x.astype(np.float32), kernel, scale))
        exact = (x.astype(np.float64) @ kernel.astype(np.float64).T) * scale
        size = np.abs(x).max(1, keepdims=True) * np.linalg.norm(kernel.astype(np.float64), axis=1) * scale
        assert (np.abs(found - exact) <= 5e-5 * size + 1e-30).all()


def test_integers_have_the_derivative_of_the_product_before_rounding():
    kernel, x = values((4, 6), jnp.int8), values((3, 6), np.float32, seed=2)
    weights = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    found = jax.jit(jax.grad(lambda x, kernel: (row_product(x, kernel) * weights).sum()))(x, kernel)
    np.testing.assert_allclose(found, weights @ kernel.astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_a_transposed_kernel_keeps_its_shape_and_values(num_inputs):
    kernel = values((3, 4, 5), jnp.int8)
    outputs = kernel.shape[num_inputs:]
    scale = np.arange(1.0, 1 + np.prod(outputs), dtype=np.float32).reshape((1,) * num_inputs + outputs)
    x = np.ones((2, 1, *kernel.shape[:num_inputs]), np.float32)

    @jax.jit
    def run(kernel, scale, x):
        stored = transposed(kernel, scale, num_inputs)
        return stored, stored.array(), stored.product(x, num_inputs)

    stored, array, product = run(kernel, scale, x)
    assert stored.shape == (3, 4, 5)
    assert stored.values.shape == ((20, 3) if num_inputs == 1 else (5, 12))
    np.testing.assert_array_equal(array, kernel * scale)
    np.testing.assert_allclose(product, np.tensordot(x, kernel * scale, num_inputs), rtol=1e-4)


SIZES = {
    "vocab_size": 31,
    "d_model": 24,
    "num_layers": 2,
    "feed_forward.d_ff": 20,
    "num_heads": 4,
    "parameters.initializer_range": 0.4,
}


def build(**fields):
    model = CausalLM(TransformerConfig(**SIZES, position=RotaryOptions()).replace(**fields))
    return model, random_params(model, np.zeros((1, 2), np.int32))["params"]


def kept(model, params):
    """Return the shapes of the parameters for decoding, with the forms of the kernels."""
    return jax.eval_shape(functools.partial(decoding_params, model), params)


@pytest.fixture
def converts_bfloat16(monkeypatch):
    """XLA as in releases that multiply no bfloat16 on a CPU."""
    monkeypatch.setattr(generate_layers, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_of_bfloat16_have_sums_in_float32(rows):
    random = np.random.default_rng(0)
    x, kernel = (random.normal(size=shape).astype(jnp.bfloat16) for shape in ((rows, 300), (300, 7)))

    @jax.jit
    def run(x, kernel):
        given, pull = jax.vjp(bfloat16_product, x, kernel)
        return given, pull(jnp.ones_like(given))

    given, slopes = run(x, kernel)
    assert (given.shape, given.dtype) == ((rows, 7), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(np.asarray(given, np.float64), exact, atol=2**-8 * np.abs(exact).max())
    sums = np.asarray(kernel, np.float64).sum(1)
    np.testing.assert_allclose(np.asarray(slopes[0], np.float32), np.tile(sums, (rows, 1)), rtol=0.02, atol=0.02)
    assert [slope.dtype for slope in slopes] == [jnp.bfloat16] * 2


@pytest.mark.cpu_only("only a CPU transposes kernels")
def test_directly_multiplied_bfloat16_kernels_are_not_transposed(monkeypatch):
    model, params = build(dtype="bfloat16", **{"parameters.dtype": "bfloat16"})
    monkeypatch.setattr(generate_layers, "multiplies_bfloat16", lambda: True)
    assert not converted(kept(model, params))
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float16), params)
    assert converted(kept(model, half))


@pytest.mark.programs(13, reason="it decodes in one program, and token by token")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.usefixtures("converts_bfloat16")
@pytest.mark.cpu_only("only a CPU transposes kernels")
def test_greedy_text_is_unchanged_by_transposed_kernels(tie, bits, monkeypatch):
    """Decoding reads the small weights; each token has the best logit of a whole pass, up to rounding."""
    fields = {"dtype": "bfloat16", "parameters.dtype": "bfloat16"} if bits == 16 else {}
    model, params = build(**{"embedding.tie": tie}, **fields)
    if bits == 8:
        monkeypatch.setattr(
            "transformer.nn.quantization._int8._compared", lambda *pairs: None
        )  # its report reads traced numbers
        params = jax.jit(lambda params: quantize(params)[0])(params)
    kind = Transposed if bits == 8 else Widened
    nodes = jax.tree.leaves(kept(model, params), is_leaf=lambda node: isinstance(node, kind))
    # 6 kernels of each of the 2 layers, and the output
    assert sum(isinstance(node, kind) for node in nodes) == 12 + (not tie)
    greedy, prompts = Sampling(temperature=0.0), [[3, 1, 4], [5, 9, 2, 6, 5]]
    texts = generate(model, params, prompts, max_new_tokens=6, sampling=greedy)
    # All tokens at once: the padding at the end does not change the logits before it.
    rows = np.array([[*prompt, *text, 0, 0][:11] for prompt, text in zip(prompts, texts, strict=True)])
    whole = np.asarray(jax.jit(model.apply)({"params": params}, rows), np.float64)
    stream = TokenStream(model, params)
    for prompt, text, logits in zip(prompts, texts, whole, strict=True):
        logits = logits[len(prompt) - 1 :][:6]
        chosen = logits[np.arange(6), text]
        np.testing.assert_allclose(chosen, logits.max(-1), atol=1e-3 if bits == 8 else 0.1)
        pieces = stream.generate(prompt, max_new_tokens=6, sampling=greedy)
        assert len([token for piece in pieces for token in piece.tokens]) == 6


def converted(params):
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, Transposed | Widened))
    return {jax.tree_util.keystr(path[-2:]) for path, leaf in leaves if isinstance(leaf, Transposed | Widened)}


def test_float32_kernels_are_not_transposed():
    assert not converted(kept(*build()))


@pytest.mark.usefixtures("converts_bfloat16")
@pytest.mark.cpu_only("only a CPU transposes kernels")
def test_latent_attention_keeps_kernels_multiplied_in_a_different_order():
    latent = MLA(kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3)
    parts = kept(*build(**{"parameters.dtype": "bfloat16", "attention.mla": latent}, dtype="bfloat16"))
    names = {"query", "latent", "rotary_key", "out", "up", "down"}
    assert converted(parts) == {f"['{name}']['kernel']" for name in names}
