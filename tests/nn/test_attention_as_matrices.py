"""The claims of two teaching texts on attention, each checked on this code.

The texts are S1 'self-attention as matrices' and S3 'multi-head attention as one matrix operation, for vectors'. Each
test is named after the claim that it checks; docs/mathematics.md ends with a table of all claims.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import operations
from teaching_texts import KEYS, SMALL, B, D, T, X, captured, kernels, normal, softmax, start

from transformer.config import RotaryOptions, RotaryScaling
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn._positions import ALiBi, Rotary, Sinusoidal, T5Bias
from transformer.nn._stacks import Encoder
from transformer.nn.kernels import AttentionSpec, blockwise_attention, reference_attention
from transformer.nn.models import CausalLM, Seq2Seq

PLAIN = {"scale": 0.7}


def numbers(*shape):
    """Return normally distributed numbers that depend only on the shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def matrices(*shape):
    """Return one random matrix, or stack of matrices, for each of Q, K and V."""
    return dict(zip(("query", "key", "value"), numbers(3, *shape) / np.sqrt(shape[0]), strict=True))


@pytest.mark.parametrize("scale", [None, 1.0])
def test_s1_1_one_head_in_matrix_form(scale):
    """softmax(Q K^T) V with Q = X W_Q etc., W (d, d), scaled or not; an output row is a weighted mean of rows of V."""
    w = matrices(D, D)
    attention = MultiHeadAttention(num_heads=1, use_bias=False, scale=scale)
    params = kernels(**{name: matrix[:, None, :] for name, matrix in w.items()}, out=np.eye(D)[None])
    out, weights = map(np.asarray, captured(attention, params, np.asarray(X)[:1]))

    x = np.asarray(X)[0]
    q, k, v = (x @ w[name] for name in ("query", "key", "value"))
    expected = softmax(q @ k.T * (1 / np.sqrt(D) if scale is None else scale))
    np.testing.assert_allclose(weights[0, 0], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(out[0], expected @ v, rtol=1e-4, atol=1e-5)
    assert weights.min() > 0
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    mean = sum(weights[0, 0, 2, j] * v[j] for j in range(T))
    np.testing.assert_allclose(out[0, 2], mean, rtol=1e-4, atol=1e-5)
    assert (out[0] >= v.min(0)[None]).all()
    assert (out[0] <= v.max(0)[None]).all()


def test_s1_2_each_head_may_keep_the_full_width():
    """With heads of size d the concatenation is (n, h d), not (n, d), and W_O maps it back to d."""
    heads, w, w_o = 3, matrices(D, 3, D), numbers(3, D, D)
    attention = MultiHeadAttention(num_heads=heads, head_dim=D, use_bias=False)
    own = jax.tree.map(np.shape, start(attention, X)["params"])
    assert [own[name]["kernel"] for name in ("query", "value", "out")] == [(D, 3, D), (D, 3, D), (3, D, D)]
    out = np.asarray(jax.jit(attention.apply)(kernels(**w, out=w_o), X)[0])

    x = np.asarray(X)[0]
    each = []
    for i in range(heads):
        q, k, v = (x @ w[name][:, i] for name in ("query", "key", "value"))
        each.append(softmax(q @ k.T / np.sqrt(D)) @ v)
    joined = np.concatenate(each, -1)
    assert joined.shape == (T, heads * D)
    np.testing.assert_allclose(out[0], joined @ w_o.reshape(heads * D, D), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("d_k", [4, 16, 64])
def test_s1_3_a_dot_product_has_variance_d_k_and_scaled_1(d_k):
    """q.k of independent entries with mean 0 and variance 1 has mean 0 and variance d_k; 1 / sqrt(d_k) makes it 1."""
    q, k = (numbers(20_000, length, 1, d_k) for length in (1, 2))
    products = (q * k).sum(-1)
    assert products.mean() == pytest.approx(0, abs=0.03 * np.sqrt(d_k))
    assert products.var() == pytest.approx(d_k, rel=0.05)
    for scale, variance in ((1.0, d_k), (None, 1.0)):
        attend = jax.jit(lambda q, k, scale=scale: dot_product_attention(q, k, k, scale=scale, return_weights=True)[1])
        weights = np.asarray(attend(q, k))
        # log(w_0 / w_1) is the difference of two scores, whose variance is twice that of one score.
        difference = np.log(weights[..., 0]) - np.log(weights[..., 1])
        assert difference.var() / 2 == pytest.approx(variance, rel=0.05)


def test_s1_3_without_scale_the_gradient_of_softmax_dies():
    """The wider the head, the closer unscaled softmax is to one-hot, and the smaller its derivative."""

    def slope(d_k, scale):
        q, k = (numbers(32, length, 1, d_k) for length in (1, 11))

        def weights(scores, q, k):
            return dot_product_attention(q, k, k, bias=scores, scale=scale, return_weights=True)[1][:, 0, 0]

        by_scores = np.asarray(jax.jit(jax.jacobian(weights))(np.zeros((1, 11), np.float32), q, k))[:, :, 0]
        return np.median(np.linalg.norm(by_scores, axis=(1, 2)))

    scaled = [slope(d_k, None) for d_k in (8, 1024)]
    unscaled = [slope(d_k, 1.0) for d_k in (8, 64, 1024)]
    assert min(scaled) > 0.1
    assert unscaled[0] > unscaled[1] > unscaled[2]
    assert unscaled[2] < 0.01 * scaled[1]


PADDED = {
    "attention": (MultiHeadAttention(num_heads=3, head_dim=4, position=Rotary()), ["mask"]),
    "encoder": (Encoder(SMALL), ["mask"]),
    "language model": (CausalLM(SMALL.replace(**{"norm.position": "post"})), ["mask"]),
    "encoder-decoder": (Seq2Seq(SMALL.replace(position=RotaryOptions())), ["source_mask", "mask"]),
}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("kind", PADDED)
def test_s1_4_padding_a_batch_changes_nothing(kind):
    """Padding rows of different lengths into one batch changes neither the output of real tokens nor gradients."""
    module, masks = PADDED[kind]
    lengths = np.array([7, 4], np.int32)
    tokens = np.random.default_rng(4).integers(0, 13, (2, T)).astype(np.int32)
    rows = np.asarray(X)[:2] if kind in ("attention", "encoder") else tokens
    params = start(module, *[jax.device_put(rows)] * len(masks))

    @functools.partial(jax.grad, has_aux=True)
    def run(params, rows, lengths):
        out = module.apply(params, *[rows] * len(masks), **dict.fromkeys(masks, Mask.lengths(lengths)))
        out = out[0] if isinstance(out, tuple) else out
        real = jnp.arange(T)[None, : rows.shape[1]] < lengths[:, None]
        out = jnp.where(real[..., None], out, 0)
        return (out * jnp.cos(jnp.arange(out[0].size).reshape(1, *out.shape[1:]))).sum(), out

    run = jax.jit(run)
    grads, out = jax.tree.map(np.asarray, run(params, rows, lengths))
    padding = (np.arange(T)[None, :] >= lengths[:, None]).reshape(2, T, *[1] * (rows.ndim - 2))
    _, other = run(params, np.where(padding, np.asarray(5, rows.dtype), rows), lengths)
    np.testing.assert_array_equal(out, other)

    alone = [run(params, rows[i : i + 1, :n], lengths[i : i + 1]) for i, n in enumerate(lengths.tolist())]
    alone = jax.tree.map(np.asarray, alone)
    for i, (_, row) in enumerate(alone):
        np.testing.assert_allclose(out[i, : row.shape[1]], row[0], rtol=1e-4, atol=1e-5)
    total = jax.tree.map(lambda *leaves: sum(leaves), *[one for one, _ in alone])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), grads, total)
    assert sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(grads)) > 1


def test_s1_5_the_same_parameters_run_any_length():
    """No parameter shape depends on n: a module initialized with 3 elements runs on 301."""
    attention = MultiHeadAttention(num_heads=2)
    params = start(attention, jax.ShapeDtypeStruct((B, 3, D), jnp.float32))
    longer = jax.eval_shape(attention.init, KEYS[1], jax.ShapeDtypeStruct((1, 100_003, D), jnp.float32))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, longer)
    run, x = jax.jit(lambda x: attention.apply(params, x)[0]), np.asarray(X)[:1]
    out = np.asarray(run(np.concatenate([x] * 43, 1)))
    assert out.shape == (1, 301, D)
    # Each element occurs 43 times: 43 keys share its weight, and the weighted mean does not change.
    np.testing.assert_allclose(out[:, :T], run(x), rtol=1e-3, atol=1e-5)


def test_s1_5_memory_grows_linearly_with_length():
    """Doubling the length doubles the memory of the blockwise kernel and quadruples that of the formula."""

    def memory(kernel, length):
        shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3

        def loss(q, k, v):
            return kernel(q, k, v, AttentionSpec(mask=Mask.causal(), **PLAIN))[0].sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blocks = [memory(blockwise_attention, length) for length in (2048, 4096)]
    whole = [memory(reference_attention, length) for length in (2048, 4096)]
    assert blocks[1] < 2.1 * blocks[0]
    assert whole[1] > 3.8 * whole[0]
    assert blocks[1] < whole[1] / 20


def test_s1_6_short_periods_make_a_late_position_look_like_an_early_one():
    """With periods of 2 pi and 4 pi, position 88 (14 and 7 periods) is more similar to 0 than 1 is. In the paper's
    encoding it is not.
    """

    def likeness(base, features, length):
        encode = jax.jit(lambda positions: Sinusoidal(base=base).encoding(positions, features)[0])
        encoding = np.asarray(encode(np.arange(length, dtype=np.int32)[None]))
        return encoding @ encoding[0] / (features / 2)

    short = likeness(4.0, 4, 100)
    assert short[88] > 0.999 > short[1]
    assert short[1:88].max() < short[88]
    paper = likeness(10_000.0, 128, 20_000)
    assert paper[1] > paper[2:].max() + 0.01


@pytest.mark.parametrize("scheme", [Rotary(), ALiBi(num_heads=2), T5Bias(num_heads=2)])
def test_s1_6_relative_schemes_are_the_same_far_out(scheme):
    """With rotary, ALiBi and T5 the output depends only on distances, also 100,000 positions from the start."""
    table = None if scheme.table_shape is None else normal(5, *scheme.table_shape)
    attention = MultiHeadAttention(num_heads=2, head_dim=8, position=scheme)
    params = start(MultiHeadAttention(num_heads=2, head_dim=8), X)

    x, steps = np.asarray(X)[:1], np.arange(T, dtype=np.int32)

    @jax.jit
    def out(x, positions):
        return attention.apply(params, x, positions=positions[None], position_table=table)[0]

    near = np.asarray(out(x, steps))
    np.testing.assert_allclose(out(x, steps + 100_000), near, atol=1e-3)
    assert np.abs(np.asarray(out(x, steps[::-1] * 3)) - near).max() > 0.05

    absolute = jax.jit(lambda positions: Sinusoidal().encoding(positions[None], D))
    assert np.abs(np.asarray(absolute(steps + 100_000)) - np.asarray(absolute(steps))).max() > 1


def test_s1_6_schemes_that_extrapolate():
    """ALiBi decreases linearly, T5 stays in its last bucket, scaled rotary angles stay in the trained range."""
    table = np.arange(32, dtype=np.float32)[:, None]
    scaled, heads = Rotary(scaling=RotaryScaling(kind="linear", factor=4.0)), np.asarray(X)[:1, :, None]

    @jax.jit
    def run(table, heads):
        here = jnp.array([[1000]])
        far, steps = here + jnp.array([[40, 200, 100_000]]), jnp.arange(T)[None]
        biases = ALiBi(num_heads=1).bias(here, far), T5Bias(num_heads=1).bias(here, far, table)
        return [bias[0, 0, 0] for bias in biases], scaled.rotate(heads, 4 * steps), Rotary().rotate(heads, steps)

    (linear, kept), rotated, expected = jax.tree.map(np.asarray, run(table, heads))
    np.testing.assert_allclose(linear / linear[0], [1, 5, 2500])
    assert kept[0] < kept[1] == kept[2]
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


def test_s3_1_elements_are_vectors_and_the_three_sizes_are_free():
    """Elements have n_I real numbers, keys a different size n_K, values a smaller n_V: W_0 maps back to n_I."""
    n_i, n_k, n_v = D, 13, 3
    attention = MultiHeadAttention(num_heads=2, head_dim=n_k, value_dim=n_v)
    params = start(attention, X)
    own = {name: part["kernel"].shape for name, part in params["params"].items()}
    assert own == {"query": (n_i, 2, n_k), "key": (n_i, 2, n_k), "value": (n_i, 2, n_v), "out": (2, n_v, n_i)}
    assert jax.jit(attention.apply)(params, X)[0].shape == X.shape
    encoder = Encoder(SMALL.replace(d_model=n_i, **{"attention.head_dim": n_k, "attention.value_dim": n_v}))
    params, run = start(encoder, X), jax.jit(lambda params, x: encoder.apply(params, x)[0])
    out = np.asarray(run(params, X))
    assert out.shape == X.shape
    nearby = np.array(X)
    nearby[0, 2, 3] += 1e-3  # any real number is allowed, not only embeddings of tokens
    assert 0 < np.abs(np.asarray(run(params, nearby)) - out).max() < 0.1


@pytest.mark.parametrize("num_heads", [1, 2, 29])
@pytest.mark.cpu_only("reads the flattened products of a CPU")
def test_s3_2_one_matrix_multiplication_for_all_heads(num_heads):
    """One matrix multiplication each by W_Q, W_K (n_I, h n_K), W_V (n_I, h n_V) and W_0 (h n_V, n_I), for any h."""
    h, n_k, n_v = num_heads, 5, 3
    attention = MultiHeadAttention(num_heads=h, head_dim=n_k, value_dim=n_v)
    params = start(attention, X)
    seen = operations(lambda x: attention.apply(params, x)[0], X)
    products = [shapes for name, shapes in seen if name == "dot_general"]
    assert [shapes for shapes in products if len(shapes[0]) == 2] == [
        ((B * T, D), (D, h * n_k)),
        ((B * T, D), (D, h * n_k)),
        ((B * T, D), (D, h * n_v)),
        ((B * T, h * n_v), (h * n_v, D)),
    ]
    assert len(products) == 6  # plus the scores of all heads, and their weighted sums
    assert "concatenate" not in {name for name, _ in seen}


def test_s3_2_joint_heads_equal_separate_heads():
    """The concatenation changes nothing: the result is the sum over h single heads, each after its part of W_0."""
    h, heads = 3, ("query", "key", "value")
    attention = MultiHeadAttention(num_heads=h, head_dim=5, value_dim=4)
    params = start(attention, X)["params"]
    single = MultiHeadAttention(num_heads=1, head_dim=5, value_dim=4)

    def head(params, i):
        own = {name: jax.tree.map(lambda leaf: leaf[..., i : i + 1, :], params[name]) for name in heads}
        own["out"] = {"kernel": params["out"]["kernel"][i : i + 1], "bias": params["out"]["bias"] / h}
        return single.apply({"params": own}, X)[0]

    @jax.jit
    def run(params):
        return attention.apply({"params": params}, X)[0], sum(head(params, i) for i in range(h))

    whole, total = run(params)
    np.testing.assert_allclose(whole, total, rtol=1e-4, atol=1e-5)


def test_s3_3_softmax_per_query_and_head_and_w_0_without_activation():
    """Scores / sqrt(n_K), one softmax per query and head, and after the heads a matrix without an activation."""
    h, n_k = 2, 5
    w, w_0 = matrices(D, h, n_k), numbers(h, n_k, D)
    attention = MultiHeadAttention(num_heads=h, head_dim=n_k, use_bias=False)
    run = jax.jit(functools.partial(captured, attention))
    out, weights = map(np.asarray, run(kernels(**w, out=w_0), X))
    q, k, v = (np.einsum("btd,dnh->bnth", X, w[name]) for name in ("query", "key", "value"))
    expected = softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(n_k))
    np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), np.ones((B, h, T)), rtol=1e-5)
    joined = (expected @ v).transpose(0, 2, 1, 3).reshape(B, T, h * n_k)
    np.testing.assert_allclose(out, joined @ w_0.reshape(h * n_k, D), rtol=1e-3, atol=1e-4)

    other = w | {"query": np.stack([w["query"][:, 0], -w["query"][:, 1]], 1)}
    moved = np.abs(np.asarray(run(kernels(**other, out=w_0), X)[1]) - weights).max((0, 2, 3))
    assert moved[0] == 0 < 0.01 < moved[1]
    negated = run(kernels(**w | {"value": -w["value"]}, out=w_0), X)[0]
    np.testing.assert_array_equal(negated, -out)  # only a map without an activation commutes with negation


def test_s3_4_all_heads_and_positions_at_once():
    """There is no loop over heads or positions, rows of a batch are independent, and the encoder is unchanged."""
    params = start(MultiHeadAttention(num_heads=2), X)

    def run(x, implementation="reference"):
        attention = MultiHeadAttention(num_heads=2, implementation=implementation)
        return attention.apply(params, x, mask=Mask.causal())[0]

    def loops(implementation):
        return {name for name, _ in operations(lambda x: run(x, implementation), X)} & {"while", "scan", "cond", "map"}

    assert loops("blockwise")  # a loop over blocks of long sequences, not over heads; shows that loops are detected
    assert not loops("reference")
    together, alone = jax.jit(lambda x: (run(x), jax.vmap(lambda row: run(row[None])[0])(x)))(X)
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)

    def around(num_heads):
        params = jax.eval_shape(Encoder(SMALL.replace(num_heads=num_heads)).init, KEYS[1], X)["params"]
        layer = params["prefix_0"]
        return {name: jax.tree.map(lambda leaf: leaf.shape, layer[name]) for name in layer if name != "self_attention"}

    assert around(1) == around(5)
    assert set(around(1)) == {"attention_norm", "feed_forward_norm", "feed_forward"}
