"""Images from files and arrays, and their preprocessing."""

import dataclasses
import io
import json
import zlib

import numpy as np
import pytest
from PIL import Image

from transformer.config import ConfigError
from transformer.media import ImageProcessor, image_processor, open_image, save_image_processor
from transformer.media._image_settings import _READ


def photo(height=37, width=53, channels=3, seed=0):
    """Return a smooth random image: uint8, (height, width, channels)."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 5, channels)).astype(np.uint8)
    planes = [Image.fromarray(small[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    return np.stack([np.asarray(plane) for plane in planes], axis=2)


def saved(path, image, **options):
    image.save(path, **options)
    return path


def test_orientation_is_applied_to_files_and_pil_images(tmp_path):
    """EXIF orientation 6 means: rotate by 90 degrees clockwise to see it upright."""
    upright = photo(8, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(np.rot90(upright))
    path = saved(tmp_path / "phone.png", stored, exif=exif)
    np.testing.assert_array_equal(open_image(path), upright)
    with Image.open(path) as opened:
        np.testing.assert_array_equal(open_image(opened), upright)


STORED = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x, -1),
}
"""orientation of EXIF -> stored pixels of an upright image"""


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "I;16"])
def test_every_orientation_of_png_and_tiff(tmp_path, mode, orientation):
    """Pillow alone mixes up the pixels of uncompressed TIFF files of all modes but RGB with the orientations 5 to 8."""
    upright = Image.fromarray(photo(8, 12))
    gray = np.asarray(upright.convert("L")) * np.uint16(257)
    upright = Image.fromarray(gray) if mode == "I;16" else upright.convert(mode)
    stored = np.ascontiguousarray(STORED[orientation](np.asarray(upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for ending in ("tiff",) if mode == "CMYK" else ("png", "tiff"):
        image = Image.frombytes(mode, stored.shape[1::-1], stored.tobytes())
        path = saved(tmp_path / f"phone.{ending}", image, exif=exif)
        np.testing.assert_array_equal(open_image(path), open_image(upright))
        with Image.open(path) as opened:
            np.testing.assert_array_equal(open_image(opened), open_image(upright))


def test_converts_palettes_alpha_cmyk_and_gray(tmp_path):
    image = Image.fromarray(photo())
    gray = np.asarray(image.convert("L"))
    for given in (image.convert("L"), gray, gray[..., None], gray.astype(np.float64) / 255):
        np.testing.assert_allclose(open_image(given), np.repeat(gray[..., None], 3, 2), atol=1e-4)
    np.testing.assert_array_equal(open_image(image, channels=1)[..., 0], gray)
    np.testing.assert_allclose(open_image(photo() / 255, channels=1)[..., 0], gray, atol=1.0)
    palette = image.quantize(16)
    np.testing.assert_array_equal(
        open_image(saved(tmp_path / "palette.png", palette)), np.asarray(palette.convert("RGB"))
    )
    cmyk = image.convert("CMYK")
    np.testing.assert_array_equal(open_image(saved(tmp_path / "cmyk.tiff", cmyk)), np.asarray(cmyk.convert("RGB")))
    half = np.dstack([photo(), np.full((37, 53), 128, np.uint8)])
    blended = photo() * (128 / 255) + 255 * (127 / 255)
    np.testing.assert_allclose(open_image(Image.fromarray(half)).astype(float), blended, atol=1.01)
    np.testing.assert_allclose(open_image(half / 255), blended, atol=1e-3)
    # A palette may declare one of its colors transparent.
    palette.info["transparency"] = 0
    clear = open_image(saved(tmp_path / "clear.png", palette, transparency=0))
    assert (clear[np.asarray(palette) == 0] == 255).all()
    assert (np.asarray(palette) == 0).any()


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path):
    wide = np.arange(0, 65_536, 1_000, np.uint16).reshape(6, 11)
    path = saved(tmp_path / "depth.png", Image.fromarray(wide))
    np.testing.assert_allclose(open_image(path)[..., 1], wide / 257, rtol=1e-6)


def test_reads_the_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (5, 4), color) for color in ("red", "blue")]
    path = saved(tmp_path / "both.gif", frames[0], save_all=True, append_images=frames[1:])
    assert open_image(path).tolist() == np.asarray(frames[0]).tolist()


def test_resizes_an_image_of_one_pixel():
    processor = ImageProcessor(shortest_edge=9, crop_height=7, crop_width=8, resample="bicubic")
    pixels = processor([np.full((1, 1, 3), 255, np.uint8), np.zeros((1, 1))])
    assert pixels.shape == (2, 7, 8, 3)
    np.testing.assert_allclose(pixels[0], 1.0)
    np.testing.assert_allclose(pixels[1], -1.0)


@pytest.mark.parametrize("name", ["https://example.com/cat.jpg", "data:image/png;base64,AAAA", "s3://bucket/cat.png"])
def test_urls_are_refused(name):
    with pytest.raises(ValueError, match=r"URL.*URLs"):
        open_image(name)


def test_damaged_files_are_named(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(photo(200, 200)).save(buffer, "JPEG")
    (tmp_path / "half.jpg").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    with pytest.raises(ValueError, match=r"half\.jpg"):
        open_image(tmp_path / "half.jpg")
    (tmp_path / "notes.png").write_text("not an image")
    with pytest.raises(ValueError, match=r"notes\.png.*PNG.*JPEG"):
        open_image(tmp_path / "notes.png")
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        open_image(tmp_path / "none.png")
    with pytest.raises(ValueError, match="must be a regular file"):
        open_image(tmp_path)
    with pytest.raises(ValueError, match="32 bits per pixel"):
        open_image(Image.new("F", (3, 3)))


def test_huge_images_are_refused_before_they_are_decoded(tmp_path):
    """50,000 x 50,000 pixels, in a file of about 100 bytes whose data does not even exist."""
    buffer = io.BytesIO()
    Image.new("1", (50_000, 1)).save(buffer, "PNG")
    content = bytearray(buffer.getvalue())
    content[20:24] = (50_000).to_bytes(4, "big")  # the height in the header
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    (tmp_path / "bomb.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"bomb\.png.*89,478,485"):
        open_image(tmp_path / "bomb.png")
    # A narrow image is small, but not if its shorter side becomes 224 pixels.
    path = saved(tmp_path / "line.png", Image.new("RGB", (50_000, 1)))
    assert open_image(path).shape == (1, 50_000, 3)
    with pytest.raises(ValueError, match=r"line\.png.*50000.*1.*11200000.*224"):
        ImageProcessor(shortest_edge=224)([path])
    assert ImageProcessor(height=3, width=4)([path]).shape == (1, 3, 4, 3)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 5, 7), np.uint8), r"with 1, 3 or 4 channels, got \(3, 5, 7\)"),
        (np.zeros((1, 5, 7, 3), np.uint8), r"got \(1, 5, 7, 3\).*one by one"),
        (np.zeros((0, 5)), r"got \(0, 5\)"),
        (np.zeros((5, 5), np.uint16), "got uint16"),
        (np.full((5, 5), 255.0), "between 0 and 1, got 255 to 255"),
        (np.full((5, 5), np.nan), "got nan to nan"),
        (3, "must be a path, a PIL image or an array, got int"),
    ],
)
def test_rejects_unsupported_arrays(array, message):
    with pytest.raises(ValueError, match=message):
        open_image(array)


def test_normalization_equals_its_formula():
    """Normalization is (x factor - mean) / std; the center is kept; smaller images get black borders."""
    image = photo(6, 9)
    processor = ImageProcessor(crop_height=4, crop_width=12, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    got = processor([image])[0]
    expected = (image[1:5] / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    np.testing.assert_allclose(got[:, 2:11], expected, atol=1e-6)
    np.testing.assert_allclose(got[:, [0, 1, 11]], np.full((4, 3, 3), [-1 / 5, -1 / 3, -3 / 7]), atol=1e-6)
    assert got.dtype == np.float32
    gray = ImageProcessor(height=5, width=5, mean=(0.0,), std=(1.0,), rescale_factor=1.0)([image])
    assert gray.shape == (1, 5, 5, 1)
    assert gray.max() > 100


@pytest.mark.parametrize(("size", "first"), [(3, 1), (4, 0), (2, 1), (1, 2), (5, 0)])
def test_an_odd_crop_margin_rounds_down_at_the_start(size, first):
    """As transformers does: (height - crop_height) // 2."""
    image = np.arange(25, dtype=np.uint8).reshape(5, 5, 1).repeat(3, 2)
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "rescale_factor": 1.0}
    (found,) = ImageProcessor(crop_height=size, crop_width=5, **plain)([image])
    np.testing.assert_array_equal(found, image[first : first + size])
    (found,) = ImageProcessor(crop_height=5, crop_width=size, **plain)([image])
    np.testing.assert_array_equal(found, image[:, first : first + size])


def test_batches_need_one_size():
    with pytest.raises(ValueError, match="got 5 x 5, 6 x 5"):
        ImageProcessor()([photo(5, 5), photo(6, 5)])
    with pytest.raises(ValueError, match="no images"):
        ImageProcessor()([])
    with pytest.raises(ValueError, match=r"\[image\]"):
        ImageProcessor()("cat.png")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 5}, "must be set together"),
        ({"height": 5, "width": 5, "shortest_edge": 5}, "Remove one of them"),
        ({"mean": (0.5, 0.5)}, "one number per channel"),
        ({"std": (0.5, 0.5, 0.0)}, "std must be positive"),
        ({"resample": "cubic"}, r"'bicubic'"),
        ({"max_patches": 9}, r"multiple.*max_patches.*ImageProcessor"),
        ({"multiple": 4, "max_patches": 9, "min_pixels": 16}, r"min_pixels"),
        ({"multiple": 28}, r"min_pixels.*max_pixels.*ImageProcessor"),
        ({"multiple": 4, "min_pixels": 16, "max_pixels": 15}, r"min_pixels .16.*max_pixels"),
        ({"multiple": 4, "min_pixels": 16, "max_pixels": 32, "shortest_edge": 8}, r"shortest_edge"),
    ],
)
def test_rejects_invalid_processors(fields, message):
    with pytest.raises(ConfigError, match=message):
        ImageProcessor(**fields)


def described(tmp_path, values, name="preprocessor_config.json", config=None):
    (tmp_path / name).write_text(json.dumps(values))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return image_processor(tmp_path)


def test_reads_old_files_without_a_type(tmp_path):
    """As in google/vit-base-patch16-224 and openai/clip-vit-base-patch32: sizes are numbers."""
    old = {"do_normalize": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    assert described(tmp_path, old | {"size": 224}, config={"model_type": "vit"}) == ImageProcessor(
        height=224, width=224
    )
    clip = {"crop_size": 224, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3}
    got = described(tmp_path, clip | {"size": 336})
    assert (got.shortest_edge, got.crop_height, got.resample, got.mean[0]) == (336, 224, "bicubic", 0.48145466)


FIELDS = {
    "do_resize": (False, {"height": None, "width": None}),
    "size": ({"height": 9, "width": 5}, {"height": 9, "width": 5}),
    "resample": (1, {"resample": "lanczos"}),
    "do_center_crop": (False, {"crop_height": None, "crop_width": None}),
    "crop_size": ({"height": 6, "width": 8}, {"crop_height": 6, "crop_width": 8}),
    "do_rescale": (False, {"rescale_factor": 1.0}),
    "rescale_factor": (0.25, {"rescale_factor": 0.25}),
    "do_normalize": (False, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
    "image_mean": ([0.1, 0.2, 0.3], {"mean": (0.1, 0.2, 0.3)}),
    "image_std": ([0.4, 0.5, 0.6], {"std": (0.4, 0.5, 0.6)}),
}
"""field of preprocessor_config.json -> another value, and what it changes"""


@pytest.mark.parametrize("field", FIELDS)
def test_each_file_field_changes_only_its_setting(tmp_path, field):
    assert set(FIELDS) == set(_READ)
    plain = {"image_processor_type": "DeiTImageProcessor"}
    value, changes = FIELDS[field]
    assert described(tmp_path, plain | {field: value}) == dataclasses.replace(described(tmp_path, plain), **changes)


@pytest.mark.parametrize(
    ("kind", "fields", "changes"),
    [
        ("Qwen2VL", {"patch_size": 7}, {"multiple": 14}),
        ("Qwen2VL", {"merge_size": 3}, {"multiple": 42}),
        ("Qwen2VL", {"min_pixels": 3000, "max_pixels": 4000}, {"min_pixels": 3000, "max_pixels": 4000}),
        (
            "Qwen2VL",
            {"size": {"shortest_edge": 3000, "longest_edge": 4000}},
            {"min_pixels": 3000, "max_pixels": 4000},
        ),
        ("Siglip2", {"patch_size": 8, "max_num_patches": 64}, {"multiple": 8, "max_patches": 64}),
    ],
)
def test_reads_fields_for_any_aspect_ratio(tmp_path, kind, fields, changes):
    plain = {"image_processor_type": f"{kind}ImageProcessor"}
    assert described(tmp_path, plain | fields) == dataclasses.replace(described(tmp_path, plain), **changes)


def test_reads_nested_fields_of_newer_files(tmp_path):
    inner = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 5, "width": 7}, "_note": "any"}
    got = described(tmp_path, {"processor_class": "SiglipProcessor", "image_processor": inner}, "processor_config.json")
    assert got == ImageProcessor(height=5, width=7, resample="bicubic")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_processor_type": "ViTImageProcesor"}, r"'ViTImageProcessor'"),
        ({"image_processor_type": "MllamaImageProcessor"}, r"ViTImageProcessor"),
        ({"do_pad": True}, r"do_pad"),
        ({"do_centre_crop": True}, r"'do_centre_crop'.*'do_center_crop'"),
        ({"resample": 7}, r"resample.*0"),
        ({"size": {"longest_edge": 8}}, "size must have height and width"),
        ({"size": {"height": 8, "width": 10**9}}, "from 1 to 16384"),
        ({"image_mean": "red"}, "can't be used"),
        ({"do_center_crop": True}, "can't be used"),
        ({"patch_size": 14}, r"'patch_size'"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "do_resize": False}, r"do_resize"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 0}, "must be integers from 1"),
    ],
)
def test_rejects_unsupported_settings(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        described(tmp_path, {"image_processor_type": "ViTImageProcessor"} | fields)


def test_reports_missing_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        image_processor(tmp_path)
    with pytest.raises(ConfigError, match="image_processor_type"):
        described(tmp_path, {}, config={"model_type": "bert"})
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ConfigError, match="can't be read"):
        image_processor(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"height": 12, "width": 9, "resample": "lanczos"},
        {"shortest_edge": 20, "crop_height": 18, "crop_width": 16, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
        {"height": 8, "width": 8, "in_floats": True, "rescale_factor": 1.0},
        {"height": 8, "width": 8, "mean": (0.25,), "std": (0.75,)},
        {"multiple": 28, "min_pixels": 784, "max_pixels": 7840},
        {"multiple": 7, "max_patches": 23},
    ],
)
def test_saved_settings_are_read_back(tmp_path, fields):
    processor = ImageProcessor(**fields)
    assert save_image_processor(processor, tmp_path).name == "preprocessor_config.json"
    assert image_processor(tmp_path) == processor


@pytest.mark.parametrize("size", [(5, 7), (61, 40), (37, 53), (300, 221), (28, 28)])
def test_sides_are_rounded_to_multiples_within_the_pixel_range(size):
    processor = ImageProcessor(multiple=14, min_pixels=40 * 196, max_pixels=60 * 196)
    (got,) = processor([photo(*size)])
    height, width, _ = got.shape
    assert height % 14 == width % 14 == 0
    assert 40 * 196 <= height * width <= 60 * 196
    assert abs(np.log(height / width * size[1] / size[0])) < 0.35  # the aspect ratio changes by rounding only


@pytest.mark.parametrize("size", [(5, 7), (61, 40), (37, 53), (300, 221), (14, 14), (1, 400)])
def test_images_have_as_many_patches_as_possible(size):
    """One row or column more would be too many; patches are the squares of the picture row by row, then zeros."""
    processor = ImageProcessor(multiple=14, max_patches=23)
    values, grid = processor.flat_patches([photo(*size), photo(14, 14)])
    assert (values.shape, values.dtype, grid.dtype) == ((2, 23, 14 * 14 * 3), np.float32, np.int32)
    rows, columns = grid[0]
    assert rows * columns <= 23 < (rows + 1) * (columns + 1)
    (picture,) = processor([photo(*size)])
    assert picture.shape == (rows * 14, columns * 14, 3)
    last = picture[-14:, -14:].reshape(-1)
    np.testing.assert_array_equal(values[0, rows * columns - 1], last)
    assert not values[0, rows * columns :].any()


def test_reports_missing_patch_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"ImageProcessor.*max_patches"):
        ImageProcessor().flat_patches([photo(5, 5)])
    kind = {"image_processor_type": "Siglip2ImageProcessorFast"}
    assert described(tmp_path, kind) == ImageProcessor(multiple=16, max_patches=256)
    for change, message in (
        ({"do_resize": False}, "do_resize must be true"),
        ({"patch_size": 0}, "patch_size and max_num_patches must be integers from 1 to"),
        ({"min_pixels": 9}, "unknown field 'min_pixels'"),
    ):
        with pytest.raises(ConfigError, match=message):
            described(tmp_path, kind | change)


def test_long_narrow_images_are_refused():
    processor = ImageProcessor(multiple=2, min_pixels=4, max_pixels=400)
    with pytest.raises(ValueError, match="ratio of at most 200"):
        processor([photo(1, 201)])
