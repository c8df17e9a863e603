"""Complete models: calls, caches, positions, padding, packing, and errors."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_meshes import computing_on
from numeric_parts import random_params

from transformer.config import (
    ALiBiOptions,
    AttentionOptions,
    ConfigError,
    FeedForwardOptions,
    LearnedOptions,
    RotaryOptions,
    SinusoidalOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.nn._caches import cache_length
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Classifier, Seq2Seq
from transformer.nn.models._encoders import pool

CONFIG = TransformerConfig(
    vocab_size=17,
    d_model=12,
    num_layers=2,
    num_heads=3,
    attention=AttentionOptions(num_kv_heads=1),
    feed_forward=FeedForwardOptions(d_ff=7),
)
NUMBERS = np.random.default_rng(1).integers(0, 17, (2, 9), dtype=np.int32)
"""Slices of a NumPy array need no program."""
TOKENS = jax.device_put(NUMBERS)
POSITIONS = {
    "sinusoidal": SinusoidalOptions(),
    "learned": LearnedOptions(max_length=13),
    "rotary": RotaryOptions(dim=2),
    "alibi": ALiBiOptions(),
    "t5": T5BiasOptions(buckets=8, max_distance=6),
    "none": None,
}


def make(model, *inputs, **changes):
    model = model(CONFIG.replace(**changes))
    return model, random_params(model, *inputs)


@functools.cache
def started(model, *sizes):
    """Return an empty cache."""
    return jax.jit(lambda: model.init_cache(*sizes))()


@functools.partial(jax.jit, static_argnames=("model", "method"))
def apply(model, params, *inputs, method="__call__", **options):
    """Call the model under jit: without it, each operation would be compiled separately."""
    return model.apply(params, *inputs, method=method, **options)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("position", POSITIONS)
def test_cached_is_uncached(position):
    model, params = make(CausalLM, TOKENS, position=POSITIONS[position])
    whole = apply(model, params, TOKENS)
    chex.assert_shape(whole, (2, 9, 17))
    cache, parts = started(model, 2, 11), []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        logits, cache = apply(model, params, NUMBERS[:, start:stop], cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache_length(cache), [9, 9])


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("position", POSITIONS)
def test_packed_sequences_equal_separate_sequences(position):
    model, params = make(CausalLM, TOKENS, position=POSITIONS[position])
    first, second = NUMBERS[:1, :4], NUMBERS[1:, :5]
    packed = np.concatenate([first, second], 1)
    segments = np.array([[1] * 4 + [2] * 5])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])

    @jax.jit
    def run(params, packed, positions, segments, first, second):
        together = model.apply(params, packed, positions, Mask.segments(segments))
        return together, model.apply(params, first), model.apply(params, second)

    got, *alone = jax.device_get(run(params, packed, positions, segments, first, second))
    np.testing.assert_allclose(got[:, :4], alone[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[:, 4:], alone[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5"])
def test_relative_schemes_depend_only_on_distances(position):
    model, params = make(CausalLM, TOKENS, position=POSITIONS[position])
    steps = np.broadcast_to(np.arange(9), (2, 9))
    shifted = np.asarray(apply(model, params, TOKENS, steps + 1000))
    np.testing.assert_allclose(shifted, apply(model, params, TOKENS), rtol=1e-3, atol=1e-4)
    stretched = np.asarray(apply(model, params, TOKENS, 3 * steps))
    assert np.abs(stretched - shifted).max() > 1e-3


@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_given_positions_reach_a_cached_bias(position):
    """With gaps between positions, the cache must store the positions of its keys."""
    model, params = make(CausalLM, TOKENS, position=POSITIONS[position])
    positions = np.broadcast_to(np.array([0, 2, 3, 7, 8, 9, 20, 21, 30]), (2, 9))
    whole = np.asarray(apply(model, params, TOKENS, positions))
    _, cache = apply(model, params, NUMBERS[:, :6], positions[:, :6], cache=started(model, 2, 9))
    rest, _ = apply(model, params, NUMBERS[:, 6:], positions[:, 6:], cache=cache)
    np.testing.assert_allclose(rest, whole[:, 6:], rtol=1e-4, atol=1e-5)


def test_hidden_states_and_head_compose_to_the_logits():
    for changes in ({}, {"embedding.tie": False, "output.softcap": 2.0}):
        model, params = make(CausalLM, TOKENS, **changes)
        hidden = apply(model, params, TOKENS, method="hidden")
        logits = np.asarray(apply(model, params, hidden, method="head"))
        chex.assert_shape(hidden, (2, 9, 12))
        np.testing.assert_array_equal(logits, apply(model, params, TOKENS))
    assert np.abs(logits).max() < 2.0


def test_parameter_paths_are_pinned():
    _, params = make(
        Seq2Seq,
        TOKENS,
        TOKENS,
        **{"attention.num_kv_heads": None, "embedding.source_vocab_size": 19, "embedding.tie": False},
    )
    paths = {"/".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(params["params"])}
    attention = [f"{name}/{leaf}" for name in ("query", "key", "value", "out") for leaf in ("kernel", "bias")]
    norm, feed_forward = ["scale", "bias"], [f"{name}/{leaf}" for name in ("up", "down") for leaf in ("kernel", "bias")]

    def layer(cross):
        kinds = ["self_attention"] + ["cross_attention"] * cross
        norms = ["attention_norm"] + ["cross_attention_norm"] * cross + ["feed_forward_norm"]
        leaves = [f"{kind}/{leaf}" for kind in kinds for leaf in attention]
        leaves += [f"{name}/{leaf}" for name in norms for leaf in norm]
        return leaves + [f"feed_forward/{leaf}" for leaf in feed_forward]

    expected = {"embedding/embedding", "source_embedding/embedding", "output/kernel"}
    expected |= {f"encoder/layers/slot_0/{leaf}" for leaf in layer(False)}
    expected |= {f"decoder/layers/slot_0/{leaf}" for leaf in layer(True)}
    expected |= {f"{stack}/final_norm/{leaf}" for stack in ("encoder", "decoder") for leaf in norm}
    assert paths == expected


def test_seq2seq_ignores_source_padding():
    model, params = make(Seq2Seq, TOKENS, TOKENS)
    target, other = NUMBERS[:, :5], NUMBERS.copy()
    other[1, 6:] = 3

    @jax.jit
    def run(source, target, lengths):
        return model.apply(params, source, target, source_mask=Mask.lengths(lengths))

    logits, junk, short = (
        np.asarray(run(source, target, np.array(lengths)))
        for source, lengths in ((NUMBERS, [9, 6]), (other, [9, 6]), (NUMBERS[:, :6], [6, 6]))
    )
    np.testing.assert_array_equal(logits, junk)
    np.testing.assert_allclose(logits[1], short[1], rtol=1e-4, atol=1e-5)
    assert np.abs(logits[0] - short[0]).max() > 1e-3


def test_seq2seq_decodes_from_its_cache():
    model, params = make(Seq2Seq, TOKENS, TOKENS, **{"norm.position": "post", "stack.num_encoder_layers": 1})
    mask = Mask.lengths(jax.device_put(np.array([9, 6])))
    whole = apply(model, params, TOKENS, TOKENS, source_mask=mask)
    first, cache = apply(model, params, TOKENS, NUMBERS[:, :4], source_mask=mask, cache=started(model, 2, 9))
    rest, _ = apply(model, params, None, NUMBERS[:, 4:], source_mask=mask, cache=cache)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-4, atol=1e-5)


def test_source_target_and_logits_share_a_table_by_default():
    _, params = make(Seq2Seq, TOKENS, TOKENS)
    tables = [leaf.shape for leaf in jax.tree.leaves(params) if 17 in leaf.shape]
    assert tables == [(17, 12)]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_padding_does_not_change_a_classifier(pooling):
    model, params = make(Classifier, TOKENS, **{"output.num_classes": 3, "output.pooling": pooling})
    padded = np.concatenate([NUMBERS, np.zeros((2, 4), np.int32)], 1)
    got = apply(model, params, padded, mask=Mask.lengths(jax.device_put(np.array([9, 9]))))
    expected = apply(model, params, TOKENS)
    chex.assert_shape(expected, (2, 3))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    hidden = np.asarray(apply(model, params, TOKENS, method="hidden"))
    pooled = {"mean": hidden.mean(1), "first": hidden[:, 0], "last": hidden[:, -1]}[pooling]
    np.testing.assert_allclose(apply(model, params, pooled, method="head"), expected, rtol=1e-4, atol=1e-5)


def test_embeddings_are_scaled_by_the_square_root_of_the_width():
    """Scaling is the same as a table multiplied by sqrt(d_model), here sqrt(12), without scaling."""
    model, params = make(CausalLM, TOKENS, position=None)
    plain = CausalLM(model.config.replace(**{"embedding.scale": False}))
    scaled = jax.tree.map(lambda leaf: leaf, params)
    scaled["params"]["embedding"] = {
        "embedding": np.asarray(params["params"]["embedding"]["embedding"]) * np.float32(np.sqrt(12))
    }
    np.testing.assert_allclose(
        apply(model, params, TOKENS, method="hidden"),
        apply(plain, scaled, TOKENS, method="hidden"),
        rtol=1e-4,
        atol=1e-5,
    )


def test_computing_in_bfloat16_keeps_float32_parameters_and_logits():
    model, params = make(CausalLM, TOKENS, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}

    @jax.jit
    def run(params):
        exact = CausalLM(CONFIG).apply(params, TOKENS)
        return model.apply(params, TOKENS), model.apply(params, TOKENS, method="hidden"), exact

    logits, hidden, exact = jax.device_get(run(params))
    assert (logits.dtype, hidden.dtype) == (jnp.float32, jnp.bfloat16)
    with computing_on("tpu", "TPU v5 lite"):
        cache = jax.eval_shape(lambda: model.init_cache(1, 2))
    assert cache["layers"]["slot_0"].self_attention.key.dtype == jnp.bfloat16
    # A CPU stores the same numbers in float32. The result keeps the dtype of the model.
    cache = started(model, 2, TOKENS.shape[1])
    assert cache["layers"]["slot_0"].self_attention.key.dtype == jnp.float32
    cached, _ = apply(model, params, TOKENS, cache=cache)
    np.testing.assert_allclose(cached, logits, atol=0.05)
    assert 0 < np.abs(logits - exact).max() < 0.1


def starting_with(token):
    tokens = NUMBERS.copy()
    tokens[0, 0] = token
    return jax.device_put(tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, p: m.apply(p, starting_with(17)),
            r"token ids must be from 0 to 16 .* got 17",
        ),
        (lambda m, p: m.apply(p, starting_with(-1)), r"token ids must be from 0 to 16 .* got -1"),
        (lambda m, p: random_params(CausalLM(m.config.replace(vocab_size=None)), TOKENS), r"vocab_size"),
        (lambda m, p: random_params(Classifier(m.config), TOKENS), r"num_classes"),
    ],
)
def test_rejects_invalid_models(call, message):
    model, params = make(CausalLM, TOKENS)
    with pytest.raises((ValueError, ConfigError), match=message):
        call(model, params)


def test_a_learned_table_rejects_longer_inputs():
    model, params = make(CausalLM, TOKENS, position=LearnedOptions(max_length=9))
    longer = np.zeros((1, 10), np.int32)
    with pytest.raises(ValueError, match=r"10.*9.*max_length"):
        apply(model, params, longer)


def test_source_segments_do_not_affect_target_self_attention():
    """With equal lengths they would be used as the segments of the target in cross-attention."""
    source = Mask.segments(jax.device_put(np.array([[1] * 5 + [2] * 4] * 2)))
    model, params = make(Seq2Seq, TOKENS, TOKENS)
    with pytest.raises(ValueError, match=r"context_mask=Mask\.segments\(target_segments, source_segments\)"):
        apply(model, params, TOKENS, TOKENS, source_mask=source)
    logits = jax.eval_shape(lambda: model.apply(params, TOKENS, TOKENS, source_mask=source, context_mask=source))
    assert logits.shape == (2, 9, 17)


def test_mean_pooling_does_not_overflow_float16():
    """The sum exceeds the range of float16, and the count is not exact in bfloat16."""
    dtypes = (jnp.float16, jnp.bfloat16, jnp.float32)
    hidden = np.full((1, 2_049, 3), 40.0, np.float32)
    means = jax.jit(lambda hidden: [pool(hidden.astype(dtype), None, "mean") for dtype in dtypes])(hidden)
    for dtype, mean in zip(dtypes, means, strict=True):
        assert (mean.dtype, mean.tolist()) == (dtype, [[40.0] * 3])
