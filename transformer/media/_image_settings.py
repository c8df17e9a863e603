"""Read and write the image preprocessing of a model: preprocessor_config.json, or newer processor_config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformer.config._checks import ConfigError, nearest
from transformer.config._local_paths import local_path
from transformer.config._replaced_files import replace_file
from transformer.config._untrusted import read_json_object
from transformer.media._images import ImageProcessor

SETTINGS_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the preprocessing of a model; the first that exists is read."""

MAX_SIDE = 16_384
"""Largest size that a file may request: a larger one would only fill the memory."""

RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters of Pillow, in the order of their numbers in preprocessor_config.json."""

_STANDARD = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": False}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "resample": 3,
}
_SQUARE = {"size": {"height": 224, "width": 224}}
_DEIT = {"size": {"height": 256, "width": 256}, "crop_size": {"height": 224, "width": 224}}

KINDS: dict[str, dict[str, Any]] = {
    "ViT": _STANDARD | _SQUARE | {"resample": 2},
    "CLIP": _CLIP,
    "Siglip": _STANDARD | _SQUARE | {"resample": 3},
    "Bit": _CLIP,
    "Gemma3": _STANDARD | _SQUARE | {"resample": 2},
    "Llava": _CLIP,
    "DINOv3ViT": _STANDARD
    | _SQUARE
    | {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 2},
    "DeiT": _STANDARD | _DEIT | {"do_center_crop": True, "resample": 3},
    "Qwen2VL": _CLIP | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "do_center_crop": False},
    "Siglip2": _STANDARD | {"resample": 2},
}
"""Defaults of the preprocessors of Hugging Face transformers, by the name of their class without its ending."""

_KIND_OF_FAMILY = {"vit": "ViT", "clip": "CLIP", "siglip": "Siglip", "dinov2": "Bit", "deit": "DeiT"}
_KIND_OF_FAMILY |= {
    "dinov2_with_registers": "Bit",
    "dinov3_vit": "DINOv3ViT",
    "gemma3": "Gemma3",
    "paligemma": "Siglip",
    "llava": "CLIP",
    "siglip2": "Siglip2",
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2VL",
}
_ENDINGS = ("ImageProcessorPil", "ImageProcessorFast", "ImageProcessor", "FeatureExtractor")
_READ = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
)
_UNREAD = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("do_convert_rgb", "default_to_square", "data_format", "input_data_format", "return_tensors", "device"),
    *("disable_grouping", "valid_processor_keys", "pad_size", "image_seq_length"),
    *("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"),
    *("num_channels", "image_processor", "backend", "transformers_version"),
}
_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_OF_PIXELS = {*_PATCHES, "min_pixels", "max_pixels"}
"""fields that only Qwen2VL has"""
_OF_GRID = {"patch_size": 16, "max_num_patches": 256}
"""fields that only Siglip2 has"""
_FIXED = dict.fromkeys(("do_pan_and_scan", "do_pad", "do_reduce_labels", "do_convert_annotations"), (False, None))


def image_processor(directory: str | os.PathLike) -> ImageProcessor:
    """Return the image preprocessing of the model in a directory, as its authors describe it.

    Args:
        directory: a directory with preprocessor_config.json (or processor_config.json), in the format of Hugging Face
            transformers.

    Raises:
        ConfigError: the files are missing or invalid, or describe a preprocessing that is not supported; the message
            names the fields.
    """
    directory = local_path(directory, "directory")
    name = next((name for name in SETTINGS_FILES if (directory / name).exists()), None)
    if name is None:
        raise ConfigError(
            f"{directory} has no {SETTINGS_FILES[0]}, which describes how images are resized and normalized. Add the "
            f"file of the model's authors."
        )
    values = read_json_object(directory, name)
    inner = values.get("image_processor") if name == SETTINGS_FILES[1] else values
    if not isinstance(inner, dict):
        raise ConfigError(f"{directory / name} has no image_processor. Add the {SETTINGS_FILES[0]} of the model.")
    try:
        return from_settings(inner, _kind(inner, directory))
    except (ConfigError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory / name} can't be used: {error}") from error


def _kind(values: Mapping[str, Any], directory: Path) -> str:
    """Return which of KINDS a file describes: by its own type, or by the model_type of config.json."""
    given = values.get("image_processor_type") or values.get("feature_extractor_type")
    if given is None:
        has_config = (directory / "config.json").exists()
        family = read_json_object(directory, "config.json").get("model_type") if has_config else None
        if isinstance(family, str) and family in _KIND_OF_FAMILY:
            return _KIND_OF_FAMILY[family]
        raise ConfigError("image_processor_type is missing. Add it, such as ViTImageProcessor.")
    bare = next((str(given).removesuffix(ending) for ending in _ENDINGS if str(given).endswith(ending)), str(given))
    if bare not in KINDS:
        known = [f"{kind}ImageProcessor" for kind in KINDS]
        raise ConfigError(
            f"image_processor_type must be one of {', '.join(known)}, got {given!r:.80}.{nearest(str(given), known)} "
            f"Use a model with one of these."
        )
    return bare


def from_settings(values: Mapping[str, Any], kind: str) -> ImageProcessor:
    """Return the preprocessing that the fields of a preprocessor_config.json describe.

    The defaults of `kind`, a name in `KINDS`, apply to missing fields. A ConfigError for an unknown field or value.
    """
    for name, choices in _FIXED.items():
        if values.get(name) not in choices:
            raise ConfigError(f"{name} is {values[name]!r:.80}, which is not supported. Remove it if it has no effect.")
    known = {*_READ, *_UNREAD, *_FIXED} | {"Qwen2VL": _OF_PIXELS, "Siglip2": {*_OF_GRID}}.get(kind, set())
    # A name that starts with an underscore is a note of the program that wrote the file.
    if unknown := sorted(name for name in values.keys() - known if not name.startswith("_")):
        raise ConfigError(
            f"unknown field {unknown[0]!r:.80}.{nearest(unknown[0], known)} Remove it if it does not change the pixels."
        )
    flags = {"do_resize": True, "do_rescale": True, "do_normalize": True}
    given = flags | KINDS[kind] | {name: values[name] for name in _READ if values.get(name) is not None}
    changes: dict[str, Any] = {"resample": _filter(given["resample"]), "in_floats": kind == "DINOv3ViT"}
    if kind == "Qwen2VL":
        changes |= _pixel_range(values, given)
    elif kind == "Siglip2":
        changes |= _patch_range(values, given)
    elif given["do_resize"]:
        changes |= _size("size", given["size"], square=kind not in ("CLIP", "Bit", "Llava"))
    if given["do_center_crop"]:
        crop = _size("crop_size", given["crop_size"], square=True)
        changes |= {"crop_height": crop["height"], "crop_width": crop["width"]}
    if not given["do_rescale"]:
        changes["rescale_factor"] = 1.0
    elif "rescale_factor" in given:
        changes["rescale_factor"] = given["rescale_factor"]
    mean, std = (given["image_mean"], given["image_std"]) if given["do_normalize"] else ([0.0] * 3, [1.0] * 3)
    return ImageProcessor(mean=_channels(mean), std=_channels(std), **changes)


def _check_multiples(given: Mapping[str, Any], of: str) -> None:
    if not given["do_resize"] or given["do_center_crop"]:
        raise ConfigError(
            f"do_resize must be true and do_center_crop false: the sides of an image must be multiples of {of}. "
            f"Correct them."
        )


def _pixel_range(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Return the range of height x width of Qwen2VL, and the multiple of both: `merge_size` patches."""
    _check_multiples(given, "the patches")
    sizes = _PATCHES | {name: values[name] for name in _PATCHES if values.get(name) is not None}
    size = dict(given["size"]) if isinstance(given["size"], dict) else {}
    for name, field in {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}.items():
        size[field] = values[name] if values.get(name) is not None else size.get(field, size.get(name))
    numbers = [*sizes.values(), size["shortest_edge"], size["longest_edge"]]
    if not all(type(one) is int and 1 <= one <= MAX_SIDE**2 for one in numbers):
        raise ConfigError(
            f"{', '.join(_PATCHES)} and the shortest_edge and longest_edge of size must be integers from 1 to "
            f"{MAX_SIDE**2}, got {numbers!r:.80}. Correct them."
        )
    multiple = sizes["patch_size"] * sizes["merge_size"]
    return {"multiple": multiple, "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}


def _patch_range(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of the patches of Siglip2 and their largest number."""
    _check_multiples(given, "patch_size")
    size, most = (values[name] if values.get(name) is not None else default for name, default in _OF_GRID.items())
    if not all(type(one) is int and 1 <= one <= MAX_SIDE for one in (size, most)):
        raise ConfigError(
            f"patch_size and max_num_patches must be integers from 1 to {MAX_SIDE}, got {[size, most]!r:.80}. "
            f"Correct them."
        )
    return {"multiple": size, "max_patches": most}


def _channels(values: Any) -> tuple[float, ...]:
    values = [values] * 3 if isinstance(values, int | float) else values
    return tuple(float(value) for value in values)


def _filter(number: Any) -> str:
    if type(number) is not int or not 0 <= number < len(RESAMPLE):
        names = ", ".join(f"{i} ({name})" for i, name in enumerate(RESAMPLE))
        raise ConfigError(f"resample must be one of {names}, got {number!r:.80}. Correct it.")
    return RESAMPLE[number]


def _size(name: str, value: Any, *, square: bool) -> dict[str, int]:
    """Return height and width, or shortest_edge; a single number means a square, or the shortest edge."""
    if type(value) is int:
        value = {"height": value, "width": value} if square else {"shortest_edge": value}
    if isinstance(value, list) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    value = {key: side for key, side in value.items() if side is not None} if isinstance(value, dict) else {}
    if name == "crop_size" or "shortest_edge" not in value:
        expected = {"height", "width"}
    else:
        expected = {"shortest_edge"}
    if value.keys() != expected or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in value.values()):
        raise ConfigError(
            f"{name} must have {' and '.join(sorted(expected))}, integers from 1 to {MAX_SIDE}, got {value!r:.80}. "
            f"Correct it."
        )
    return value


def save_image_processor(processor: ImageProcessor, directory: str | os.PathLike) -> Path:
    """Write `preprocessor_config.json` into a directory, which `image_processor` and Hugging Face transformers read.

    Returns:
        The path of the file.
    """
    path = local_path(directory, "directory") / SETTINGS_FILES[0]
    return replace_file(path, json.dumps(to_settings(processor), indent=2) + "\n")


def to_settings(processor: ImageProcessor) -> dict[str, Any]:
    """Return the fields of a preprocessor_config.json that describe a preprocessing: the inverse of `from_settings`."""
    kind = "DINOv3ViT" if processor.in_floats else "ViT" if processor.shortest_edge is None else "CLIP"
    values: dict[str, Any] = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_resize": (processor.height, processor.shortest_edge) != (None, None),
        "resample": RESAMPLE.index(processor.resample),
        "do_center_crop": processor.crop_height is not None,
        "do_rescale": True,
        "rescale_factor": processor.rescale_factor,
        "do_normalize": True,
        "image_mean": list(processor.mean),
        "image_std": list(processor.std),
    }
    if processor.max_patches is not None:
        values |= {"image_processor_type": "Siglip2ImageProcessor", "do_resize": True}
        values |= {"patch_size": processor.multiple, "max_num_patches": processor.max_patches}
    elif processor.multiple is not None:
        merge = 2 if processor.multiple % 2 == 0 else 1
        values |= {"image_processor_type": "Qwen2VLImageProcessor", "do_resize": True}
        values["size"] = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
        values |= {"patch_size": processor.multiple // merge, "merge_size": merge, "temporal_patch_size": 2}
    elif processor.shortest_edge is not None:
        values["size"] = {"shortest_edge": processor.shortest_edge}
    elif processor.height is not None:
        values["size"] = {"height": processor.height, "width": processor.width}
    if processor.crop_height is not None:
        values["crop_size"] = {"height": processor.crop_height, "width": processor.crop_width}
    return values
