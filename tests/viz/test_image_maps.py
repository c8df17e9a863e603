"""Tests of attention drawn on images: which patches get color, which query is shown, and errors."""

import numpy as np
import pytest
from matplotlib.image import imread

from transformer.config import Patches
from transformer.viz import _image_maps as module
from transformer.viz import save_image_attention
from transformer.viz._attention_weights import AttentionMap, attention_rollout

PATCHES = Patches(image_height=7, image_width=11, patch_size=3, channels=3, class_token=True, drop_remainder=True)
ROWS, COLUMNS = 2, 3


def uniform(patches=PATCHES, layer=0, heads=2):
    size = patches.positions
    weights = np.full((heads, size, size), 1 / size, np.float32)
    return AttentionMap("encoder", layer, "self", weights, np.zeros((size, size), bool))


def test_the_patch_that_the_class_token_attends_to_is_colored():
    one = uniform()
    one.weights[1, 0] = 0
    one.weights[1, 0, 1 + 1 * COLUMNS + 2] = 1.0  # row 1, column 2, after the class token
    found = module.patch_weights(one.weights, PATCHES)
    assert found.shape == (2, ROWS, COLUMNS)
    np.testing.assert_array_equal(found[1], [[0, 0, 0], [0, 0, 1]])
    gray = np.full((7, 11, 3), 0.5)
    changed = np.abs(module.painted(gray, found[1], 3) - gray).max(-1) > 1e-9
    expected = np.zeros((7, 11), bool)
    expected[3:6, 6:9] = True
    np.testing.assert_array_equal(changed, expected)


def test_the_color_is_relative_to_the_largest_weight():
    gray = np.zeros((2, 4, 1))
    found = module.painted(gray, np.array([[0.02, 0.01]]), 2)
    np.testing.assert_allclose(found[:, :2], np.broadcast_to(0.8 * module._COLOR, (2, 2, 3)))
    np.testing.assert_allclose(found[:, 2:], found[:, :2] / 2)


def test_without_a_class_token_the_mean_of_all_patches_is_shown():
    patches = Patches(image_height=6, image_width=9, patch_size=3, class_token=False)
    weights = np.random.default_rng(0).random((2, 6, 6)).astype(np.float32)
    found = module.patch_weights(weights, patches)
    np.testing.assert_allclose(found.reshape(2, 6), weights.mean(1), rtol=1e-6)


def test_the_rollout_of_each_layer_and_the_pooling_are_pictures(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(module, "draw_pictures", lambda path, image, size, *page: drawn.update({path.name: page}))
    maps = [uniform(layer=layer) for layer in range(3)]
    maps[1].weights[:, 0] = np.eye(PATCHES.positions, dtype=np.float32)[2]
    pooling = np.random.default_rng(1).random((2, 1, PATCHES.positions)).astype(np.float32)
    image = np.zeros((7, 11, 3), np.float32)
    paths = save_image_attention(image, maps, tmp_path, patches=PATCHES, pooling=pooling)
    assert [path.name for path in paths] == [*(f"image_layer{i}.png" for i in (1, 2, 3)), *list(drawn)[3:]]
    assert list(drawn)[3:] == ["image_rollout.png", "image_pooling.png"]
    title, names, weights = drawn["image_rollout.png"]
    assert (title, names) == ("attention rollout of the class token", ["layer 1", "layer 2", "layer 3"])
    expected = [one.weights[0, 0, 1:].reshape(ROWS, COLUMNS) for one in attention_rollout(maps)]
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(drawn["image_pooling.png"][2].reshape(2, -1), pooling[:, 0, 1:])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_drawn_file_is_colored_only_where_weights_are_positive(tmp_path, channels):
    patches = Patches(image_height=6, image_width=9, patch_size=3, channels=channels)
    one = uniform(patches, heads=1)
    one.weights[0, 0] = np.eye(patches.positions, dtype=np.float32)[1]  # the first patch
    image = np.full((6, 9, channels), 0.5, np.float32)
    path = save_image_attention(image, [one], tmp_path, patches=patches)[0]
    pixels = imread(path)[..., :3]
    red = (pixels[..., 0] - pixels[..., 1] > 0.3).sum()
    gray = (np.abs(pixels - 0.5).max(-1) < 0.01).sum()
    # Two pictures: the image, and the head, in which one of six patches is red.
    assert gray / red == pytest.approx(11, rel=0.05)


@pytest.mark.parametrize(
    ("image", "positions", "message"),
    [
        ((7, 10, 3), 7, r"expected an image of shape \(7, 11, 3\).* got \(7, 10, 3\)"),
        ((7, 11, 3), 8, r"7.*\(1.*6 patches\).*got 8"),
    ],
)
def test_rejects_sizes_that_do_not_fit(tmp_path, image, positions, message):
    one = AttentionMap("encoder", 0, "self", np.ones((1, positions, positions)), np.zeros((positions, positions), bool))
    with pytest.raises(ValueError, match=message):
        save_image_attention(np.zeros(image), [one], tmp_path, patches=PATCHES)


def test_weights_must_be_finite(tmp_path):
    one = uniform()
    one.weights[0, 0, 1] = np.nan
    with pytest.raises(ValueError, match="attention weights must be finite"):
        save_image_attention(np.zeros((7, 11, 3)), [one], tmp_path, patches=PATCHES)
