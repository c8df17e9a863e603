"""Tests of `inspect image`: pictures of the attention to patches for every family of images, and errors."""

import dataclasses
import json

import numpy as np
import pytest
from attention_page_parts import data_of
from golden import case as golden_case
from golden import ours
from matplotlib.image import imread
from vision_parts import picture

from transformer.__main__ import main
from transformer.cli import _inspect_image as module
from transformer.inference import open_model
from transformer.media import image_processor
from transformer.viz import attention_maps

KINDS = {
    "vit": ("classifier", "ViTImageProcessor"),
    "deit": ("teacher", "DeiTImageProcessor"),
    "dinov2": ("base", "BitImageProcessor"),
    "clip": ("dual", "CLIPImageProcessor"),
    "siglip": ("dual", "SiglipImageProcessor"),
    "siglip2": ("dual", "Siglip2ImageProcessor"),
}
POOLED = ("siglip", "siglip2")
"""Families that pool by attention."""


def written(directory, family):
    """Write a tiny model, its preprocessing and an image; return its directory and the config of its image encoder."""
    name, kind = KINDS[family]
    path = ours.write(directory, golden_case.golden(family)[name])
    model = open_model(path).model
    config = model.config.image_encoder if name == "dual" else model.config
    patches = config.patches
    size = {"height": patches.image_height, "width": patches.image_width}
    fields = {"size": size, "do_center_crop": False}
    if patches.resize_positions:  # the picture has 15 x 20 pixels: 3 rows and 4 columns
        fields = {"patch_size": patches.patch_size, "max_num_patches": 13}
        config = config.replace(input=dataclasses.replace(patches, image_height=9, image_width=12))
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind} | fields))
    picture(0).save(path / "a.png")
    return path, config


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.programs(10, reason="the package computes single operations outside of jit")
def test_every_layer_the_rollout_and_the_pooling_are_drawn(tmp_path, capsys, family):
    path, config = written(tmp_path, family)
    assert main(["inspect", "image", str(path), str(path / "a.png"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [name.rpartition("/")[2] for name in found["paths"]]
    layers = [f"image_layer{number + 1}.png" for number in range(config.num_layers)]
    assert names == [*layers, "image_rollout.png", *(["image_pooling.png"] if family in POOLED else [])]
    assert all(name.startswith(str(path / "attention")) for name in found["paths"])
    assert all(imread(name)[..., :3].std() > 0 for name in found["paths"])
    assert found["image"] == str(path / "a.png")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.programs(10, reason="the package computes single operations outside of jit")
def test_the_page_has_every_layer_and_query(tmp_path, capsys, family):
    path, config = written(tmp_path, family)
    assert main(["inspect", "image", str(path), str(path / "a.png"), "--html", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "a.html")]
    data = data_of((tmp_path / "a.html").read_text())
    assert (len(data["layers"]), len(data["rollout"])) == (config.num_layers, config.num_layers)
    assert {(one["heads"], one["queries"]) for one in data["layers"]} == {(config.num_heads, config.patches.positions)}
    assert len(data["tokens"]) == config.patches.extra_tokens
    assert ("pooling" in data["views"]) == (family in POOLED)
    assert not (path / "attention").exists()


@pytest.mark.parametrize("family", ["vit", *POOLED])
def test_the_page_has_the_weights_and_pixels_of_the_model(tmp_path, family):
    path, config = written(tmp_path, family)
    image, read, sown = module._capture(open_model(path), str(path / "a.png"))
    assert read.patches == config.patches
    assert image.shape == (config.patches.image_height, config.patches.image_width, 3)
    small = np.asarray(picture(0).resize(image.shape[1::-1], 2), np.float32) / 255
    assert np.abs(image - small).max() < (0.01 if family == "vit" else 0.2)
    assert "encoder" in sown
    assert ("attention_pooling" in sown) == (family in POOLED)


@pytest.mark.programs(11, reason="the package computes single operations outside of jit")
def test_the_command_does_not_overwrite_a_picture_of_the_user(tmp_path, capsys):
    path, _ = written(tmp_path / "model", "vit")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "image_layer1.png").write_text("mine")
    words = ["inspect", "image", str(path), str(path / "a.png"), "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert "this program did not write it" in capsys.readouterr().err
    assert main([*words[:3], "https://example.com/a.png"]) == 2
    assert "URLs are not downloaded" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert capsys.readouterr().out.split()[0] == str(tmp_path / "out" / "image_layer1.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "IMAGE is missing: image file"),
        (["none.png"], "image none.png not found"),
        (["a.png", "--target", "a"], "inspect image has no option --target"),
        (["a.png", "--html", "a.png"], "--html must name the HTML file to write"),
        (["a.png", "--html", "mine.html"], "this program did not write it"),
        (["a.png", "--sizes"], "inspect image has no option --sizes"),
        (["a.png", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_invalid_options_are_one_line_errors_before_loading(tmp_path, capsys, monkeypatch, words, message):
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "mine.html").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "image", "nowhere", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_text_model_has_no_patches(tmp_path, capsys):
    path = ours.write(tmp_path, golden_case.golden("gpt2")["lm"])
    picture(0).save(path / "a.png")
    assert main(["inspect", "image", str(path), str(path / "a.png")]) == 2
    assert "needs a model that reads images, such as ViT, DINOv2, CLIP, SigLIP or LLaVA" in capsys.readouterr().err


def test_an_image_encoder_rejects_a_prompt(tmp_path, capsys):
    path, _ = written(tmp_path, "vit")
    assert main(["inspect", "image", str(path), str(path / "a.png"), "--prompt", "a"]) == 2
    assert "--prompt is for vision-language models" in capsys.readouterr().err


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "theirs"), [("vit", "ViTModel"), ("clip", "CLIPVisionModel"), ("siglip", "SiglipVisionModel")]
)
def test_weights_equal_transformers(tmp_path, torch, transformers, family, theirs):
    path, config = written(tmp_path, family)
    _, _, sown = module._capture(open_model(path), str(path / "a.png"))
    found = attention_maps(sown, config)
    model = getattr(transformers, theirs).from_pretrained(path, attn_implementation="eager")
    pixels = image_processor(path)([str(path / "a.png")]).transpose(0, 3, 1, 2).copy()
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(pixels), output_attentions=True).attentions
    assert len(found) == len(expected) == config.num_layers
    for mine, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.weights, one[0].numpy(), atol=1e-5)
