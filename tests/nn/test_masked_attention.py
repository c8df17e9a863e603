"""The claims of the teaching text S4 'masked multi-head attention with numbers', each checked on this code.

Each test is named after the claim that it checks; docs/mathematics.md ends with a table of all claims.
"""

import functools

import jax
import numpy as np
import pytest
from teaching_texts import SMALL, B, D, T, X, captured, kernels, normal, softmax, start

from transformer.config import ConfigError
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._blocks import LayerInputs, PreNormBlock
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder
from transformer.nn.layers._layers import FeedForward
from transformer.nn.layers._norms import LayerNorm


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "decoder"])
def test_s4_1_no_output_depends_on_later_tokens(implementation):
    """The derivative of output t with respect to input s is exactly 0 for every s > t, and not 0 for any other s."""
    if implementation == "decoder":
        module, options = Decoder(SMALL), {}
    else:
        module, options = MultiHeadAttention(num_heads=2, implementation=implementation), {"mask": Mask.causal()}
    params = start(module, X)
    jacobian = jax.jit(jax.jacobian(lambda row: module.apply(params, row[None], **options)[0][0]))(np.asarray(X)[0])
    reach = np.abs(jacobian).max((1, 3))
    np.testing.assert_array_equal(reach > 0, np.tri(T, dtype=bool))


def test_s4_1_the_mask_is_a_matrix_of_zeros_and_minus_infinities():
    """softmax(Q K^T / sqrt(d_k) + M) V, with M = 0 for visible keys and -inf for hidden ones; d_k = d_model / h."""
    m = np.where(np.tri(T, dtype=bool), 0.0, -np.inf).astype(np.float32)
    q, k, v = (normal(seed, B, T, 2, 5) for seed in (6, 7, 8))
    attend = jax.jit(functools.partial(dot_product_attention, return_weights=True))
    out, weights = attend(q, k, v, bias=m)
    masked = attend(q, k, v, mask=Mask.causal())
    jax.tree.map(np.testing.assert_array_equal, (out, weights), masked)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(5) + m[None, None]
    np.testing.assert_allclose(weights, softmax(scores), rtol=1e-4, atol=1e-6)

    shapes = jax.tree.map(np.shape, start(MultiHeadAttention(num_heads=2), X)["params"])
    assert shapes["query"]["kernel"] == shapes["key"]["kernel"] == (D, 2, D // 2)


def test_s4_2_the_worked_example_digit_for_digit():
    """The text's example "Life is awesome": three tokens, two heads of size two, causal; all intermediate results."""
    x = np.array([[[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]]], np.float32)
    w = {
        "query": [[[1, 0], [0, 1], [1, 0], [0, 1]], [[0, 1], [1, 0], [0, 1], [1, 0]]],
        "key": [[[1, 1], [0, 1], [1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1], [1, 0]]],
        "value": [[[1, 0], [0, 1], [1, 1], [0, 1]], [[0, 1], [1, 0], [1, 0], [0, 1]]],
    }
    heads = {
        "query": [[[2, 0], [1, 1], [1, 2]], [[0, 2], [1, 1], [2, 1]]],
        "key": [[[2, 1], [1, 1], [1, 3]], [[1, 1], [1, 2], [3, 1]]],
        "value": [[[2, 1], [1, 2], [1, 2]], [[1, 1], [2, 0], [1, 2]]],
    }
    scores = np.array([[[4, 2, 2], [3, 2, 4], [4, 3, 7]], [[2, 4, 2], [2, 3, 4], [3, 4, 7]]])
    a1 = ["1.000 0.000 0.000", "0.670 0.330 0.000", "0.102 0.050 0.848"]
    a2 = ["1.000 0.000 0.000", "0.330 0.670 0.000", "0.050 0.102 0.848"]
    results = ["2.000 1.000 1.000 1.000", "1.670 1.330 1.670 0.330", "1.102 1.898 1.102 1.747"]

    attention = MultiHeadAttention(num_heads=2, use_bias=False)
    own = kernels(**{n: np.array(w[n]).transpose(1, 0, 2) for n in w}, out=np.eye(4).reshape(2, 2, 4))
    options = {"sow_weights": True, "capture_intermediates": True, "mutable": ["intermediates"]}
    call = jax.jit(lambda x, mask=None: attention.apply(own, x, mask=mask, **options))
    (out, _), seen = jax.tree.map(np.asarray, call(x, Mask.causal()))
    for name, expected in heads.items():
        computed = seen["intermediates"][name]["__call__"][0][0]  # (T, N, H)
        np.testing.assert_array_equal(computed.transpose(1, 0, 2), expected)
    # Weights are exp(score) / sum of the row, so their logarithms are the scores up to one constant per row.
    logs = np.log(np.asarray(call(x)[1]["intermediates"]["weights"][0])[0])
    shifted = logs - logs[..., :1] + scores[..., :1] / np.sqrt(2)
    np.testing.assert_allclose(shifted * np.sqrt(2), scores, atol=1e-5)

    def digits(rows):
        return [" ".join(f"{number:.3f}" for number in row) for row in rows]

    first, second = seen["intermediates"]["weights"][0][0]
    assert (digits(first), digits(second), digits(out[0])) == (a1, a2, results)


def test_s4_3_the_pre_norm_block_is_its_equation():
    """x + MHA(LN(x)), then x + FFN(LN(x))."""
    block, inputs = PreNormBlock(SMALL), LayerInputs(mask=Mask.causal())
    params = start(block, X, inputs)["params"]

    def part(module, name, x, **options):
        return module.apply({"params": params[name]}, x, **options)

    mha, ffn = MultiHeadAttention(num_heads=2, head_dim=6), FeedForward(width=7)

    @jax.jit
    def run(x):
        got = block.apply({"params": params}, x, inputs).x
        x = x + part(mha, "self_attention", part(LayerNorm(), "attention_norm", x), mask=Mask.causal())[0]
        return got, x + part(ffn, "feed_forward", part(LayerNorm(), "feed_forward_norm", x))

    got, expected = run(X)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_s4_3_a_mask_of_hidden_keys_is_inverted_by_not():
    """An upper-triangular array, True where a key is hidden: ~ converts it to the causal mask of this library."""
    hidden = np.triu(np.ones((T, T), bool), k=1)
    attention = MultiHeadAttention(num_heads=2)
    params = start(attention, X)

    @jax.jit
    def run(hidden):
        masks = Mask.causal(), Mask.array(~hidden), Mask.array(hidden)
        return [attention.apply(params, X, mask=mask)[0] for mask in masks]

    causal, turned, not_turned = map(np.asarray, run(hidden))
    np.testing.assert_array_equal(turned, causal)
    assert np.abs(not_turned - causal).max() > 0.01


def test_s4_3_weights_are_returned_only_on_request():
    """By default only the output is returned; with return_weights or sow_weights also the weights."""
    q = jax.device_put(np.asarray(X)[:, :, None])
    attention = MultiHeadAttention(num_heads=2)
    blockwise = MultiHeadAttention(num_heads=2, implementation="blockwise")  # never computes the full attention matrix
    params = start(attention, X)
    assert set(params) == {"params"}

    @jax.jit
    def run(q):
        with_weights = dot_product_attention(q, q, q, return_weights=True)
        return dot_product_attention(q, q, q), with_weights, attention.apply(params, X), blockwise.apply(params, X)[0]

    alone, (_, weights), (_, none), in_blocks = run(q)
    assert isinstance(alone, jax.Array)
    assert weights.shape == (B, 1, T, T)
    assert none is None
    assert captured(attention, params, X)[1].shape == (B, 2, T, T)
    assert in_blocks.shape == X.shape
    with pytest.raises(ConfigError, match="can't return attention weights"):
        captured(blockwise, params, X)
