"""`dot_product_attention` and `MultiHeadAttention`: worked examples, properties and equivalences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import operations

from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._caches import ContextCache, KVCache, cache_length, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._positions import ALiBi, Rotary

B, T, S, N, K, H, HV, D = 2, 7, 11, 6, 3, 4, 5, 13
KEYS = jax.random.split(jax.random.key(0), 8)
QUERY = jax.random.normal(KEYS[0], (B, T, N, H))
KEY = jax.random.normal(KEYS[1], (B, S, K, H))
VALUE = jax.random.normal(KEYS[2], (B, S, K, HV))
X = jax.random.normal(KEYS[3], (B, T, D))


def worked_example(causal_mask):
    """A worked example from a textbook: "Life is awesome", three tokens, two heads of size two, W_O the identity."""
    x = jnp.array([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]], jnp.float32)[None]
    heads = {
        "query": [[[1, 0], [0, 1], [1, 0], [0, 1]], [[0, 1], [1, 0], [0, 1], [1, 0]]],
        "key": [[[1, 1], [0, 1], [1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1], [1, 0]]],
        "value": [[[1, 0], [0, 1], [1, 1], [0, 1]], [[0, 1], [1, 0], [1, 0], [0, 1]]],
    }
    params = {name: {"kernel": jnp.array(w, jnp.float32).transpose(1, 0, 2)} for name, w in heads.items()}
    params["out"] = {"kernel": jnp.eye(4).reshape(2, 2, 4)}
    attention = MultiHeadAttention(num_heads=2, use_bias=False)
    options = {"sow_weights": True, "mutable": ["intermediates"]}
    (out, _), seen = attention.apply({"params": params}, x, mask=causal_mask, **options)
    return out[0], seen["intermediates"]["weights"][0][0]


def test_the_worked_example_digit_for_digit():
    out, weights = worked_example(Mask.causal())
    np.testing.assert_allclose(weights[0], [[1, 0, 0], [0.670, 0.330, 0], [0.102, 0.050, 0.848]], atol=5e-4)
    np.testing.assert_allclose(weights[1], [[1, 0, 0], [0.330, 0.670, 0], [0.050, 0.102, 0.848]], atol=5e-4)
    expected = [[2.000, 1.000, 1.000, 1.000], [1.670, 1.330, 1.670, 0.330], [1.102, 1.898, 1.102, 1.747]]
    np.testing.assert_allclose(out, expected, atol=5e-4)


class PureFunction(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_is_the_formula(self):
        attend = self.variant(lambda q, k, v: dot_product_attention(q, k, v, return_weights=True))
        out, weights = attend(QUERY, KEY, VALUE)
        chex.assert_shape([out, weights], [(B, T, N, HV), (B, N, T, S)])
        key, value = np.repeat(KEY, N // K, axis=2), np.repeat(VALUE, N // K, axis=2)
        scores = np.einsum("btnh,bsnh->bnts", QUERY, key) / np.sqrt(H)
        expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", expected, value), rtol=1e-4, atol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_scale_of_one_is_unscaled(self):
        plain = self.variant(lambda q: dot_product_attention(q, KEY, VALUE, scale=1.0))(QUERY)
        np.testing.assert_allclose(plain, dot_product_attention(QUERY * 2, KEY, VALUE), rtol=1e-5)  # sqrt(H) = 2


def test_mask_arrays_and_bias_arrays_broadcast():
    allowed = jax.random.bernoulli(KEYS[4], 0.5, (T, S))
    expected = dot_product_attention(QUERY, KEY, VALUE, mask=Mask.array(allowed))
    additive = jnp.where(allowed, 0.0, -1e30)
    for options in ({"mask": allowed}, {"mask": allowed[None, None]}, {"bias": additive[None]}):
        np.testing.assert_allclose(dot_product_attention(QUERY, KEY, VALUE, **options), expected, atol=1e-6)
    per_key = jnp.arange(S) < 4
    np.testing.assert_array_equal(
        dot_product_attention(QUERY, KEY, VALUE, mask=per_key),
        dot_product_attention(QUERY, KEY, VALUE, mask=Mask.lengths(jnp.array([4, 4]))),
    )


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_bias_functions_equal_bias_arrays(implementation):
    table = jax.random.normal(KEYS[4], (N, T, S))

    def out(bias):
        return dot_product_attention(QUERY, KEY, VALUE, bias=bias, implementation=implementation)

    np.testing.assert_allclose(out(lambda q, k: table[:, q][:, :, k]), out(table), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out(table[:, :, :1] + jnp.zeros((N, T, 1))), out(None), rtol=1e-5, atol=1e-5)


def test_softcap_and_sinks():
    capped = dot_product_attention(QUERY, KEY, VALUE, softcap=1e-6)
    np.testing.assert_allclose(capped, np.repeat(VALUE.mean(1, keepdims=True), T, 1).repeat(N // K, 2), atol=1e-5)
    _, weights = dot_product_attention(QUERY, KEY, VALUE, sinks=jnp.full(N, 2.0), return_weights=True)
    zero_key = jnp.concatenate([KEY, jnp.zeros((B, 1, K, H))], 1)
    one_more = jnp.concatenate([jnp.zeros((T, S)), jnp.full((T, 1), 2.0)], 1)
    value = jnp.concatenate([VALUE, jnp.zeros((B, 1, K, HV))], 1)
    _, expected = dot_product_attention(QUERY, zero_key, value, bias=one_more, return_weights=True)
    np.testing.assert_allclose(weights, expected[..., :S], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": KEY[:, :3]}, "key and value must have the same length"),
        ({"key": KEY[..., :3]}, "query and key must have the same head size"),
        ({"query": QUERY[:, :, :4]}, "query heads must be a multiple of key heads"),
        ({"query": QUERY[:1]}, "the batch sizes differ"),
        ({"query": QUERY[0]}, r"query must be \(batch, length, heads, head size\), got shape"),
        ({"sinks": jnp.zeros(5)}, "must have one number per query head"),
        ({"dropout_rate": 0.1}, "dropout_key is None: pass a jax.random.key"),
        ({"dropout_rate": 1.0}, "at least 0 and below 1, got 1.0"),
        ({"scale": 0.0}, "scale must be above 0, got 0.0. Use scale=1.0"),
        ({"bias": jnp.zeros((3, 3))}, "doesn't broadcast to"),
        ({"bias": jnp.zeros((7, 1, 1, 1))}, "doesn't broadcast to"),
        ({"bias": jnp.zeros((1, 1, 1, 1, 1))}, "doesn't broadcast to"),
        ({"mask": jnp.zeros((T, S))}, "must be boolean"),
        ({"mask": Mask.lengths(jnp.ones(3, int))}, r"key_lengths has shape \(3,\)"),
        ({"implementation": "flash"}, "attention kernel must be one of"),
        ({"implementation": "blockwise", "return_weights": True}, "can't return attention weights"),
    ],
)
def test_what_can_not_be_computed_says_why(options, message):
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    # Bypass the type checker of the tests, to get the message that a user sees.
    plain = getattr(dot_product_attention, "__wrapped__", dot_product_attention)
    with pytest.raises(ValueError, match=message):
        plain(**(arrays | options))


def products(function, *args):
    """Return the shapes of both operands of each matrix multiplication, including those in loops and calls."""
    return [shapes for name, shapes in operations(function, *args) if name == "dot_general"]


def test_all_heads_of_a_projection_are_one_product():
    attention = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    shapes = products(lambda x: attention.apply(params, x)[0], X)
    assert [s for s in shapes if len(s[0]) == 2] == [
        ((B * T, D), (D, N * H)),
        ((B * T, D), (D, K * H)),
        ((B * T, D), (D, K * HV)),
        ((B * T, N * HV), (N * HV, D)),
    ]
    assert len(shapes) == 6  # plus Q K^T and the multiplication by V


@pytest.mark.parametrize("use_bias", [True, False])
def test_sizes_are_free(use_bias):
    context = jax.random.normal(KEYS[4], (B, S, 9))
    attention = MultiHeadAttention(
        num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV, out_features=3, use_bias=use_bias
    )
    (out, _), params = attention.init_with_output(jax.random.key(0), X, context)
    assert out.shape == (B, T, 3)
    shapes = jax.tree.map(jnp.shape, params["params"])
    kernels = {"query": (D, N, H), "key": (9, K, H), "value": (9, K, HV), "out": (N, HV, 3)}
    assert {name: part["kernel"] for name, part in shapes.items()} == kernels
    assert all(("bias" in part) == use_bias for part in shapes.values())


def test_grouped_heads_equal_repeated_heads():
    grouped = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, position=Rotary())
    full = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = jax.jit(grouped.init)(jax.random.key(0), X)["params"]
    repeated = dict(params)
    for name in ("key", "value"):
        repeated[name] = jax.tree.map(lambda leaf: jnp.repeat(leaf, N // K, axis=-2), params[name])
    got, expected = grouped.apply({"params": params}, X)[0], full.apply({"params": repeated}, X)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_qk_norm_makes_scores_blind_to_the_size_of_x():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, qk_norm=True, use_bias=False)
    params = jax.jit(attention.init)(jax.random.key(0), X)

    def weights(x):
        _, seen = attention.apply(params, x, sow_weights=True, mutable=["intermediates"])
        return seen["intermediates"]["weights"][0]

    np.testing.assert_allclose(weights(X), weights(7 * X), atol=1e-5)


@pytest.mark.parametrize("kind", ["rms_norm", "zero_centered_rms_norm"])
def test_qk_norm_over_all_heads_together(kind):
    """The weights equal those of projections that are normalized by hand, over all heads together."""
    sizes = {"num_heads": N, "num_kv_heads": K, "head_dim": H, "use_bias": False}
    attention = MultiHeadAttention(**sizes, qk_norm=True, qk_norm_scope="all", qk_norm_kind=kind)
    params = jax.jit(attention.init)(jax.random.key(0), X)["params"]
    scales = {"query": jnp.arange(1.0, N * H + 1) / 9, "key": jnp.arange(1.0, K * H + 1) / 7}
    start = 0.0 if kind == "zero_centered_rms_norm" else 1.0
    for name, scale in scales.items():
        np.testing.assert_array_equal(params[f"{name}_norm"]["scale"], jnp.full(scale.shape, start))
        params[f"{name}_norm"] = {"scale": scale - 1 + start}
    (_, _), seen = attention.apply({"params": params}, X, sow_weights=True, mutable=["intermediates"])

    def heads(name):
        x = jnp.einsum("btd,dnh->btnh", X, params[name]["kernel"])
        flat = x.reshape(B, T, -1)
        flat = flat / jnp.sqrt(jnp.square(flat).mean(-1, keepdims=True) + 1e-6) * scales[name][None, None]
        return flat.reshape(x.shape)

    _, weights = dot_product_attention(heads("query"), heads("key"), jnp.zeros((B, T, K, H)), return_weights=True)
    np.testing.assert_allclose(seen["intermediates"]["weights"][0], weights, rtol=1e-4, atol=1e-5)


def test_biases_are_where_they_are_said_to_be():
    def biased(**options):
        shapes = jax.eval_shape(MultiHeadAttention(num_heads=N, head_dim=H, **options).init, jax.random.key(0), X)
        return [name for name, leaf in shapes["params"].items() if "bias" in leaf]

    assert sorted(biased(biases=("query", "value"), use_bias=False)) == ["query", "value"]
    assert biased(biases=(), use_bias=True) == []
    assert sorted(biased()) == ["key", "out", "query", "value"]
    with pytest.raises(ValueError, match="biases must be names among query, key, value and out, got 'keys'"):
        biased(biases=("keys",))


def test_causal_output_does_not_depend_on_what_comes_after():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=ALiBi(num_heads=N))
    params = jax.jit(attention.init)(jax.random.key(0), X)
    jacobian = jax.jit(jax.jacobian(lambda x: attention.apply(params, x, mask=Mask.causal())[0][0]))(X)[:, :, 0]
    reach = jnp.abs(jacobian).max((1, 3))  # (output t, input t)
    np.testing.assert_array_equal(reach > 0, np.tri(T, dtype=bool))


def test_padding_changes_nothing():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = jax.jit(attention.init)(jax.random.key(0), X)
    padded = jnp.concatenate([X, jnp.full((B, 4, D), 1e3)], 1)
    lengths = jnp.full((B,), T)
    expected = attention.apply(params, X)[0]
    got = attention.apply(params, padded, mask=Mask.lengths(lengths))[0][:, :T]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_kept_only_when_asked_for():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    assert set(params) == {"params"}
    assert not attention.apply(params, X, mutable=["intermediates"])[1]
    _, seen = attention.apply(params, X, sow_weights=True, mutable=["intermediates"])
    weights = seen["intermediates"]["weights"][0]
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_dropout_needs_its_rng_and_is_off_when_deterministic():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, dropout_rate=0.5)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    same = attention.apply(params, X, deterministic=True)[0]
    np.testing.assert_array_equal(same, MultiHeadAttention(num_heads=N, head_dim=H).apply(params, X)[0])
    dropped = attention.apply(params, X, deterministic=False, rngs={"dropout": jax.random.key(1)})[0]
    assert np.abs(dropped - same).max() > 0.01


@pytest.mark.parametrize("position", [pytest.param(Rotary(), marks=pytest.mark.slow), ALiBi(num_heads=N)])
def test_a_cache_filled_in_parts_equals_the_whole(position):
    attention = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV, position=position)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    expected = attention.apply(params, X, mask=Mask.causal())[0]
    cache = KVCache.create(B, 9, K, H, HV, jnp.float32)
    parts = []
    for part in (X[:, :3], X[:, 3:4], X[:, 4:]):
        out, cache = attention.apply(params, part, mask=Mask.causal(), cache=cache)
        parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache_length(cache), [T, T])


def test_empty_slots_are_not_attended_even_without_causality():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = jax.jit(attention.init)(jax.random.key(0), X)
    got, _ = attention.apply(params, X, cache=KVCache.create(B, 12, N, H, H, jnp.float32))
    np.testing.assert_allclose(got, attention.apply(params, X)[0], rtol=1e-5, atol=1e-6)


def test_rows_of_a_cache_go_on_from_their_own_length():
    """Row 0 has 2 real tokens of 4: the padding after them is overwritten and never attended to."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = jax.jit(attention.init)(jax.random.key(0), X)
    padded = X[:, :4].at[0, 2:].set(1e3)
    _, cache = attention.apply(params, padded, mask=Mask.causal(), cache=KVCache.create(B, 9, N, H, H, jnp.float32))
    cache = set_cache_length(cache, jnp.array([2, 4]))
    rest = jnp.stack([X[0, 2:5], X[1, 4:7]])
    got, cache = attention.apply(params, rest, mask=Mask.causal(), cache=cache)
    expected = attention.apply(params, X, mask=Mask.causal())[0]
    np.testing.assert_allclose(got, jnp.stack([expected[0, 2:5], expected[1, 4:7]]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache_length(cache), [5, 7])


def test_a_cache_too_short_is_an_error_or_drops_never_overwrites():
    cache = KVCache.create(1, 3, K, H, HV, jnp.float32)
    ones = jnp.ones((1, 4, K, H)), jnp.ones((1, 4, K, HV)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="4 tokens don't fit a cache of 3 slots: create a longer cache"):
        cache.append(*ones)
    two = [a[:, :2] for a in ones]
    steps = jnp.array([7.0, 8.0])[None, :, None, None]
    full = cache.append(*two).append(two[0] * steps, two[1] * steps, two[2])
    np.testing.assert_array_equal(full.key[0, 0, :, 0], [1, 1, 7])


def test_cross_attention_reads_what_its_cache_holds():
    context = jax.random.normal(KEYS[4], (B, S, 9))
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = jax.jit(attention.init)(jax.random.key(0), X, context)
    expected, _ = attention.apply(params, X, context)
    first, cache = attention.apply(params, X, context, cache=ContextCache())
    again, same = attention.apply(params, X, cache=cache)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_allclose(again, expected, rtol=1e-6)
    assert same is cache
    with pytest.raises(ValueError, match="cross-attention cache is empty: pass context"):
        attention.apply(params, X, cache=ContextCache())


def test_a_width_that_does_not_divide_says_what_to_give():
    with pytest.raises(ValueError, match=r"width of x \(13\) must be a multiple of num_heads \(6\) .* Pass head_dim"):
        MultiHeadAttention(num_heads=6).init(jax.random.key(0), X)


def test_a_cache_of_self_attention_is_refused_beside_a_context():
    x, cache = jnp.ones((1, 3, 8)), KVCache.create(1, 4, 2, 4, 4, jnp.float32)
    with pytest.raises(ValueError, match="a KVCache is for self-attention, but a context is given"):
        MultiHeadAttention(num_heads=2).init(jax.random.key(0), x, x, cache=cache)
