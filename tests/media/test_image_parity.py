"""Comparison of image preprocessing with Hugging Face transformers, for the processor of each vision family."""

import json

import numpy as np
import pytest
from PIL import Image

from transformer.media import ImageProcessor, image_processor

pytestmark = pytest.mark.parity

# Settings as in the published files of each family, and defaults of the class for an empty file.
PROCESSORS = {
    "vit": ("ViTImageProcessorPil", {"size": {"height": 24, "width": 24}, "resample": 2}),
    "vit_defaults": ("ViTImageProcessorPil", {}),
    "clip": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 22}, "crop_size": {"height": 22, "width": 22}}),
    "clip_defaults": ("CLIPImageProcessorPil", {}),
    "siglip": ("SiglipImageProcessorPil", {"size": {"height": 21, "width": 23}, "resample": 3}),
    "siglip_defaults": ("SiglipImageProcessorPil", {}),
    "dinov2": (  # the mean and the deviation of ImageNet
        "BitImageProcessorPil",
        {"size": {"shortest_edge": 26}, "crop_size": {"height": 22, "width": 22}}
        | {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    ),
    "deit": ("DeiTImageProcessorPil", {"size": {"height": 26, "width": 26}, "crop_size": {"height": 22, "width": 22}}),
    "deit_defaults": ("DeiTImageProcessorPil", {}),
    "gemma3": ("Gemma3ImageProcessorPil", {"size": {"height": 28, "width": 28}, "do_pan_and_scan": False}),
    "gemma3_defaults": ("Gemma3ImageProcessorPil", {}),
    "llava": ("LlavaImageProcessorPil", {"size": {"shortest_edge": 22}, "crop_size": {"height": 22, "width": 22}}),
    "llava_defaults": ("LlavaImageProcessorPil", {}),
    "lanczos": ("ViTImageProcessorPil", {"size": {"height": 17, "width": 31}, "resample": 1}),
    "nearest": ("ViTImageProcessorPil", {"size": {"height": 17, "width": 31}, "resample": 0}),
    "crop_only": ("CLIPImageProcessorPil", {"do_resize": False, "crop_size": {"height": 30, "width": 64}}),
    "pixels_only": ("ViTImageProcessorPil", {"do_normalize": False, "size": {"height": 20, "width": 20}}),
}


def images():
    """Return photos of several sizes: taller, wider, smaller than the result, and noise."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in ((61, 40), (37, 53), (13, 9), (300, 221)):
        small = rng.integers(0, 256, (7, 5, 3)).astype(np.uint8)
        found.append(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    return [*found, Image.fromarray(rng.integers(0, 256, (45, 45, 3)).astype(np.uint8))]


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_equal_transformers(transformers, tmp_path, name):
    kind, fields = PROCESSORS[name]
    theirs = getattr(transformers, kind)(**fields)
    theirs.save_pretrained(tmp_path)
    ours = image_processor(tmp_path)
    for image in images():
        expected = theirs(image, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
        got = ours([image])
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 3}},
        {"min_pixels": 28 * 28 * 90, "max_pixels": 28 * 28 * 100},
        {"patch_size": 3, "merge_size": 2, "min_pixels": 36, "max_pixels": 1000},
    ],
)
def test_dynamic_resolution_pixels_equal_transformers(transformers, tmp_path, fields):
    """The reference returns flat patches in groups of merge_size x merge_size; ours are those of the same picture."""
    theirs = transformers.Qwen2VLImageProcessorPil(**fields)
    theirs.save_pretrained(tmp_path)
    ours, patch = image_processor(tmp_path), fields.get("patch_size", 14)
    for image in images():
        expected = theirs(image, return_tensors="np")
        (got,) = ours([image])
        rows, columns = got.shape[0] // patch, got.shape[1] // patch
        assert expected["image_grid_thw"].tolist() == [[1, rows, columns]]
        # (rows/2, 2, p, columns/2, 2, p, C) -> (rows/2, columns/2, 2, 2, C, p, p), each patch twice in time
        blocks = got.reshape(rows // 2, 2, patch, columns // 2, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        flat = np.repeat(blocks.reshape(rows * columns, 3, 1, patch, patch), 2, axis=2).reshape(rows * columns, -1)
        np.testing.assert_allclose(flat, expected["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"patch_size": 7, "max_num_patches": 23}, {"max_num_patches": 1024}])
def test_patches_of_any_aspect_ratio_equal_transformers(transformers, tmp_path, fields):
    theirs = transformers.Siglip2ImageProcessorPil(**fields)
    theirs.save_pretrained(tmp_path)
    ours, several = image_processor(tmp_path), [*images(), Image.new("RGB", (5, 190), (9, 90, 200))]
    expected = theirs(several, return_tensors="np")
    values, grid = ours.flat_patches(several)
    np.testing.assert_array_equal(grid, expected["spatial_shapes"])
    np.testing.assert_allclose(values, expected["pixel_values"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.arange(values.shape[1]) < grid.prod(1)[:, None], expected["pixel_attention_mask"])


def test_patches_of_torchvision_differ_by_one_level(transformers, tmp_path):
    theirs = transformers.Siglip2ImageProcessor()
    theirs.save_pretrained(tmp_path)
    expected = theirs(images(), return_tensors="np")
    values, grid = image_processor(tmp_path).flat_patches(images())
    np.testing.assert_array_equal(grid, expected["spatial_shapes"])
    assert np.abs(values - expected["pixel_values"]).max() * 127.5 < 1.01


def test_transparency_equals_transformers(transformers, tmp_path):
    theirs = transformers.CLIPImageProcessorPil(size={"shortest_edge": 22})
    theirs.save_pretrained(tmp_path)
    clear = np.random.default_rng(1).integers(0, 256, (40, 50, 4)).astype(np.uint8)
    expected = theirs(Image.fromarray(clear), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(image_processor(tmp_path)([Image.fromarray(clear)]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(22, 31), (70, 90)])
def test_resizing_equals_torchvision(torch, resample, size):
    """torchvision resizes tensors with this function: 8-bit images differ by one level, other images by rounding.

    PyTorch rounds the weights of 8-bit images more coarsely: where bicubic enlarges an image, up to 1 value in 10,000
    differs by two levels.
    """
    processor = ImageProcessor(height=size[0], width=size[1], resample=resample, mean=(0.0,) * 3, std=(1.0,) * 3)
    for image in images():
        array = np.array(image)
        first = torch.tensor(array.transpose(2, 0, 1)[None])
        options = {"size": size, "mode": resample, "antialias": True, "align_corners": False}
        expected = torch.nn.functional.interpolate(first, **options).numpy()[0].transpose(1, 2, 0)
        levels = np.abs(np.round(processor([image])[0] * 255) - expected)
        assert levels.max() <= 2
        assert (levels > 1).mean() < (1e-4 if resample == "bicubic" else 1e-9)
        scaled = torch.nn.functional.interpolate(first.float() / 255, **options).numpy()[0].transpose(1, 2, 0)
        np.testing.assert_allclose(processor([array / 255])[0], scaled, rtol=0, atol=1e-5)


def test_dinov3_resizes_in_floating_point(torch, tmp_path):
    """Its preprocessor rescales before it resizes, with torchvision: this compares with the function that resizes."""
    settings = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": {"height": 22, "width": 31}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = image_processor(tmp_path)
    mean, std = (np.asarray(values, np.float32) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    options = {"size": (22, 31), "mode": "bilinear", "antialias": True, "align_corners": False}
    for image in images():
        scaled = torch.tensor(np.array(image).transpose(2, 0, 1)[None]).float() / 255
        expected = torch.nn.functional.interpolate(scaled, **options).numpy()[0].transpose(1, 2, 0)
        np.testing.assert_allclose(processor([image])[0], (expected - mean) / std, rtol=0, atol=1e-5)
