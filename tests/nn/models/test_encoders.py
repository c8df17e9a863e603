"""Encoder models: masked language model, classifier, embedder, image classifier; their heads, pooling and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numeric_parts import random_params
from scipy.special import erf

from transformer.config import (
    ConfigError,
    FeedForwardOptions,
    HeadTransform,
    LearnedOptions,
    Patches,
    QKNorm,
    RotaryOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import axes_of
from transformer.nn._sharding import parameter_spec
from transformer.nn.models import CausalLM, Classifier, Embedder, MaskedLM, Seq2Seq, VisionClassifier
from transformer.nn.models._encoders import pool
from transformer.nn.models._vision import cut_patches
from transformer.training._state import parameter_paths

CONFIG = TransformerConfig(
    vocab_size=17,
    d_model=12,
    num_layers=1,
    num_heads=3,
    feed_forward=FeedForwardOptions(d_ff=7),
    position=RotaryOptions(),
)
NUMBERS = np.random.default_rng(1).integers(0, 17, (2, 5), dtype=np.int32)
TOKENS = jax.device_put(NUMBERS)
PATCHES = Patches(image_height=6, image_width=4, patch_size=2, channels=5)
VISION = CONFIG.replace(
    input=PATCHES, **{"output.num_classes": 3, "output.pooling": "first"}, position=LearnedOptions(max_length=7)
)
PICTURES = np.random.default_rng(0).normal(size=(2, 6, 4, 5)).astype(np.float32)
IMAGES = jax.device_put(PICTURES)
BERT = HeadTransform(activation="gelu_erf", norm=True)


def shapes(model, *inputs):
    return jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *inputs), *inputs)["params"]


def make(model, *inputs):
    """Return random parameters in which every bias and scale has an effect."""
    return {"params": random_params(model, *inputs)["params"]}


@functools.partial(jax.jit, static_argnames=("model", "method"))
def apply(model, params, *inputs, method="__call__", **options):
    return model.apply(params, *inputs, method=method, **options)


def run(model, params, *inputs, **options):
    return jax.device_get(apply(model, params, *inputs, **options))


FIVE = Mask.lengths(jax.device_put(np.array([5, 5])))


def last_token_plus(number):
    changed = NUMBERS.copy()
    changed[:, -1] = (changed[:, -1] + number) % 17
    return changed


# Heads


def test_the_head_of_a_masked_language_model_equals_its_equation():
    model = MaskedLM(
        CONFIG.replace(**{"output.transform": BERT, "output.bias": True, "output.scale": 0.5, "output.softcap": 9.0})
    )
    params = make(model, TOKENS)
    p = params["params"]
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    x = np.random.default_rng(2).normal(size=(2, 5, 12)).astype(np.float32)
    dense, norm = p["head_transform"]["dense"], p["head_transform"]["norm"]
    y = x @ dense["kernel"] + dense["bias"]
    y = y * (1 + erf(y / np.sqrt(2))) / 2
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + CONFIG.norm.epsilon)
    y = (y * norm["scale"] + norm["bias"]) * 0.5
    logits = y @ p["embedding"]["embedding"].T + p["output_bias"]
    got = run(model, params, x, method="head")
    np.testing.assert_allclose(got, 9 * np.tanh(logits / 9), rtol=1e-4, atol=1e-5)
    hidden = run(model, params, TOKENS, method="hidden")
    np.testing.assert_allclose(
        run(model, params, TOKENS), run(model, params, hidden, method="head"), rtol=1e-4, atol=1e-5
    )
    assert got.dtype == jnp.float32


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        (MaskedLM, {"output.bias": True}, {"output_bias"}),
        (MaskedLM, {}, set()),
        (CausalLM, {"embedding.tie": False}, {"output/kernel"}),
        (CausalLM, {"embedding.tie": False, "output.bias": True}, {"output/kernel", "output/bias"}),
        (Classifier, {"output.num_classes": 3}, {"output/kernel", "output/bias"}),
        (Classifier, {"output.num_classes": 3, "output.bias": False}, {"output/kernel"}),
        (Embedder, {"output.bias": True}, set()),
        (
            MaskedLM,
            {"output.transform": BERT},
            {f"head_transform/{leaf}" for leaf in ("dense/kernel", "dense/bias", "norm/scale", "norm/bias")},
        ),
        (
            Embedder,
            {"output.transform": HeadTransform(activation="tanh", norm=False, use_bias=False)},
            {"head_transform/dense/kernel"},
        ),
    ],
)
def test_paths_of_heads_are_pinned(model, changes, expected):
    paths = set(parameter_paths(shapes(model(CONFIG.replace(**changes)), TOKENS)))
    assert {path for path in paths if not path.startswith(("encoder", "decoder"))} == {"embedding/embedding"} | expected


def test_a_classifier_applies_pooling_transform_and_output_in_order():
    model = Classifier(
        CONFIG.replace(**{"output.num_classes": 3, "output.transform": HeadTransform(activation="tanh", norm=False)})
    )
    params = make(model, TOKENS)
    p = jax.device_get(params["params"])
    pooled = np.random.default_rng(2).normal(size=(2, 12)).astype(np.float32)
    dense = p["head_transform"]["dense"]
    transformed = np.tanh(pooled @ dense["kernel"] + dense["bias"])
    expected = transformed @ p["output"]["kernel"] + p["output"]["bias"]
    np.testing.assert_allclose(run(model, params, pooled, method="head"), expected, rtol=1e-4, atol=1e-5)


def test_an_embedder_normalizes_vectors_if_configured():
    plain, normal = Embedder(CONFIG), Embedder(CONFIG.replace(**{"output.normalize": True}))
    params = make(plain, TOKENS)
    vectors, unit = run(plain, params, TOKENS), run(normal, params, TOKENS)
    hidden = run(plain, params, TOKENS, method="hidden")
    np.testing.assert_allclose(vectors, hidden.mean(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(unit, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), rtol=1e-4, atol=1e-6)
    zeros = np.zeros((1, 12), np.float32)
    np.testing.assert_array_equal(run(normal, params, zeros, method="head"), zeros)
    gradient = np.asarray(jax.jit(jax.grad(lambda x: normal.apply(params, x, method="head").sum()))(zeros))
    assert np.isfinite(gradient).all()


# Padding, types, direction


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_uses_only_non_padding_tokens(pooling):
    x = np.arange(1, 25, dtype=np.float32).reshape(3, 4, 2)

    @jax.jit
    def pooled(x):
        right = Mask.lengths(jnp.array([4, 3, 1]))
        left = Mask.segments(jnp.array([[1, 2, 2, 3], [0, 1, 1, 1], [0, 0, 0, 7]]))
        both = Mask.lengths(jnp.array([4, 3, 4])) & left
        return [pool(x, mask, pooling) for mask in (right, left, both)]

    right, left, both = pooled(x)
    rows = {"mean": [x[0].mean(0), x[1, :3].mean(0), x[2, 0]], "first": x[:, 0], "last": [x[0, 3], x[1, 2], x[2, 0]]}
    np.testing.assert_allclose(right, np.stack(list(rows[pooling])), rtol=1e-6)
    rows = {"mean": [x[0].mean(0), x[1, 1:].mean(0), x[2, 3]], "first": [x[0, 0], x[1, 1], x[2, 3]], "last": x[:, 3]}
    np.testing.assert_allclose(left, np.stack(list(rows[pooling])), rtol=1e-6)
    rows = {"mean": [x[0].mean(0), x[1, 1:3].mean(0), x[2, 3]], "first": [x[0, 0], x[1, 1], x[2, 3]]}
    rows["last"] = [x[0, 3], x[1, 2], x[2, 3]]
    np.testing.assert_allclose(both, np.stack(rows[pooling]), rtol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_padding_on_either_side_does_not_change_an_embedding(pooling):
    model = Embedder(CONFIG.replace(**{"output.pooling": pooling}))
    params = make(model, TOKENS)
    expected = run(model, params, TOKENS)
    junk = np.full((2, 2), 3, np.int32)
    got = run(model, params, np.concatenate([NUMBERS, junk], 1), mask=FIVE)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    segments = jax.device_put(np.array([[0, 0, 1, 1, 1, 1, 1]] * 2))
    positions = np.array([[0, 1, 0, 1, 2, 3, 4]] * 2)
    got = run(model, params, np.concatenate([junk, NUMBERS], 1), positions, Mask.segments(segments))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_masked_language_model_attends_both_ways_and_ignores_padding():
    model = MaskedLM(CONFIG)
    params = make(model, TOKENS)
    padded = np.concatenate([NUMBERS, np.full((2, 2), 3, np.int32)], 1)
    got = run(model, params, padded, mask=FIVE)[:, :5]
    expected = run(model, params, TOKENS)
    assert expected.shape == (2, 5, 17)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(run(model, params, last_token_plus(-1))[:, 0] - expected[:, 0]).max() > 1e-4


def test_token_types_are_added_and_default_to_zero():
    model = MaskedLM(CONFIG.replace(**{"embedding.token_types": 2}))
    params = make(model, TOKENS)
    assert params["params"]["token_type_embedding"]["embedding"].shape == (2, 12)
    types = np.array([[0, 0, 1, 1, 1]] * 2)
    typed, untyped = run(model, params, TOKENS, token_types=types), run(model, params, TOKENS)
    np.testing.assert_array_equal(run(model, params, TOKENS, token_types=0 * types), untyped)
    assert np.abs(typed - untyped).max() > 1e-3
    # Without positions and scaling, type 1 everywhere is the same as adding its vector to the whole token table.
    plain = MaskedLM(model.config.replace(**{"embedding.token_types": None, "embedding.scale": False}))
    unscaled = MaskedLM(model.config.replace(**{"embedding.scale": False}))
    params = jax.device_get(params)
    rows = params["params"]["token_type_embedding"]["embedding"]
    moved = {name: leaf for name, leaf in params["params"].items() if name != "token_type_embedding"}
    moved["embedding"] = {"embedding": moved["embedding"]["embedding"] + rows[1][None]}
    np.testing.assert_allclose(
        run(unscaled, params, TOKENS, token_types=np.ones_like(NUMBERS), method="hidden"),
        run(plain, {"params": moved}, TOKENS, method="hidden"),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_causal_classifier_attends_only_to_earlier_tokens():
    model = Classifier(CONFIG.replace(**{"output.num_classes": 3, "output.pooling": "last", "attention.causal": True}))
    params = make(model, TOKENS)
    hidden = run(model, params, TOKENS, method="hidden")
    other = run(model, params, last_token_plus(1), method="hidden")
    np.testing.assert_allclose(hidden[:, :-1], other[:, :-1], rtol=1e-5, atol=1e-6)
    assert np.abs(hidden[:, -1] - other[:, -1]).max() > 1e-3


def test_auxiliary_values_are_returned_with_the_output():
    for model in (MaskedLM(CONFIG), Embedder(CONFIG), Classifier(CONFIG.replace(**{"output.num_classes": 3}))):
        params = make(model, TOKENS)
        output, aux = run(model, params, TOKENS, method="with_aux")
        np.testing.assert_allclose(output, run(model, params, TOKENS), rtol=1e-5, atol=1e-6)
        assert aux == {}


def test_a_source_may_have_a_longer_table_than_the_target():
    model = Seq2Seq(CONFIG.replace(position=LearnedOptions(max_length=5, source_max_length=7)))
    params = shapes(model, jax.ShapeDtypeStruct((2, 7), jnp.int32), TOKENS)
    assert params["encoder"]["position_table"].shape == (7, 12)
    assert params["decoder"]["position_table"].shape == (5, 12)


# Images


def test_patches_are_squares_row_by_row():
    patches = np.asarray(jax.jit(lambda: cut_patches(IMAGES, PATCHES))())
    assert patches.shape == (2, 6, 2, 2, 5)
    np.testing.assert_array_equal(patches[1, 3], PICTURES[1, 2:4, 2:4])
    np.testing.assert_array_equal(patches[0, 4], PICTURES[0, 4:6, 0:2])


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_vision_classifier_is_a_class_token_and_patches(pooling):
    model = VisionClassifier(VISION.replace(**{"output.pooling": pooling}))
    params = make(model, IMAGES)
    p = jax.device_get(params["params"])
    assert p["patch_embedding"]["kernel"].shape == (2, 2, 5, 12)
    assert p["encoder"]["position_table"].shape == (7, 12)
    # (B, rows, 2, columns, 2, C) -> (B, rows, columns, 2, 2, C) -> (B, T, 2, 2, C)
    patches = PICTURES.reshape(2, 3, 2, 2, 2, 5).swapaxes(2, 3).reshape(2, 6, 2, 2, 5)
    x = np.einsum("btijc,ijcd->btd", patches, p["patch_embedding"]["kernel"])
    x = x + p["patch_embedding"]["bias"]
    x = np.concatenate([np.broadcast_to(p["class_token"], (2, 1, 12)), x], 1)
    hidden, logits = run(model, params, IMAGES, method="hidden"), run(model, params, IMAGES)
    expected, _, _ = jax.jit(lambda x: model.clone().bind(params).encoder(x))(x)
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)
    pooled = hidden[:, 0] if pooling == "first" else hidden[:, 1:].mean(1)
    assert logits.shape == (2, 3)
    np.testing.assert_allclose(logits, pooled @ p["output"]["kernel"] + p["output"]["bias"], rtol=1e-4, atol=1e-5)
    assert run(model, params, IMAGES, method="with_aux")[1] == {}


# Errors


def call(model, *inputs):
    """Initialize the model and call it without jit, where token types are checked."""
    return model.apply(make(model, inputs[0]), *inputs)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (VisionClassifier(VISION), (PICTURES[0],), r"\(batch.*6.*4.*5\).*got float32.*\(6.*4.*5\)"),
        (VisionClassifier(VISION), (np.zeros((2, 4, 6, 5), np.float32),), r"got float32.*\(2.*4.*6.*5\)"),
        (
            VisionClassifier(VISION),
            (np.zeros((2, 6, 4, 5), np.uint8),),
            r"images.*uint8",
        ),
        (
            VisionClassifier(VISION.replace(**{"output.pooling": "last"})),
            (IMAGES,),
            r"output.pooling.*'first' \(the.*token\).*'mean'.*got 'last'",
        ),
        (
            VisionClassifier(VISION.replace(**{"output.num_classes": None})),
            (IMAGES,),
            r"output.num_classes.*VisionClassifier",
        ),
        (
            VisionClassifier(CONFIG.replace(**{"output.num_classes": 3})),
            (IMAGES,),
            r"input.*VisionClassifier",
        ),
        (
            MaskedLM(CONFIG.replace(vocab_size=None)),
            (TOKENS,),
            r"vocab_size.*MaskedLM",
        ),
        (MaskedLM(CONFIG), (TOKENS, None, None, True, TOKENS), r"token_types"),
        (
            MaskedLM(CONFIG.replace(**{"embedding.token_types": 2})),
            (TOKENS, None, None, True, np.full((2, 5), 2)),
            r"token_types.*0.*1 \(token_types 2\).*got 2",
        ),
    ],
)
def test_rejects_invalid_models(model, inputs, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        call(model, *inputs)


def test_every_parameter_of_every_model_has_axes():
    """Every parameter has a sharding rule for its name and rank, which determines its mesh axes."""
    rich = {
        "output.transform": BERT,
        "embedding.norm": True,
        "attention.qk_norm": QKNorm(scope="all"),
    }
    sandwich = {"norm.position": "sandwich", "embedding.token_types": 2, "output.bias": True}
    t5 = {"position": T5BiasOptions(), "position.per_layer": True}
    for model, inputs in [
        (MaskedLM(CONFIG.replace(**rich, **sandwich, **t5)), TOKENS),
        (Classifier(CONFIG.replace(**rich, **{"output.num_classes": 4})), TOKENS),
        (VisionClassifier(VISION.replace(**rich)), IMAGES),
    ]:
        params = shapes(model, inputs)
        for path, leaf in zip(parameter_paths(params), jax.tree.leaves(params), strict=True):
            axes = axes_of(path, leaf.ndim)
            assert axes is not None, path
            assert leaf.ndim - len(axes.names) == ("/layers/" in f"/{path}"), (path, leaf.shape, axes)
    sizes = {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    assert parameter_spec("output_bias", (18,), sizes) == PartitionSpec("tensor")
    assert parameter_spec("token_type_embedding/embedding", (2, 12), sizes) == PartitionSpec(None, "fsdp")
    assert parameter_spec("head_transform/dense/kernel", (12, 12), sizes) == PartitionSpec("fsdp", None)
    assert parameter_spec("patch_embedding/kernel", (2, 2, 5, 12), sizes) == PartitionSpec(None, None, None, "fsdp")
