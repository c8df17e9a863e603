"""`dot_product_attention` and `MultiHeadAttention`: worked examples, properties and equivalences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import operations
from numeric_parts import random_params

from transformer.config import QKNorm
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._caches import ContextCache, KVCache, cache_length, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._positions import ALiBi, Rotary

B, T, S, N, K, H, HV, D = 2, 7, 11, 6, 3, 4, 5, 13


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def zeros(*shape):
    return jax.device_put(np.zeros(shape, np.float32))


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, HV)
X = normal(3, B, T, D)


def worked_example(causal_mask):
    """A worked example from a textbook: "Life is awesome", three tokens, two heads of size two, W_O the identity."""
    x = jax.device_put(np.array([[[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]]], np.float32))
    heads = {
        "query": [[[1, 0], [0, 1], [1, 0], [0, 1]], [[0, 1], [1, 0], [0, 1], [1, 0]]],
        "key": [[[1, 1], [0, 1], [1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1], [1, 0]]],
        "value": [[[1, 0], [0, 1], [1, 1], [0, 1]], [[0, 1], [1, 0], [1, 0], [0, 1]]],
    }
    params = {name: {"kernel": np.array(w, np.float32).transpose(1, 0, 2)} for name, w in heads.items()}
    params["out"] = {"kernel": np.eye(4, dtype=np.float32).reshape(2, 2, 4)}
    attention = MultiHeadAttention(num_heads=2, use_bias=False)
    options = {"sow_weights": True, "mutable": ["intermediates"]}
    call = jax.jit(lambda params, x: attention.apply({"params": params}, x, mask=causal_mask, **options))
    (out, _), seen = jax.tree.map(np.asarray, call(params, x))
    return out[0], seen["intermediates"]["weights"][0][0]


def test_the_worked_example_digit_for_digit():
    out, weights = worked_example(Mask.causal())
    np.testing.assert_allclose(weights[0], [[1, 0, 0], [0.670, 0.330, 0], [0.102, 0.050, 0.848]], atol=5e-4)
    np.testing.assert_allclose(weights[1], [[1, 0, 0], [0.330, 0.670, 0], [0.050, 0.102, 0.848]], atol=5e-4)
    expected = [[2.000, 1.000, 1.000, 1.000], [1.670, 1.330, 1.670, 0.330], [1.102, 1.898, 1.102, 1.747]]
    np.testing.assert_allclose(out, expected, atol=5e-4)


class PureFunction(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @pytest.mark.programs(22, reason="each operation of the variant without jit is a program")
    def test_attention_equals_its_formula(self):
        key, value = np.repeat(KEY, N // K, axis=2), np.repeat(VALUE, N // K, axis=2)
        for scale, factor in ((None, 1 / np.sqrt(H)), (1.0, 1.0)):
            attend = self.variant(
                lambda q, k, v, scale=scale: dot_product_attention(q, k, v, scale=scale, return_weights=True)
            )
            out, weights = attend(QUERY, KEY, VALUE)
            chex.assert_shape([out, weights], [(B, T, N, HV), (B, N, T, S)])
            scores = np.einsum("btnh,bsnh->bnts", QUERY, key) * factor
            expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            np.testing.assert_allclose(weights, expected, rtol=1e-5)
            np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", expected, value), rtol=1e-4, atol=1e-6)


def test_mask_arrays_and_bias_arrays_broadcast():
    allowed = np.random.default_rng(4).random((T, S)) < 0.5
    additive = np.where(allowed, 0.0, -1e30).astype(np.float32)
    per_key = np.arange(S) < 4

    @jax.jit
    def run(allowed, additive, per_key):
        variants = [{"mask": allowed}, {"mask": allowed[None, None]}, {"bias": additive[None]}]
        variants += [{"mask": per_key}, {"mask": Mask.lengths(jnp.array([4, 4]))}, {"mask": Mask.array(allowed)}]
        return [dot_product_attention(QUERY, KEY, VALUE, **options) for options in variants]

    *same, by_key, by_length, expected = run(allowed, additive, per_key)
    for one in same:
        np.testing.assert_allclose(one, expected, atol=1e-6)
    np.testing.assert_array_equal(by_key, by_length)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_bias_functions_equal_bias_arrays(implementation):
    table = normal(4, N, T, S)
    column = np.broadcast_to(np.asarray(table)[:, :, :1], (N, T, S))  # softmax ignores a constant per query

    @jax.jit
    def run(table, column):
        biases = (lambda q, k: table[:, q][:, :, k]), table, column, None
        return [dot_product_attention(QUERY, KEY, VALUE, bias=one, implementation=implementation) for one in biases]

    by_function, by_array, constant, without = run(table, column)
    np.testing.assert_allclose(by_function, by_array, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(constant, without, rtol=1e-5, atol=1e-5)


def test_softcap_and_sinks():
    """A sink is one more key of zeros, whose score is the sink and whose value is 0."""
    zero_key = np.concatenate([KEY, np.zeros((B, 1, K, H), np.float32)], 1)
    one_more = np.concatenate([np.zeros((T, S)), np.full((T, 1), 2.0)], 1).astype(np.float32)
    value = np.concatenate([VALUE, np.zeros((B, 1, K, HV), np.float32)], 1)

    @jax.jit
    def run(zero_key, one_more, value):
        capped = dot_product_attention(QUERY, KEY, VALUE, softcap=1e-6)
        sinks = dot_product_attention(QUERY, KEY, VALUE, sinks=jnp.full(N, 2.0), return_weights=True)[1]
        return capped, sinks, dot_product_attention(QUERY, zero_key, value, bias=one_more, return_weights=True)[1]

    capped, weights, expected = map(np.asarray, run(zero_key, one_more, value))
    mean = np.asarray(VALUE).mean(1, keepdims=True)
    np.testing.assert_allclose(capped, mean.repeat(T, 1).repeat(N // K, 2), atol=1e-5)
    np.testing.assert_allclose(weights, expected[..., :S], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": zeros(B, 3, K, H)}, "key and value must have the same length"),
        ({"key": zeros(B, S, K, 3)}, "query and key must have the same head size"),
        ({"query": zeros(B, T, 4, H)}, "query heads must be a multiple of key heads"),
        ({"query": zeros(1, T, N, H)}, "the batch sizes differ"),
        ({"query": zeros(T, N, H)}, r"query.*\(batch.*size\)"),
        ({"sinks": zeros(5)}, "must have one number per query head"),
        ({"dropout_rate": 0.1}, r"dropout_key.*jax.random.key"),
        ({"dropout_rate": 1.0}, "at least 0 and below 1, got 1.0"),
        ({"scale": 0.0}, r"scale.*0.*got 0.0.*scale=1.0"),
        ({"bias": zeros(3, 3)}, "doesn't broadcast to"),
        ({"bias": zeros(7, 1, 1, 1)}, "doesn't broadcast to"),
        ({"bias": zeros(1, 1, 1, 1, 1)}, "doesn't broadcast to"),
        ({"mask": zeros(T, S)}, "must be boolean"),
        ({"mask": Mask.lengths(jax.device_put(np.ones(3, np.int32)))}, r"key_lengths.*\(3,\)"),
        ({"implementation": "fused"}, "attention kernel must be one of"),
        ({"implementation": "blockwise", "return_weights": True}, "can't return attention weights"),
    ],
)
def test_rejects_invalid_arguments_with_a_reason(options, message):
    arrays = {"query": QUERY, "key": KEY, "value": VALUE}
    # Bypass the type checker of the tests, to get the message that a user sees.
    plain = getattr(dot_product_attention, "__wrapped__", dot_product_attention)
    with pytest.raises(ValueError, match=message):
        plain(**(arrays | options))


def products(function, *args):
    """Return the shapes of both operands of each matrix multiplication, including those in loops and calls."""
    return [shapes for name, shapes in operations(function, *args) if name == "dot_general"]


@pytest.mark.cpu_only("reads the flattened products of a CPU")
def test_all_heads_of_a_projection_are_one_matrix_multiplication():
    attention = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV)
    params = random_params(attention, X)
    shapes = products(lambda x: attention.apply(params, x)[0], X)
    assert [s for s in shapes if len(s[0]) == 2] == [
        ((B * T, D), (D, N * H)),
        ((B * T, D), (D, K * H)),
        ((B * T, D), (D, K * HV)),
        ((B * T, N * HV), (N * HV, D)),
    ]
    assert len(shapes) == 6  # plus Q K^T and the multiplication by V


@pytest.mark.parametrize("use_bias", [True, False])
def test_head_sizes_are_independent_of_the_width(use_bias):
    context = zeros(B, S, 9)
    attention = MultiHeadAttention(
        num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV, out_features=3, use_bias=use_bias
    )
    start = jax.jit(lambda: attention.init_with_output(jax.random.key(0), X, context))
    (out, _), params = start()
    assert out.shape == (B, T, 3)
    shapes = jax.tree.map(np.shape, params["params"])
    kernels = {"query": (D, N, H), "key": (9, K, H), "value": (9, K, HV), "out": (N, HV, 3)}
    assert {name: part["kernel"] for name, part in shapes.items()} == kernels
    assert all(("bias" in part) == use_bias for part in shapes.values())


def test_grouped_heads_equal_repeated_heads():
    grouped = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, position=Rotary())
    full = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = random_params(grouped, X)["params"]
    repeated = dict(params)
    for name in ("key", "value"):
        repeated[name] = jax.tree.map(lambda leaf: np.repeat(leaf, N // K, axis=-2), params[name])
    got = jax.jit(lambda params: grouped.apply({"params": params}, X)[0])(params)
    expected = jax.jit(lambda params: full.apply({"params": params}, X)[0])(repeated)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_qk_norm_makes_scores_invariant_to_input_scale():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, qk_norm=QKNorm(), use_bias=False)
    params = random_params(attention, X)

    @jax.jit
    def weights(x):
        _, seen = attention.apply(params, x, sow_weights=True, mutable=["intermediates"])
        return seen["intermediates"]["weights"][0]

    np.testing.assert_allclose(weights(X), weights(7 * np.asarray(X)), atol=1e-5)


@pytest.mark.parametrize("kind", ["rms_norm", "zero_centered_rms_norm"])
def test_qk_norm_can_span_all_heads(kind):
    """The weights equal those of projections that are normalized by hand, over all heads together."""
    sizes = {"num_heads": N, "num_kv_heads": K, "head_dim": H, "use_bias": False}
    attention = MultiHeadAttention(**sizes, qk_norm=QKNorm(scope="all", kind=kind))
    widths, start = {"query": N * H, "key": K * H}, 0.0 if kind == "zero_centered_rms_norm" else 1.0
    first = jax.jit(lambda: attention.init(jax.random.key(0), X)["params"])()
    for name, width in widths.items():
        np.testing.assert_array_equal(first[f"{name}_norm"]["scale"], np.full(width, start))
    params = random_params(attention, X)["params"]
    call = jax.jit(
        lambda params: attention.apply({"params": params}, X, sow_weights=True, mutable=["intermediates"])[1]
    )
    weights = call(params)["intermediates"]["weights"][0]

    def heads(name):
        x = np.einsum("btd,dnh->btnh", X, params[name]["kernel"], dtype=np.float64)
        flat = x.reshape(B, T, -1)
        scale = np.asarray(params[f"{name}_norm"]["scale"], np.float64) + 1 - start
        return (flat / np.sqrt(np.square(flat).mean(-1, keepdims=True) + 1e-6) * scale).reshape(x.shape)

    scores = np.einsum("btnh,bsnh->bnts", heads("query"), heads("key").repeat(N // K, 2)) / np.sqrt(H)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)


def test_biases_follow_the_config():
    def biased(**options):
        shapes = jax.eval_shape(MultiHeadAttention(num_heads=N, head_dim=H, **options).init, jax.random.key(0), X)
        return [name for name, leaf in shapes["params"].items() if "bias" in leaf]

    assert sorted(biased(biases=("query", "value"), use_bias=False)) == ["query", "value"]
    assert biased(biases=(), use_bias=True) == []
    assert sorted(biased()) == ["key", "out", "query", "value"]
    with pytest.raises(ValueError, match=r"biases.*got 'keys'"):
        biased(biases=("keys",))


def test_causal_output_does_not_depend_on_later_tokens():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=ALiBi(num_heads=N))
    params = random_params(attention, X)
    jacobian = jax.jit(jax.jacobian(lambda x: attention.apply(params, x, mask=Mask.causal())[0][0]))(X)[:, :, 0]
    reach = np.abs(jacobian).max((1, 3))  # (output t, input t)
    np.testing.assert_array_equal(reach > 0, np.tri(T, dtype=bool))


def test_padding_changes_nothing():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = random_params(attention, X)
    padded = np.concatenate([X, np.full((B, 4, D), 1e3, np.float32)], 1)
    lengths = np.full((B,), T, np.int32)
    expected = jax.jit(lambda params: attention.apply(params, X)[0])(params)
    run = jax.jit(lambda params, padded, lengths: attention.apply(params, padded, mask=Mask.lengths(lengths))[0])
    got = np.asarray(run(params, padded, lengths))[:, :T]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_returned_only_on_request():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = random_params(attention, X)
    assert set(params) == {"params"}

    @jax.jit
    def run(params):
        _, without = attention.apply(params, X, mutable=["intermediates"])
        return without, attention.apply(params, X, sow_weights=True, mutable=["intermediates"])[1]

    without, seen = run(params)
    assert not without
    weights = np.asarray(seen["intermediates"]["weights"][0])
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_dropout_needs_its_rng_and_is_off_when_deterministic():
    attention = MultiHeadAttention(num_heads=N, head_dim=H, dropout_rate=0.5)
    params = random_params(attention, X)

    @jax.jit
    def run(params):
        same = attention.apply(params, X, deterministic=True)[0]
        without = MultiHeadAttention(num_heads=N, head_dim=H).apply(params, X)[0]
        dropped = attention.apply(params, X, deterministic=False, rngs={"dropout": jax.random.key(1)})[0]
        return same, without, dropped

    same, without, dropped = map(np.asarray, run(params))
    np.testing.assert_array_equal(same, without)
    assert np.abs(dropped - same).max() > 0.01


@pytest.mark.parametrize("position", [pytest.param(Rotary(), marks=pytest.mark.slow), ALiBi(num_heads=N)])
def test_a_cache_filled_in_parts_equals_the_whole(position):
    attention = MultiHeadAttention(num_heads=N, num_kv_heads=K, head_dim=H, value_dim=HV, position=position)
    params = random_params(attention, X)

    @jax.jit
    def run(params):
        whole, _ = attention.apply(params, X, mask=Mask.causal())
        cache, parts = KVCache.create(B, 9, K, H, HV, jnp.float32), []
        for part in (X[:, :3], X[:, 3:4], X[:, 4:]):
            out, cache = attention.apply(params, part, mask=Mask.causal(), cache=cache)
            parts.append(out)
        return whole, parts, cache_length(cache)

    expected, parts, lengths = run(params)
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(lengths, [T, T])


def test_empty_slots_are_not_attended_even_without_causality():
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = random_params(attention, X)

    @jax.jit
    def run(params):
        got, _ = attention.apply(params, X, cache=KVCache.create(B, 12, N, H, H, jnp.float32))
        return got, attention.apply(params, X)[0]

    np.testing.assert_allclose(*run(params), rtol=1e-5, atol=1e-6)


def test_rows_of_a_cache_continue_from_their_own_length():
    """Row 0 has 2 real tokens of 4: the padding after them is overwritten and never attended to."""
    attention = MultiHeadAttention(num_heads=N, head_dim=H, position=Rotary())
    params = random_params(attention, X)
    padded = np.array(X[:, :4])
    padded[0, 2:] = 1e3

    @jax.jit
    def run(params, padded):
        cache = KVCache.create(B, 9, N, H, H, jnp.float32)
        _, cache = attention.apply(params, padded, mask=Mask.causal(), cache=cache)
        cache = set_cache_length(cache, jnp.array([2, 4]))
        rest = jnp.stack([X[0, 2:5], X[1, 4:7]])
        got, cache = attention.apply(params, rest, mask=Mask.causal(), cache=cache)
        return got, cache_length(cache), attention.apply(params, X, mask=Mask.causal())[0]

    got, lengths, expected = map(np.asarray, run(params, padded))
    np.testing.assert_allclose(got, np.stack([expected[0, 2:5], expected[1, 4:7]]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(lengths, [5, 7])


def test_a_full_cache_raises_or_drops_but_never_overwrites():
    @jax.jit
    def fill(steps):
        cache = KVCache.create(1, 3, K, H, HV, jnp.float32)
        ones = jnp.ones((1, 4, K, H)), jnp.ones((1, 4, K, HV)), jnp.zeros((1, 4), jnp.int32)
        with pytest.raises(ValueError, match="4 tokens don't fit a cache of 3 slots: create a longer cache"):
            cache.append(*ones)
        two = [a[:, :2] for a in ones]
        return cache.append(*two).append(two[0] * steps, two[1] * steps, two[2])

    full = fill(np.array([7.0, 8.0], np.float32)[None, :, None, None])
    np.testing.assert_array_equal(np.asarray(full.key)[0, 0, :, 0], [1, 1, 7])


def test_cross_attention_reads_its_cache():
    context = normal(4, B, S, 9)
    attention = MultiHeadAttention(num_heads=N, head_dim=H)
    params = random_params(attention, X, context)

    @jax.jit
    def run(params, context):
        expected, _ = attention.apply(params, X, context)
        first, cache = attention.apply(params, X, context, cache=ContextCache())
        again, same = attention.apply(params, X, cache=cache)
        assert same is cache
        return expected, first, again

    expected, first, again = run(params, context)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_allclose(again, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="cross-attention cache is empty: pass context"):
        jax.eval_shape(lambda params: attention.apply(params, X, cache=ContextCache()), params)


def test_an_indivisible_width_names_the_field_to_set():
    with pytest.raises(ValueError, match=r"\(13\).*num_heads \(6\).*head_dim"):
        jax.eval_shape(MultiHeadAttention(num_heads=6).init, jax.random.key(0), X)


def test_rejects_a_self_attention_cache_with_a_context():
    def start(key, x):
        cache = KVCache.create(1, 4, 2, 4, 4, jnp.float32)
        return MultiHeadAttention(num_heads=2).init(key, x, x, cache=cache)

    with pytest.raises(ValueError, match="KVCache"):
        jax.eval_shape(start, jax.random.key(0), zeros(1, 3, 8))
