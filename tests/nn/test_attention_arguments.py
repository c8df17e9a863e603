"""Arguments of attention: masks of any shape and dtype, biases, weights on request, and explicit dropout."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import MLA, CausalLM, Decoder, Encoder, LayerInputs, NoPosition, PreNormBlock, TransformerConfig
from transformer.config import ConfigError
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._caches import KVCache
from transformer.nn._masks import Mask
from transformer.nn._mla import LatentAttention
from transformer.nn._positions import ALiBi, Rotary

B, T, N, H, D = 2, 7, 6, 4, 13
X = jax.random.normal(jax.random.key(3), (B, T, D))


def test_other_intermediates_leave_the_kernel_alone():
    """Collecting the intermediates of other modules changes neither the kernel nor the collected weights."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, implementation="blockwise")
    params = jax.jit(attention.init)(jax.random.key(0), X)
    program = {
        mutable: jax.make_jaxpr(lambda x, m=mutable: attention.apply(params, x, mutable=m)[0])(X)
        for mutable in (False, "intermediates")
    }
    assert str(program[False]) == str(program["intermediates"])
    with pytest.raises(ConfigError, match="blockwise attention kernel can't return attention weights"):
        attention.apply(params, X, sow_weights=True, mutable="intermediates")
    attention.apply(params, X, sow_weights=True)  # the collection is not mutable, so nothing is sown


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("position", [Rotary(), ALiBi(num_heads=N)], ids=["rotary", "alibi"])
def test_a_bias_is_added_to_that_of_the_position_scheme(position, implementation):
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=position, implementation=implementation)
    plain = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary() if position == Rotary() else NoPosition())
    params = jax.jit(attention.init)(jax.random.key(0), X)
    bias = jax.random.normal(jax.random.key(4), (B, N, T, T))
    total = bias
    if isinstance(position, ALiBi):
        total = bias + position.bias(jnp.arange(T)[None], jnp.arange(T)[None], None)
    expected = plain.apply(params, X, bias=total)[0]
    assert np.abs(expected - plain.apply(params, X)[0]).max() > 0.01
    for given in (bias, lambda queries, keys: bias[:, :, queries][:, :, :, keys]):
        np.testing.assert_allclose(attention.apply(params, X, bias=given)[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        jax.grad(lambda b: attention.apply(params, X, bias=b)[0].sum())(bias),
        jax.grad(lambda b: plain.apply(params, X, bias=total - bias + b)[0].sum())(bias),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_bias_spans_the_cache_and_a_context():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    bias = jax.random.normal(jax.random.key(4), (N, T, T))
    whole = attention.apply(params, X, mask=Mask.causal(), bias=bias)[0]
    cache = KVCache.create(B, T, N, H, H, jnp.float32)
    for t in range(T):
        step, cache = attention.apply(params, X[:, t : t + 1], mask=Mask.causal(), bias=bias[:, t : t + 1], cache=cache)
        np.testing.assert_allclose(step, whole[:, t : t + 1], rtol=1e-4, atol=1e-5)
    crossed = attention.apply(params, X, X, bias=bias)[0]
    np.testing.assert_allclose(crossed, attention.apply(params, X, bias=bias)[0], rtol=1e-5, atol=1e-6)


def test_dropout_is_never_left_out_silently():
    message = r"dropout rate of 0\.5 and deterministic is not given: pass deterministic=True to evaluate or determ"
    config = TransformerConfig(d_model=D, num_heads=1, dropout_rate=0.5, position="none")
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
        with pytest.raises(ValueError, match=f"{type(module).__name__} has a {message}"):
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
ALLOWED = jax.random.bernoulli(jax.random.key(5), 0.6, (B, N, T, T)).at[..., 0].set(True)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("implementation", ["reference", "query_chunked", "blockwise", "splash"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_masks_of_any_shape_are_what_they_broadcast_to(shape, implementation):
    heads, given = X[:, :, None].repeat(N, 2), shape(ALLOWED)
    expected = dot_product_attention(heads, heads, heads, mask=jnp.broadcast_to(given, (B, N, T, T)))
    if implementation == "splash" and given.shape[1:3] != (1, 1):
        with pytest.raises(ConfigError, match="splash"):
            dot_product_attention(heads, heads, heads, mask=given, implementation=implementation)
        return
    for mask in (given, Mask.array(given), Mask.array(given) & Mask.array(jnp.ones((T, T), bool))):
        if implementation == "splash" and mask is not given:
            continue
        got = dot_product_attention(heads, heads, heads, mask=mask, implementation=implementation)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", ["heads", "latent"])
def test_modules_take_padding_arrays(module):
    latent = MLA(kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=3)
    attention = MultiHeadAttention(num_heads=2, head_dim=H) if module == "heads" else LatentAttention(2, latent)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    real = jnp.array([T, 3])
    padding = (jnp.arange(T)[None] < real[:, None])[:, None, None]
    expected = attention.apply(params, X, mask=Mask.lengths(real))[0]
    np.testing.assert_allclose(attention.apply(params, X, mask=padding)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(attention.apply(params, X, mask=padding * 1.0)[0], expected, rtol=1e-5, atol=1e-5)
    joined = attention.apply(params, X, mask=Mask.array(padding) & Mask.causal())[0]
    expected = attention.apply(params, X, mask=Mask.lengths(real) & Mask.causal())[0]
    np.testing.assert_allclose(joined, expected, rtol=1e-5, atol=1e-5)


def test_a_padding_array_spans_the_cache():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    padding = jnp.arange(T)[None, None, None] != 1
    whole = attention.apply(params, X, mask=Mask.causal() & Mask.array(padding))[0]
    cache = KVCache.create(B, T, N, H, H, jnp.float32)
    for part in (X[:, :3], X[:, 3:4], X[:, 4:]):
        start = int(cache.length[0])
        out, cache = attention.apply(params, part, mask=Mask.causal() & Mask.array(padding), cache=cache)
        np.testing.assert_allclose(out, whole[:, start : start + part.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, np.float64])
def test_masks_of_zeros_and_ones_are_accepted_where_their_values_are_known(dtype):
    mask = np.tri(T).astype(dtype)
    for given in (mask, jnp.asarray(mask)):
        np.testing.assert_array_equal(Mask.array(given).dense(T, T)[0, 0], np.tri(T, dtype=bool))
    traced = jax.jit(lambda x: Mask.array(mask).dense(T, T) & (x > 0))(
        1
    )  # the values of a constant are known inside jit
    np.testing.assert_array_equal(traced[0, 0], np.tri(T, dtype=bool))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.where(np.tri(T), 0.0, -1e9), r"got float\d+ of shape \(7, 7\) with values from -1000000000.0 to 0.0"),
        (
            np.zeros((T, T), np.float32),
            "contain only 0 and 1 and at least one 1, got float32 .* with values from 0.0 to 0.0",
        ),
        (np.arange(T * T).reshape(T, T), r"got int\d+ .* with values from 0 to 48"),
        (np.full((T, T), np.nan), "values from nan to nan"),
        (np.zeros((0, T)), "with no values"),
        (np.ones(T, bool), r"must end in the axes \(T, S\), got shape \(7,\). Add axes: .* mask\[:, None, None, :\]"),
    ],
)
def test_arrays_that_may_not_be_masks_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        Mask.array(mask)


def test_inside_jit_a_mask_must_be_boolean():
    """Inside jit, a mask of 0 and 1 can't be distinguished from an additive one; Flax treats any nonzero as True."""
    message = r"must be boolean \(True attends\) inside jit, where values are unknown, got float32 .*astype\(bool\)"
    with pytest.raises(ValueError, match=message + r".* dtype=bool.* pass it as bias="):
        jax.jit(lambda x: dot_product_attention(x, x, x, mask=nn.make_causal_mask(x[..., 0, 0])))(X[:, :, None])
    got = jax.jit(lambda x: dot_product_attention(x, x, x, mask=nn.make_causal_mask(x[..., 0, 0], dtype=bool)))
    heads = X[:, :, None]
    expected = dot_product_attention(heads, heads, heads, mask=Mask.causal())
    np.testing.assert_allclose(got(heads), expected, rtol=1e-5, atol=1e-6)
    eager = dot_product_attention(heads, heads, heads, mask=nn.make_causal_mask(heads[..., 0, 0]))
    np.testing.assert_allclose(eager, expected, rtol=1e-5, atol=1e-6)


def test_a_position_scheme_with_a_context_is_refused():
    """It would have no effect: a call attention(x, x) in the style of Flax would silently lose its rotation."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    with pytest.raises(ValueError, match=r"Rotary is for self-attention.*Leave the context out"):
        attention.init(jax.random.key(0), X, X)
    MultiHeadAttention(num_heads=N, head_dim=H).init(jax.random.key(0), X, X)
