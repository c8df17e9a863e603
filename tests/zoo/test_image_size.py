"""Models for images of another size: interpolated positions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import ConfigError
from transformer.inference import embed_images, open_model
from transformer.zoo import load_pretrained, with_image_size
from transformer.zoo._image_size import antialiased_weights, bicubic_weights


def loaded(tmp_path, family, name):
    return load_pretrained(ours.write(tmp_path / family, golden_case.golden(family)[name]))


@pytest.mark.parametrize(("old", "new"), [(3, 5), (7, 4), (5, 5), (1, 3)])
def test_interpolation_reproduces_constants_and_lines(old, new):
    """Weights sum to 1; away from the border, values on a line stay on it; the same size changes nothing."""
    weights = bicubic_weights(old, new)
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-6)
    if old == new:
        np.testing.assert_allclose(weights, np.eye(old), atol=1e-7)
    centers = (np.arange(new) + 0.5) * old / new - 0.5
    inside = (np.floor(centers) >= 1) & (np.floor(centers) <= old - 3)
    line = weights @ (3.0 * np.arange(old) + 1)
    middle = centers == np.floor(centers)
    np.testing.assert_allclose(line[inside & middle], 3 * centers[inside & middle] + 1, rtol=1e-5)


def test_resizing_back_restores_the_positions(tmp_path):
    """The class token keeps its position; the same size gives the same objects."""
    found = loaded(tmp_path, "dinov2", "base")
    model, params = with_image_size(found.model, found.params, 15, 6)
    table, old = (np.asarray(one["encoder"]["position_table"]) for one in (params, found.params))
    assert table.shape == (1 + 5 * 2, 12)
    np.testing.assert_array_equal(table[0], old[0])
    assert model.config.patches.positions == model.config.max_length == 11
    assert with_image_size(found.model, found.params, 9, 9) == (found.model, found.params)
    images = np.random.default_rng(0).normal(size=(2, 15, 6, 3)).astype(np.float32)
    assert jax.jit(model.apply)({"params": params}, images).shape == (2, 12)


def test_resizes_a_dual_encoder(tmp_path):
    found = loaded(tmp_path, "clip", "dual")
    model, params = with_image_size(found.model, found.params, 13, 12)
    patches = model.config.images.patches
    assert (patches.count, patches.drop_remainder) == (16, True)
    out = jax.jit(model.apply)({"params": params}, np.ones((2, 5), int), np.zeros((3, 13, 12, 3), np.float32))
    assert out.shape == (3, 2)


def test_rejects_models_without_patch_positions(tmp_path):
    found = loaded(tmp_path, "gpt2", "lm")
    with pytest.raises(ConfigError, match="has no table of positions of patches"):
        with_image_size(found.model, found.params, 9, 9)


def test_dinov2_adapts_to_its_preprocessing(tmp_path):
    """Published models have positions for 518 pixels, and preprocessing for 224."""
    found = loaded(tmp_path, "dinov2", "base")
    settings = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 14}, "crop_size": 12}
    (tmp_path / "dinov2" / "preprocessor_config.json").write_text(json.dumps(settings))
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    opened = open_model(tmp_path / "dinov2")
    vectors = embed_images(opened, [image])
    model, params = with_image_size(found.model, found.params, 12, 12)
    from transformer.media import image_processor

    pixels = image_processor(opened.directory)([image])
    np.testing.assert_allclose(vectors, jax.jit(model.apply)({"params": params}, pixels), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("size", [12, 18, 6])
@pytest.mark.parametrize(("family", "name", "kind"), [("dinov2", "base", "Dinov2Model"), ("vit", "base", "ViTModel")])
def test_hidden_states_equal_transformers(tmp_path, torch, transformers, family, name, kind, size):
    found = loaded(tmp_path, family, name)
    model, params = with_image_size(found.model, found.params, size, size)
    images = jnp.asarray(np.random.RandomState(5).standard_normal((2, size, size, 3)).astype(np.float32))
    theirs = getattr(transformers, kind).from_pretrained(found.directory).eval()
    options = {"interpolate_pos_encoding": True} if family == "vit" else {}
    with torch.no_grad():
        expected = theirs(torch.tensor(np.array(images.transpose(0, 3, 1, 2))), **options).last_hidden_state.numpy()
    got = jax.jit(lambda params: model.apply({"params": params}, images, method="hidden"))(params)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_antialiased_weights_equal_pillow():
    Image = pytest.importorskip("PIL.Image")
    values = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    for old, new in ((9, 4), (9, 14), (9, 9)):
        expected = Image.fromarray(values).resize((7, new), Image.Resampling.BICUBIC)
        np.testing.assert_allclose(antialiased_weights(old, new) @ values, np.asarray(expected), atol=1e-5)


@pytest.mark.parametrize(("family", "table"), [("dinov2_with_registers", (1 + 2 * 4, 12)), ("dinov3_vit", None)])
def test_handles_registers_and_rotary_positions(tmp_path, family, table):
    found = loaded(tmp_path, family, "base")
    model, params = with_image_size(found.model, found.params, 6, 12, antialias=found.family.antialias)
    assert jax.jit(model.apply)({"params": params}, jnp.ones((2, 6, 12, 3))).shape == (2, 12)
    if table is None:
        assert params is found.params
    else:
        assert params["encoder"]["position_table"].shape == table
