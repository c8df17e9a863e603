"""Arguments of attention: masks of any shape and dtype, biases, weights on request, and explicit dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer import MLA, CausalLM, Decoder, Encoder, LayerInputs, NoPosition, PreNormBlock, TransformerConfig
from transformer.config import ConfigError
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._caches import KVCache
from transformer.nn._masks import Mask
from transformer.nn._mla import LatentAttention
from transformer.nn._positions import ALiBi, Rotary

B, T, N, H, D = 2, 7, 6, 4, 13


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(3, B, T, D)


def test_other_intermediates_do_not_change_the_kernel():
    """Collecting the intermediates of other modules changes neither the kernel nor the collected weights."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, implementation="blockwise")
    params = random_params(attention, X)
    program = {
        mutable: jax.make_jaxpr(lambda x, m=mutable: attention.apply(params, x, mutable=m)[0])(X)
        for mutable in (False, "intermediates")
    }
    assert str(program[False]) == str(program["intermediates"])
    with pytest.raises(ConfigError, match="blockwise attention kernel can't return attention weights"):
        jax.eval_shape(lambda x: attention.apply(params, x, sow_weights=True, mutable="intermediates"), X)
    jax.jit(lambda x: attention.apply(params, x, sow_weights=True)[0])(
        X
    )  # the collection is not mutable, so nothing is sown


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("position", [Rotary(), ALiBi(num_heads=N)], ids=["rotary", "alibi"])
def test_a_bias_is_added_to_the_position_bias(position, implementation):
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=position, implementation=implementation)
    plain = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary() if position == Rotary() else NoPosition())
    params = random_params(attention, X)
    bias = normal(4, B, N, T, T)

    @jax.jit
    def run(bias):
        total = bias
        if isinstance(position, ALiBi):
            total = bias + position.bias(jnp.arange(T)[None], jnp.arange(T)[None], None)
        given = (bias, lambda queries, keys: bias[:, :, queries][:, :, :, keys])
        out = [attention.apply(params, X, bias=one)[0] for one in given]
        gradients = [
            jax.grad(lambda b: attention.apply(params, X, bias=b)[0].sum())(bias),
            jax.grad(lambda b: plain.apply(params, X, bias=total - bias + b)[0].sum())(bias),
        ]
        return plain.apply(params, X, bias=total)[0], plain.apply(params, X)[0], out, gradients

    expected, without, out, gradients = jax.tree.map(np.asarray, run(bias))
    assert np.abs(expected - without).max() > 0.01
    for one in out:
        np.testing.assert_allclose(one, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_a_bias_spans_the_cache_and_a_context():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params, causal = random_params(attention, X), Mask.causal()
    bias = normal(4, N, T, T)

    @jax.jit
    def run(params):
        whole = attention.apply(params, X, mask=causal, bias=bias)[0]
        return whole, attention.apply(params, X, X, bias=bias)[0], attention.apply(params, X, bias=bias)[0]

    @jax.jit
    def step(x, bias, cache):
        return attention.apply(params, x, mask=causal, bias=bias, cache=cache)

    whole, crossed, alone = map(np.asarray, run(params))
    cache = jax.jit(lambda: KVCache.create(B, T, N, H, H, jnp.float32))()
    x, rows = np.asarray(X), np.asarray(bias)
    for t in range(T):
        out, cache = step(x[:, t : t + 1], rows[:, t : t + 1], cache)
        np.testing.assert_allclose(out, whole[:, t : t + 1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(crossed, alone, rtol=1e-5, atol=1e-6)


def test_dropout_is_never_skipped_silently():
    message = r"dropout rate of 0\.5 and deterministic is not given: pass deterministic=True to evaluate or determ"
    config = TransformerConfig(d_model=D, num_heads=1, dropout_rate=0.5, position=None)
    latent = MLA(kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    modules = {
        MultiHeadAttention(num_heads=2, head_dim=H, dropout_rate=0.5): (),
        LatentAttention(num_heads=2, mla=latent, dropout_rate=0.5): (),
        PreNormBlock(config): (LayerInputs(),),
        Encoder(config): (),
        Decoder(config.replace(dropout_rate=0.0, **{"attention.dropout_rate": 0.5})): (),
    }
    for module, more in modules.items():
        params = jax.eval_shape(module.init, jax.random.key(0), X, *more)
        with pytest.raises(ValueError, match=rf"{type(module).__name__}.*{message}"):
            jax.eval_shape(module.apply, params, X, *more)
        given = () if not more else (LayerInputs(deterministic=True),)
        options = {} if more else {"deterministic": True}
        jax.eval_shape(functools.partial(module.apply, **options), params, X, *given)
    model = CausalLM(config.replace(vocab_size=5))
    tokens = jnp.zeros((1, 3), jnp.int32)
    jax.eval_shape(
        model.apply, jax.eval_shape(model.init, jax.random.key(0), tokens), tokens
    )  # a complete model evaluates by default


SHAPES = {
    "(T, T)": lambda allowed: allowed[0, 0],
    "(B, 1, T, T)": lambda allowed: allowed[:, :1],
    "(B, N, T, T)": lambda allowed: allowed,
    "(B, 1, 1, T)": lambda allowed: allowed[:, :1, :1],
    "(B, 1, T, 1)": lambda allowed: allowed[:, :1, :, :1],
    "(1, N, 1, T)": lambda allowed: allowed[:1, :, :1],
}
ALLOWED = np.random.default_rng(5).random((B, N, T, T)) < 0.6
ALLOWED[..., 0] = True


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("implementation", ["reference", "query_chunked", "blockwise", "splash"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masks_of_any_shape_broadcast(shape, implementation):
    heads, given = jax.device_put(np.asarray(X)[:, :, None].repeat(N, 2)), jax.device_put(shape(ALLOWED))
    if implementation == "splash" and given.shape[1:3] != (1, 1):
        with pytest.raises(ConfigError, match="splash"):
            dot_product_attention(heads, heads, heads, mask=given, implementation=implementation)
        return

    @jax.jit
    def run(heads, given):
        masks = [given]
        if implementation != "splash":
            masks += [Mask.array(given), Mask.array(given) & Mask.array(jnp.ones((T, T), bool))]
        expected = dot_product_attention(heads, heads, heads, mask=jnp.broadcast_to(given, (B, N, T, T)))
        return expected, [
            dot_product_attention(heads, heads, heads, mask=mask, implementation=implementation) for mask in masks
        ]

    expected, found = run(heads, given)
    for got in found:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["heads", "latent"])
def test_modules_take_padding_arrays(module):
    latent = MLA(kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    attention = MultiHeadAttention(num_heads=2, head_dim=H) if module == "heads" else LatentAttention(2, latent)
    params = random_params(attention, X)
    real = np.array([T, 3], np.int32)
    padding = (np.arange(T)[None] < real[:, None])[:, None, None]

    @jax.jit
    def run(params, real, padding):
        by_length = Mask.lengths(real)
        # The values of a mask of numbers must be known, so that mask is a constant of the program.
        masks = [by_length, padding, known, by_length & Mask.causal(), Mask.array(padding) & Mask.causal()]
        return [attention.apply(params, X, mask=mask)[0] for mask in masks]

    known = jax.device_put(padding.astype(np.float32))
    expected, by_array, by_numbers, expected_causal, joined = run(params, real, padding)
    np.testing.assert_allclose(by_array, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_numbers, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(joined, expected_causal, rtol=1e-5, atol=1e-5)


def test_a_padding_array_spans_the_cache():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = random_params(attention, X)

    @jax.jit
    def run(params, padding):
        mask = Mask.causal() & Mask.array(padding)
        whole, _ = attention.apply(params, X, mask=mask)
        cache, parts = KVCache.create(B, T, N, H, H, jnp.float32), []
        for part in (X[:, :3], X[:, 3:4], X[:, 4:]):
            out, cache = attention.apply(params, part, mask=mask, cache=cache)
            parts.append(out)
        return whole, parts

    whole, parts = run(params, np.arange(T)[None, None, None] != 1)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, np.float64])
def test_masks_of_zeros_and_ones_are_accepted_where_their_values_are_known(dtype):
    mask = np.tri(T).astype(dtype)
    for given in (mask, jax.device_put(mask)):
        dense = jax.jit(lambda given=given: Mask.array(given).dense(T, T))()
        np.testing.assert_array_equal(np.asarray(dense)[0, 0], np.tri(T, dtype=bool))
    traced = jax.jit(lambda x: Mask.array(mask).dense(T, T) & (x > 0))(
        1
    )  # the values of a constant are known inside jit
    np.testing.assert_array_equal(np.asarray(traced)[0, 0], np.tri(T, dtype=bool))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.where(np.tri(T), 0.0, -1e9), r"got float\d+.*\(7.*7\).*-1000000000.0.*0.0"),
        (
            np.zeros((T, T), np.float32),
            r"contain.*0.*1.*1.*got float32.*0.0.*0.0",
        ),
        (np.arange(T * T).reshape(T, T), r"got int\d+.*0.*48"),
        (np.full((T, T), np.nan), "values from nan to nan"),
        (np.zeros((0, T)), "with no values"),
        (np.ones(T, bool), r"\(T.*S\).*\(7,\).*mask\[:,.*:\]"),
    ],
)
def test_rejects_arrays_that_are_not_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        Mask.array(mask)


def test_inside_jit_a_mask_must_be_boolean():
    """Inside jit, a mask of 0 and 1 can't be distinguished from an additive one; Flax treats any nonzero as True."""
    message = r"must be boolean \(True attends\) inside jit, where values are unknown, got float32 .*astype\(bool\)"
    heads = jax.device_put(np.asarray(X)[:, :, None])

    def attend(mask):
        return dot_product_attention(heads, heads, heads, mask=mask)

    with pytest.raises(ValueError, match=message + r".* dtype=bool.* pass it as bias="):
        jax.jit(lambda x: attend(nn.make_causal_mask(x)))(np.ones((B, T), np.float32))
    numbers = jax.jit(nn.make_causal_mask)(np.ones((B, T), np.float32))

    @jax.jit
    def run(x):
        return attend(nn.make_causal_mask(x, dtype=bool)), attend(Mask.causal())

    got, expected = run(np.ones((B, T), np.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    constant = jax.jit(lambda: attend(numbers))()  # not traced, so its values are known
    np.testing.assert_allclose(constant, expected, rtol=1e-5, atol=1e-6)


def test_a_position_scheme_with_a_context_is_refused():
    """It would have no effect: a call attention(x, x) in the style of Flax would silently lose its rotation."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    with pytest.raises(ValueError, match=r"Rotary is for self-attention.*Leave the context out"):
        jax.eval_shape(attention.init, jax.random.key(0), X, X)
    jax.eval_shape(MultiHeadAttention(num_heads=N, head_dim=H).init, jax.random.key(0), X, X)
