"""Saving and loading of models whose weights are quantized by `nn.quantize`: packed in the file, and in memory, too.

The directory has the config.json of the model's family. Its tensors have the paths of the parameters as names, because
a packed matrix can't be transposed or divided as other formats need it. Other programs can't read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from transformer.config._checks import ConfigError, shortened
from transformer.nn.quantization._int8 import GROUP_SIZES, quantized_shapes
from transformer.zoo._family import abstract_params
from transformer.zoo.weights._files import WeightFiles, WeightsError, first_non_finite
from transformer.zoo.weights._header import TensorInfo
from transformer.zoo.weights._quantized import FIELD, OWN_METHOD

MAX_LISTED = 20
"""Maximum number of tensors that an error message lists."""


def quantization_fields(bits: int, group_size: int) -> dict[str, Any]:
    """Return the field of config.json that describes weights of `nn.quantize`."""
    groups = {"group_size": group_size} if bits == 4 else {}
    return {FIELD: {"quant_method": OWN_METHOD, "bits": bits} | groups}


def quantization_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return bits and group size of a config.json; None if its weights are not quantized by `nn.quantize`."""
    settings = config.get(FIELD)
    if not isinstance(settings, Mapping) or settings.get("quant_method") != OWN_METHOD:
        return None
    bits, size = settings.get("bits"), settings.get("group_size", GROUP_SIZES[0])
    if type(bits) is not int or bits not in (4, 8) or type(size) is not int or size not in GROUP_SIZES:
        raise ConfigError(
            f"{FIELD} must have bits 4 or 8, and a group_size of {', '.join(map(str, GROUP_SIZES))}; got {bits!r:.40} "
            f"and {size!r:.40}. Convert the model again."
        )
    return bits, size


def arrays_by_name(params: PyTree) -> dict[str, Any]:
    """Return the arrays of a tree of parameters by path, such as "decoder/layers/slot_0/.../kernel/codes"."""
    return {_named(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _named(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def load_quantized(files: WeightFiles, model: nn.Module, bits: int, group_size: int) -> PyTree:
    """Load quantized parameters; plain arrays are cast to the model's dtype. WeightsError lists all problems."""
    expected = quantized_shapes(abstract_params(model), bits, group_size)
    named = arrays_by_name(expected)
    is_packed = {name for name in named if name.rsplit("/", 1)[-1] in ("codes", "values", "scale")}
    is_packed -= set(arrays_by_name(abstract_params(model)))
    faults = {
        "missing": [name for name in named if name not in files.tensors],
        "unexpected": [name for name in files.tensors if name not in named],
        "of a wrong shape or dtype": [
            f"{name}: expected {leaf.dtype} {leaf.shape}, got {files.tensors[name].dtype} {files.tensors[name].shape}"
            for name, leaf in named.items()
            if name in files.tensors and not _fits(files.tensors[name], leaf, name in is_packed)
        ],
    }
    if problems := [f"{len(found)} {what}: {shortened(found, MAX_LISTED)}" for what, found in faults.items() if found]:
        raise WeightsError(
            f"the tensors in {files.directory} are not those of this quantized model. {'. '.join(problems)}. Convert "
            f"the model again. Nothing was loaded."
        )

    def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = _named(path)
        array = files.read(name)
        if (index := first_non_finite(array)) is not None:
            raise WeightsError(f"{files.directory}: {name}{list(index)} is not finite. The checkpoint is damaged.")
        return jax.device_put(array.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(one, expected)


def _fits(info: TensorInfo, leaf: jax.ShapeDtypeStruct, is_packed: bool) -> bool:
    """Return whether a tensor has the shape of a parameter, and its dtype (plain ones: any floating-point dtype)."""
    is_right = info.dtype == leaf.dtype if is_packed else np.dtype(info.dtype).kind not in "biuc"
    return info.shape == leaf.shape and is_right
