"""What calls of attention take: masks of any shape and type, biases, weights on request, and dropout said aloud."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import MLA, CausalLM, Decoder, Encoder, LayerInputs, NoPosition, PreNormBlock, TransformerConfig
from transformer.attention import MultiHeadAttention
from transformer.caches import KVCache
from transformer.config import ConfigError
from transformer.masks import Mask
from transformer.mla import LatentAttention
from transformer.positions import ALiBi, Rotary

B, T, N, H, D = 2, 7, 6, 4, 13
X = jax.random.normal(jax.random.key(3), (B, T, D))


def test_other_intermediates_leave_the_kernel_alone():
    """A call that collects what somebody else sows computes with the same kernel, and gets no weights."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, implementation="chunked")
    params = jax.jit(attention.init)(jax.random.key(0), X)
    program = {
        mutable: jax.make_jaxpr(lambda x, m=mutable: attention.apply(params, x, mutable=m)[0])(X)
        for mutable in (False, "intermediates")
    }
    assert str(program[False]) == str(program["intermediates"])
    with pytest.raises(ConfigError, match="chunked attention kernel can't return attention weights"):
        attention.apply(params, X, sow_weights=True, mutable="intermediates")
    attention.apply(params, X, sow_weights=True)  # nobody collects them


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
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
    latent = MLA(kv_rank=4, plain_dim=2, rotary_dim=2, value_dim=3)
    modules = {
        MultiHeadAttention(num_heads=2, head_dim=H, dropout_rate=0.5): (),
        LatentAttention(num_heads=2, mla=latent, dropout_rate=0.5): (),
        PreNormBlock(config): (LayerInputs(),),
        Encoder(config): (),
        Decoder(config.replace(dropout_rate=0.0, attention_dropout_rate=0.5)): (),
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
    jax.eval_shape(model.apply, jax.eval_shape(model.init, jax.random.key(0), tokens), tokens)  # whole models evaluate
