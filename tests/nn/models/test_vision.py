"""Models of images: pooling, learned tokens, LayerScale, two classifiers, and two encoders with one space."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import (
    ConfigError,
    FeedForwardOptions,
    Images,
    LearnedOptions,
    Patches,
    RotaryOptions,
    TransformerConfig,
)
from transformer.nn._blocks import position_scheme
from transformer.nn._masks import Mask
from transformer.nn._parameter_axes import axes_of
from transformer.nn._positions import RotaryGrid
from transformer.nn.layers._layers import ACTIVATIONS
from transformer.nn.models import (
    Classifier,
    DistilledVisionClassifier,
    DualEncoder,
    Embedder,
    ImagePatches,
    VisionClassifier,
    VisionEmbedder,
)
from transformer.nn.models._vision import AttentionPooling, cut_patches, grid_positions
from transformer.training._state import parameter_paths

CONFIG = TransformerConfig(
    vocab_size=17,
    d_model=12,
    num_layers=1,
    num_heads=3,
    feed_forward=FeedForwardOptions(d_ff=7),
    position=RotaryOptions(),
)
NUMBERS = np.random.default_rng(1).integers(0, 17, (3, 5), dtype=np.int32)
TOKENS = jax.device_put(NUMBERS)
PICTURES = np.random.default_rng(0).normal(size=(2, 6, 4, 5)).astype(np.float32)
PIXELS = jax.device_put(PICTURES)
PATCHES = Patches(image_height=6, image_width=4, patch_size=2, channels=5)
VISION = CONFIG.replace(
    input=PATCHES, **{"output.num_classes": 3, "output.pooling": "first"}, position=LearnedOptions()
)
DISTILLED = VISION.replace(input=dataclasses.replace(PATCHES, distillation_token=True))
DUAL = CONFIG.replace(
    input=Images(
        features=7,
        encoder=TransformerConfig(
            d_model=8,
            num_layers=1,
            num_heads=2,
            feed_forward=FeedForwardOptions(d_ff=3, activation="quick_gelu"),
            position=LearnedOptions(),
            input=PATCHES,
            **{"output.pooling": "first"},
        ),
    ),
    **{"output.pooling": "last"},
)
SIGMOID = DUAL.replace(**{"input.similarity": "sigmoid"})


def make(model, *inputs):
    """Return random parameters in which every bias and scale has an effect."""
    return {"params": random_params(model, *inputs)["params"]}


def shapes(model, *inputs):
    return jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *inputs), *inputs)["params"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("model", "method"))
def apply(model, params, *inputs, method="__call__", **options):
    return model.apply(params, *inputs, method=method, **options)


def run(model, params, *inputs, **options):
    return jax.device_get(apply(model, params, *inputs, **options))


def initialized(init):
    return jax.jit(lambda: init(jax.random.key(0)))()


def test_quick_gelu_equals_its_formula():
    x = np.float32([-3.0, 0.0, 0.5, 2.0])
    np.testing.assert_allclose(jax.jit(ACTIVATIONS["quick_gelu"])(x), x / (1 + np.exp(-1.702 * x)), rtol=1e-6)


@pytest.mark.parametrize("pooling", ["first", "mean", "first_and_mean"])
def test_mean_pooling_averages_only_patches(pooling):
    hidden = normal(0, 2, 8, 12)
    first, mean = hidden[:, 0], hidden[:, 2:].mean(1)
    expected = {"first": first, "mean": mean, "first_and_mean": np.concatenate([first, mean], -1)}[pooling]
    model = VisionEmbedder(DISTILLED.replace(**{"output.pooling": pooling}))
    np.testing.assert_allclose(run(model, make(model, PIXELS), hidden, method="pool"), expected, rtol=1e-6, atol=1e-7)
    # A classifier of both halves has twice as many inputs.
    assert shapes(VisionClassifier(model.config), PIXELS)["output"]["kernel"].shape == (
        24 if pooling == "first_and_mean" else 12,
        3,
    )


def test_supports_images_without_a_class_token():
    config = VISION.replace(input=dataclasses.replace(PATCHES, class_token=False), **{"output.pooling": "mean"})
    model = VisionEmbedder(config)
    params = make(model, PIXELS)
    assert "class_token" not in params["params"]
    hidden = run(model, params, PIXELS, method="hidden")
    assert hidden.shape == (2, 6, 12)
    np.testing.assert_allclose(run(model, params, PIXELS), hidden.mean(1), rtol=1e-4, atol=1e-5)


def test_registers_have_no_positions():
    """Registers are added after the class token; patches keep their rows of the table, and registers get none."""
    patches = dataclasses.replace(PATCHES, registers=2)
    model = VisionEmbedder(VISION.replace(input=patches, num_layers=1, **{"output.pooling": "mean"}))
    params = make(model, PIXELS)
    assert params["params"]["registers"].shape == (2, 12)
    assert params["params"]["encoder"]["position_table"].shape == (7, 12)
    scheme = position_scheme(model.config, causal=False)
    table = np.repeat(np.arange(1, 8, dtype=np.float32)[:, None], 12, axis=1)
    added = np.asarray(jax.jit(scheme.add)(np.zeros((1, 9, 12), np.float32), np.arange(9)[None], table))
    np.testing.assert_array_equal(added[0, :, 0], [1, 0, 0, 2, 3, 4, 5, 6, 7])
    # The mean is that of the 6 patches.
    hidden = run(model, params, PIXELS, method="hidden")
    assert hidden.shape == (2, 9, 12)
    np.testing.assert_allclose(run(model, params, PIXELS), hidden[:, 3:].mean(1), rtol=1e-4, atol=1e-5)


def test_a_rotary_grid_depends_on_differences_of_rows_and_columns():
    scheme = RotaryGrid(grid=(3, 5), first=2, base=7.0)
    heads = np.broadcast_to(normal(0, 1, 1, 1, 8), (1, 17, 1, 8))
    rotated = np.asarray(jax.jit(scheme.rotate)(heads, np.arange(17)[None]))[0, :, 0]
    np.testing.assert_allclose(rotated[:2], heads[0, :2, 0])  # learned tokens are not rotated
    scores = (rotated[2:] @ rotated[2:].T).reshape(3, 5, 3, 5)
    # From (0, 1) to (1, 3) and from (1, 0) to (2, 2): the same difference; another one with rows and columns swapped.
    np.testing.assert_allclose(scores[0, 1, 1, 3], scores[1, 0, 2, 2], rtol=1e-5)
    assert abs(scores[0, 1, 1, 3] - scores[0, 1, 2, 2]) > 1e-3
    # 2 pi / base^(4i / H): the first pair of a row turns by its coordinates, -2/3, 0 and 2/3 of the three rows.
    first = rotated[2 + 5, 0], rotated[2, 0]
    a, b = heads[0, 0, 0, 0], heads[0, 0, 0, 4]
    angle = 2 * np.pi * -2 / 3
    np.testing.assert_allclose(first, (a, a * np.cos(angle) - b * np.sin(angle)), rtol=1e-4)
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        jax.jit(scheme.rotate)(heads[..., :6], np.arange(17)[None])


def test_pixels_outside_whole_patches_have_no_effect():
    size = {"image_height": 7, "image_width": 5, "drop_remainder": True}
    model = VisionEmbedder(VISION.replace(input=dataclasses.replace(PATCHES, **size)))
    larger = np.pad(PICTURES, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=3.0)
    params = make(model, larger)
    expected = run(VisionEmbedder(VISION), params, PIXELS)
    np.testing.assert_allclose(run(model, params, larger), expected, rtol=1e-5, atol=1e-6)


def test_attention_pooling_does_not_depend_on_the_order_of_patches():
    model = AttentionPooling(VISION)
    hidden = normal(0, 2, 5, 12)
    params = make(model, hidden)
    pooled = run(model, params, hidden)
    np.testing.assert_allclose(run(model, params, hidden[:, ::-1]), pooled, atol=1e-4)
    assert np.abs(pooled - run(model, params, hidden[:, :4])).max() > 1e-3


def test_layer_scale_multiplies_the_output_of_each_sublayer():
    """Factors of 1 change nothing, factors of 0 remove a layer; they start with the value of the config."""
    plain, model = (VisionEmbedder(VISION.replace(**{"stack.layer_scale": value})) for value in (None, 0.3))
    params = jax.device_get(make(model, PIXELS))

    def scaled(value):
        layers = params["params"]["encoder"]["layers"]["slot_0"]
        layers = layers | {
            name: np.full((1, 12), value, np.float32) for name in ("attention_scale", "feed_forward_scale")
        }
        encoder = params["params"]["encoder"] | {"layers": {"slot_0": layers}}
        return run(model, {"params": params["params"] | {"encoder": encoder}}, PIXELS, method="hidden")

    layers = params["params"]["encoder"]["layers"]["slot_0"]
    layers = {name: leaf for name, leaf in layers.items() if not name.endswith("_scale")}
    encoder = params["params"]["encoder"] | {"layers": {"slot_0": layers}}
    same = {"params": params["params"] | {"encoder": encoder}}
    np.testing.assert_allclose(scaled(1.0), run(plain, same, PIXELS, method="hidden"), rtol=1e-4, atol=1e-5)
    without = {"slot_0": jax.tree.map(np.zeros_like, layers)}
    nothing = {"params": params["params"] | {"encoder": encoder | {"layers": without}}}
    np.testing.assert_allclose(scaled(0.0), run(plain, nothing, PIXELS, method="hidden"), rtol=1e-4, atol=1e-5)
    fresh = initialized(lambda key: model.init(key, PIXELS)["params"]["encoder"]["layers"]["slot_0"])
    for name in ("attention_scale", "feed_forward_scale"):
        np.testing.assert_allclose(fresh[name], 0.3)


def test_a_distilled_classifier_averages_two_classifiers():
    model = DistilledVisionClassifier(DISTILLED)
    params = make(model, PIXELS)
    hidden, p = run(model, params, PIXELS, method="hidden"), jax.device_get(params["params"])
    names = ("output", "distillation_output")
    both = [hidden[:, i] @ p[name]["kernel"] + p[name]["bias"] for i, name in enumerate(names)]
    np.testing.assert_allclose(run(model, params, PIXELS), (both[0] + both[1]) / 2, rtol=1e-4, atol=1e-5)
    assert run(model, params, PIXELS, method="with_aux")[1] == {}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("config", [DUAL, SIGMOID], ids=["softmax", "sigmoid"])
def test_a_dual_encoder_compares_all_pairs(config):
    model = DualEncoder(config)
    params = make(model, TOKENS, PIXELS)
    texts = run(model, params, TOKENS, method="embed_texts")
    images = run(model, params, PIXELS, method="embed_images")
    assert (texts.shape, images.shape) == ((3, 7), (2, 7))
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(images, axis=1), 1.0, rtol=1e-5)
    p = jax.device_get(params["params"])
    expected = np.exp(p["logit_scale"][0]) * (images @ texts.T) + (p["logit_bias"][0] if config is SIGMOID else 0.0)
    np.testing.assert_allclose(run(model, params, TOKENS, PIXELS), expected, rtol=1e-4, atol=1e-5)
    # Padding does not change the vector of a text.
    padded = np.pad(NUMBERS, ((0, 0), (0, 2)))
    mask = Mask.lengths(jax.device_put(np.full(3, 5)))
    again = run(model, params, padded, mask, method="embed_texts")
    np.testing.assert_allclose(again, texts, atol=1e-5)
    logit_scale = initialized(lambda key: model.init(key, TOKENS, PIXELS)["params"]["logit_scale"])
    np.testing.assert_allclose(np.exp(logit_scale), 10 if config is SIGMOID else 1 / 0.07, rtol=1e-5)


def test_a_causal_text_encoder_without_a_mask_ends_at_the_end_token():
    """The padding can be the end token or any other one. Without an end token, the last position is pooled."""
    causal = DualEncoder(DUAL.replace(**{"attention.causal": True}))
    params, end = make(causal, TOKENS, PIXELS), CONFIG.vocab_size - 1
    texts = NUMBERS % end
    texts[0, 3], texts[1, [1, 3, 4]] = end, [end, end, 2]
    lengths = jax.device_put(np.array([4, 2, 5]))
    got = run(causal, params, texts, method="embed_texts")
    expected = run(causal, params, texts, Mask.lengths(lengths), method="embed_texts")
    np.testing.assert_allclose(got, expected, atol=1e-5)
    both = SIGMOID.replace(**{"output.pooling": "last"})
    model = DualEncoder(both)  # not causal: SigLIP reads the last position
    params = make(model, TOKENS, PIXELS)
    full = Mask.lengths(jax.device_put(np.full(3, 5)))
    got, expected = (run(model, params, texts, *given, method="embed_texts") for given in ((), (full,)))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (DistilledVisionClassifier(DISTILLED), (PIXELS,)),
        (VisionEmbedder(VISION.replace(**{"output.pooling": "attention", "stack.layer_scale": 0.1})), (PIXELS,)),
        (DualEncoder(SIGMOID), (TOKENS, PIXELS)),
    ],
)
def test_every_parameter_has_axes(model, inputs):
    params = shapes(model, *inputs)
    for path, leaf in zip(parameter_paths(params), jax.tree.leaves(params), strict=True):
        axes = axes_of(path, leaf.ndim)
        assert axes is not None, path
        assert leaf.ndim - len(axes.names) == ("/layers/" in f"/{path}"), (path, leaf.shape, axes)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            VisionEmbedder(VISION.replace(input=dataclasses.replace(PATCHES, class_token=False))),
            (PIXELS,),
            r"output.pooling='first'.*input.class_token",
        ),
        (VisionEmbedder(CONFIG), (PIXELS,), r"input.*VisionEmbedder"),
        (
            DistilledVisionClassifier(VISION),
            (PIXELS,),
            r"input.distillation_token=True",
        ),
        (Embedder(CONFIG.replace(**{"output.pooling": "attention"})), (TOKENS,), r"output.pooling='attention'"),
        (
            Classifier(VISION.replace(**{"output.pooling": "first_and_mean"})),
            (TOKENS,),
            r"output.pooling='first_and_mean'",
        ),
        (DualEncoder(CONFIG), (TOKENS, PIXELS), r"DualEncoder.*input=Images"),
        (
            DualEncoder(DUAL.replace(**{"output.normalize": True})),
            (TOKENS, PIXELS),
            r"output.transform.*output.normalize",
        ),
    ],
)
def test_rejects_invalid_models(model, inputs, message):
    with pytest.raises(ConfigError, match=message):
        shapes(model, *inputs)


ANY_GRID = VISION.replace(
    input=dataclasses.replace(PATCHES, class_token=False, resize_positions=True),
    **{"output.pooling": "mean", "position": None},
)


def flat(pixels, padding=0):
    """Return images (B, height, width, 5) as ImagePatches with padding that is not zero."""
    values = np.asarray(jax.jit(lambda pixels: cut_patches(pixels, PATCHES))(pixels)).reshape(len(pixels), -1, 20)
    values = np.pad(values, ((0, 0), (0, padding), (0, 0)), constant_values=7.0)
    grid = np.array([pixels.shape[1] // 2, pixels.shape[2] // 2])
    return ImagePatches(values, np.broadcast_to(grid, (len(pixels), 2)))


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_padding_of_patches_changes_nothing(pooling):
    """Images of different grids in one batch have the results of each image alone, without padding."""
    model = VisionClassifier(ANY_GRID.replace(**{"output.pooling": pooling}))
    params = make(model, PIXELS)
    wide, high = normal(0, 1, 4, 10, 5), normal(1, 1, 8, 2, 5)
    alone = [run(model, params, one)[0] for one in (wide, high)]
    parts = flat(wide, 1), flat(high, 7)
    both = ImagePatches(*(np.concatenate(arrays) for arrays in zip(*map(jax.tree.leaves, parts), strict=True)))
    assert both.values.shape == (2, 11, 20)
    np.testing.assert_allclose(run(model, params, both), np.stack(alone), atol=1e-5)
    assert np.abs(alone[0] - run(model, params, wide[:, ::-1])[0]).max() > 1e-3  # positions have an effect


def test_positions_are_interpolated_for_other_grids():
    """Of the stored grid, they are the table; otherwise a constant stays, and rows and columns swap with the table."""
    table = normal(0, 6, 4)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def of(table, stored, count, grid):
        return grid_positions(table, stored, grid, count)

    stored = np.asarray(of(table, (3, 2), 6, np.array([[3, 2]])))
    np.testing.assert_allclose(stored[0], table, atol=1e-6)
    np.testing.assert_allclose(of(np.ones((6, 4)), (3, 2), 35, np.array([[5, 7]])), 1.0, rtol=1e-5)
    swapped = table.reshape(3, 2, 4).swapaxes(0, 1).reshape(6, 4)
    one = np.asarray(of(table, (3, 2), 5, np.array([[5, 1]])))
    np.testing.assert_allclose(of(swapped, (2, 3), 5, np.array([[1, 5]])), one, atol=1e-6)
    # One column is the mean of both; of three rows, five rows have centers at 0.3, 0.9, 1.5, 2.1 and 2.7.
    rows = table.reshape(3, 2, 4).mean(1)
    expected = np.stack([rows[0], 0.6 * rows[0] + 0.4 * rows[1], rows[1], 0.4 * rows[1] + 0.6 * rows[2], rows[2]])
    np.testing.assert_allclose(one[0], expected, atol=1e-6)


def test_images_of_any_grid_have_the_right_shape():
    model = VisionClassifier(ANY_GRID)
    params = make(model, PIXELS)
    with pytest.raises(ValueError, match=r"\(batch.*2.*2.*5\)"):
        apply(model, params, np.zeros((2, 5, 4, 5)))
    with pytest.raises(ValueError, match=r"\(batch.*20\)"):
        apply(model, params, ImagePatches(np.zeros((2, 3, 19)), np.ones((2, 2), int)))
    plain = VisionClassifier(VISION)
    with pytest.raises(ValueError, match="got ImagePatches"):
        apply(plain, make(plain, PIXELS), flat(PICTURES))
